"""States that go on where others were: what is kept, what is new, and what is no such state."""

import functools

from absl.testing import absltest, parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparse24_jax as s24

RNG = np.random.default_rng(0)
NAMES = ('down', 'head', 'up')
GRADS, PARAMS = (
  {name: jnp.asarray(RNG.standard_normal((16, 16)), jnp.float32) for name in NAMES} for _ in range(2)
)
FST = functools.partial(s24.recipes.transposable_srste, masked_decay=1e-3, dense_fraction=0.0)
RECIPES = {
  's_ste': s24.recipes.s_ste, 'fst': FST, 'ste': s24.recipes.ste,
  'rigl': functools.partial(s24.recipes.rigl, total_steps=100, density=0.3, refresh_every=3),
}  # fmt: skip


def optimizer(recipe, *, phase='sparse'):
  return optax.chain(optax.clip_by_global_norm(1.0), s24.sparse_training(optax.sgd(1e-2, 0.9), recipe, phase=phase))


def trained(tx, steps, params=PARAMS, state=None):
  """Parameters and state after steps."""
  update, state = jax.jit(tx.update), tx.init(params) if state is None else state
  for _ in range(steps):
    updates, state = update(GRADS, state, params)
    params = optax.apply_updates(params, updates)
  return params, state


def masks(state):
  return {path: np.asarray(leaf) for path, leaf in state[1].projections.items() if hasattr(leaf, 'shape')}


class CarryOverTest(parameterized.TestCase):

  @parameterized.parameters(*RECIPES)
  def test_another_layer_is_sparse_from_here_on(self, name):
    before, after = (optimizer(RECIPES[name](path)) for path in ('up', 'up|down'))
    params, old = trained(before, 5)
    new = after.init(params)
    state = s24.carry_over(new, old)
    self.assertEqual(jax.tree.structure(state), jax.tree.structure(new))
    found, fresh, kept = masks(state), masks(new), masks(old)
    np.testing.assert_array_equal(found['up'], kept['up'])
    np.testing.assert_array_equal(found['down'], fresh['down'])
    if name not in ('ste', 'fst'):  # which choose the same masks of the same weights
      self.assertFalse(np.array_equal(fresh['up'], kept['up']))
    self.assertEqual(int(state[1].count), 5)
    jax.tree.map(np.testing.assert_array_equal, state[1].inner_state, old[1].inner_state)
    # A rate of all weights together is not one of these.
    self.assertTrue(np.isnan(float(s24.get_flip_rate(state).overall)))
    params, state = trained(after, 2, params, state)
    self.assertEqual(int(state[1].count), 7)
    self.assertTrue(np.isfinite(params['up']).all())

  def test_a_layer_is_dense_from_here_on(self):
    before, after = (optimizer(s24.recipes.s_ste(path)) for path in ('up|down', 'up'))
    params, old = trained(before, 3)
    with self.assertRaisesRegex(ValueError, r'leaves down dense\. .*carry_over\(tx.init\(params\), opt_state\)'):
      after.update(params, old, params)
    state = s24.carry_over(after.init(params), old)
    self.assertEqual(list(masks(state)), ['up'])
    self.assertEqual(float(masks(state)['up']), float(masks(old)['up']))
    trained(after, 1, params, state)

  @parameterized.parameters('s_ste', 'ste')
  def test_another_projection_chooses_anew(self, name):
    params, old = trained(optimizer(RECIPES[name]('up|down')), 3)
    after = optimizer(FST('up|down'))
    with self.assertRaisesRegex(ValueError, r'its state was made by projection .* make a state of .*carry_over\('):
      after.update(params, old, params)
    state = s24.carry_over(after.init(params), old)
    for path, mask in masks(state).items():
      np.testing.assert_array_equal(mask, s24.transposable_mask(params[path]))
    trained(after, 1, params, state)
    # The text of rules does not count.
    same = s24.carry_over(optimizer(RECIPES[name]('up|dow.')).init(params), old)
    jax.tree.map(np.testing.assert_array_equal, masks(same), masks(old))
    np.testing.assert_equal(float(s24.get_flip_rate(same).overall), float(s24.get_flip_rate(old).overall))

  def test_weights_that_are_set_between_steps(self):
    """As by an outer step: far away, which a step under jit refuses."""
    tx = optimizer(FST('up|down'))
    params, state = trained(tx, 3)
    outer = jax.tree.map(lambda w: w * 0.5 + 0.3, params)
    _, refused = trained(tx, 1, outer, state)
    with self.assertRaisesRegex(ValueError, r'set on purpose, averaged or clipped, make, before the update, a state'):
      s24.get_flip_rate(refused)
    state = jax.jit(lambda params, state: s24.carry_over(tx.init(params), state))(outer, state)
    _, state = trained(tx, 40, outer, state)
    self.assertEqual(int(state[1].count), 43)
    self.assertTrue(np.isfinite(float(s24.get_flip_rate(state).overall)))
    # What was refused stays so.
    with self.assertRaisesRegex(ValueError, 'other weights'):
      s24.get_flip_rate(s24.carry_over(tx.init(outer), refused))

  def test_after_a_dense_start(self):
    dense = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, 0.9))
    params, old = trained(dense, 3)
    tx = optimizer(s24.recipes.s_ste('up'))
    state = s24.carry_over(tx.init(params), old)
    jax.tree.map(np.testing.assert_array_equal, state[1].inner_state, old[1])
    self.assertEqual(int(state[1].count), 0)
    trained(tx, 1, params, state)

  def test_wrappers_around_keep_what_they_have(self):
    tx = optax.MultiSteps(optimizer(s24.recipes.ste('up')), 3)
    _, state = trained(tx, 4)
    found = s24.carry_over(tx.init(PARAMS), state)
    self.assertEqual((int(found.mini_step), int(found.gradient_step)), (1, 1))
    jax.tree.map(np.testing.assert_array_equal, found.acc_grads, state.acc_grads)

  def test_the_next_step_may_be_of_any_phase(self):
    """A dense start under the recipe that watches, and a run that goes on after its dense end."""
    recipe = s24.recipes.transposable_srste('up', masked_decay=1e-3)
    for before in (recipe, s24.recipes.dense('up', watch=s24.transposable())):
      params, old = trained(optimizer(before, phase='dense'), 2)
      state = s24.carry_over(optimizer(recipe).init(params), old)
      self.assertEqual(int(state[1].count), 2)
      s24.sparse_variables(params, state, recipe, phase='sparse')
      trained(optimizer(recipe), 1, params, state)

  def test_a_stacked_ensemble(self):
    before, after = (optimizer(s24.recipes.ste(path)) for path in ('up', 'up|down'))
    params = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), PARAMS)
    old, new = (jax.jit(jax.vmap(tx.init))(params) for tx in (before, after))
    _, state = jax.jit(jax.vmap(after.update))(params, s24.carry_over(new, old), params)
    self.assertEqual(state[1].count.tolist(), [1, 1])
    self.assertEqual(s24.get_flip_rate(state).overall.shape, (2,))

  def test_in_the_boxes_of_nnx(self):
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    recipe = s24.recipes.s_ste('kernel')
    made = [nnx.Optimizer(model, s24.sparse_training(optax.adam(1e-2), recipe), wrt=nnx.Param) for _ in range(2)]
    made[0].update(model, nnx.state(model, nnx.Param))
    state = s24.carry_over(made[1].opt_state, made[0].opt_state)
    self.assertEqual(jax.tree.structure(state), jax.tree.structure(made[0].opt_state))
    made[1].opt_state = state
    made[1].update(model, nnx.state(model, nnx.Param))
    self.assertEqual(int(made[1].opt_state.count[...]), 2)

  def test_the_state_of_an_nnx_optimizer_beside_that_of_tx_init(self):
    model, recipe = nnx.Linear(16, 16, rngs=nnx.Rngs(0)), s24.recipes.s_ste('kernel')
    tx, params = s24.sparse_training(optax.adam(1e-2), recipe), nnx.state(model, nnx.Param)
    for before in (tx, optax.adam(1e-2)):  # or dense so far
      old = nnx.Optimizer(model, before, wrt=nnx.Param).opt_state
      with self.assertRaisesRegex(ValueError, r'new is not tx\.init\(params\), but nnx\.Optimizer\(model, tx, wrt'):
        s24.carry_over(tx.init(params), old)
      s24.carry_over(nnx.Optimizer(model, tx, wrt=nnx.Param).opt_state, old)

  def test_what_is_no_such_state(self):
    tx = optimizer(s24.recipes.ste('up'))
    _, state = trained(tx, 1)
    with self.assertRaisesRegex(ValueError, r'new holds no .* is tx.init\(params\), and .*To go on .* inner_state of'):
      s24.carry_over(optax.adam(1e-3).init(PARAMS), state)
    with self.assertRaisesRegex(ValueError, 'new has made steps already: it is tx.init'):
      s24.carry_over(state, tx.init(PARAMS))
    narrow = {name: w[:8] for name, w in PARAMS.items()}
    with self.assertRaisesRegex(ValueError, r"inner_state.*down'\] new has float32 of shape \(8, 16\), and old"):
      s24.carry_over(tx.init(narrow), state)
    many = optax.MultiSteps(tx, 2)
    with self.assertRaisesRegex(ValueError, r'new has float32 of shape \(8, 16\)'):
      s24.carry_over(many.init(narrow), many.init(PARAMS))
    other = optax.chain(optax.clip_by_global_norm(1.0), s24.sparse_training(optax.sgd(0.1), s24.recipes.ste('up')))
    with self.assertRaisesRegex(ValueError, 'old is no state of the optimizer that made new.* is of another kind'):
      s24.carry_over(other.init(PARAMS), state)
    with self.assertRaisesRegex(ValueError, 'old is no state of the optimizer that made new'):
      s24.carry_over(tx.init(PARAMS), state[1])

  def test_a_state_that_was_read_into_the_tree_of_another_recipe(self):
    """It would say that its masks are of that recipe's kind."""
    by_magnitude, transposable = (optimizer(recipe) for recipe in (s24.recipes.ste('up'), FST('up')))
    _, state = trained(by_magnitude, 1)
    leaves, tree = jax.tree.leaves(state), jax.tree.structure(transposable.init(PARAMS))
    wrong, new = jax.tree.unflatten(tree, leaves), transposable.init(PARAMS)
    with self.assertRaisesRegex(ValueError, "made by projection 'magnitude 2:4', and the recipe has 'transposable"):
      s24.carry_over(new, wrong)
    found = jax.jit(s24.carry_over)(new, wrong)
    with self.assertRaisesRegex(ValueError, 'its state was made by projection'):
      s24.get_flip_rate(found) and s24.sparse_variables(PARAMS, found, FST('up'))


if __name__ == '__main__':
  absltest.main()
