"""The neuron-level recipe through both feed-forward layers: `neuron_level_ffn` on their own parameters."""

from absl.testing import absltest, parameterized
from flax import linen, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax.projections import projections_of
from tests.draws import gaussian, parameters

D, HIDDEN = 8, 32
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, D), np.float32))
POLICY = s24.ActivationPolicy(s24.VNM(4, 8))
PUBLISHED = s24.ActivationPolicy(s24.VNM(4, 8), s24.VNM(4, 8), dense_features=0.05)
TWO_OF_FOUR = s24.ActivationPolicy(s24.TwoOfFour(), dense_features=0.05)
UP, DOWN = '.*up/kernel', '.*down/kernel'


def recipe_of(policy=POLICY, **kwargs) -> s24.Recipe:
  return s24.recipes.neuron_level(UP, DOWN, policy=policy, **kwargs)


def opt_state_of(params, recipe):
  return s24.sparse_training(optax.sgd(0.1), recipe, phase='sparse').init(params)


def variables(params, recipe):
  return s24.sparse_variables(params, opt_state_of(params, recipe), recipe, phase='sparse')


def value_and_grad(f, params):
  return jax.jit(jax.value_and_grad(lambda params: jnp.sum(jnp.sin(f(params).astype(jnp.float32)))))(params)


def expected(policy, params, x):
  """What the block itself gives, with states from the projections."""
  def block(params):
    kernels, biases = ({role: p.get(name) for role, p in params.items()} for name in ('kernel', 'bias'))
    state = {role: projections_of(policy)[role].init(jax.lax.stop_gradient(kernels[role])) for role in kernels}
    return s24.neuron_level_ffn(
      x, kernels['up'], kernels['down'], state, policy=policy, b_up=biases['up'], b_down=biases['down']
    )
  return value_and_grad(block, params)


def assert_trees_close(found, expected):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def random_biases(params):
  return jax.tree.map(lambda a: a if a.ndim > 1 else jnp.linspace(-0.5, 0.5, a.size), params)


def linen_mlp(**kwargs):
  return s24.linen.Sparse24MLP(HIDDEN, **dict(activation='squared_relu') | kwargs)


def nnx_mlp(**kwargs):
  mlp = s24.nnx.Sparse24MLP(D, HIDDEN, rngs=nnx.Rngs(0), **dict(activation='squared_relu') | kwargs)
  for linear in (mlp.up, mlp.down):
    if linear.bias is not None:
      linear.bias[...] = jnp.linspace(-0.5, 0.5, linear.bias.size)
  return mlp


class Dense(linen.Module):
  """A block of plain layers."""

  @linen.compact
  def __call__(self, x):
    return linen.Dense(D, name='down')(jnp.square(linen.relu(linen.Dense(HIDDEN, name='up')(x))))


class LinenTest(parameterized.TestCase):

  @parameterized.product(policy=(POLICY, PUBLISHED, TWO_OF_FOUR), use_bias=(False, True))
  @pytest.mark.few
  def test_is_the_block(self, policy, use_bias):
    mlp, recipe = linen_mlp(use_bias=use_bias), recipe_of(policy)
    params = random_biases(parameters(mlp, X))
    sparse, states = s24.sparsify(mlp, recipe, phase='sparse'), variables(params, recipe)
    found = value_and_grad(lambda p: sparse.apply({'params': p, 'sparse24': states}, X), params)
    assert_trees_close(found, expected(policy, params, X))
    plain = value_and_grad(lambda p: mlp.apply({'params': p}, X), params)
    self.assertGreater(abs(float(found[0] - plain[0])), 1e-3)

  def test_bfloat16_layer(self):
    mlp, recipe = linen_mlp(dtype=jnp.bfloat16), recipe_of()
    params = parameters(mlp, X)
    sparse = s24.sparsify(mlp, recipe, phase='sparse')
    y = jax.eval_shape(lambda p: sparse.apply({'params': p, 'sparse24': variables(p, recipe)}, X), params)
    self.assertEqual((y.dtype, y.shape), (jnp.bfloat16, X.shape))

  def test_dense_phase_is_dense(self):
    mlp, recipe = linen_mlp(), recipe_of()
    self.assertEqual(s24.sparsify(mlp, recipe, phase='dense'), mlp)
    params = parameters(mlp, X)
    state = s24.sparse_training(optax.sgd(0.1), recipe, phase='dense').init(params)
    self.assertEqual(s24.sparse_variables(params, state, recipe, phase='dense'), {})

  @pytest.mark.slow
  def test_experts_under_vmap_are_blocks_of_their_own(self):
    axes = {'params': 0, 'sparse24': 0}
    experts = linen.vmap(s24.linen.Sparse24MLP, variable_axes=axes, split_rngs={'params': True}, in_axes=0)
    mlp, recipe = experts(HIDDEN, activation='squared_relu'), recipe_of()
    x = gaussian(2, (3, 8, D))
    params = parameters(mlp, x)
    sparse, states = s24.sparsify(mlp, recipe, phase='sparse'), variables(params, recipe)
    value, grads = value_and_grad(lambda p: sparse.apply({'params': p, 'sparse24': states}, x), params)
    alone = [expected(POLICY, jax.tree.map(lambda a, i=i: a[i], params), x[i]) for i in range(3)]
    self.assertAlmostEqual(float(value), sum(float(v) for v, _ in alone), places=4)
    assert_trees_close(grads, jax.tree.map(lambda *parts: jnp.stack(parts), *(g for _, g in alone)))

  @parameterized.parameters(
    (dict(gated=True), "activation='squared_relu' without a gate, found 'squared_relu' with a gate"),
    (dict(activation='relu'), "activation='squared_relu' without a gate, found 'relu'"),
  )
  def test_refuses_another_activation_and_a_gate(self, kwargs, message):
    mlp = linen_mlp(**kwargs)
    recipe = recipe_of()
    if kwargs.get('gated'):
      recipe = s24.recipes.neuron_level('.*(up|gate)/kernel', DOWN, policy=POLICY)
    params = parameters(mlp, X)
    with self.assertRaisesRegex(ValueError, message):
      s24.sparsify(mlp, recipe, phase='sparse').apply({'params': params, 'sparse24': variables(params, recipe)}, X)

  def test_one_map_alone_is_refused(self):
    mlp = linen_mlp()
    recipe = s24.Recipe('half', (s24.Rule(UP, s24.DotPolicy(s24.soft_threshold_projection()), POLICY),))
    params = parameters(mlp, X)
    with self.assertRaisesRegex(ValueError, 'one rule setting for all maps'):
      s24.sparsify(mlp, recipe, phase='sparse').apply({'params': params, 'sparse24': variables(params, recipe)}, X)

  def test_plain_layers_are_the_block(self):
    recipe = recipe_of()
    params = random_biases(parameters(Dense(), X))
    sparse, states = s24.sparsify(Dense(), recipe, phase='sparse'), variables(params, recipe)
    found = value_and_grad(lambda p: sparse.apply({'params': p, 'sparse24': states}, X), params)
    assert_trees_close(found, expected(POLICY, params, X))


class NnxTest(parameterized.TestCase):

  @parameterized.product(policy=(POLICY, PUBLISHED, TWO_OF_FOUR), use_bias=(True, False))
  @pytest.mark.few
  def test_is_the_block(self, policy, use_bias):
    mlp, recipe = nnx_mlp(use_bias=use_bias), recipe_of(policy)
    sparse = s24.sparsify(mlp, recipe, phase='sparse')
    params = nnx.state(mlp, nnx.Param)
    nnx.update(sparse, variables(params, recipe))
    graphdef, held, rest = nnx.split(sparse, nnx.Param, ...)
    value, grads = value_and_grad(lambda held: nnx.merge(graphdef, held, rest)(X), held)
    assert_trees_close((value, nnx.to_pure_dict(grads)), expected(policy, nnx.to_pure_dict(params), X))

  def test_dense_phase_is_dense(self):
    mlp, recipe = nnx_mlp(), recipe_of()
    back = s24.sparsify(s24.sparsify(mlp, recipe, phase='sparse'), recipe, phase='dense')
    np.testing.assert_array_equal(back(X), mlp(X))
    del back.sparse24  # the mark of a dense phase
    self.assertEqual(nnx.graphdef(back), nnx.graphdef(mlp))
    self.assertFalse((s24.sparsify(mlp, recipe, phase='sparse')(X) == mlp(X)).all())

  @parameterized.parameters(
    (dict(gated=True), 'two matmuls with a squared ReLU between them; found the matmul at .* by itself'),
    (dict(activation='gelu'), "activation='squared_relu' without a gate, found 'gelu'"),
  )
  def test_refuses_another_activation_and_a_gate(self, kwargs, message):
    sparse = s24.sparsify(nnx_mlp(**kwargs), recipe_of(), phase='sparse')
    with self.assertRaisesRegex(ValueError, message):
      sparse(X)

  def test_one_map_alone_is_refused(self):
    recipe = s24.Recipe('half', (s24.Rule(UP, s24.DotPolicy(s24.soft_threshold_projection()), POLICY),))
    with self.assertRaisesRegex(ValueError, 'one rule setting for all maps'):
      s24.sparsify(nnx_mlp(), recipe, phase='sparse')(X)

  def test_a_layer_by_itself_is_refused(self):
    sparse = s24.sparsify(nnx_mlp(), recipe_of(), phase='sparse')
    with self.assertRaisesRegex(ValueError, 'Linear.__call__ of a sparsified model was called from outside'):
      sparse.up(X)


if __name__ == '__main__':
  absltest.main()
