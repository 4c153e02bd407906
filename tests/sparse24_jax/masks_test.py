from absl.testing import absltest, parameterized
import jax
from jax.experimental import checkify
import jax.numpy as jnp
import numpy as np

import sparse24_jax as s24
from tests import oracles

W = jnp.asarray(np.random.default_rng(0).standard_normal((2, 16, 8)), jnp.bfloat16)


class MasksTest(parameterized.TestCase):
  def test_defaults_group_the_input_axis_of_flax_kernels(self):
    np.testing.assert_array_equal(s24.magnitude_mask(W), oracles.magnitude_mask(W, n=2, m=4, axis=1))
    np.testing.assert_array_equal(s24.magnitude_mask(W, n=1, m=8), oracles.magnitude_mask(W, n=1, m=8, axis=1))
    c = s24.compress(W, s24.magnitude_mask(W))
    self.assertEqual((c.axis, c.values.shape), (-2, (2, 8, 8)))
    oracles.assert_same(s24.decompress(c), jnp.where(s24.magnitude_mask(W), W, jnp.zeros((), W.dtype)))
    s24.verify24(s24.decompress(c))

  def test_ranking_by_magnitude_not_by_value(self):
    w = -jnp.arange(1.0, 17.0).reshape(4, 4)
    np.testing.assert_array_equal(s24.magnitude_mask(w), jnp.array([[False], [False], [True], [True]]) & (w < 0))
    np.testing.assert_array_equal(s24.transposable_mask(w), s24.transposable_mask(-w))

  def test_transposable_methods(self):
    for batch in range(2):
      exact, greedy = s24.transposable_mask(W[batch]), s24.transposable_mask(W[batch], method='two_approx')
      best = oracles.PATTERNS[oracles.pattern_scores(W[batch]).argmax(1)]
      np.testing.assert_array_equal(oracles.blocks(exact), best)
      np.testing.assert_array_equal(
        oracles.blocks(greedy), [oracles.greedy_block(block) for block in oracles.blocks(W[batch])]
      )
      np.testing.assert_array_equal(s24.transposable_mask(W)[batch], exact)

  @parameterized.parameters(s24.magnitude_mask, s24.transposable_mask, s24.soft_threshold, s24.soft_threshold_scale)
  def test_nan_is_an_error_under_checkify(self, function):
    checked = checkify.checkify(jax.jit(function))
    w = W[0].astype(jnp.float32)
    error, _ = checked(w)
    self.assertIsNone(error.get())
    error, _ = checked(w.at[3, 3].set(jnp.nan))
    self.assertRegex(str(error.get()), 'w holds a NaN')
    function(w.at[3, 3].set(jnp.nan))  # and none elsewhere

  def test_verify24_tells_what_is_not(self):
    s24.verify24(jnp.where(s24.magnitude_mask(W), W, jnp.zeros((), W.dtype)))
    with self.assertRaisesRegex(ValueError, r'not 2:4 along axis -2: group \(0, 0, 0\) holds \['):
      s24.verify24(W)
    with self.assertRaisesRegex(ValueError, 'not 2:4 along axis -1'):
      s24.verify24(jnp.where(s24.magnitude_mask(W), W, jnp.zeros((), W.dtype)), axis=-1)
    s24.verify24(jnp.where(s24.transposable_mask(W), W, jnp.zeros((), W.dtype)), axis=-1)


if __name__ == '__main__':
  absltest.main()
