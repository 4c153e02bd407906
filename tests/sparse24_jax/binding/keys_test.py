"""Keys that are made at once are those that `fold_in` makes one by one, wherever in a function they are taken."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

import sparse24_jax as s24
from sparse24_jax.binding.keys import Keys, require_key

MANY = 150  # more than are made at once


def taken(key, *, inside=range(0)):
  """Words of many keys; those of `inside` are taken in a checkpoint, as `binding.calls` does."""
  keys, words = Keys(key), []

  def take(keys, n):
    return [jax.random.key_data(keys.next()) for _ in range(n)]

  words += take(keys, inside.start)
  words += jax.checkpoint(lambda key: take(keys.inside(key), len(inside)))(key)
  keys.count += len(inside)
  return jnp.stack(words + take(keys, MANY - len(words)))


class KeysTest(parameterized.TestCase):
  @parameterized.parameters(
    (jax.random.PRNGKey, range(0)), (jax.random.key, range(60, 70)), (jax.random.key, range(3, 140))
  )
  def test_they_are_those_of_fold_in(self, make, inside):
    key = make(7)
    with jax.checking_leaks():
      found = jax.jit(lambda key: taken(key, inside=inside))(key)
    folded = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(1, MANY + 1))
    np.testing.assert_array_equal(found, jax.random.key_data(folded))

  def test_a_vmap_from_outside_has_those_of_each_key(self):
    keys = jax.random.split(jax.random.key(5), 3)
    found = jax.jit(jax.vmap(taken))(keys)
    np.testing.assert_array_equal(found, jnp.stack([jax.jit(taken)(key) for key in keys]))

  @parameterized.parameters(('threefry2x32', 3), ('rbg', MANY), ('unsafe_rbg', MANY))
  def test_one_operation_makes_many(self, impl, operations):
    text = str(jax.make_jaxpr(taken)(jax.random.key(0, impl=impl)))
    self.assertEqual(text.count('random_fold_in'), operations)

  def test_xla_knows_no_place_of_a_reader_nor_what_it_reads(self):
    """Or it would compile a kernel for each place, and make all keys anew in each."""
    equations = jax.make_jaxpr(taken)(jax.random.key(0)).eqns
    hidden = [out for e in equations if e.primitive.name == 'optimization_barrier' for out in e.outvars]
    readers = [e for e in equations if e.params.get('name') == 'dynamic_index_in_dim']
    self.assertLen(readers, MANY)
    for reader in readers:
      for read in reader.invars:
        self.assertTrue(any(read is each for each in hidden), reader)

  def test_what_is_no_key_is_refused_where_it_is_given(self):
    params, f = {'w': jnp.ones((8, 4))}, lambda p, tokens: tokens.astype(jnp.float32) @ p['w']
    key, tokens = jax.random.key(0), jnp.ones((2, 8), jnp.int32)
    for phase in ('sparse', 'dense'):
      recipe = s24.recipes.ste('w')
      variables = s24.sparse_variables(params, None, recipe, phase=phase)
      sparse = s24.sparsify(f, recipe, phase=phase)
      for given in (None, key, jax.random.PRNGKey(0), np.asarray(jax.random.PRNGKey(0))):
        self.assertEqual(sparse(params, variables, given, tokens).shape, (2, 4))
        self.assertEqual(jax.eval_shape(sparse, params, variables, given, tokens).shape, (2, 4))
      keys = jax.random.split(key, 3)
      many = jax.eval_shape(jax.vmap(sparse, (None, None, 0, None)), params, variables, keys, tokens)
      self.assertEqual(many.shape, (3, 2, 4))
      for bad, found in ((tokens, r'int32 of shape \(2, 8\)'), (keys, r'keys of shape \(3,\)'), (0, 'a int')):
        message = rf'the third argument must be a PRNG key or None: f\(params, variables, key, ...\); found {found}'
        for call in (sparse, jax.jit(sparse)) if hasattr(bad, 'dtype') else (sparse,):
          with self.assertRaisesRegex(ValueError, message):
            call(params, variables, bad, key)

  @parameterized.parameters('threefry2x32', 'rbg', 'unsafe_rbg')
  def test_keys_of_each_kind_pass(self, impl):
    key = jax.random.key(0, impl=impl)
    for each in (key, jax.random.key_data(key), jax.eval_shape(lambda: key)):
      require_key(each)


if __name__ == '__main__':
  absltest.main()
