"""Functions that read and write a `jax.new_ref`: what they count, and what of a weight passes through one."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

import sparse24_jax as s24

STE, W, X = s24.recipes.ste('w'), {'w': jax.random.normal(jax.random.key(0), (16, 8))}, jnp.ones((4, 16))


def with_ref(f, ref, given):
  """A function of weights and x, and what else it is given: the Ref, or nothing, where it closes over it."""
  return (f, (ref,)) if given else (lambda w, x: f(w, x, ref), ())


class RefsTest(parameterized.TestCase):

  @parameterized.parameters(True, False)
  def test_what_a_function_adds_to(self, given):
    """Binding adds nothing, and each call once."""
    def counted(w, x, seen):
      seen[...] += 1
      return x @ w['w'] * seen[...]

    seen = jax.new_ref(jnp.zeros(()))
    f, args = with_ref(counted, seen, given)
    bound = s24.bind(STE, f, W, X, *args)
    sparse, states = s24.sparsify(f, bound), s24.sparse_variables(W, None, bound)
    one, two = (float(jnp.sum(jax.jit(sparse)(W, states, None, X, *args))) for _ in range(2))
    self.assertEqual(float(seen[...]), 2)
    np.testing.assert_allclose(two, 2 * one, rtol=1e-6)

  @parameterized.parameters(True, False)
  def test_a_norm_that_scales_what_a_matmul_reads_is_refused_through_a_ref_too(self, given):
    def scaled(w, x, ref):
      ref[...] = jnp.sum(w['w'] ** 2)
      return (x * ref[...]) @ w['w']

    f, args = with_ref(scaled, jax.new_ref(jnp.zeros(())), given)
    with self.assertRaisesRegex(ValueError, 'w of shape .*reduce_sum at .*refs_test.* reads it as it is stored, dense'):
      s24.bind(STE, f, W, X, *args)


if __name__ == '__main__':
  absltest.main()
