"""The two doors, as a newcomer uses them: complete examples of fewer than ten lines, and what comes through."""

from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparse24_jax as s24


class LinenModel(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Dense(32, name='up')(x))
    return nn.Dense(4, name='down')(x)


class NnxModel(nnx.Module):
  def __init__(self, rngs):
    self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)

  def __call__(self, x):
    return self.down(nnx.relu(self.up(x)))


X = jax.random.normal(jax.random.key(0), (16, 16))
Y = jax.random.normal(jax.random.key(1), (16, 4))

# What a user adds to a training script; the lines that follow are the step that was there before.
LINEN = """
recipe = s24.recipes.transposable_srste('(up|down)/kernel', masked_decay=6e-5)
tx = optax.chain(optax.clip_by_global_norm(1.0), s24.sparse_training(optax.adamw(1e-2), recipe))
sparse = s24.sparsify(model, recipe)
def forward(params, opt_state, x, key):
  variables = {'params': params, 'sparse24': s24.sparse_variables(params, opt_state, recipe)}
  return sparse.apply(variables, x, rngs={'mvue': key})
"""

NNX = """
recipe = s24.recipes.transposable_srste('(up|down)/kernel', masked_decay=6e-5)
tx = optax.chain(optax.clip_by_global_norm(1.0), s24.sparse_training(optax.adamw(1e-2), recipe))
sparse = s24.sparsify(model, recipe, rngs=nnx.Rngs(mvue=0))
optimizer = nnx.Optimizer(sparse, tx, wrt=nnx.Param)
def after_step(sparse, optimizer):
  nnx.update(sparse, s24.sparse_variables(nnx.state(sparse, nnx.Param), optimizer.opt_state, recipe))
"""


class ExampleTest(parameterized.TestCase):

  def test_linen(self):
    self.assertLess(len(LINEN.strip().splitlines()), 10)
    model = LinenModel()
    scope = {'s24': s24, 'optax': optax, 'model': model}
    exec(LINEN, scope)
    tx, forward, recipe = scope['tx'], scope['forward'], scope['recipe']
    params = model.init(jax.random.key(0), X)['params']
    state = tx.init(params)

    @jax.jit
    def step(params, state, key):
      loss, grads = jax.value_and_grad(lambda p: ((forward(p, state, X, key) - Y) ** 2).mean())(params)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state, loss

    losses = []
    for i in range(30):
      params, state, loss = step(params, state, jax.random.key(i))
      losses.append(float(loss))
    self.assertLess(losses[-1], 0.7 * losses[0])
    s24.verify24(s24.project(params, state, recipe)['up']['kernel'])

  def test_nnx(self):
    self.assertLess(len(NNX.strip().splitlines()), 10)
    scope = {'s24': s24, 'optax': optax, 'nnx': nnx, 'model': NnxModel(nnx.Rngs(0))}
    exec(NNX, scope)

    @nnx.jit
    def step(model, optimizer):
      loss, grads = nnx.value_and_grad(lambda m: ((m(X) - Y) ** 2).mean(), argnums=nnx.DiffState(0, nnx.Param))(model)
      optimizer.update(model, grads)
      scope['after_step'](model, optimizer)
      return loss

    losses = [float(step(scope['sparse'], scope['optimizer'])) for _ in range(30)]
    self.assertLess(losses[-1], 0.7 * losses[0])


class SparsifyTest(parameterized.TestCase):

  def test_sparse_variables_are_the_states_by_layer(self):
    params = {'a': {'b': {'kernel': jnp.eye(8), 'bias': jnp.ones(8)}}, 'c': {'kernel': jnp.eye(8)}}
    recipe = s24.recipes.ste('a/.*')
    state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
    found = s24.sparse_variables(params, state, recipe)
    del found['made of']  # which weights these are the states of
    self.assertEqual(jax.tree.structure(found), jax.tree.structure({'a': {'b': {'kernel': 0}}}))
    np.testing.assert_array_equal(found['a']['b']['kernel'], state.projections['a']['b']['kernel'])

  def test_a_rule_without_projection_needs_no_state(self):
    recipe = s24.Recipe('fp8', (s24.Rule('up/kernel', s24.DotPolicy(precision='fp8')),))
    params = LinenModel().init(jax.random.key(0), X)['params']
    state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
    variables = {'params': params, 'sparse24': s24.sparse_variables(params, state, recipe)}
    self.assertEqual(variables['sparse24'], {})
    found = s24.sparsify(LinenModel(), recipe).apply(variables, X)
    dense = LinenModel().apply({'params': params}, X)
    self.assertTrue((found != dense).any())
    np.testing.assert_allclose(found, dense, atol=0.2)
    model = NnxModel(nnx.Rngs(0))
    np.testing.assert_allclose(s24.sparsify(model, recipe)(X), model(X), atol=0.2)

  def test_first_rule_that_matches_decides(self):
    magnitude, soft = s24.DotPolicy(s24.magnitude()), s24.DotPolicy(s24.soft_threshold_projection())
    recipe = s24.Recipe('two', (s24.Rule('up/.*', soft), s24.Rule('.*', magnitude)))
    params = LinenModel().init(jax.random.key(0), X)['params']
    state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
    states = s24.sparse_variables(params, state, recipe)
    self.assertEqual(states['up']['kernel'].dtype, jnp.float32)
    self.assertEqual(states['down']['kernel'].dtype, jnp.bool_)
    found = s24.sparsify(LinenModel(), recipe).apply({'params': params, 'sparse24': states}, X)
    expected = LinenModel().apply({'params': s24.project(params, state, recipe)}, X)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    model = NnxModel(nnx.Rngs(0))
    sparse = s24.sparsify(model, recipe)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, s24.project(params, s24.sparse_training(optax.sgd(0.1), recipe).init(params), recipe))
    np.testing.assert_allclose(sparse(X), model(X), rtol=1e-5, atol=1e-6)

  @parameterized.product(phase=(None, 'dense'), watched=(False, True))
  def test_dense_recipe_changes_nothing(self, phase, watched):
    recipe = s24.recipes.dense('.*', watch=s24.magnitude()) if watched else s24.recipes.dense()
    params = LinenModel().init(jax.random.key(0), X)['params']
    sparse = s24.sparsify(LinenModel(), recipe, phase=phase)
    np.testing.assert_array_equal(sparse.apply({'params': params}, X), LinenModel().apply({'params': params}, X))
    model = NnxModel(nnx.Rngs(0))
    np.testing.assert_array_equal(s24.sparsify(model, recipe, phase=phase)(X), model(X))
    opt_state = s24.sparse_training(optax.sgd(0.1), recipe, phase=phase).init(params)
    self.assertIs(s24.project(params, opt_state, recipe, phase=phase), params)
    self.assertEqual(s24.sparse_variables(params, opt_state, recipe, phase=phase), {})

  def test_dense_recipe_is_never_sparse(self):
    with self.assertRaisesRegex(ValueError, "phase='sparse', but recipe 'dense'"):
      s24.sparsify(LinenModel(), s24.recipes.dense(), phase='sparse')

  def test_a_scale_is_kept(self):
    recipe = s24.recipes.s_ste('up/kernel')
    model = s24.sparsify(NnxModel(nnx.Rngs(0)), recipe)
    scale = model.sparse24.states['up/kernel'][...]
    model.up.kernel[...] = model.up.kernel[...] ** 3
    again = s24.sparsify(model, recipe)
    np.testing.assert_array_equal(again.sparse24.states['up/kernel'][...], scale)

  def test_precision_of_a_layer_is_not_dropped(self):
    recipe = s24.recipes.ste('kernel')
    layer = nn.Dense(4, precision='highest')
    params = layer.init(jax.random.key(0), X)['params']
    opt_state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
    variables = {'params': params, 'sparse24': s24.sparse_variables(params, opt_state, recipe)}
    jaxpr = jax.make_jaxpr(lambda v: s24.sparsify(layer, recipe).apply(v, X))(variables)
    self.assertIn('precision=(Precision.HIGHEST, Precision.HIGHEST)', str(jaxpr))


if __name__ == '__main__':
  absltest.main()
