from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from sparse24_jax import numerics
from tests import oracles

FORMATS = {'e4m3': (ml_dtypes.float8_e4m3fn, 448.0), 'e5m2': (ml_dtypes.float8_e5m2, 57344.0)}

round_to_fp8 = jax.jit(numerics.round_to_fp8, static_argnames='to')


def rounded(x, fmt: str) -> np.ndarray:
  """Scaled, rounded by ml_dtypes, restored; all in float32, then in the dtype of `x`."""
  dtype, largest = FORMATS[fmt]
  scale = np.float32(largest) / abs(x.astype(np.float32)).max()
  return ((x.astype(np.float32) * scale).astype(dtype).astype(np.float32) / scale).astype(x.dtype)


class RoundToFp8Test(parameterized.TestCase):
  @parameterized.product(fmt=list(FORMATS), dtype=oracles.DTYPES, spread=(1e-4, 1.0, 100.0))
  def test_against_ml_dtypes(self, fmt, dtype, spread):
    x = np.random.default_rng(0).standard_t(2, (64, 256)) * spread
    x = x.clip(-6e4, 6e4).astype(dtype)
    oracles.assert_same(round_to_fp8(x, to=FORMATS[fmt][0]), rounded(x, fmt))

  @parameterized.parameters(*FORMATS)
  def test_every_value_of_the_format_is_kept_and_midpoints_go_to_even(self, fmt):
    dtype, largest = FORMATS[fmt]
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    self.assertEqual(values.max(), largest)
    oracles.assert_same(round_to_fp8(values, to=FORMATS[fmt][0]) + 0, values + 0)
    midpoints = np.append((values[1:] + values[:-1]) / 2, largest)
    oracles.assert_same(round_to_fp8(midpoints, to=FORMATS[fmt][0]), midpoints.astype(dtype).astype(np.float32))

  @parameterized.product(fmt=list(FORMATS), dtype=oracles.DTYPES)
  def test_largest_magnitudes(self, fmt, dtype):
    info = jnp.finfo(dtype)
    self.assertEqual(round_to_fp8(np.zeros(4, dtype), to=FORMATS[fmt][0]).tolist(), [0.0] * 4)
    for largest in (info.max, info.smallest_normal, info.smallest_subnormal):
      x = np.array([1, 0.5, -1, 0], dtype) * largest
      found = oracles.wide(round_to_fp8(x, to=FORMATS[fmt][0]))
      self.assertTrue(np.isfinite(found).all())
      if float(largest) > 2.0**-100:
        np.testing.assert_array_equal(found[[0, 2, 3]], oracles.wide(x)[[0, 2, 3]])
    for bad in (np.nan, np.inf, -np.inf):  # stays visible
      self.assertFalse(np.isfinite(oracles.wide(round_to_fp8(np.array([1, bad, 0, 2], dtype), to=FORMATS[fmt][0]))[1]))


if __name__ == '__main__':
  absltest.main()
