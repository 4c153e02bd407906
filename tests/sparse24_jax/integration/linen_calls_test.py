"""Sparse linen models among what else looks at, or keeps, the calls of modules."""

from absl.testing import absltest
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from tests.draws import parameters

RULE = '.*(up|down)/kernel'
X = jnp.asarray(np.random.default_rng(9).standard_normal((8, 16), np.float32))


class Block(nn.Module):

  @nn.compact
  def __call__(self, x):
    return nn.Dense(16, name='down')(nn.relu(nn.Dense(32, name='up')(x)))


JittedBlock = nn.jit(Block)


class Model(nn.Module):
  """A block compiled by itself: Flax keeps its program from call to call."""

  def setup(self):
    self.block = JittedBlock()

  def __call__(self, x):
    return x + self.block(x)


class JittedMethod(nn.Module):

  @nn.jit
  @nn.compact
  def __call__(self, x):
    return x + Block(name='block')(x)


def variables(model, recipe):
  params = parameters(model, X)
  opt_state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
  return {'params': params, 'sparse24': s24.sparse_variables(params, opt_state, recipe)}


def gradient(model, recipe):
  """The gradient of the upper kernel."""
  given = variables(model, recipe)

  def loss(params):
    out = s24.sparsify(model, recipe).apply(given | {'params': params}, X, rngs={'mvue': jax.random.key(1)})
    return jnp.sum(out**2)

  return jax.grad(loss)(given['params'])['block']['up']['kernel']


class LinenCallsTest(absltest.TestCase):

  @pytest.mark.slow
  def test_a_jitted_block_is_another_program_for_another_recipe(self):
    """The masks of both look alike, so that nothing but the recipe tells the programs apart."""
    for model in (Model(), JittedMethod()):
      sampled, exact = (
        s24.Recipe(grad, (s24.Rule(RULE, s24.DotPolicy(s24.transposable(), weight_grad=grad)),))
        for grad in ('mvue', 'dense')
      )
      first, second = gradient(model, sampled), gradient(model, exact)
      jax.clear_caches()
      np.testing.assert_allclose(second, gradient(model, exact), rtol=1e-5, atol=1e-5)
      self.assertGreater(float(jnp.abs(first - second).max()), 0.1)
      np.testing.assert_allclose(first, gradient(model, sampled), rtol=1e-5, atol=1e-5)

  def test_a_jitted_block_is_compiled_once_for_a_recipe(self):
    traces = []

    class Counted(Block):

      @nn.compact
      def __call__(self, x):
        traces.append(self.path)
        return nn.Dense(16, name='up')(x)

    class Outer(nn.Module):
      inner: type

      @nn.compact
      def __call__(self, x):
        return self.inner(name='block')(x)

    model = Outer(nn.jit(Counted))
    recipes = [s24.recipes.ste('.*up/kernel') for _ in range(3)]
    given = variables(model, recipes[0])
    traces.clear()
    for recipe in recipes:
      s24.sparsify(model, recipe).apply(given, X)
    self.assertLen(traces, 1)

  def test_captured_calls_are_those_of_the_model(self):
    recipe = s24.recipes.ste(RULE)
    given = variables(Block(), recipe)
    _, found = s24.sparsify(Block(), recipe).apply(given, X, capture_intermediates=True)
    _, plain = Block().apply({'params': given['params']}, X, capture_intermediates=True)
    for layer in ('up', 'down'):
      self.assertLen(found['intermediates'][layer]['__call__'], 1)
      self.assertEqual(
        jax.tree.structure(found['intermediates'][layer]), jax.tree.structure(plain['intermediates'][layer])
      )

  def test_a_model_may_use_any_name(self):
    sequence = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(4)])
    for model, layer in (
      (Named(), 'inner'), (InSetup(), 'inner'), (Field(nn.Dense(16)), 'inner'), (sequence, 'layers_2')
    ):
      with self.subTest(type(model).__name__):
        recipe = s24.recipes.ste(f'{layer}/kernel')
        given = variables(model, recipe)
        sparse = s24.sparsify(model, recipe)
        expected = model.apply({'params': projected(given['params'], layer)}, X)
        np.testing.assert_allclose(sparse.apply(given, X), expected, rtol=1e-6, atol=1e-6)
        self.assertEqual(
          jax.tree.structure(parameters(sparse, X)), jax.tree.structure(given['params'])
        )

  def test_rules_name_layers_of_the_part_that_is_sparse(self):
    part = Part()
    recipe = s24.recipes.ste('(inner|mlp/down)/kernel')
    given = variables(part, recipe)
    expected = s24.sparsify(part, recipe).apply(given, X)
    self.assertGreater(float(jnp.abs(expected - part.apply({'params': given['params']}, X)).max()), 0.01)
    whole = {name: {'inner': leaves} for name, leaves in given.items()}
    np.testing.assert_array_equal(Field(s24.sparsify(part, recipe), out=False).apply(whole, X), expected)
    elsewhere = s24.sparsify(part, s24.recipes.ste('inner/inner/kernel'))
    with self.assertRaisesRegex(ValueError, "'inner/inner/kernel' of recipe 'ste' decides for no weight"):
      Field(elsewhere, out=False).apply(whole, X)

  def test_a_sparse_part_in_a_sparse_model(self):
    """Each layer follows the recipe that names it, also a field of the part, which was named before either wrapper."""
    whole, part = Field(Field(nn.Dense(16)), out=False), Field(nn.Dense(16))
    outer, inner = s24.recipes.ste('inner/inner/kernel'), s24.recipes.ste('out/kernel')
    given = variables(whole, s24.recipes.ste('inner/(inner|out)/kernel'))
    params = given['params']['inner']
    for layer in ('inner', 'out'):
      params = projected(params, layer)
    found = s24.sparsify(Field(s24.sparsify(part, inner), out=False), outer).apply(given, X)
    np.testing.assert_allclose(found, part.apply({'params': params}, X), rtol=1e-6, atol=1e-6)


class Named(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(4, name='out')(nn.Dense(16, name='inner')(x))


class InSetup(nn.Module):
  def setup(self):
    self.inner, self.out = nn.Dense(16), nn.Dense(4)

  def __call__(self, x):
    return self.out(self.inner(x))


class Field(nn.Module):
  inner: nn.Module
  out: bool = True

  @nn.compact
  def __call__(self, x):
    x = self.inner(x)
    return nn.Dense(4, name='out')(x) if self.out else x


class Part(nn.Module):
  @nn.compact
  def __call__(self, x):
    return s24.linen.Sparse24MLP(32, name='mlp')(nn.Dense(16, name='inner')(x))


def projected(params, layer):
  """With one layer 2:4, by hand: the two largest of each four along the input."""
  w = params[layer]['kernel']
  groups = jnp.abs(w).reshape(-1, 4, w.shape[1])
  kept = jnp.argsort(jnp.argsort(-groups, axis=1), axis=1) < 2
  return params | {layer: params[layer] | {'kernel': w * kept.reshape(w.shape)}}


if __name__ == '__main__':
  absltest.main()
