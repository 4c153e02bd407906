"""Sparse linen models among what else looks at, or keeps, the calls of modules."""

from absl.testing import absltest
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparse24_jax as s24

RULE = '.*(up|down)/kernel'
X = jax.random.normal(jax.random.key(9), (8, 16))


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
  params = model.init(jax.random.key(0), X)['params']
  opt_state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
  return {'params': params, 'sparse24': s24.sparse_variables(params, opt_state, recipe)}


def gradient(model, recipe):
  """Of the upper kernel."""
  given = variables(model, recipe)

  def loss(params):
    out = s24.sparsify(model, recipe).apply(given | {'params': params}, X, rngs={'mvue': jax.random.key(1)})
    return jnp.sum(out**2)

  return jax.grad(loss)(given['params'])['block']['up']['kernel']


class LinenCallsTest(absltest.TestCase):

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


if __name__ == '__main__':
  absltest.main()
