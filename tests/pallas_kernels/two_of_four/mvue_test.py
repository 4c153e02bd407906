import functools

from absl.testing import absltest, parameterized
import jax
from jax.experimental import checkify
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from pallas_kernels.two_of_four import mvue
from tests import oracles

mvue24 = jax.jit(mvue.mvue24, static_argnames='axis')
KEY = jax.random.key(0)
NUM_KEYS = 100_000

# Groups of four: the three regions of the exact sampler, their borders, zeros, single entries, wide ranges.
GROUPS = np.array(
  [
    [1, 1, 1, 1],
    [1, -2, 3, -4],
    [1, 2, 3, 6],  # exactly half: the border of the dominant entry
    [1, 2, 3, 6.001],
    [-7, 1, 0.5, 0.25],
    [0.25, -0.5, 1, 7],
    [5, 5, 0, 0],
    [0, 5, 0, -2],
    [0, 0, 0, -3],
    [3, 0, 0, 0],
    [0, 0, 0, 0],
    [0, 1, 1, 1],
    [1e-3, 1, 1, 1],
    [1e-6, 1e-6, 1, 1],
    [1e-6, 2e-6, 3e-6, 1],
    [1e30, 2e30, -1e30, 3e29],
    [1e-30, 2e-30, -1e-30, 3e-31],
    *np.random.default_rng(0).standard_normal((15, 4)).tolist(),
  ],
  np.float32,
)


@jax.jit
def moments(keys, x, largest):
  """Sums of the samples and of their squares, both relative to the largest entry of a group."""
  samples = jax.vmap(lambda key: mvue.mvue24(x, key))(keys).astype(jnp.float32)
  samples = samples / largest.astype(jnp.float32)
  return samples.sum(0), (samples * samples).sum(0)


@functools.cache
def means(dtype):
  """Mean of the samples and of their squares over all keys, float64, in units of the largest entry."""
  limit = float(jnp.finfo(dtype).max) / 4
  x = GROUPS.clip(-limit, limit).astype(dtype)
  largest = abs(x).max(-1, keepdims=True)[None]
  largest = np.where(largest > 0, largest, np.ones((), dtype))
  keys = jax.random.split(jax.random.key(1), NUM_KEYS).reshape(20, -1)
  first, second = zip(*(moments(chunk, x, largest) for chunk in keys), strict=True)
  return x, *(np.sum(np.asarray(m, np.float64), 0) / NUM_KEYS for m in (first, second))


def relative(x) -> np.ndarray:
  largest = abs(oracles.wide(x)).max(-1, keepdims=True)
  return oracles.wide(x) / np.where(largest > 0, largest, 1)


class UnbiasedTest(parameterized.TestCase):
  @parameterized.parameters(*oracles.DTYPES)
  @pytest.mark.few(2)
  def test_mean_over_keys(self, dtype):
    """Within four standard errors, the variance of an entry being x^2 (1 - p) / p for an inclusion probability p."""
    x, mean, _ = means(dtype)
    inclusion = oracles.mvue_inclusion(x)
    variance = relative(x) ** 2 * (1 - inclusion) / np.where(inclusion > 0, inclusion, 1)
    # A kept value is rounded to the dtype and the samples are summed in float32.
    rounding = abs(relative(x)) * (float(jnp.finfo(dtype).eps) / 2 + 2**-18)
    np.testing.assert_array_less(abs(mean - relative(x)), 4 * np.sqrt(variance / NUM_KEYS) + rounding + 1e-30)

  def test_inclusion_probabilities(self):
    """The second moment of an entry is x^2 / p; its estimate has the variance x^4 (1 - p) / p^3."""
    x, _, square = means(jnp.float32)
    p = oracles.mvue_inclusion(x)
    safe = np.where(p > 0, p, 1)
    error = 4 * relative(x) ** 2 * np.sqrt((1 - p) / safe**3 / NUM_KEYS)
    np.testing.assert_array_less(abs(square - relative(x) ** 2 / safe), error + 1e-5 * square + 1e-30)


class VarianceTest(parameterized.TestCase):
  def test_the_smallest_variance_in_every_sample(self):
    """||sample||^2 is a constant: S^2 / 2, or x_4^2 + R^2 with R the sum of the others of a dominant entry x_4.

    Summed variance is its mean less ||x||^2, hence S^2 / 2 - sum a^2, or R^2 - (a_1^2 + a_2^2 + a_3^2).
    """
    x = np.concatenate([GROUPS, np.random.default_rng(1).standard_normal((4000, 4)).astype(np.float32)])
    a = np.sort(abs(oracles.wide(relative(x))), -1)
    total, rest = a.sum(-1), a[:, :3].sum(-1)
    dominant = a[:, 3] > rest
    expected = np.where(dominant, a[:, 3] ** 2 + rest**2, total**2 / 2)
    for key in jax.random.split(KEY, 5):
      scaled = oracles.wide(mvue24(x, key)) / np.maximum(abs(oracles.wide(x)).max(-1, keepdims=True), 1e-300)
      np.testing.assert_allclose((scaled**2).sum(-1), expected, rtol=1e-6, atol=1e-30)
    self.assertBetween(dominant.mean(), 0.2, 0.5)

  def test_no_other_probabilities_do_better(self):
    """The formulas are the minimum of sum x^2 / p - x^2 over all 0 < p <= 1 that add up to two."""
    rng = np.random.default_rng(2)
    p = rng.dirichlet(np.ones(4), 400_000) * 2
    p = p[(p <= 1).all(1)]
    for x in ([1, 2, 3, 4], [1, 1, 1, 5], [2, 3, 3, 1], [0.5, 1, 1, 9]):
      a = np.sort(np.array(x, float))
      total, rest = a.sum(), a[:3].sum()
      formula = rest**2 - (a[:3] ** 2).sum() if a[3] > rest else total**2 / 2 - (a**2).sum()
      found = (a**2 / p).sum(1) - (a**2).sum()
      self.assertGreaterEqual(found.min(), formula - 1e-9)
      self.assertLess(found.min(), 1.1 * formula)

  def test_drawing_twice_without_replacement_has_six_percent_more(self):
    """The papers' code draws a first index with a / S, and a second among the rest."""
    x = np.random.default_rng(3).standard_normal((20_000, 4)).astype(np.float32)
    a, p = oracles.wide(x), oracles.drawn_twice_inclusion(x)
    ours = float((mvue24(x, KEY) ** 2).sum() - (x**2).sum())
    # One standard error of the ratio is about 0.004 at 1e5 groups.
    self.assertAlmostEqual((a**2 * (1 / p - 1)).sum() / ours, 1.061, delta=0.016)


class ValuesTest(parameterized.TestCase):
  @parameterized.parameters(*oracles.DTYPES)
  @pytest.mark.few(2)
  def test_any_bits(self, dtype):
    """At most two non-zeros, signs and zeros kept; NaN in the first two of the groups that are not finite."""
    x = oracles.bit_patterns(dtype, (64, 256), seed=1)
    x[::2] = np.where(np.isfinite(oracles.wide(x[::2])), x[::2], np.ones((), dtype))
    found = oracles.groups_last(mvue24(x, KEY), -1)
    entries = oracles.groups_last(x, -1)
    self.assertEqual(found.dtype, dtype)
    finite = np.isfinite(oracles.wide(entries)).all(-1)
    self.assertBetween(finite.mean(), 0.5, 0.999)
    self.assertTrue(np.isfinite(found[finite]).all())
    self.assertEqual((found[finite] != 0).sum(-1).max(), 2)
    found, entries = oracles.wide(found), oracles.wide(entries)
    self.assertTrue(((np.sign(found) == np.sign(entries)) | (found == 0))[finite].all())
    np.testing.assert_array_equal(np.isnan(found[~finite]), np.broadcast_to([1, 1, 0, 0], found[~finite].shape))
    self.assertFalse(found[~finite][:, 2:].any())

  @parameterized.product(dtype=oracles.DTYPES, place=(0, 1, 2, 3))
  @pytest.mark.few(4)
  def test_single_and_double_entries_are_kept_as_they_are(self, dtype, place):
    x = np.zeros((64, 4), dtype)
    x[:, place] = np.random.default_rng(4).standard_normal(64).astype(dtype)
    np.testing.assert_array_equal(mvue24(x, KEY), x)
    x[:, (place + 1) % 4] = x[::-1, place]
    np.testing.assert_array_equal(mvue24(x, KEY), x)
    self.assertFalse(mvue24(np.zeros((4, 8), dtype), KEY).any())

  @parameterized.parameters(*oracles.DTYPES)
  @pytest.mark.few
  def test_extremes_are_finite(self, dtype):
    info = jnp.finfo(dtype)
    values = [float(v) for v in (info.max, info.max / 2, 1.0, info.smallest_normal, info.smallest_subnormal, 0.0)]
    x = np.array(np.meshgrid(*[values] * 4)).reshape(4, -1).T.astype(dtype)
    for key in jax.random.split(KEY, 3):
      found = np.asarray(mvue24(x, key))
      self.assertTrue(np.isfinite(found).all())
      self.assertLessEqual((found != 0).sum(-1).max(), 2)
      self.assertTrue((found[(x == x[:, :1]).all(1) & (x[:, 0] >= info.smallest_normal * 16)] != 0).any(-1).all())
    # A value beyond the dtype is clipped to its largest.
    found = mvue24(np.full((1, 4), info.max, dtype), KEY)
    self.assertEqual(sorted(oracles.wide(found)[0]), [0, 0, float(info.max), float(info.max)])

  def test_small_gradients_of_each_dtype_are_not_lost(self):
    """2^-120 in float32 and bfloat16, subnormals in float16."""
    for dtype, size in ((jnp.float32, 2.0**-120), (jnp.bfloat16, 2.0**-120), (jnp.float16, 2.0**-24)):
      x = (np.array([[1, 2, 3, 4]]) * size).astype(dtype)
      self.assertEqual((np.asarray(mvue24(x, KEY)) != 0).sum(), 2)


class SameBitsTest(parameterized.TestCase):
  X = np.random.default_rng(5).standard_normal((2, 3, 16, 24)).astype(np.float32)

  @parameterized.product(axis=(-1, -2))
  @pytest.mark.few
  def test_tiles(self, axis):
    x = np.moveaxis(self.X.reshape(6, 16, 24), -2, axis)
    whole = np.moveaxis(np.asarray(mvue24(x, KEY, axis=axis)), axis, -2)
    grouped = np.moveaxis(x, axis, -2)
    for batch, rows, columns in ((0, 0, 0), (2, 4, 8), (4, 8, 12), (1, 0, 16)):
      tile = np.s_[batch : batch + 2, rows : rows + 8, columns : columns + 8]
      part = np.moveaxis(grouped[tile], -2, axis)
      found = np.asarray(mvue24(part, KEY, axis=axis, origin=(batch, rows // 4, columns)))
      np.testing.assert_array_equal(np.moveaxis(found, axis, -2), whole[tile])

  def test_shards(self):
    x = self.X[0, 0]  # [16, 24], rows grouped, over 2 x 2 devices
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ('rows', 'columns'))

    def on_a_shard(x):
      origin = (0, jax.lax.axis_index('rows') * 2, jax.lax.axis_index('columns') * 12)
      return mvue.mvue24(x, KEY, axis=0, origin=origin)

    spec = PartitionSpec('rows', 'columns')
    found = jax.jit(jax.shard_map(on_a_shard, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    np.testing.assert_array_equal(found, mvue24(x, KEY, axis=0))

  @parameterized.product(columns=(1, 5, 23))
  @pytest.mark.few(2)
  def test_padding_of_columns(self, columns):
    whole = np.asarray(mvue24(self.X[0], KEY, axis=-2))
    found = mvue24(self.X[0, :, :, :columns], KEY, axis=-2)
    np.testing.assert_array_equal(found, whole[..., :columns])

  def test_axes(self):
    # The remaining axes keep their order and the last of them is the columns.
    whole = np.asarray(mvue24(self.X, KEY, axis=-2))
    for axis in (0, -1):
      x = np.moveaxis(self.X, -2, axis)
      np.testing.assert_array_equal(np.moveaxis(np.asarray(mvue24(x, KEY, axis=axis)), axis, -2), whole)
    matrices = np.asarray(mvue24(self.X.reshape(6, 16, 24), KEY, axis=1))
    np.testing.assert_array_equal(matrices.ravel(), whole.ravel())
    column = self.X[0, 0, :, 0]
    np.testing.assert_array_equal(mvue24(column, KEY, axis=0), whole[0, 0, :, 0])

  def test_jit_or_not(self):
    eager = mvue.mvue24(jnp.asarray(self.X), KEY, axis=-2)
    np.testing.assert_array_equal(mvue24(self.X, KEY, axis=-2), eager)
    self.assertTrue((mvue24(self.X, jax.random.key(1), axis=-2) != eager).any())

  def test_checkify_adds_no_error_of_its_own(self):
    checked = jax.jit(checkify.checkify(lambda x: mvue.mvue24(x, KEY), errors=checkify.all_checks))
    error, _ = checked(jnp.asarray(GROUPS))
    self.assertIsNone(error.get())


class IndependenceTest(parameterized.TestCase):
  def test_neighbouring_groups_columns_and_tiles(self):
    """Whether the first entry of a group is kept does not tell about its neighbours: |r| below four standard errors."""
    kept = np.asarray(mvue24(np.ones((2048, 512), np.float32), KEY, axis=0))[::4] != 0
    self.assertAlmostEqual(kept.mean(), 0.5, delta=4 * 0.5 / 512)
    kept = kept - 0.5
    for groups, columns in ((0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (0, 4), (0, 16), (16, 0), (0, 128), (128, 128)):
      left, right = kept[: 512 - groups, : 512 - columns], kept[groups:, columns:]
      self.assertLess(abs((left * right).mean() * 4), 4 / np.sqrt(left.size), (groups, columns))
    other = np.asarray(mvue24(np.ones((2048, 512), np.float32), jax.random.key(1), axis=0))[::4] != 0
    self.assertLess(abs((kept * (other - 0.5)).mean() * 4), 4 / 512)


if __name__ == '__main__':
  absltest.main()
