"""What comes through both doors, linen and nnx."""

from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparse24_jax as s24
from tests.draws import parameters


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


X = jnp.asarray(np.random.default_rng(0).standard_normal((16, 16), np.float32))


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
    params = parameters(LinenModel(), X)
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
    params = parameters(LinenModel(), X)
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
    params = parameters(LinenModel(), X)
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

  def test_precision_of_a_layer_is_not_dropped(self):
    recipe = s24.recipes.ste('kernel')
    layer = nn.Dense(4, precision='highest')
    params = parameters(layer, X)
    opt_state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
    variables = {'params': params, 'sparse24': s24.sparse_variables(params, opt_state, recipe)}
    jaxpr = jax.make_jaxpr(lambda v: s24.sparsify(layer, recipe).apply(v, X))(variables)
    self.assertIn('precision=(Precision.HIGHEST, Precision.HIGHEST)', str(jaxpr))


if __name__ == '__main__':
  absltest.main()
