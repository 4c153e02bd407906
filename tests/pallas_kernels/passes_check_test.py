"""The check of packers, with references in place of the kernels of a GPU that is not there."""

import functools
import os
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _checks, _disk_cache, _dispatch, _passes_check
from tests import targets

A100 = targets.target_device('sm_80')


class PassesCheckTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.dict(os.environ, {_disk_cache.VARIABLE: 'off'}))
    self.enter_context(mock.patch.dict(_checks._made, clear=True))
    self.enter_context(mock.patch.object(_passes_check, '_SHAPE', (64, 256)))
    _dispatch.log_once.cache_clear()

  def test_one_wrong_entry_is_enough(self):
    def stand_in(implementation, op, *args):
      off = implementation == 'triton' and op.__name__ == wrong
      return jax.tree.map(lambda x: _ones(x, off=off), _shapes(op, *args))

    self.enter_context(mock.patch.object(_passes_check, '_run', stand_in))
    for wrong in (None, 'masked_pack', 'activation_backward_pack'):
      with self.subTest(wrong), self.assertLogs('pallas_kernels', 'INFO') as logs:
        _checks._made.clear()
        self.assertEqual(_passes_check.right(A100), wrong is None)
      self.assertEqual(logs.records[0].levelname, 'WARNING' if wrong else 'INFO')
      self.assertIn(f'the kernel is wrong here: {wrong}: ' if wrong else 'the kernels are right', logs.output[0])

  def test_kernels_that_do_not_run_are_not_right(self):
    run = _passes_check._run

    def stand_in(implementation, op, *args):
      return run('triton', op, *args) if implementation == 'triton' else jax.tree.map(_ones, _shapes(op, *args))

    self.enter_context(mock.patch.object(_passes_check, '_run', stand_in))
    with self.assertLogs('pallas_kernels', 'WARNING') as logs:
      self.assertFalse(_passes_check.right(A100))
    # Of an environment without Triton one error, with it another.
    self.assertRegex(logs.output[0], 'a kernel could not be checked: (ValueError|NotImplementedError)')


def _shapes(op, *args):
  """The shapes of what the reference makes, not compiled."""
  return jax.eval_shape(functools.partial(op, implementation='reference'), *args)


def _ones(x, off=False):
  x = np.ones(x.shape, x.dtype)
  x.flat[3] += off
  return jnp.asarray(x)


if __name__ == '__main__':
  absltest.main()
