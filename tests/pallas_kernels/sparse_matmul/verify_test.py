"""The check by random problems on a CPU: the reference in place of the kernels, and what a record says of a run."""

import contextlib
import dataclasses
import io
import json
import math
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _dispatch, _records, _tuning
from pallas_kernels.sparse_matmul import _problem, mosaic_gpu, reference, verify
from pallas_kernels.sparse_matmul.api import BACKENDS

_KIND = ('rows', 'bn', 'cluster', 'along', 'delay', 'split', 'halves')


def _right(*args, config, **kwargs):
  del config
  return reference.sparse_matmul(*args, **kwargs)


def _without_bias(a, b, vectors, *args, **kwargs):
  return _right(a, b, vectors._replace(bias=None), *args, **kwargs)


def _nan(*args, **kwargs):
  found = _right(*args, **kwargs)
  return tuple(x * math.nan for x in found) if isinstance(found, tuple) else found * math.nan


class VerifyTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.out = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())) / 'verify.jsonl'
    self.enter_context(contextlib.redirect_stdout(io.StringIO()))
    # Small ones, since NumPy's matmul is made of each.
    draw = verify.random_problem
    self.enter_context(mock.patch.object(
      verify, 'random_problem', lambda *args: draw(*args) | dict(m=24, n=16, k=64)))
    self.enter_context(mock.patch.object(verify.arg_specs, 'RAGGED', ((1, 1, 4),)))

  def _run(self, kernel, *args, implementation='mosaic_gpu', **kwargs):
    with mock.patch.object(_dispatch, 'load', {BACKENDS[implementation]: kernel}.__getitem__):
      return verify.verify(*args, implementation=implementation, **kwargs)

  @parameterized.parameters('mosaic_gpu', 'mosaic_gpu_sm80')
  @pytest.mark.few
  def test_a_record_of_a_run(self, implementation):
    for seed in (0, 3):
      self.assertEqual(self._run(_right, 2, seed, out=self.out, implementation=implementation), 0)
    first, second = map(json.loads, self.out.read_text().splitlines())
    self.assertContainsSubset({'device', 'versions', 'commit', 'command', 'when'}, first)
    for record, seed in ((first, 0), (second, 3)):
      of_run = {name: record[name] for name in ('count', 'seed', 'repeats', 'failures', 'implementation')}
      self.assertEqual(
        of_run, dict(count=2, seed=seed, repeats=_tuning.REPEATS, failures=[], implementation=implementation)
      )
      self.assertBetween(record['worst_error'], 1e-9, _tuning.TOLERANCE)

  def test_what_failed_is_in_the_record_with_its_problem(self):
    failed = self._run(_without_bias, 2, 1, out=self.out)
    (record,) = map(json.loads, self.out.read_text().splitlines())
    self.assertBetween(failed, 1, 2)
    self.assertLen(record['failures'], failed)
    for failure in record['failures']:
      self.assertIn('exceeds 4e-03', failure['reason'])
      self.assertTrue(failure['problem']['bias'])
    self.assertGreater(record['worst_error'], _tuning.TOLERANCE)

  def test_nan_fails_and_the_record_is_json(self):
    self.assertEqual(self._run(_nan, 2, out=self.out), 2)
    self.assertIsNone(json.loads(self.out.read_text(), parse_constant=self.fail)['worst_error'])

  @parameterized.parameters(2, 0)
  def test_neither_a_matrix_nor_the_largest_magnitude_hides_that_the_other_is_off(self, ndim):
    def off(*args, **kwargs):
      return tuple(x * 1.02 if x.ndim == ndim else x for x in _right(*args, **kwargs))

    draw = verify.random_problem
    with mock.patch.object(verify, 'random_problem', lambda *args: draw(*args) | dict(amax=True)):
      self.assertEqual((self._run(_right, 2), self._run(off, 2)), (0, 2))

  def test_time_ends_a_run(self):
    self.assertEqual(self._run(_right, 4, seconds=-1.0, out=self.out), 0)
    self.assertEqual(json.loads(self.out.read_text())['count'], 0)

  def test_mma_sp_gets_neither_float8_nor_settings(self):
    drawn = [verify.random_problem(np.random.default_rng(i), 'mosaic_gpu_sm80') for i in range(20)]
    self.assertEqual({case['a_dtype'] for case in drawn}, {'bfloat16', 'float16'})
    self.assertEqual({case['config'] for case in drawn}, {None})

  @parameterized.parameters('mosaic_gpu', 'mosaic_gpu_sm80')
  def test_kernels_run_with_what_was_drawn(self, implementation):
    given, seen = [], []

    def right(*args, config, **kwargs):
      given.append(config)
      return _right(*args, config=config, **kwargs)

    draw = verify.random_problem

    def drawn(*args):
      seen.append(draw(*args))
      return seen[-1]

    with mock.patch.object(verify, 'random_problem', drawn):
      self.assertEqual(self._run(right, 3, 5, implementation=implementation), 0)
    configs = [case['config'] and mosaic_gpu.Config(**case['config']) for case in seen]
    self.assertEqual(given, configs)
    self.assertEqual(any(configs), implementation == 'mosaic_gpu')


class DrawTest(parameterized.TestCase):

  @parameterized.parameters(0, 1)
  @pytest.mark.slow
  def test_3000_draws_hold_every_kind_of_setting_that_ships(self, seed):
    def kind(dtype, config):
      config = {'along': 'm', 'halves': 'm'} | config
      return jnp.dtype(dtype).itemsize, *(config[name] for name in _KIND)

    def drawn():
      rng = np.random.default_rng(seed)
      return [verify.random_problem(rng) for _ in range(3000)]

    shipped = {
      kind(entry['key']['dtype'], entry['choice']['config'])
      for path in _records.TUNED.glob('*/sparse_matmul.json') for entry in json.loads(path.read_text())['entries']
      if entry['choice']['implementation'] == 'mosaic_gpu'
    }
    self.assertGreater(len(shipped), 10)
    cases = drawn()
    self.assertEqual(cases, drawn())
    self.assertEqual(cases, json.loads(json.dumps(cases)))
    kinds = {kind(case['a_dtype'], case['config']) for case in cases if case['config']}
    self.assertEmpty(shipped - kinds)
    # And some that a tuner would try, and the user's way.
    self.assertNotEmpty(kinds - shipped)
    self.assertBetween(sum(case['config'] is None for case in cases), 150, 900)

  def test_settings_can_be_built_for_their_problems(self):
    rng, fields = np.random.default_rng(2), {f.name for f in dataclasses.fields(mosaic_gpu.Problem)}
    for _ in range(100):
      case = verify.random_problem(rng)
      dtypes = {name: jnp.dtype(case[name]) for name in ('a_dtype', 'b_dtype', 'out_dtype')}
      p = mosaic_gpu.Problem(**({name: value for name, value in case.items() if name in fields} | dtypes))
      if case['config']:
        _problem.check_config(p, mosaic_gpu.Config(**case['config']))


if __name__ == '__main__':
  absltest.main()
