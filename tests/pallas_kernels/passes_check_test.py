"""The check of packers, with references in place of the kernels of a GPU that is not there."""

import os
from unittest import mock

from absl.testing import absltest
import jax

from pallas_kernels import _checks, _device, _dispatch, _kept, _passes_check

A100 = _device.target_device('sm_80')


class PassesCheckTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.dict(os.environ, {_kept.VARIABLE: 'off'}))
    self.enter_context(mock.patch.dict(_checks._made, clear=True))
    self.enter_context(mock.patch.object(_passes_check, '_SHAPE', (64, 256)))
    _dispatch.log_once.cache_clear()

  def test_one_wrong_entry_is_enough(self):
    run, kept = _passes_check._run, {}

    def stand_in(implementation, op, *args):
      name = getattr(op, '__name__', 'mvue_pack of a gradient')
      if name not in kept:  # of the same arguments the same
        kept[name] = run('reference', op, *args)
      flip = implementation == 'triton' and name == wrong
      return jax.tree.map(lambda x: x.ravel().at[3].add(1).reshape(x.shape), kept[name]) if flip else kept[name]

    self.enter_context(mock.patch.object(_passes_check, '_run', stand_in))
    for wrong in (None, 'masked_pack', 'activation_backward_pack'):
      with self.subTest(wrong), self.assertLogs('pallas_kernels', 'INFO') as logs:
        _checks._made.clear()
        self.assertEqual(_passes_check.right(A100), wrong is None)
      self.assertEqual(logs.records[0].levelname, 'WARNING' if wrong else 'INFO')
      self.assertIn(f'the kernel is wrong here: {wrong}: ' if wrong else 'the kernels are right', logs.output[0])

  def test_kernels_that_do_not_run_are_not_right(self):
    with self.assertLogs('pallas_kernels', 'WARNING') as logs:
      self.assertFalse(_passes_check.right(A100))
    self.assertIn('a kernel could not be checked: ValueError', logs.output[0])


if __name__ == '__main__':
  absltest.main()
