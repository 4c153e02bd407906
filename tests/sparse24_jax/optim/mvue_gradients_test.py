"""`mvue_gradients`: unbiased 2:4 samples of finished gradients, other ones for each leaf and step."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparse24_jax as s24

GRADS = {
  'a': np.random.default_rng(0).standard_normal((8, 16), np.float32),
  'b': np.random.default_rng(0).standard_normal((8, 16), np.float32),
  'stack': np.random.default_rng(1).standard_normal((3, 8, 4), np.float32),
  'bias': np.arange(8, dtype=np.float32),
  'odd': np.ones((4, 6), np.float32),
}
KEY = jax.random.key(7)


class MvueGradientsTest(parameterized.TestCase):

  def test_two_of_four_where_groups_fit_and_untouched_elsewhere(self):
    tx = s24.mvue_gradients(KEY)
    updates, state = jax.jit(tx.update)(GRADS, tx.init(GRADS))
    for name in ('a', 'b', 'stack'):
      s24.verify24(updates[name], axis=-1)
      self.assertTrue((updates[name] != GRADS[name]).any())
    for name in ('bias', 'odd'):
      np.testing.assert_array_equal(updates[name], GRADS[name])
    self.assertEqual(int(state.count), 1)

  def test_other_axis(self):
    tx, grads = s24.mvue_gradients(KEY, axis=-2), {name: GRADS[name] for name in ('stack', 'odd')}
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
    s24.verify24(updates['stack'], axis=-2)
    s24.verify24(updates['odd'], axis=-2)

  def test_a_leaf_without_the_axis_passes(self):
    grads = {name: GRADS[name] for name in ('a', 'stack')}
    stack = s24.mvue_gradients(KEY, axis=-3)
    self.assertIs(stack.update(grads, stack.init(grads))[0]['a'], GRADS['a'])
    none = s24.mvue_gradients(KEY, axis=5)
    with self.assertRaisesRegex(ValueError, 'axis=5: no gradient has that axis'):
      none.update(grads, none.init(grads))

  def test_leaves_and_steps_draw_differently_and_reproducibly(self):
    tx = s24.mvue_gradients(KEY)
    update = jax.jit(tx.update)
    first, state = update(GRADS, tx.init(GRADS))
    second, _ = update(GRADS, state)
    again, _ = update(GRADS, tx.init(GRADS))
    self.assertTrue((first['a'] != first['b']).any())  # equal gradients, different leaves
    for name in ('a', 'b', 'stack'):
      self.assertTrue((first[name] != second[name]).any())
      np.testing.assert_array_equal(first[name], again[name])
    self.assertEqual(update._cache_size(), 1)

  def test_mean_over_steps_is_the_gradient(self):
    tx = s24.mvue_gradients(KEY)
    grads = {'w': GRADS['a']}

    def step(state, _):
      updates, state = jax.jit(tx.update)(grads, state)
      return state, updates['w']

    _, samples = jax.jit(lambda state: jax.lax.scan(step, state, length=4000))(tx.init(grads))
    sigma = np.std(samples, axis=0) / np.sqrt(len(samples))
    self.assertLess(np.max(np.abs(np.mean(samples, axis=0) - GRADS['a']) / (sigma + 1e-6)), 5)

  @parameterized.parameters('threefry2x32', 'rbg')
  def test_takes_any_kind_of_key(self, impl):
    grads = {'a': GRADS['a']}
    for key in (jax.random.key(3, impl=impl), jax.random.PRNGKey(3)):
      tx = s24.mvue_gradients(key)
      updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
      s24.verify24(updates['a'], axis=-1)

  def test_donating_the_state_leaves_the_key(self):
    tx, grads = s24.mvue_gradients(KEY), {'bias': GRADS['bias']}
    update = jax.jit(tx.update, donate_argnums=1)
    for _ in range(2):
      update(grads, tx.init(grads))
    self.assertFalse(KEY.is_deleted())

  def test_dtypes_and_chain(self):
    grads = {name: GRADS[name].astype(jnp.bfloat16) for name in ('a', 'bias')}
    tx = optax.chain(s24.mvue_gradients(KEY), optax.sgd(1.0))
    updates, state = jax.jit(tx.update)(grads, tx.init(grads), grads)
    self.assertEqual({u.dtype for u in jax.tree.leaves(updates)}, {jnp.dtype('bfloat16')})
    self.assertEqual(jax.tree.structure(state), jax.tree.structure(jax.eval_shape(tx.init, grads)))


if __name__ == '__main__':
  absltest.main()
