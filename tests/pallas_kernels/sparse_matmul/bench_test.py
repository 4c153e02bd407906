"""The tuner's way through a problem on a CPU: XLA in place of the kernels, a clock of our own in place of CUPTI."""

import contextlib
import functools
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _device, _tuning
from pallas_kernels.sparse_matmul import api, arg_specs, bench, mosaic_gpu

_SPEC = arg_specs.Spec(64, 128, 192, 'forward')
_CARD = _device.target_device('sm_90a')


def _times(f, args, iterations):
  jax.block_until_ready(f(*args))
  return [1.0] * iterations


def _stand_in(wrong):
  """A product by XLA for the kernel with a setting, off by 2% for settings in `wrong`."""
  def sparse(p, config):
    def f(a, b):
      d = api.sparse_matmul(
        a, b, b_layout=p.b_layout, out_layout=p.out_layout, out_dtype=jnp.float32, implementation='reference'
      )
      return (d * (1.02 if wrong(config) else 1.0)).astype(p.out_dtype)
    return f
  return sparse


class TuneTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    self.enter_context(mock.patch.object(bench, '_times_ms', _times))
    self.enter_context(mock.patch.object(bench, '_gap_s', lambda p, iterations: 0.0))
    self.enter_context(mock.patch.object(_device, 'current', lambda: _CARD))
    self.enter_context(mock.patch.object(_device, 'environment', dict))

  def _entries(self):
    return json.loads((self.folder / _CARD.slug / 'sparse_matmul.json').read_text())['entries']

  def test_a_problem_of_two_roles_is_tuned_once_with_the_lock_held_where_the_card_is_used(self):
    held = []

    class Lock(contextlib.AbstractContextManager):

      def __enter__(self):
        held.append(True)

      def __exit__(self, *_):
        held.append(False)

    def sparse(p, config):
      self.assertFalse(held and held[-1])
      return _stand_in(lambda c: c.slots == 2)(p, config)

    with mock.patch.object(bench, '_sparse', sparse):
      bench.tune([_SPEC, arg_specs.Spec(64, 192, 128, 'input_grad')], self.folder, ('mosaic_gpu',), Lock())
    self.assertEqual(held, [True, False])
    (entry,) = self._entries()
    self.assertEqual(entry['key'], bench.problem(_SPEC).key)
    wrong = [row for row in entry['candidates'] if row['config']['slots'] == 2]
    self.assertNotEmpty(wrong)
    for row in entry['candidates']:
      self.assertEqual(row['rejected'] is not None, row in wrong)
      mosaic_gpu.Config(**row['config'])

  def test_what_is_known_takes_part_again(self):
    known = mosaic_gpu.Config(rows=64, bn=64, stages=3)
    p = bench.problem(_SPEC)
    row = dict(implementation='mosaic_gpu', config=bench._plain(known), error=0.0, rejected=None, samples_ms=[1.0])
    path = self.folder / _CARD.slug / 'sparse_matmul.json'
    _tuning.save(path, {'op': 'x'}, [dict(key=p.key, baseline={}, candidates=[row], choice=row)])
    self.assertEqual(bench._settings(p, _CARD, self.folder, False), [known])
    self.assertIn(known, bench._settings(p, _CARD, self.folder, True))
    self.assertLen(bench._settings(p, _CARD, self.folder, True), 11)

  @parameterized.product(
    dtype=('bfloat16', 'float8_e4m3fn'), role=arg_specs.ROLES,
  )
  def test_the_right_answer(self, dtype, role):
    spec = arg_specs.Spec(48, 64, 80, role, jnp.dtype(dtype))
    p = bench.problem(spec)
    x = bench._inputs(p, jax.random.key(0))
    a, b = (np.asarray(v, np.float64) for v in (x.a_dense, x.b))
    d = a @ (b.T if p.b_layout == 'nk' else b)
    expected = d if p.out_layout == 'mn' else d.T
    np.testing.assert_allclose(jax.jit(functools.partial(bench._expected, p))(x.a_dense, x.b), expected, atol=1e-4)


if __name__ == '__main__':
  absltest.main()
