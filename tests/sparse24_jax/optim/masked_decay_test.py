"""`add_masked_decay`: the formula, its place in a chain, and what it leaves alone."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparse24_jax as s24
from tests.draws import gaussian

W = np.array([[1.0, -2.0, 3.0], [0.5, 0.0, -4.0]], np.float32)
MASK = np.array([[True, False, False], [False, True, True]])
G = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], np.float32)
PARAMS = {'w': jnp.asarray(W), 'b': jnp.ones(3)}
MASKS = {'w': jnp.asarray(MASK), 'b': optax.MaskedNode()}
GRADS = {'w': jnp.asarray(G), 'b': jnp.full(3, 0.7)}


class AddMaskedDecayTest(parameterized.TestCase):

  @parameterized.parameters(0.0, 0.5, 2e-4)
  def test_formula(self, decay):
    tx = s24.add_masked_decay(decay, MASKS)
    updates, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates['w'], G + decay * np.where(MASK, 0, W), rtol=1e-6)
    np.testing.assert_array_equal(updates['b'], GRADS['b'])
    self.assertEqual(int(state.count), 1)

  def test_schedule_counts_steps(self):
    tx = s24.add_masked_decay(lambda count: 0.25 * count, MASKS)
    state = tx.init(PARAMS)
    for count in range(3):
      updates, state = jax.jit(tx.update)(GRADS, state, PARAMS)
      np.testing.assert_allclose(updates['w'], G + 0.25 * count * np.where(MASK, 0, W), rtol=1e-6)

  def test_between_clip_and_moments(self):
    tx = optax.chain(optax.clip_by_global_norm(1e-3), s24.add_masked_decay(0.5, MASKS), optax.scale_by_adam(b1=0.9))
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    clipped = G * 1e-3 / float(optax.tree.norm(GRADS))
    np.testing.assert_allclose(state[2].mu['w'], 0.1 * (clipped + 0.5 * np.where(MASK, 0, W)), rtol=1e-5)

  def test_once_for_many_micro_batches(self):
    tx = optax.MultiSteps(s24.add_masked_decay(0.5, MASKS), every_k_schedule=3)
    state = tx.init(PARAMS)
    for _ in range(3):
      updates, state = tx.update(GRADS, state, PARAMS)
    np.testing.assert_allclose(updates['w'], G + 0.5 * np.where(MASK, 0, W), rtol=1e-6)
    self.assertEqual(int(state.inner_opt_state.count), 1)

  @parameterized.parameters('bfloat16', 'float16')
  def test_sums_in_float32_and_keeps_the_dtype(self, dtype):
    params, grads = (jax.tree.map(lambda a: a.astype(dtype), tree) for tree in (PARAMS, GRADS))
    tx = s24.add_masked_decay(0.3, MASKS)
    updates, _ = tx.update(grads, tx.init(params), params)
    w, g = (np.asarray(tree['w'], np.float32) for tree in (params, grads))
    expected = jnp.asarray(g + np.float32(0.3) * np.where(MASK, 0, w)).astype(dtype)
    np.testing.assert_array_equal(updates['w'], expected)
    self.assertEqual({str(u.dtype) for u in jax.tree.leaves(updates)}, {dtype})

  def test_a_small_decay_arrives_beside_gradients_of_few_bits(self):
    """Gradients are often summed over devices in bfloat16: 6e-5 of a weight is less than the last bit of most."""
    keys = jax.random.split(jax.random.key(0), 3)
    w, mask = 0.02 * jax.random.normal(keys[0], (64, 64)), jax.random.bernoulli(keys[1], 0.5, (64, 64))
    g = (1e-3 * jax.random.normal(keys[2], (64, 64))).astype(jnp.bfloat16)
    tx = s24.add_masked_decay(6e-5, {'w': mask})
    updates, _ = tx.update({'w': g}, tx.init({'w': w}), {'w': w})
    expected = np.float64(g) + 6e-5 * np.where(mask, 0, np.float64(w))
    np.testing.assert_allclose(updates['w'], expected, rtol=1e-6, atol=1e-12)

  def test_neither_16_bit_type_holds_the_numbers_of_the_other(self):
    params = {'w': jnp.full((4, 4), 1e6, jnp.bfloat16)}  # float16 ends at 65504
    tx = s24.add_masked_decay(1.0, {'w': jnp.zeros((4, 4), bool)})
    updates, _ = tx.update({'w': jnp.ones((4, 4), jnp.float16)}, tx.init(params), params)
    np.testing.assert_allclose(updates['w'], 1e6, rtol=2**-8)

  def test_infinite_weight_that_is_kept_adds_nothing(self):
    params = {'w': jnp.array([jnp.inf, 1.0])}
    tx = s24.add_masked_decay(0.1, {'w': jnp.array([True, False])})
    updates, _ = tx.update({'w': jnp.zeros(2)}, tx.init(params), params)
    np.testing.assert_allclose(updates['w'], [0.0, 0.1])

  def test_factor_can_be_injected(self):
    tx = optax.inject_hyperparams(lambda decay: s24.add_masked_decay(decay, MASKS))(decay=0.1)
    state = tx.init(PARAMS)
    state.hyperparams['decay'] = jnp.asarray(0.4)
    updates, _ = jax.jit(tx.update)(GRADS, state, PARAMS)
    np.testing.assert_allclose(updates['w'], G + 0.4 * np.where(MASK, 0, W), rtol=1e-6)

  def test_same_as_sparse_training(self):
    params = {'w': gaussian(0, (8, 4))}
    grads = {'w': gaussian(1, (8, 4))}
    recipe = s24.recipes.sr_ste('w', masked_decay=0.2, decay_on='gradients')
    both = (
      s24.sparse_training(optax.adam(0.1), recipe),
      optax.chain(s24.add_masked_decay(0.2, {'w': s24.magnitude_mask(params['w'])}), optax.adam(0.1)),
    )
    first, second = (tx.update(grads, tx.init(params), params)[0] for tx in both)
    np.testing.assert_array_equal(first['w'], second['w'])


if __name__ == '__main__':
  absltest.main()
