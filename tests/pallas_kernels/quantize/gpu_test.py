"""Rounding to float8 and the dense float8 matmul on a GPU: `pytest -m gpu`."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from pallas_kernels import _tuning
from pallas_kernels.quantize import api
from tests.pallas_kernels.on_a_gpu import check, check_default, draw, LARGE, marks, RAGGED, REPEATS

pytestmark = marks(8, 9)

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


class QuantizeTest(parameterized.TestCase):

  # The largest entry that fits: of normal values many saturate, none does, or many round to zero.
  @parameterized.product(
    case=((RAGGED, jnp.float32, 0.5), (RAGGED, jnp.float16, 3e5), (LARGE, jnp.bfloat16, 5.0)), dtype=(E4M3, E5M2),
    transpose=('both', 'only'),
  )  # fmt: skip
  def test_bit_for_bit(self, case, dtype, transpose):
    shape, source, top = case
    scale = jnp.full(shape[:-2], float(jnp.finfo(dtype).max) / top, jnp.float32)
    repeats = REPEATS if (shape, transpose) == (LARGE, 'both') else 0
    check(api.quantize, draw(shape, source), scale, dtype=dtype, transpose=transpose, repeats=repeats)

  def test_default(self):
    check_default(api.quantize, draw((512, 512)), jnp.float32(80), dtype=E4M3, transpose='both')


class DotTest(parameterized.TestCase):

  @parameterized.product(size=((1024, 512, 2048), (208, 144, 400)), dtypes=((E4M3, E4M3), (E5M2, E4M3)))
  def test_against_float32(self, size, dtypes):
    m, n, k = size
    a, b = (jax.random.normal(jax.random.key(i), (i, k)).astype(d) for i, d in zip((m, n), dtypes, strict=True))
    found = jax.jit(api.fp8_dot)(a, b, jnp.float32(0.5), jnp.float32(3))
    expected = jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32).T, precision='highest') / 1.5
    self.assertLessEqual(_tuning.relative_error(found, expected), _tuning.TOLERANCE)


if __name__ == '__main__':
  absltest.main()
