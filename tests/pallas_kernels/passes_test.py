"""What `bench` and `tune` of memory-bound ops keep, with a clock and results of our own."""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import io
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _device, _passes, _triton, costs
from pallas_kernels.ops import OPS
from tests import targets
from tests.pallas_kernels import triton_interpreter

_HEAD = dict(bench='memory_bound', device='gpu', driver='1', versions={}, when='2026-01-01')
_ROW = _passes.Case(
  costs.Move('negated', 256), (8, 8), lambda key: (jnp.ones((8, 8), jnp.bfloat16),), None, jnp.negative, ()
)  # fmt: skip


def _op(check, **more):
  return _passes.Op('pack', lambda: [_ROW, dataclasses.replace(_ROW, move=costs.Move('other', 256))], check, more)


class PassesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    for module, name, value in (
      (_passes, 'bandwidths', lambda: dict(copy_tb_s=3.0, pass_tb_s=2.5)),
      (_passes, 'common_fields', lambda device: _HEAD),
      (_compat, 'device_times_ms', lambda f, args, iterations: [1.28e-7] * iterations),
      (_device, 'current', lambda: targets.target_device('sm_90a')),
    ):
      self.enter_context(mock.patch.object(module, name, value))

  def _run(self, command, op, *arguments):
    parser = argparse.ArgumentParser()
    for option in ('--out', '--tuned'):  # of every op
      parser.add_argument(option, type=pathlib.Path)
    getattr(_passes, f'{command}_arguments')(parser)
    with contextlib.redirect_stdout(io.StringIO()):
      return getattr(_passes, command)(op, parser.parse_args(arguments))

  @parameterized.parameters(
    ([0, 0], (), True), ([0, 3], (), False), (None, (), False), ([0], ('--only', 'negated'), False)
  )
  def test_bandwidths_are_kept_if_all_was_measured_and_right(self, differing, arguments, kept):
    """`differing` entries of a comparison; None for a check that breaks off."""
    check = mock.Mock(side_effect=RuntimeError) if differing is None else lambda: [dict(differing=differing)]
    status = self._run('tune', _op(check), '--tuned', str(self.folder), *arguments)
    self.assertEqual(status, int(differing is None or sum(differing) > 0))
    found = list(self.folder.glob('*/memory_bound_pack.json'))
    self.assertEqual(bool(found), kept)
    if kept:
      # 256 bytes in 1.28e-7 ms are 2 TB/s.
      self.assertEqual(costs.expected_ms(found[0].parent.name, 'negated', 2 * 10**9, folder=self.folder), 1.005)

  def test_a_record_a_row_and_what_an_op_measures_besides(self):
    out = self.folder / 'out.jsonl'
    op = _op(lambda: [dict(differing=[0], error=0.01)], matmuls=lambda options, write: write({'op': 'more'}))
    self.assertEqual(self._run('bench', op, '--out', str(out)), 1)  # the error is too large
    records = [json.loads(line) for line in out.read_text().splitlines()]
    self.assertEqual([record['op'] for record in records], ['negated', 'other', 'more'])
    self.assertEqual((records[0]['error'], records[0]['bytes'], len(records[0]['samples_ms'])), (1, 256, 15))
    out.unlink()
    self.assertEqual(self._run('bench', op, '--out', str(out), '--only', 'matmuls', '--skip-check'), 0)
    self.assertEqual([json.loads(line)['op'] for line in out.read_text().splitlines()], ['more'])


@absltest.skipUnless(triton_interpreter.HAS_TRITON, 'needs triton')
class OpsTest(parameterized.TestCase):

  @parameterized.parameters('pack', 'gated_activation', 'quantize')
  def test_every_row_has_arrays_of_its_bytes_and_settings_or_a_form_of_xla(self, name):
    for case in importlib.import_module(f'pallas_kernels.{OPS[name].folder}.arg_specs').cases():
      arrays = jax.eval_shape(case.inputs, jax.random.key(0))
      self.assertEqual(arrays[0].shape, case.shape)
      self.assertEqual(bool(case.configs), case.triton is not None)
      self.assertTrue(case.triton or case.xla)
      results = jax.eval_shape(case.xla or functools.partial(case.triton, config=case.configs[0]), *arrays)
      if case.move.op in ('masked_pack', 'masked_pack8'):  # the codes come back as they went in
        results = results.rows, results.columns
      moved = [a for a in jax.tree.leaves((arrays, results)) if a.size > 1]  # no keys, no scales
      self.assertEqual(case.move.size, sum(a.size * a.dtype.itemsize for a in moved), case.move.op)

  @parameterized.parameters('pack', 'gated_activation', 'quantize')
  def test_the_first_settings_of_a_row_are_those_that_the_library_runs(self, name):
    call = _triton.call
    for case in importlib.import_module(f'pallas_kernels.{OPS[name].folder}.arg_specs').cases():
      if case.triton is None:
        continue
      arrays, launches = jax.eval_shape(case.inputs, jax.random.key(0)), []
      for config in (None, case.configs[0]):
        with mock.patch.object(_triton, 'call', side_effect=call) as made:
          jax.eval_shape(functools.partial(case.triton, config=config), *arrays)
        launches.append([dict(c.kwargs, out_shape=None) for c in made.call_args_list])
      self.assertNotEmpty(launches[0])
      self.assertEqual(launches[0], launches[1], (case.move.op, case.dtype))


if __name__ == '__main__':
  absltest.main()
