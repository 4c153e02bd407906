"""The check by random problems on a CPU: the reference in place of the kernels, and what a record says of a run."""

import contextlib
import io
import json
import math
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _tuning
from pallas_kernels.sparse_matmul import reference, verify


def _right(*args, config, **kwargs):
  del config
  return reference.sparse_matmul(*args, **kwargs)


def _without_bias(a, b, bias, *args, **kwargs):
  return _right(a, b, None if bias is None else jnp.zeros_like(bias), *args, **kwargs)


def _nan(*args, **kwargs):
  found = _right(*args, **kwargs)
  return tuple(x * math.nan for x in found) if isinstance(found, tuple) else found * math.nan


class VerifyTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.out = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())) / 'verify.jsonl'
    self.enter_context(contextlib.redirect_stdout(io.StringIO()))
    # Small ones, since NumPy's product is made of each.
    draw = verify.random_problem
    self.enter_context(mock.patch.object(
      verify, 'random_problem', lambda rng, **kwargs: draw(rng, **kwargs) | dict(m=24, n=16, k=64)))
    self.enter_context(mock.patch.object(verify.arg_specs, 'RAGGED', ((1, 1, 4),)))

  def _run(self, kernel, *args, implementation='mosaic_gpu', **kwargs):
    with mock.patch.dict(verify.KERNELS, {implementation: kernel}):
      return verify.verify(*args, implementation=implementation, **kwargs)

  @parameterized.parameters('mosaic_gpu', 'mosaic_gpu_sm80')
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
      self.assertBetween(record['worst_error'], 1e-5, _tuning.TOLERANCE)

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

  def test_time_ends_a_run(self):
    self.assertEqual(self._run(_right, 4, seconds=-1.0, out=self.out), 0)
    self.assertEqual(json.loads(self.out.read_text())['count'], 0)

  def test_mma_sp_gets_no_float8(self):
    drawn = [verify.random_problem(np.random.default_rng(i), float8=False)['a_dtype'] for i in range(20)]
    self.assertEqual(set(drawn), {'bfloat16', 'float16'})


if __name__ == '__main__':
  absltest.main()
