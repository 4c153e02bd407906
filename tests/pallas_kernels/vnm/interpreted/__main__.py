"""The Triton V:N:M packer against the reference, bit for bit, in Triton's interpreter. Run by interpreted_test.py."""

import dataclasses
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
  return jnp.asarray(x.astype(dtype))


# One program: operation by operation XLA would take longer than the interpreter.
_transpose_pack = jax.jit(reference.transpose_pack)
_reference = jax.jit(reference.vnm_pack, static_argnames=('v', 'm', 'activation', 'masked', 'residuals'))


def _interpreted(f, *args, **options):
  """`f` of the launcher, with its own choice of kernels and constants, and the interpreter in place of the GPU."""

  def call(kernel, *inputs, out_shape, grid, num_warps, zeroed_outputs=(), **constants):
    del num_warps
    outputs = [(a.shape, a.dtype) for a in out_shape]
    kernels.append(kernel.fn.__name__ if hasattr(kernel, 'fn') else kernel.__name__)
    found = triton_interpreter.run(
      kernel, grid, inputs, outputs, constants, zero_last=zeroed_outputs == (len(outputs) - 1,)
    )
    return [jnp.asarray(a) for a in found]

  kernels = []
  with mock.patch.object(_triton, 'call', call):
    return f(*args, **options), kernels


def _assert_same_bits(found, expected):
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    bits = f'u{b.dtype.itemsize}'
    np.testing.assert_array_equal(np.asarray(a).view(bits), np.asarray(b).view(bits))


class InterpretedTest(parameterized.TestCase):

  @parameterized.parameters((64, 8, 'bfloat16'), (128, 16, 'bfloat16'), (64, 4, 'float16'))
  def test_rows(self, v, m, dtype):
    for shape, activation in (((2 * v, 32 * m), 'squared_relu'), ((v, 16 * m), None)):
      x, options = _whole(shape, dtype), dict(v=v, m=m, activation=activation)
      found, kernels = _interpreted(packers.vnm_pack, x, **options)
      self.assertEqual(kernels, ['pack_rows'])
      _assert_same_bits(found, _reference(x, **options))

  @parameterized.parameters((None, (64, 8)), ('squared_relu', (128, 16)))
  def test_under_a_pattern(self, activation, block):
    v, m = block
    x, gradient = _finite((2 * v, 16 * m)), _finite((2 * v, 16 * m), 1)
    pattern, _, inputs, _ = _reference(x, v=v, m=m, activation=activation, residuals=True)
    options = dict(v=v, m=m, activation=activation, gradient=gradient, pattern=pattern, masked=True)
    found, kernels = _interpreted(packers.vnm_pack, inputs, **options)
    self.assertEqual(kernels, ['pack_rows_as'])
    _assert_same_bits(found, _reference(inputs, **options))

  def test_the_pattern_given_is_used(self):
    # Of other numbers than x: nothing is found again.
    x, gradient = _finite((64, 128)), _finite((64, 128), 1)
    pattern, *_ = _reference(x[::-1], v=64, m=8)
    expected, *_ = _reference(pattern.compact.values, v=64, m=8, gradient=gradient, pattern=pattern)
    np.testing.assert_array_equal(expected.rows, pattern.rows)
    dense = np.asarray(jax.jit(decompress_operand)(expected), np.float32)
    kept = np.asarray(jax.jit(functools.partial(reference.vnm_mask, v=64, m=8))(x[::-1]))
    np.testing.assert_array_equal(dense, np.where(kept, np.asarray(gradient, np.float32), 0))

  def test_dense_from_an_operand(self):
    operand = jax.jit(functools.partial(soft_threshold_pack, axis=-1))(_finite((128, 192)), jnp.float32(1.5)).operand
    found, _ = _interpreted(packers.expand, operand)
    _assert_same_bits(found, jax.jit(reference.expand)(operand))

  @parameterized.parameters((64, 8, 'bfloat16'), (128, 16, 'float16'), (64, 4, 'bfloat16'))
  def test_residuals(self, v, m, dtype):
    x = _whole((2 * v, 16 * m), dtype)
    options = dict(v=v, m=m, activation='squared_relu')
    found, _ = _interpreted(packers.vnm_pack, x, residuals=True, **options)
    expected = _reference(x, residuals=True, **options)
    _assert_same_bits(found, expected)

  @parameterized.parameters(
    # Twice the smallest rows at least: blocks beside each other, and members of a group in different blocks; in the
    # first case rows are a whole number of V M as well, as those of large layers are.
    (64, 8, 'bfloat16', True, (512, 128)), (128, 16, 'float16', True, (512, 256)),
    (64, 4, 'bfloat16', False, (128, 64)),
  )  # fmt: skip
  def test_transpose_pack(self, v, m, dtype, select, shape):
    a, *_ = _reference(_whole(shape, dtype), v=v, m=m)
    used = np.arange(shape[1]) % 3 > 0 if select else None
    found, _ = _interpreted(packers.transpose_pack, a, used=used, pattern=None)
    expected = _transpose_pack(a, used=used, pattern=None)
    _assert_same_bits(found, expected)
    other, *_ = _reference(jnp.asarray(np.asarray(_finite(shape, 1)).astype(dtype)), v=v, m=m)
    found, _ = _interpreted(packers.transpose_pack, other, used=None, pattern=expected)
    _assert_same_bits(found, _transpose_pack(other, used=None, pattern=expected))

  @parameterized.parameters(
    (64, 8, 'bfloat16', True, (128, 512)), (128, 16, 'float16', True, (256, 256)),
    (64, 4, 'bfloat16', False, (128, 128)), (192, 8, 'float16', False, (192, 128)),
  )  # fmt: skip
  def test_transpose_pack_24(self, v, m, dtype, select, shape):
    a, *_ = _reference(_whole(shape, dtype), v=v, m=m)
    used = np.arange(shape[1]) % 3 > 0 if select else None
    found, _ = _interpreted(packers.transpose_pack_24, a, used=used, pattern=None)
    expected = jax.jit(reference.transpose_pack_24)(a, used=used, pattern=None)
    _assert_same_bits(found, expected)
    other, *_ = _reference(jnp.asarray(np.asarray(_finite(shape, 1)).astype(dtype)), v=v, m=m)
    found, _ = _interpreted(packers.transpose_pack_24, other, used=None, pattern=expected)
    _assert_same_bits(found, jax.jit(reference.transpose_pack_24)(other, used=None, pattern=expected))

  @parameterized.parameters((64, 8, False), (128, 16, True))
  def test_dense_from_blocks(self, v, m, spread):
    a, *_ = _reference(_whole((2 * v, 32 * m) if not spread else (16 * m, 2 * v), 'bfloat16'), v=v, m=m)
    a = jax.jit(reference.transpose_pack)(a, used=None, pattern=None) if spread else a
    found, _ = _interpreted(packers.expand, a)
    _assert_same_bits(found, jax.jit(decompress_operand)(a))

  def test_an_index_that_is_out_of_range_is_taken_for_the_last(self):
    """Nothing beside the arrays is read or written, where the interpreter would end or go on with other numbers."""
    x = _finite((128, 128))

    def hostile(a, last):
      bad, clamped = a.rows.at[0, 1].set(-5).at[0, 6].set(10**9), a.rows.at[0, 1].set(last).at[0, 6].set(last)
      return dataclasses.replace(a, rows=bad), dataclasses.replace(a, rows=clamped)

    def check(f, *pair):
      found, expected = (_interpreted(f, a)[0] for a in pair)
      _assert_same_bits(jax.tree.leaves(found)[0], jax.tree.leaves(expected)[0])

    a, *_ = _reference(x, v=64, m=8)
    check(packers.expand, *hostile(a, 127))
    transposed = jax.jit(reference.transpose_pack)(a, used=None, pattern=None)
    check(lambda p: packers.transpose_pack(a, used=None, pattern=p), *hostile(transposed, 127))

  @parameterized.parameters((64, 8), (128, 16))
  def test_take_columns(self, v, m):
    a, *_ = _reference(_whole((2 * v, 16 * m), 'bfloat16'), v=v, m=m)
    columns = jnp.asarray(np.random.default_rng(3).permutation(16 * m)[:83], jnp.int32)
    columns = columns.at[:4].set(jnp.asarray([-1, -16 * m - 5, 16 * m, 2**30], jnp.int32))
    found, _ = _interpreted(packers.take_columns, a, columns)
    _assert_same_bits(found, jax.jit(reference.take_columns)(a, columns))
    found, kernels = _interpreted(packers.take_columns, a, columns[:0])
    self.assertEqual((found.shape, found.dtype, kernels), ((2 * v, 0), jnp.bfloat16, []))


def _finite(shape, seed=0):
  x = _whole(shape, 'bfloat16', seed)
  x = np.asarray(x)
  return jnp.asarray(np.where(np.isfinite(x), x, x.dtype.type(1)))


if __name__ == '__main__':
  absltest.main()
