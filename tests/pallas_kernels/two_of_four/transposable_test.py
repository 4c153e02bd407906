from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.two_of_four import transposable
from tests import oracles

exact = jax.jit(transposable.transposable_mask)
greedy = jax.jit(transposable.two_approximation_mask)

INTEGERS = np.random.default_rng(0).integers(-3, 4, (160, 240)).astype(np.float32)  # 2400 blocks full of ties
# The greedy choice strands row 1 and column 2, which meet in an entry that is kept already: seven of sixteen.
TRAP = np.array([[3, 12, 4, 11], [1, 5, 8, 6], [15, 13, 7, 10], [14, 9, 2, 16]], np.float32)


def score(w, mask) -> np.ndarray:
  """float64 magnitude kept of each block."""
  return (abs(oracles.wide(oracles.blocks(w))) * oracles.blocks(mask)).sum((1, 2))


class PatternsTest(absltest.TestCase):
  def test_are_all_and_in_the_documented_order(self):
    self.assertLen(oracles.PATTERNS, 90)
    self.assertLen(set(map(bytes, oracles.PATTERNS)), 90)
    self.assertTrue((oracles.PATTERNS.sum(1) == 2).all() and (oracles.PATTERNS.sum(2) == 2).all())
    np.testing.assert_array_equal(transposable.PATTERNS, oracles.PATTERNS)


class ExactTest(parameterized.TestCase):
  @parameterized.parameters(*oracles.DTYPES)
  def test_ties_go_to_the_first_pattern(self, dtype):
    w = INTEGERS.astype(dtype)
    scores = oracles.pattern_scores(w)
    self.assertGreater(((scores == scores.max(1, keepdims=True)).sum(1) > 1).mean(), 0.5)
    np.testing.assert_array_equal(oracles.blocks(exact(w)), oracles.PATTERNS[scores.argmax(1)])

  @parameterized.product(dtype=oracles.DTYPES, spread=(1e-3, 1.0, 1e4))
  def test_optimum(self, dtype, spread):
    w = (np.random.default_rng(1).standard_normal((160, 240)) * spread).astype(dtype)
    mask = np.asarray(exact(w))
    blocks = oracles.blocks(mask)
    self.assertTrue((blocks.sum(1) == 2).all() and (blocks.sum(2) == 2).all())
    # Eight float32 additions: two patterns nearer than that may change places.
    np.testing.assert_allclose(score(w, mask), oracles.pattern_scores(w).max(1), rtol=8 * 2**-24)

  def test_patterns_closer_than_tf32_are_told_apart(self):
    # All ones but for one entry larger by 2^-20: the mask must keep it, wherever it is. TF32 ends at 2^-10.
    w = np.ones((16, 4, 4), np.float32)
    w.reshape(16, 16)[np.arange(16), np.arange(16)] += 2.0**-20
    mask = oracles.blocks(exact(w.reshape(64, 4)))
    self.assertTrue(mask.reshape(16, 16)[np.arange(16), np.arange(16)].all())

  def test_neighbours_at_the_resolution_of_a_float32_sum(self):
    w = 1 + np.random.default_rng(2).integers(0, 2, (160, 240)).astype(np.float32) * np.float32(2**-20)
    np.testing.assert_array_equal(oracles.blocks(exact(w)), oracles.PATTERNS[oracles.pattern_scores(w).argmax(1)])

  def test_mask_of_the_transposed_is_the_transposed_mask(self):
    w = np.random.default_rng(3).integers(-(10**4), 10**4, (160, 240)).astype(np.float32)
    scores = np.sort(oracles.pattern_scores(w), 1)
    self.assertGreater((scores[:, -1] > scores[:, -2]).mean(), 0.99)
    unique = np.repeat(np.repeat((scores[:, -1] > scores[:, -2]).reshape(40, 60), 4, 0), 4, 1)
    np.testing.assert_array_equal(np.where(unique, exact(w.T).T, False), np.where(unique, exact(w), False))

  @parameterized.parameters(*oracles.DTYPES)
  def test_seven_of_sixteen_trap(self, dtype):
    self.assertEqual(oracles.greedy_block(TRAP).sum(), 7)
    self.assertEqual(int(greedy(TRAP.astype(dtype)).sum()), 7)
    self.assertEqual(int(exact(TRAP.astype(dtype)).sum()), 8)

  @parameterized.parameters(*oracles.DTYPES)
  def test_signs_do_not_matter(self, dtype):
    w = INTEGERS.astype(dtype)
    np.testing.assert_array_equal(exact(-abs(w)), exact(w))
    zeros = np.where(np.arange(16).reshape(4, 4) % 2, 0.0, -0.0).astype(dtype)
    np.testing.assert_array_equal(exact(zeros), oracles.PATTERNS[0])

  @parameterized.parameters(*oracles.DTYPES)
  def test_nan_is_never_kept(self, dtype):
    rng = np.random.default_rng(4)
    w = rng.integers(1, 4, (160, 240)).astype(dtype)
    w[::4, ::4][rng.random((40, 60)) < 0.5] = np.nan  # at most one a block: never in the way of eight
    mask = np.asarray(exact(w))
    self.assertFalse((mask & np.isnan(w)).any())
    blocks = oracles.blocks(mask)
    self.assertTrue((blocks.sum(1) == 2).all() and (blocks.sum(2) == 2).all())
    scores = oracles.pattern_scores(np.where(np.isnan(w), -100, abs(w)).astype(np.float32) + 100) - 800
    np.testing.assert_array_equal(score(np.nan_to_num(oracles.wide(w)), mask), scores.max(1))
    # In the way: a row of NaN keeps nothing, the others two.
    w = np.where(np.arange(4)[:, None] == 2, np.nan, np.ones((4, 4))).astype(dtype)
    for method, least in ((exact, 6), (greedy, 6)):
      self.assertEqual(method(w).sum(1).tolist(), [2, 2, 0, 2])
      self.assertEqual(int(method(w).sum()), least)
      self.assertFalse(method(np.full((4, 4), np.nan, dtype)).any())

  @parameterized.product(dtype=oracles.DTYPES, largest=('inf', 'max'))
  def test_infinities_and_extremes_are_kept(self, dtype, largest):
    value = np.inf if largest == 'inf' else float(jnp.finfo(dtype).max)
    for pattern in oracles.PATTERNS[::7]:
      w = np.where(pattern, value, 1.0).astype(dtype)
      w[0] *= -1
      for method in (exact, greedy):
        np.testing.assert_array_equal(method(w), pattern)
    self.assertEqual(int(exact(np.full((4, 4), value, dtype)).sum()), 8)

  def test_no_infinity_is_worth_a_nan(self):
    # As many as any pattern keeps: an infinity beside a NaN does not make up for it.
    rng = np.random.default_rng(0)
    w = rng.standard_normal((160, 160)).astype(np.float32)
    w[rng.random(w.shape) < 0.3], w[rng.random(w.shape) < 0.15] = np.inf, np.nan
    nan = oracles.blocks(np.isnan(w))
    most = np.max([(pattern & ~nan).sum((1, 2)) for pattern in transposable.PATTERNS], axis=0)
    np.testing.assert_array_equal(oracles.blocks(exact(w)).sum((1, 2)), most)

  def test_float16_subnormals_are_ranked(self):
    w = (INTEGERS * 2.0**-24).astype(np.float16)
    np.testing.assert_array_equal(exact(w), exact(INTEGERS))

  def test_batch_axes_vmap_and_no_jit(self):
    w = INTEGERS.reshape(2, 5, 16, 240)
    flat = np.asarray(exact(INTEGERS)).reshape(w.shape)
    np.testing.assert_array_equal(exact(w), flat)
    np.testing.assert_array_equal(jax.vmap(exact)(w), flat)
    np.testing.assert_array_equal(transposable.transposable_mask(jnp.asarray(w)), flat)


class TwoApproximationTest(parameterized.TestCase):
  @parameterized.parameters(*oracles.DTYPES)
  def test_is_the_published_greedy(self, dtype):
    for w in (INTEGERS[:80, :80].astype(dtype), np.random.default_rng(5).standard_normal((80, 80)).astype(dtype)):
      expected = np.array([oracles.greedy_block(block) for block in oracles.blocks(w)])
      np.testing.assert_array_equal(oracles.blocks(greedy(w)), expected)

  @parameterized.parameters(*oracles.DTYPES)
  def test_at_least_half_of_the_optimum(self, dtype):
    for w in (INTEGERS.astype(dtype), np.random.default_rng(6).standard_normal((160, 240)).astype(dtype)):
      mask = np.asarray(greedy(w))
      best = oracles.pattern_scores(w).max(1)
      self.assertTrue((score(w, mask) >= best / 2).all())
      self.assertLess(score(w, mask).sum(), best.sum())
      blocks = oracles.blocks(mask)
      self.assertTrue((blocks.sum(1) <= 2).all() and (blocks.sum(2) <= 2).all())

  def test_batch_axes(self):
    np.testing.assert_array_equal(greedy(INTEGERS.reshape(2, 5, 16, 240)).reshape(160, 240), greedy(INTEGERS))


if __name__ == '__main__':
  absltest.main()
