"""Predicted times against the shipped records, and what is chosen by them."""

import dataclasses
import json
import statistics

from absl.testing import absltest, parameterized
import jax.numpy as jnp

from pallas_kernels import _records
from pallas_kernels.sparse_matmul import _predict, _prepared, arg_specs
from pallas_kernels.sparse_matmul._problem import Config, fits, Problem

_BF16 = jnp.dtype('bfloat16')


def _problem(key):
  dtype, out_dtype = jnp.dtype(key['dtype']), jnp.dtype(key['out_dtype'])
  return Problem(key['m'], key['n'], key['k'], dtype, dtype, out_dtype, key['b_layout'], key['out_layout'])


def _measured(gpu='nvidia_h100_80gb_hbm3'):
  """Problems of the record with {setting: microseconds of its first heat}."""
  path = _records.TUNED / gpu / 'sparse_matmul.json'
  for entry in json.loads(path.read_text())['entries']:
    rows = [r for r in entry['candidates'] if r['implementation'] == 'mosaic_gpu' and r['rejected'] is None]
    yield _problem(entry['key']), {Config(**r['config']): 1e3 * statistics.median(r['samples_ms']) for r in rows}


class PredictTest(parameterized.TestCase):

  @parameterized.parameters('nvidia_h100_80gb_hbm3', 'nvidia_h200')
  def test_the_setting_predicted_fastest_is_nearly_the_fastest_measured(self, gpu):
    losses = []
    for p, times in _measured(gpu):
      if _predict.reads_only(p):
        continue
      chosen = min(times, key=lambda c: _predict.predicted_us(p, c))
      losses.append(times[chosen] / min(times.values()))
    self.assertLess(statistics.median(losses), 1.02)
    self.assertLess(max(losses), 1.2)

  def test_long_matmuls_are_predicted_to_a_twentieth(self):
    ratios = [
      _predict.predicted_us(p, c) / us for p, times in _measured() for c, us in times.items()
      if us > 150 and p.a_dtype == _BF16
    ]
    self.assertGreater(len(ratios), 50)
    self.assertLess(statistics.median(abs(r - 1) for r in ratios), 0.05)

  @parameterized.parameters(*arg_specs.ALL)
  def test_candidates_are_distinct_and_can_be_built(self, spec):
    p = _prepared.problem(spec)
    found = _predict.candidates(p, 132)
    self.assertLen(set(found), len(found))
    self.assertBetween(len(found), 5, 10)
    self.assertTrue(all(fits(p, c) for c in found))
    self.assertEqual(found[0], _predict.default_config(p))

  @parameterized.parameters(
    (6400, 1600, 24576, 'kn', (128, 160)), (6400, 1600, 24576, 'nk', (128, 160)),
    (16384, 4096, 16384, 'kn', (128, 192)), (3072, 32768, 768, 'nk', (128, 176)), (3072, 32768, 768, 'kn', (128, 192)),
  )
  def test_a_width_that_divides_n_or_fills_the_last_wave_is_taken(self, m, n, k, b_layout, tile):
    found = _predict.default_config(Problem(m, n, k, _BF16, _BF16, _BF16, b_layout, 'nm'))
    self.assertEqual((found.rows, found.bn), tile)

  @parameterized.product(n=(1, 8, 24, 64), b_layout=('nk', 'kn'), out_layout=('nm', 'mn'))
  def test_few_tokens_have_a_setting_in_every_layout(self, n, b_layout, out_layout):
    p = Problem(4096, n, 4096, _BF16, _BF16, _BF16, b_layout, out_layout)
    self.assertTrue(fits(p, _predict.default_config(p)))

  @parameterized.parameters((4096, 128), (4160, 64))
  def test_of_few_tokens_a_weight_is_not_copied_to_whole_steps(self, k, step):
    p = Problem(4096, 1, k, _BF16, _BF16, _BF16, 'nk', 'nm')
    self.assertEqual({c.bk for c in _predict.candidates(p, 132)}, {step})
    other = Config(rows=64, bn=8, bk=128, stages=11, cluster=1, split=5, epilogue_n=8)
    self.assertEqual(_predict.of_neighbour(p, other).bk, _predict.default_config(p).bk)

  def test_a_last_wave_is_split_where_this_gpu_has_one(self):
    # 64 tiles of 512 x 192: a whole wave of 64 clusters, on 66 of them less than one.
    p = Problem(4096, 1536, 4096, _BF16, _BF16, _BF16)
    whole, rest = (
      {c for c in _predict._ways(p, sms) if c.split > 1 and dataclasses.replace(c, split=1) == Config()}
      for sms in (128, 132)
    )
    self.assertEmpty(whole)
    self.assertLen(rest, 1)
    for sms in (64, 114, 128, 132):
      split = [c for c in _predict._ways(p, sms) if c.split > 1]
      self.assertTrue(all(_predict.schedule(p, c, sms).remainder for c in split))

  def test_a_neighbours_setting_stays_unless_it_wastes_a_wave(self):
    p = Problem(1600, 24576, 6400, _BF16, _BF16, _BF16, out_layout='nm')
    best = _predict.default_config(p)
    self.assertEqual(best.along, 'n')
    other = dataclasses.replace(best, slots=2, band=16)
    self.assertEqual(_predict.of_neighbour(p, other), other)
    # 4 x 128 tiles of 512 x 192: eight waves at 76% where the other way round needs seven of half the height.
    self.assertEqual(_predict.of_neighbour(p, Config()), best)

  def test_a_setting_that_does_not_fit_is_left(self):
    p = Problem(4096, 4096, 4096, _BF16, _BF16, jnp.dtype('float32'), out_layout='mn')
    full = Config(slots=3)
    self.assertFalse(fits(p, full))
    self.assertEqual(_predict.of_neighbour(p, full), _predict.default_config(p))


if __name__ == '__main__':
  absltest.main()
