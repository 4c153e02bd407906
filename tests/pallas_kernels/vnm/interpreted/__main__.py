"""The Triton V:N:M packer against the reference, bit for bit, in Triton's interpreter. Run by triton_test.py."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.vnm import reference
from pallas_kernels.vnm import triton as packers
from pallas_kernels.vnm._kernels import pack_kernel
from tests.pallas_kernels import triton_interpreter


def _whole(shape, dtype, seed=0):
  # Small integers: sums are exact in any order; ties, zeros of both signs, and some infinities and NaN.
  rng = np.random.default_rng(seed)
  x = rng.integers(-9, 10, shape).astype(np.float32)
  x = np.where(rng.random(shape) < 0.05, np.float32(-0.0), x)
  for value in (np.inf, -np.inf, np.nan):
    x = np.where(rng.random(shape) < 1e-3, np.float32(value), x)
  return jnp.asarray(x).astype(dtype)


class InterpretedTest(parameterized.TestCase):

  def _check(self, x, v, m, *, axis=-1, spread=False, activation=None, gradient=None, masked=False):
    options = dict(v=v, m=m, axis=axis, spread=spread, activation=activation, masked=masked)
    expected = jax.jit(lambda x, g: reference.vnm_pack(x, gradient=g, **options))(x, gradient)
    r, c = x.shape if axis == -1 else x.shape[::-1]
    leaves = jax.tree.leaves(expected)
    leaves = leaves if masked else [*leaves, jnp.zeros((1,), x.dtype)]
    found = triton_interpreter.run(
      pack_kernel, packers.grid(r, c, v, m), [x, x if gradient is None else gradient],
      [(a.shape, a.dtype) for a in leaves],
      packers.constants(
        r, c, v, m, transposed=axis == -2, spread=spread, activation=activation, gradient=gradient is not None,
        masked=masked,
      ),
    )  # fmt: skip
    pairs = list(zip(found, leaves, strict=True))
    for a, b in (pairs[:3] if gradient is None else pairs[:1]) + (pairs[3:] if masked else []):
      bits = f'u{b.dtype.itemsize}'
      np.testing.assert_array_equal(a.view(bits), np.asarray(b).view(bits))

  @parameterized.parameters((64, 8, 'bfloat16'), (128, 16, 'bfloat16'), (64, 4, 'float16'))
  def test_forward(self, v, m, dtype):
    self._check(_whole((2 * v, 32 * m), dtype), v, m, activation='squared_relu', masked=m == 16)

  @parameterized.parameters(-1, -2)
  def test_spread_and_transposed(self, axis):
    self._check(_whole((256, 256), 'bfloat16'), 64, 8, axis=axis, spread=True, masked=True)

  @parameterized.product(axis=(-1, -2), activation=(None, 'squared_relu'))
  def test_gradient(self, axis, activation):
    x, gradient = _whole((128, 128), 'bfloat16'), _whole((128, 128), 'bfloat16', 1)
    x, gradient = (jnp.where(jnp.isfinite(a), a, 1) for a in (x, gradient))
    self._check(x, 64, 8, axis=axis, activation=activation, gradient=gradient, masked=True)


if __name__ == '__main__':
  absltest.main()
