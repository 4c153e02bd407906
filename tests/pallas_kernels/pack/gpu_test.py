"""The packers on a GPU, bit for bit: `pytest -m gpu`."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from pallas_kernels import _device
from pallas_kernels.pack import api
from tests.pallas_kernels.on_a_gpu import check, check_default, draw, LARGE, marks, RAGGED, REPEATS

pytestmark = marks(8, 0)

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
ORIGIN = (1, 2, 4)
KEY = jax.random.key(5)


def random_codes(w):
  return jax.random.bits(KEY, (*w.shape[:-2], w.shape[-2] // 4, w.shape[-1] // 4), jnp.uint16)


class PackTest(parameterized.TestCase):

  # Tiles with an infinity or a NaN take a second kernel.
  @parameterized.parameters((RAGGED, BF16, 0.003), (RAGGED, F32, 0.0), (LARGE, BF16, 0.0), (LARGE, F16, 0.003))
  def test_transposable(self, shape, dtype, special):
    w = draw(shape, dtype, special=special)
    check(api.transposable_pack, w, repeats=REPEATS if special and shape == LARGE else 0)

  @parameterized.parameters((RAGGED, F32), (LARGE, BF16))
  def test_masked(self, shape, dtype):
    codes = jax.jit(api.transposable_pack)(draw(shape, seed=1)).codes
    check(api.masked_pack, draw(shape, dtype), codes)

  @parameterized.product(case=((RAGGED, F32), (LARGE, BF16)), axis=(-1, -2))
  def test_soft_threshold(self, case, axis):
    w = draw(*case)
    check(api.soft_threshold_pack, w, jnp.full(w.shape[:-2], 1.48, F32), axis=axis)

  @parameterized.parameters((RAGGED, F16), (LARGE, BF16))
  def test_mvue(self, shape, dtype):
    check(api.mvue_pack, draw(shape, dtype), KEY, origin=ORIGIN, repeats=REPEATS if shape == LARGE else 0)

  def test_default(self):
    w = draw((512, 512))
    codes = random_codes(w)
    check_default(api.transposable_pack, w)
    check_default(api.masked_pack, w, codes)
    check_default(api.soft_threshold_pack, w, F32(1.48))
    check_default(api.mvue_pack, w, KEY)


def filling(shape, top, dtype):
  """Scales, one a matrix, that bring `top` to the largest value of `dtype`."""
  return jnp.full(shape[:-2], float(jnp.finfo(dtype).max) / top, F32)


class Float8Test(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    if _device.current().capability < (8, 9):
      self.skipTest('needs compute capability 8.9')

  # The largest entry that fits: of normal values many saturate, none does, or many round to zero.
  @parameterized.parameters(
    (RAGGED, F32, -1, 0.5, 'float8_e5m2'), (RAGGED, BF16, -2, 3e5, 'float8_e4m3fn'),
    (LARGE, BF16, -1, 5.0, 'float8_e5m2'), (LARGE, BF16, -2, 5.0, 'float8_e4m3fn'),
  )  # fmt: skip
  def test_soft_threshold(self, shape, source, axis, top, dtype):
    check(api.soft_threshold_pack, draw(shape, source), filling(shape, top, dtype), axis=axis, dtype=dtype)

  @parameterized.parameters((RAGGED, F32, 0.5), (RAGGED, BF16, 3e5), (LARGE, BF16, 5.0))
  def test_masked(self, shape, source, top):
    codes = jax.jit(api.transposable_pack)(draw(shape, seed=1)).codes
    scale = filling(shape, top, 'float8_e4m3fn')
    check(api.masked_pack, draw(shape, source), codes, scale, dtype='float8_e4m3fn')

  @parameterized.parameters(
    (RAGGED, F32, 0.5, 'float8_e5m2'), (RAGGED, BF16, 3e5, 'float8_e4m3fn'), (LARGE, BF16, 5.0, 'float8_e5m2'),
  )  # fmt: skip
  def test_mvue(self, shape, source, top, dtype):
    x, scale = draw(shape, source), filling(shape, top, dtype)
    check(api.mvue_pack, x, KEY, scale, origin=ORIGIN, dtype=dtype, repeats=REPEATS if shape == LARGE else 0)

  def test_default(self):
    w = draw((512, 512))
    check_default(api.soft_threshold_pack, w, F32(100), dtype='float8_e4m3fn')
    check_default(api.masked_pack, w, random_codes(w), F32(100), dtype='float8_e4m3fn')
    check_default(api.mvue_pack, w, KEY, F32(100), dtype='float8_e5m2')


if __name__ == '__main__':
  absltest.main()
