"""A gate in the epilogue of `sparse_matmul`: its meaning, and the Hopper kernel interpreted with race detection."""

import dataclasses
import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _tuning, formats, operand
from pallas_kernels.sparse_matmul import api, mosaic_gpu
from pallas_kernels.sparse_matmul.call import Call, Vectors
from tests import targets
from tests.pallas_kernels.sparse_matmul import interpreted

_BF16 = jnp.dtype('bfloat16')
_E4M3 = jnp.dtype('float8_e4m3fn')
_CONFIG = mosaic_gpu.Config(bn=64, stages=2, cluster=1)


def _operand(rows, k, dtype, seed):
  rng = np.random.default_rng(seed)
  keep = np.argsort(rng.random((rows, k // 4, 4)), axis=-1) < 2
  w = rng.standard_normal((rows, k)).astype(np.float32).astype(dtype)
  return operand.to_operand(formats.compress(jnp.asarray(w), jnp.asarray(keep.reshape(rows, k)), axis=-1))


def _inputs(hidden, n, k, dtype):
  gate, up = (_operand(hidden, k, dtype, seed) for seed in range(2))
  b = np.random.default_rng(2).standard_normal((n, k)).astype(np.float32)
  return gate, up, jnp.asarray(b.astype(dtype))


def _dense(a):
  return np.asarray(formats.expand(operand.from_operand(a)), np.float32)


class MeaningTest(parameterized.TestCase):

  @parameterized.parameters('mn', 'nm')
  def test_rows_in_turns_make_a_gate_and_what_it_gates(self, out_layout):
    gate, up, b = _inputs(192, 24, 64, _BF16)
    biases = np.linspace(-1, 1, 2 * 192, dtype=np.float32).reshape(2, 192)
    z = np.stack([_dense(a) @ np.asarray(b, np.float32).T for a in (gate, up)]) + biases[..., None]
    h = np.maximum(z[0], 0) * z[1]
    in_turns = biases.reshape(2, -1, 64).transpose(1, 0, 2).reshape(-1)
    found = api.sparse_matmul(
      operand.in_turns(gate, up), b, bias=in_turns, activation='relu', keep_preactivation=True, amax=True, gated=True,
      out_layout=out_layout, out_dtype=jnp.float32,
    )  # fmt: skip
    for f, e in zip(found, (h, z.reshape(2 * 192, 24)), strict=False):
      np.testing.assert_allclose(f, e if out_layout == 'mn' else e.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[2], np.abs(h).max(), rtol=1e-5)

  def test_gradients_are_those_of_the_formula(self):
    gate, up, b = _inputs(128, 16, 32, _BF16)
    b = b.astype(jnp.float32)
    dense = [jnp.asarray(_dense(a)) for a in (gate, up)]

    def found(b):
      a = operand.in_turns(gate, up)
      d = api.sparse_matmul(a, b.astype(_BF16), activation='silu', gated=True, out_layout='nm', out_dtype=jnp.float32)
      return jnp.sum(d**2)

    def expected(b):
      z, u = (jnp.dot(b, w.T, precision='highest') for w in dense)
      return jnp.sum((jax.nn.silu(z) * u) ** 2)

    found, expected = (np.asarray(jax.grad(f)(b)) for f in (found, expected))
    self.assertLess(np.abs(found - expected).max(), 0.01 * np.abs(expected).max())  # cotangents of b have 16 bits

  @parameterized.parameters((64, 'silu'), (128, None))
  def test_refuses_what_makes_no_gate(self, rows, activation):
    a = _operand(rows, 32, _BF16, 0)
    with self.assertRaisesRegex(ValueError, 'gated=True needs an activation and a multiple of 128 rows'):
      api.sparse_matmul(a, jnp.zeros((8, 32), _BF16), activation=activation, gated=True)

  @parameterized.parameters(('nm', 'n'), ('nm', 'm'), ('mn', 'k'))
  def test_on_a_mesh(self, out_layout, divided):
    gate, up, b = _inputs(256, 16, 128, _BF16)
    asked = dict(activation='silu', keep_preactivation=True, gated=True, out_layout=out_layout)
    f = functools.partial(api.sparse_matmul, **asked)
    mesh = jax.make_mesh((2,), ('d',), axis_types=(jax.sharding.AxisType.Auto,))

    def put(x, *axes):
      spec = jax.P(*('d' if axis == divided else None for axis in axes))
      return jax.device_put(x, jax.NamedSharding(mesh, spec))

    a = operand.in_turns(gate, up)
    parts = operand.SparseOperand(put(a.values, 'm', 'k'), put(a.metadata, 'm', 'k', ''), a.layout)
    for found, expected in zip(jax.jit(f)(parts, put(b, 'n', 'k')), jax.jit(f)(a, b), strict=True):
      self.assertLess(_tuning.relative_error(found, expected.astype(jnp.float32)), 1e-2)

  def test_operands_of_other_rows_are_refused(self):
    with self.assertRaisesRegex(ValueError, 'no equal multiples of 64 rows'):
      operand.in_turns(_operand(64, 32, _BF16, 0), _operand(128, 32, _BF16, 0))


@pytest.mark.few
class InterpretTest(parameterized.TestCase):

  # Rows of the gate: whole tiles, or 64 of a tile whose other 64 are none; with a cluster whole CTAs are none, too.
  @parameterized.parameters(
    (256, 64, dict(slots=3)), (192, 128, dict(slots=2, epilogue_n=32)), (192, 64, dict(cluster=2, ctas=2, slots=3)),
    (192, 64, dict(cluster=2, along='n')), (128, 256, dict(split=2, ctas=3, slots=3)), (192, 192, dict(delay=0)),
  )
  def test_gate_in_the_epilogue(self, hidden, k, change):
    self._check(hidden, k, _BF16, change, activation='silu', keep_preactivation=True, out_layout='nm')
    without = change | dict(slots=1)
    self._check(hidden, k, _BF16, without, activation='silu', keep_preactivation=False, out_layout='nm')

  @parameterized.parameters(('bfloat16', 'mn'), ('float32', 'mn'), ('float32', 'nm'))
  def test_other_results(self, out_dtype, out_layout):
    asked = dict(out_dtype=jnp.dtype(out_dtype), out_layout=out_layout)
    self._check(192, 64, _BF16, dict(epilogue_n=32), activation='gelu', keep_preactivation=True, **asked)

  def test_scaled_with_its_largest_magnitude(self):
    self._check(
      192, 320, _E4M3, dict(bk=128), scales=(jnp.float32(0.5), jnp.float32(2)), activation='relu', amax=True,
      keep_preactivation=True, out_layout='nm',
    )  # fmt: skip

  def test_settings_of_64_rows_do_not_serve_a_gate(self):
    p = mosaic_gpu.Problem(512, 256, 64, _BF16, _BF16, _BF16, activation='silu', gated=True)
    self.assertFalse(mosaic_gpu.fits(p, mosaic_gpu.Config(rows=64)))
    for keep in (True, False):
      wanted = dataclasses.replace(p, keep_preactivation=keep)
      found = mosaic_gpu.for_outputs(wanted, mosaic_gpu.Config(slots=2))
      self.assertEqual((found.slots, mosaic_gpu.fits(wanted, found)), (3, True) if keep else (1, True))
      self.assertTrue(mosaic_gpu.fits(wanted, mosaic_gpu.default_config(wanted)))

  @parameterized.parameters(1, 16, 64, 72)
  def test_few_tokens_have_a_setting(self, n):
    for keep in (True, False):
      p = mosaic_gpu.Problem(
        2048, n, 1024, _BF16, _BF16, _BF16, out_layout='nm', activation='silu', keep_preactivation=keep, gated=True
      )
      self.assertTrue(mosaic_gpu.fits(p, mosaic_gpu.chosen_config(p, targets.target_device('sm_90a'))))

  def test_few_rows_are_refused(self):
    a, _, b = _inputs(128, 16, 32, _BF16)
    with self.assertRaisesRegex(NotImplementedError, 'a gate takes 256 rows of A or more, found 128'):
      call = Call(_BF16, 'nk', 'nm', 'silu', gated=True)
      mosaic_gpu.sparse_matmul(a, b, Vectors(), call, interpret=True)

  def _check(self, hidden, k, dtype, change, scales=(None, None), **asked):
    gate, up, b = _inputs(hidden, 72, k, dtype)
    call = Call(**dict(out_dtype=_BF16, b_layout='nk', gated=True) | asked)
    # Without a bias where the largest magnitude is noted: the last tile of columns is not full.
    bias = None if call.amax else jnp.linspace(-1, 1, 2 * hidden, dtype=jnp.float32)
    args = operand.in_turns(gate, up), b, Vectors(bias, *scales)
    interpreted.check(self, args, call, dataclasses.replace(_CONFIG, **change))


if __name__ == '__main__':
  absltest.main()
