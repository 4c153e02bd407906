from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pallas_kernels.two_of_four import prune
from tests import oracles

magnitude_mask = jax.jit(prune.magnitude_mask, static_argnames=('n', 'm', 'axis'))
soft_threshold = jax.jit(prune.soft_threshold, static_argnames='axis')
soft_threshold_scale = jax.jit(prune.soft_threshold_scale, static_argnames='axis')


class MagnitudeMaskTest(parameterized.TestCase):
  @parameterized.product(
    dtype=oracles.DTYPES, pattern=((2, 4), (1, 4), (4, 4), (1, 2), (2, 8), (5, 8)), axis=(-2, -1)
  )
  @pytest.mark.few(12)
  def test_any_bits(self, dtype, pattern, axis):
    n, m = pattern
    w = oracles.bit_patterns(dtype, (3, 48, 32), seed=n + m)
    np.testing.assert_array_equal(
      magnitude_mask(w, n=n, m=m, axis=axis), oracles.magnitude_mask(w, n=n, m=m, axis=axis)
    )

  @parameterized.product(dtype=oracles.DTYPES, axis=(0, 1, -1))
  def test_ties_go_to_the_lower_index(self, dtype, axis):
    w = np.random.default_rng(0).integers(-2, 3, (8, 12, 16)).astype(dtype)
    np.testing.assert_array_equal(magnitude_mask(w, axis=axis), oracles.magnitude_mask(w, axis=axis))

  @parameterized.product(
    case=(
      ([0.0, -0.0, 0.0, -0.0], [1, 1, 0, 0]),
      ([-0.0, 0.0, -0.0, 0.0], [1, 1, 0, 0]),
      ([-9.0, -1.0, -5.0, -7.0], [1, 0, 0, 1]),
      ([np.inf, 1.0, -np.inf, np.inf], [1, 0, 1, 0]),
      ([np.nan, 1.0, 2.0, 3.0], [0, 0, 1, 1]),
      ([np.nan, np.nan, np.nan, 0.0], [0, 0, 0, 1]),
      ([np.nan, -np.nan, np.nan, np.nan], [0, 0, 0, 0]),
      ([np.inf, np.nan, np.nan, -0.0], [1, 0, 0, 1]),
      ([1.0, -1.0, 1.0, -1.0], [1, 1, 0, 0]),
    ),
    dtype=oracles.DTYPES,
  )
  def test_by_hand(self, case, dtype):
    entries, kept = case
    self.assertEqual(magnitude_mask(np.array(entries, dtype), axis=-1).astype(int).tolist(), kept)

  @parameterized.parameters(*oracles.DTYPES)
  def test_subnormals_are_ranked(self, dtype):
    w = (np.array([1, 3, 2, 4]) * np.float64(jnp.finfo(dtype).smallest_subnormal)).astype(dtype)
    self.assertEqual(magnitude_mask(w, axis=-1).tolist(), [False, True, False, True])

  def test_neighbours_in_float32_are_told_apart(self):
    one = np.float32(1)
    w = np.array([one, np.nextafter(one, np.float32(2)), one, np.nextafter(one, np.float32(2))])
    self.assertEqual(magnitude_mask(w, axis=-1).tolist(), [False, True, False, True])


class SubnormalTest(parameterized.TestCase):
  def test_ties_under_jit(self):
    bits = np.array([1, 2, 3, 3, 0x8001, 2, 0x8002, 0x0002], np.uint16)
    w = bits.view(jnp.bfloat16)
    np.testing.assert_array_equal(magnitude_mask(w, n=1, m=2, axis=-1), [0, 1, 1, 0, 0, 1, 1, 0])


class SoftThresholdTest(parameterized.TestCase):
  @parameterized.product(dtype=oracles.DTYPES, axis=(-1, -2))
  def test_against_float64(self, dtype, axis):
    w = np.random.default_rng(1).standard_normal((2, 64, 32)).astype(dtype)
    found = soft_threshold(w, axis=axis)
    # One subtraction, correctly rounded: float64 rounded once gives the same bits.
    np.testing.assert_array_equal(found, oracles.soft_threshold(w, axis=axis).astype(dtype))
    self.assertEqual(int((oracles.groups_last(found, axis) != 0).sum(-1).max()), 2)

  def test_ties(self):
    w = np.random.default_rng(2).integers(-2, 3, (400, 8)).astype(np.float32)
    found = soft_threshold(w)
    np.testing.assert_array_equal(found, oracles.soft_threshold(w))
    self.assertLessEqual(int((oracles.groups_last(found, -2) != 0).sum(-1).max()), 2)

  @parameterized.product(
    case=(
      ([1.0, -4.0, 2.0, 3.0], [0.0, -2.0, 0.0, 1.0]),
      ([5.0, -5.0, 5.0, 5.0], [0.0, 0.0, 0.0, 0.0]),
      ([0.0, -0.0, -3.0, 0.0], [0.0, 0.0, -3.0, 0.0]),
      ([np.inf, 1.0, 2.0, -np.inf], [np.inf, 0.0, 0.0, -np.inf]),
      ([np.inf, np.inf, np.inf, 1.0], [0.0, 0.0, 0.0, 0.0]),
      ([7.0, 1.0, np.nan, 2.0], [np.nan, np.nan, 0.0, 0.0]),
    ),
    dtype=oracles.DTYPES,
  )
  def test_by_hand(self, case, dtype):
    entries, expected = case
    found = soft_threshold(np.array(entries, dtype), axis=-1)
    np.testing.assert_array_equal(oracles.wide(found), expected)

  @parameterized.parameters(*oracles.DTYPES)
  def test_healthy_entries_set_no_alarm_off(self, dtype):
    with jax.debug_nans(True):
      self.assertEqual(prune.soft_threshold(jnp.ones((8, 4), dtype)).dtype, dtype)  # under jit none would be

  def test_continuous_where_the_mask_jumps(self):
    """Along paths on which the second and third magnitudes, of any signs and places, change order."""
    rng = np.random.default_rng(3)
    steps, paths = 201, 64
    shift = np.linspace(-0.1, 0.1, steps)[:, None]
    small, large = rng.uniform(0, 0.5, paths), rng.uniform(1.5, 2, paths)
    magnitudes = np.stack(np.broadcast_arrays(small, 1 + shift, 1 - shift, large), -1)
    place = np.argsort(rng.random((paths, 4)), -1)
    w = np.take_along_axis(magnitudes, np.broadcast_to(place, magnitudes.shape), -1) * rng.choice([-1, 1], (paths, 4))
    w = w.astype(np.float32)
    soft, hard = soft_threshold(w, axis=-1), np.where(magnitude_mask(w, axis=-1), w, 0)
    # Each entry moves by at most 1e-3 a step, and S by at most twice that.
    self.assertLess(float(abs(np.diff(soft, axis=0)).max()), 2.1e-3)
    self.assertGreater(float(abs(np.diff(hard, axis=0)).max()), 0.9)

  def test_lipschitz(self):
    rng = np.random.default_rng(4)
    w = rng.integers(-3, 4, (4000, 4)).astype(np.float32)  # ties in most groups
    moved = w + rng.uniform(-1e-3, 1e-3, w.shape).astype(np.float32)
    self.assertLess(float(abs(soft_threshold(moved, axis=-1) - soft_threshold(w, axis=-1)).max()), 2.01e-3)


def _scale_of_gaussian():
  """<w, S(w)> / ||S(w)||^2 of four Gaussian numbers: an integral over t, the second smallest, and those above it."""
  y = np.linspace(0, 9, 2001)
  t = y[:, None]
  density, above = 2 * stats.norm.pdf(y), y > t
  of_t = density * (1 - 2 * stats.norm.sf(y)) * 2 * stats.norm.sf(y)  # and one more larger than t
  inner = [(np.where(above, part, 0) * density).sum(1) for part in (y * (y - t), (y - t) ** 2)]
  return (of_t * inner[0]).sum() / (of_t * inner[1]).sum()


class SoftThresholdScaleTest(parameterized.TestCase):
  @parameterized.parameters((1e-30, -1), (1.0, -1), (1.0, -2), (1e30, -2))
  def test_gaussian(self, spread, axis):
    w = (np.random.default_rng(5).standard_normal((1024, 512)) * spread).astype(np.float32)
    self.assertAlmostEqual(float(soft_threshold_scale(w, axis=axis)), 1.483, delta=0.005)

  @parameterized.parameters((jnp.float32, 2e-6), (jnp.bfloat16, 2e-6), (jnp.float16, 2e-6))
  def test_against_float64(self, dtype, tolerance):
    # The sums are float32 whatever the dtype: the tolerance is that of a float32 sum of 4096 squares.
    w = np.random.default_rng(6).standard_normal((3, 64, 64)).astype(dtype)
    for axis in (-1, -2):
      np.testing.assert_allclose(
        soft_threshold_scale(w, axis=axis), oracles.soft_threshold_scale(w, axis=axis), rtol=tolerance
      )

  def test_minimises_the_squared_error(self):
    w = np.random.default_rng(7).standard_normal((64, 64)).astype(np.float32)
    soft, beta = oracles.soft_threshold(w), float(soft_threshold_scale(w))
    error = {step: ((w - (beta + step) * soft) ** 2).sum() for step in (-1e-3, 0, 1e-3)}
    self.assertLess(error[0], min(error[-1e-3], error[1e-3]))

  def test_scale_invariance_is_exact_for_powers_of_two(self):
    w = np.random.default_rng(8).standard_normal((64, 64)).astype(np.float32)
    beta = soft_threshold_scale(w)
    for exponent in (-90, -20, 1, 60, 120):
      self.assertEqual(soft_threshold_scale(np.ldexp(w, exponent)), beta)

  def test_zeros_and_groups_of_equals_have_the_scale_of_gaussian_numbers(self):
    # A layer that starts at zero has no scale of its own yet; 1 would be too small for all that it becomes.
    for nothing in (jnp.zeros((2, 8, 4)), jnp.full((1, 8, 4), -3.0, jnp.bfloat16)):
      np.testing.assert_allclose(soft_threshold_scale(nothing), _scale_of_gaussian(), atol=5e-5)
    self.assertEqual(soft_threshold_scale(jnp.ones((8, 4), jnp.bfloat16)).dtype, jnp.float32)

  @parameterized.parameters(9e37, 3.4e38, 1e-30)
  def test_of_the_largest_and_the_smallest_numbers(self, largest):
    w = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    expected = soft_threshold_scale(w)
    found = soft_threshold_scale((w * (largest / np.abs(w).max())).astype(np.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


if __name__ == '__main__':
  absltest.main()
