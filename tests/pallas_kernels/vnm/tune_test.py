"""The tuner of `vnm_matmul` on a CPU: the reference in place of the kernel, a clock of our own."""

import argparse
import contextlib
import functools
import io
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp

from pallas_kernels import _device, _records, _tuning
from pallas_kernels.vnm import api, arg_specs, mosaic_gpu, tune
from pallas_kernels.vnm.format import decompress_operand, verify
from tests import targets

_SPEC = arg_specs.Spec(64, 8, (128, 256, 128))


class TuneTest(absltest.TestCase):

  def test_the_fastest_that_is_right_is_kept(self):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    gpu = targets.target_device('sm_90a')
    right = functools.partial(api.vnm_matmul, implementation='reference')

    def multiply(a, b, config, **_):
      return right(a, b) * (1.02 if config.band == 64 else 1)

    def times(f, args, iterations):
      jax.block_until_ready(f(*args))
      return [1.0 if isinstance(args[0], jax.Array) else 0.5] * iterations

    def dense(wide):
      # A CPU multiplies bfloat16 in few layouts.
      return {'plain': lambda a, b: jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32)).astype(a.dtype)}

    for module, name, value in (
      (mosaic_gpu, 'vnm_matmul', multiply), (tune, 'dense_ways', dense), (_tuning, 'times_ms', times),
      (_tuning.time, 'sleep', lambda s: None), (_device, 'current', lambda: gpu), (_device, 'environment', dict),
    ):
      self.enter_context(mock.patch.object(module, name, value))
    with mock.patch.dict(arg_specs.SPECS, small=_SPEC), contextlib.redirect_stdout(io.StringIO()) as out:
      self.assertEqual(tune.run(argparse.Namespace(select=['small'], tuned=folder)), 0)
    (entry,) = json.loads((folder / gpu.slug / f'{api.OP}.json').read_text())['entries']
    self.assertEqual(entry['key']['pattern'], '64:2:8')
    self.assertEqual(entry['choice']['implementation'], 'mosaic_gpu')
    wrong = [row for row in entry['candidates'] if row['rejected']]
    self.assertEqual([row['config']['band'] for row in wrong], [64])
    self.assertIn('0.5000 ms, dense 1.0000, x2.000', out.getvalue())


class SettingsTest(absltest.TestCase):

  def test_settings_can_be_built(self):
    for v in (64, 128, 256):
      problem = mosaic_gpu.Problem(16384, 4096, 8192, v, 16384, *[jnp.dtype('bfloat16')] * 2, 'mn')
      for config in mosaic_gpu.settings(v):
        mosaic_gpu.check_config(problem, config)

  def test_what_the_records_choose_can_be_built(self):
    paths = sorted(_records.TUNED.glob(f'*/{api.OP}.json'))
    self.assertContainsSubset(('nvidia_h100_80gb_hbm3', 'nvidia_h200'), [path.parent.name for path in paths])
    chosen = 0
    for entry in (entry for path in paths for entry in _records.entries_of(path)):
      key, v = entry['key'], int(entry['key']['pattern'].split(':')[0])
      m = int(entry['key']['pattern'].split(':')[2])
      types = [jnp.dtype(key[name]) for name in ('dtype', 'out_dtype')]
      problem = mosaic_gpu.Problem(key['m'], key['n'], 4 * key['k'] // m, v, key['k'], *types, key['out_layout'])
      for row in entry['candidates']:
        mosaic_gpu.check_config(problem, mosaic_gpu.Config(**row['config']))
      chosen += entry['choice']['implementation'] == 'mosaic_gpu'
    self.assertEqual(chosen, 8 * len(paths))

  def test_the_random_operand_is_legal(self):
    a = arg_specs.operand(128, 64, 64, 8, jax.random.key(0))
    verify(decompress_operand(a), v=64, m=8)


if __name__ == '__main__':
  absltest.main()
