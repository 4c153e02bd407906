from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

import sparse24_jax as s24


class FlipRateTest(absltest.TestCase):
  def test_counts_over_all_leaves_together(self):
    rng = np.random.default_rng(0)
    old = {'a': rng.random((64, 32)) < 0.5, 'b': [rng.random((3, 8, 4)) < 0.5]}
    new = {'a': rng.random((64, 32)) < 0.5, 'b': [old['b'][0]]}
    flips, size = sum(int(o) != int(n) for o, n in zip(old['a'].ravel(), new['a'].ravel(), strict=True)), 64 * 32 + 96
    for function in (s24.flip_rate, jax.jit(s24.flip_rate)):
      self.assertEqual(float(function(old, new)), np.float32(flips) / np.float32(size))
    self.assertEqual(s24.flip_rate(old, new).dtype, jnp.float32)

  def test_of_frozen_and_of_inverted_masks(self):
    mask = jnp.array([[True, False, True, False]] * 3)
    self.assertEqual((s24.flip_rate(mask, mask), s24.flip_rate(mask, ~mask)), (0.0, 1.0))

  def test_counts_beyond_the_integers_of_float32(self):
    mask = jnp.ones((2**24 + 2**20,), bool)
    self.assertEqual(s24.flip_rate([mask, mask], [~mask, mask]), 0.5)


if __name__ == '__main__':
  absltest.main()
