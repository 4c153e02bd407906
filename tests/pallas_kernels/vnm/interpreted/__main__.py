"""The Triton V:N:M packer against the reference, bit for bit, in Triton's interpreter. Run by triton_test.py."""

import functools
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _triton
from pallas_kernels.pack.api import soft_threshold_pack
from pallas_kernels.vnm import reference
from pallas_kernels.vnm import triton as packers
from pallas_kernels.vnm.format import decompress_operand
from tests.pallas_kernels import triton_interpreter


def _whole(shape, dtype, seed=0):
  # Small integers: sums are exact in any order; ties, zeros of both signs, and some infinities and NaN.
  rng = np.random.default_rng(seed)
  x = rng.integers(-9, 10, shape).astype(np.float32)
  x = np.where(rng.random(shape) < 0.05, np.float32(-0.0), x)
  for value in (np.inf, -np.inf, np.nan):
    x = np.where(rng.random(shape) < 1e-3, np.float32(value), x)
  return jnp.asarray(x).astype(dtype)


# One program: operation by operation XLA would take longer than the interpreter.
_reference = jax.jit(reference.vnm_pack, static_argnames=('v', 'm', 'axis', 'spread', 'activation', 'masked'))


class InterpretedTest(parameterized.TestCase):

  def _check(
    self, x, v, m, *, axis=-1, spread=False, activation=None, gradient=None, masked=False, used=None, general=False
  ):
    pattern_of = dict(v=v, m=m, axis=axis, spread=spread, activation=activation)
    pattern = None
    if gradient is not None:
      pattern, _ = _reference(x, **pattern_of)

    # The launcher's own choice of kernel and constants, with the interpreter in place of the card.
    def call(kernel, *inputs, out_shape, grid, num_warps, **constants):
      del num_warps
      found = triton_interpreter.run(kernel, grid, inputs, [(a.shape, a.dtype) for a in out_shape], constants)
      kernels.append(kernel.fn.__name__ if hasattr(kernel, 'fn') else kernel.__name__)
      return [jnp.asarray(a) for a in found]

    kernels = []
    options = pattern_of | dict(gradient=gradient, pattern=pattern, masked=masked, used=used)
    with mock.patch.object(_triton, 'call', call):
      found, found_masked = packers.vnm_pack(x, **options)
    self.assertEqual(kernels, ['pack_kernel'] if general else mock.ANY)
    self.assertEqual(general, kernels == ['pack_kernel'])
    expected, expected_masked = _reference(
      x, gradient=gradient, pattern=pattern, used=used, masked=masked, **pattern_of
    )
    pairs = [
      (found.compact.values, expected.compact.values), (found.compact.words, expected.compact.words),
      (found.rows, expected.rows),
    ] + ([(found_masked, expected_masked)] if masked else [])
    for a, b in pairs:
      bits = f'u{b.dtype.itemsize}'
      np.testing.assert_array_equal(np.asarray(a).view(bits), np.asarray(b).view(bits))

  @parameterized.parameters(
    (64, 8, 'bfloat16', False), (128, 16, 'bfloat16', True), (64, 4, 'float16', True)
  )
  def test_rows(self, v, m, dtype, masked):
    self._check(_whole((2 * v, 32 * m), dtype), v, m, activation='squared_relu', masked=masked)
    self._check(_whole((v, 16 * m), dtype), v, m, masked=masked)

  @parameterized.parameters((64, 8, 'bfloat16'), (128, 16, 'bfloat16'), (64, 4, 'float16'))
  def test_columns(self, v, m, dtype):
    self._check(_whole((32 * m, 2 * v), dtype), v, m, axis=-2, spread=True)
    used = jnp.arange(v) % 3 > 0
    self._check(_whole((16 * m, v), dtype), v, m, axis=-2, activation='squared_relu', used=used)

  @parameterized.parameters(
    (-1, None, 64, 8), (-1, 'squared_relu', 128, 16), (-2, None, 128, 16), (-2, 'squared_relu', 64, 8)
  )
  def test_under_a_pattern(self, axis, activation, v, m):
    shape = (2 * v, 16 * m) if axis == -1 else (16 * m, 2 * v)
    x, gradient = _finite(shape), _finite(shape, 1)
    self._check(x, v, m, axis=axis, spread=axis == -2, activation=activation, gradient=gradient, masked=axis == -1)

  def test_the_pattern_given_is_used(self):
    # Of other numbers than x: nothing is found again.
    x, gradient = _finite((64, 128)), _finite((64, 128), 1)
    pattern, _ = _reference(x[::-1], v=64, m=8)
    expected, _ = _reference(x, v=64, m=8, gradient=gradient, pattern=pattern)
    np.testing.assert_array_equal(expected.rows, pattern.rows)
    dense = np.asarray(jax.jit(decompress_operand)(expected), np.float32)
    kept = np.asarray(jax.jit(functools.partial(reference.vnm_mask, v=64, m=8))(x[::-1]))
    np.testing.assert_array_equal(dense, np.where(kept, np.asarray(gradient, np.float32), 0))

  def test_dense_from_an_operand(self):
    operand = jax.jit(functools.partial(soft_threshold_pack, axis=-1))(_finite((128, 192)), jnp.float32(1.5))

    def call(kernel, *inputs, out_shape, grid, num_warps, **constants):
      del num_warps
      return triton_interpreter.run(kernel, grid, inputs, [(a.shape, a.dtype) for a in out_shape], constants)

    with mock.patch.object(_triton, 'call', call):
      found = packers.expand(operand)
    expected = np.asarray(jax.jit(reference.expand)(operand))
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))

  @parameterized.parameters((-1, 64, None), (-2, 64, 'squared_relu'), (-1, 192, None))
  def test_general(self, axis, v, activation):
    shape = (v, 128) if axis == -1 else (128, v)
    x, gradient = _finite(shape), _finite(shape, 1)
    options = dict(axis=axis, spread=v == 64, activation=activation, masked=True, general=True)
    self._check(x, v, 8, **options)
    self._check(x, v, 8, gradient=gradient, **options)


def _finite(shape, seed=0):
  x = _whole(shape, 'bfloat16', seed)
  return jnp.where(jnp.isfinite(x), x, 1)


if __name__ == '__main__':
  absltest.main()
