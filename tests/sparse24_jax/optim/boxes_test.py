"""Parameters in the boxes of Flax: metadata of sharding around an array, and what is not of its rank."""

from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from tests.draws import gaussian

RULE = '.*(up|down)/kernel'
RECIPES = {
  'fst': s24.recipes.transposable_srste(RULE, masked_decay=0.1, refresh_every=2),  # masks
  's_ste': s24.recipes.s_ste(RULE),  # a scale a matrix
  'rigl': s24.recipes.rigl(RULE, density=0.4, total_steps=10, refresh_every=2),
}
SPEC = jax.P('embed', 'mlp')
INIT = nn.initializers.lecun_normal()
PARTITIONED = nnx.with_partitioning(INIT, ('embed', 'mlp'))


def trees(boxed):
  """Parameters and gradients in linen's boxes, one of them matched by no rule, with a layer in none, or without any."""
  leaves = {
    'up': {'kernel': gaussian(0, (8, 16)), 'bias': jnp.ones(16)},
    'down': {'kernel': gaussian(1, (16, 8))},
    'head': {'kernel': gaussian(2, (8, 8))},
  }
  if boxed:
    for name in ('up', 'head'):
      leaves[name]['kernel'] = nn.Partitioned(leaves[name]['kernel'], ('embed', 'mlp'))
  return leaves, jax.tree.map(lambda a: 0.1 * a + 0.2, leaves)


class LinenTest(parameterized.TestCase):

  @parameterized.parameters(*RECIPES)
  @pytest.mark.few
  def test_steps_are_those_without_boxes(self, name):
    found = {}
    for boxed in (True, False):
      params, grads = trees(boxed)
      tx = optax.chain(optax.clip_by_global_norm(10.0), s24.sparse_training(optax.sgd(0.3, 0.9), RECIPES[name]))
      state = tx.init(params)
      update = jax.jit(tx.update)
      for _ in range(4):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
      self.assertEqual(jax.tree.structure(state), jax.tree.structure(tx.init(params)))
      projected = s24.project(params, state, RECIPES[name])
      found[boxed] = jax.tree.leaves((projected, state, s24.get_flip_rate(state)))
    for a, b in zip(found[True], found[False], strict=True):
      np.testing.assert_array_equal(a, b)

  @parameterized.parameters(*RECIPES)
  @pytest.mark.slow
  def test_the_state_is_made_under_the_shardings_that_flax_reads_from_it(self, name):
    mesh = jax.make_mesh((2, 2), ('embed', 'mlp'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params, grads = trees(boxed=True)
    tx = s24.sparse_training(optax.adam(0.3), RECIPES[name])
    shardings = nn.get_sharding(jax.eval_shape(tx.init, params), mesh)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    _, state = jax.jit(tx.update, out_shardings=(None, shardings))(grads, state, params)
    states = s24.sparse_variables(params, state, RECIPES[name])
    if name != 's_ste':
      self.assertEqual(states['up']['kernel'].sharding.spec, SPEC)
    self.assertEqual(states['down']['kernel'].sharding.spec, jax.P())

  def test_a_part_of_the_parameters(self):
    params, _ = trees(boxed=True)
    recipe = s24.recipes.ste('down/kernel')
    box = nn.Partitioned('b', ('embed', 'mlp'))
    labels = {'up': {'kernel': box, 'bias': 'b'}, 'down': 'a', 'head': {'kernel': box}}
    tx = optax.partition({'a': s24.sparse_training(optax.sgd(0.1), recipe), 'b': optax.sgd(0.1)}, labels)
    state = tx.init(params)
    updates, state = tx.update(params, state, params)
    np.testing.assert_allclose(updates['up']['kernel'].value, -0.1 * params['up']['kernel'].value, rtol=1e-6)
    self.assertEqual(list(s24.get_flip_rate(state).per_weight), ['down/kernel'])


class Block(nnx.Module):

  def __init__(self, rngs, init=PARTITIONED):
    self.up = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)
    self.down = nnx.Linear(16, 8, kernel_init=init, rngs=rngs)
    self.head = nnx.Linear(8, 8, kernel_init=init, rngs=rngs)

  def __call__(self, x):
    return self.head(self.down(jax.nn.relu(self.up(x))))


class NnxTest(parameterized.TestCase):

  @parameterized.parameters(INIT, PARTITIONED)
  def test_a_variable_stands_at_the_place_of_each_parameter(self, init):
    """Those of unmatched ones hold nothing; a checkpoint without them has another tree."""
    mesh = jax.make_mesh((1, 1), ('embed', 'mlp'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
      model = Block(nnx.Rngs(0), init)
      optimizer = nnx.Optimizer(model, s24.sparse_training(optax.adam(0.1), RECIPES['s_ste']), wrt=nnx.Param)
    places = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    for held in (optimizer.opt_state.projections, optimizer.opt_state.flip_rate.per_weight):
      self.assertEqual([path for path, _ in nnx.to_flat_state(nnx.state(held))], places)

  @parameterized.parameters(*RECIPES)
  @pytest.mark.slow
  def test_an_optimizer_made_on_a_mesh(self, name):
    recipe = RECIPES[name]
    mesh = jax.make_mesh((2, 2), ('embed', 'mlp'), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    @nnx.jit
    def create():
      model = s24.sparsify(Block(nnx.Rngs(0)), recipe, rngs=nnx.Rngs(mvue=0))
      return model, nnx.Optimizer(model, s24.sparse_training(optax.adam(0.1), recipe), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
      nnx.update(model, s24.sparse_variables(nnx.state(model, nnx.Param), optimizer.opt_state, recipe))
      loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
      optimizer.update(model, grads)
      return loss

    with jax.set_mesh(mesh):
      model, optimizer = create()
      losses = [float(step(model, optimizer, jnp.ones((4, 8)))) for _ in range(3)]
    self.assertLess(losses[-1], losses[0])
    arrays = nnx.state(optimizer)
    placed = jax.device_put(arrays, nnx.get_named_sharding(arrays, mesh))
    self.assertEqual(jax.tree.structure(placed), jax.tree.structure(arrays))
    self.assertEqual(model.up.kernel.get_value().sharding.spec, SPEC)
    if name != 's_ste':
      mask = optimizer.opt_state.projections['up']['kernel'].get_value()
      self.assertEqual(mask.sharding.spec, SPEC)


if __name__ == '__main__':
  absltest.main()
