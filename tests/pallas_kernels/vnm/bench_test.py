"""The benchmark of `vnm_matmul` on small shapes: what its records hold."""

import contextlib
import io
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import pytest

from pallas_kernels import __main__ as command
from pallas_kernels import _device, _tuning
from pallas_kernels.vnm import api, arg_specs, bench, mosaic_gpu
from tests import targets


class BenchTest(parameterized.TestCase):
  @pytest.mark.slow
  def test_records(self):
    roles = ('residuals', 'pull_back', 'transpose', 'columns')
    names = ['64x2x8-16384x4096x16384', *(f'64x2x8-{role}' for role in roles)]
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()) as said:
      out = pathlib.Path(name) / 'records.jsonl'
      options = ['--out', str(out), '--tiny', '--rounds', '2', '--steps', '2', '--select', *names]
      self.assertEqual(command.main(['bench', 'vnm_matmul', *options]), 0, said.getvalue())
      records = [json.loads(line) for line in out.read_text().splitlines()]
    matmul, forward, pull_back, transpose, columns = records
    self.assertEqual([r['bench'] for r in records], ['vnm_matmul', *['memory_bound'] * 4])
    for record in records:
      self.assertContainsSubset(('device', 'versions', 'commit', 'command', 'samples_ms', 'pattern', 'recipe'), record)
      self.assertLen(record['samples_ms'], 4)  # every one
      self.assertFalse(record['headline'])
    self.assertLessEqual(matmul['error'], 4e-3)
    self.assertEqual([*matmul['baselines']], ['dense', 'dense_without_zeros'])
    ratio = matmul['baselines']['dense']['median_ms'] / matmul['median_ms']
    self.assertAlmostEqual(matmul['speedup'], ratio, places=3)
    # x [128, 256] read; a quarter of it twice, 2 bits for each of these, int32 of kept columns and of counts written.
    self.assertEqual(forward['bytes'], 65536 + 2 * 65536 // 4 + 128 * 64 // 4 + 2 * 128 * 4 + 256 * 4)
    # The gradient, what was kept of x and the positions read, values written.
    self.assertEqual(pull_back['bytes'], 65536 + 65536 // 4 + 128 * 64 // 4 + 2 * 128 * 4 + 65536 // 4)
    # An operand of [256, 128] and a flag a column read, an operand of [128, 256] written.
    self.assertEqual(transpose['bytes'], 2 * (65536 // 4 + 128 * 64 // 4) + 4 * 64 * 4 + 128 + 2 * 128 * 4)
    # 13 of 256 columns written, [128, 13]; they are in groups of 8, so at most all 4 sectors of a row's 32 groups.
    self.assertBetween(columns['bytes'], 2 * 128 * 13 + 32 * 128, 2 * 128 * 13 + 4 * 32 * 128 + 2 * 512 * 2)

  @parameterized.parameters((1.0, 0), (1.02, 1))
  @pytest.mark.slow
  def test_the_kernel_of_the_gpu_with_its_recorded_setting(self, factor, status):
    """The reference in place of the kernel, off by a factor."""
    out = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())) / 'records.jsonl'

    def multiply(a, b, **_):
      return api.vnm_matmul(a, b, implementation='reference') * factor

    def dense(wide):
      # A CPU multiplies bfloat16 in few layouts.
      return {'plain': lambda a, b: jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32)).astype(a.dtype)}

    def sustained(calls):
      return [
        {'sustained_ms': float(i), 'zeros': float(jnp.mean(args[0] == 0)) if i > 1 else None}
        for i, (_, args) in enumerate(calls, 1)
      ]

    for module, name, value in (
      (mosaic_gpu, 'vnm_matmul', multiply), (bench, 'dense_ways', dense), (_tuning, 'sustained', sustained),
      (_device, 'current', lambda: targets.target_device('sm_90a')),
    ):
      self.enter_context(mock.patch.object(module, name, value))
    spec = arg_specs.Spec(64, 8, (128, 256, 128))
    with mock.patch.dict(arg_specs.SPECS, small=spec), contextlib.redirect_stdout(io.StringIO()) as said:
      options = ['--out', str(out), '--rounds', '2', '--steps', '1', '--select', 'small']
      self.assertEqual(command.main(['bench', 'vnm_matmul', *options]), status)
    if status:
      self.assertIn('small: failed: ValueError: relative error', said.getvalue())
      self.assertFalse(out.exists())
      return
    (record,) = map(json.loads, out.read_text().splitlines())
    self.assertEqual((record['implementation'], record['headline'], record['sustained_ms']), ('mosaic_gpu', True, 1.0))
    mosaic_gpu.Config(**record['config'])
    same, full = (record['baselines'][name] for name in ('dense', 'dense_without_zeros'))
    self.assertEqual((same['config'], same['sustained_ms'], same['zeros']), ({'way': 'plain'}, 2.0, 0.75))
    self.assertEqual((full['config'], full['sustained_ms'], full['zeros']), ({'way': 'plain'}, 3.0, 0.0))


if __name__ == '__main__':
  absltest.main()
