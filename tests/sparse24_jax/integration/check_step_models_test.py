"""`check_step` of models of linen, nnx and Equinox: what goes in and out, and the lines that it names."""

import functools
import inspect

from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24

X = np.ones((8, 16), np.float32)


class CheckStepModelsTest(parameterized.TestCase):

  def test_layers_of_flax_have_the_lines_of_their_calls(self):
    class Layer(nn.Module):
      @nn.compact
      def __call__(self, x, _):
        return nn.Dense(16, name='up')(x), None

    class Model(nn.Module):
      @nn.compact
      def __call__(self, x):
        layers = nn.scan(nn.remat(Layer), variable_axes={'params': 0}, split_rngs={'params': True}, length=2)
        return layers(name='h')(x, None)[0]

    model = Model()
    params = model.init(jax.random.key(0), X)['params']
    recipe = s24.bind(s24.recipes.ste('.*kernel'), model, params, X)
    tx, sparse = s24.sparse_training(optax.sgd(0.1), recipe), s24.sparsify(model, recipe)

    def step(params, state, x):
      variables = {'sparse24': s24.sparse_variables(params, state, recipe)}
      grads = jax.grad(lambda p: (sparse.apply({'params': p} | variables, x) ** 2).mean())(params)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    (line,) = s24.check_step(step, params, tx.init(params), X).weights['h/up/kernel']
    start = inspect.getsourcelines(type(self).test_layers_of_flax_have_the_lines_of_their_calls)[1]
    self.assertRegex(line, rf'check_step_models_test.py:{start + 4}:\d+ \(.*Layer.__call__\)$')

  @parameterized.parameters(1, 40)
  def test_an_nnx_model_that_is_not_sparsified_again(self, every):
    recipe = s24.recipes.transposable_srste('kernel', masked_decay=1e-3, refresh_every=every)
    plain = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(model, optimizer, x):
      optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).mean())(model))

    sparse = s24.sparsify(plain, recipe, phase='sparse', rngs=nnx.Rngs(mvue=0))
    for model in (sparse, s24.sparsify(sparse, recipe, phase='dense'), plain):
      optimizer = nnx.Optimizer(model, s24.sparse_training(optax.sgd(0.1), recipe, phase='dense'), wrt=nnx.Param)
      if model is sparse:
        with self.assertRaisesRegex(ValueError, "^kernel: the step updates in phase 'dense', and reads it sparse at"):
          s24.check_step(step, model, optimizer, X)
      else:
        self.assertEqual(s24.check_step(step, model, optimizer, X).phase, 'dense')

  def test_nnx(self):
    recipe = s24.recipes.ste('kernel')
    plain = nnx.Linear(16, 4, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(model, optimizer, x):
      if hasattr(model, 'sparse24'):
        nnx.update(model, s24.sparse_variables(nnx.state(model, nnx.Param), optimizer.opt_state, recipe))
      optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).mean())(model))

    for model in (s24.sparsify(plain, recipe), plain):
      optimizer = nnx.Optimizer(model, s24.sparse_training(optax.sgd(0.1), recipe), wrt=nnx.Param)
      if model is plain:
        with self.assertRaisesRegex(ValueError, 'kernel: the step reads it dense at'):
          s24.check_step(step, model, optimizer, X)
      else:
        self.assertEmpty(s24.check_step(step, model, optimizer, X).brought)

  @parameterized.parameters(('head/kernel', [1]), ('.*/kernel', [2, 1]))
  @pytest.mark.few
  def test_an_nnx_model_that_has_a_variable_twice(self, pattern, lines):
    """Its state and that of its optimizer have one name for the two."""

    class Tied(nnx.Module):
      def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.second, self.head = self.first, nnx.Linear(8, 4, rngs=rngs)

      def __call__(self, x):
        return self.head(jnp.sin(self.second(jnp.sin(self.first(x)))))

    def dense(model, x):
      return jnp.mean(model(x) ** 2)

    model, x = Tied(nnx.Rngs(0)), jnp.ones((4, 8))
    recipe = s24.bind(s24.recipes.ste(pattern), dense, model, x)
    optimizer = nnx.Optimizer(model, s24.sparse_training(optax.sgd(0.1), recipe), wrt=nnx.Param)
    sparse = s24.sparsify(dense, recipe)

    def step(model, optimizer, loss=sparse):
      variables = s24.sparse_variables(nnx.state(model, nnx.Param), optimizer.opt_state, recipe)
      optimizer.update(model, nnx.grad(loss)(model, variables, None, x))

    found = s24.check_step(nnx.jit(step), model, optimizer)
    self.assertEqual([len(each) for each in found.weights.values()], lines)
    with self.assertRaisesRegex(ValueError, 'head/kernel: the step reads it dense at'):
      s24.check_step(functools.partial(step, loss=lambda model, *rest: dense(model, rest[-1])), model, optimizer)

  def test_an_nnx_step_that_brings_no_states_in(self):
    recipe = s24.recipes.ste('kernel')
    model = s24.sparsify(nnx.Linear(16, 4, rngs=nnx.Rngs(0)), recipe)
    optimizer = nnx.Optimizer(model, s24.sparse_training(optax.sgd(0.1), recipe), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
      optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).mean())(model))

    self.assertRegex(str(s24.check_step(step, model, optimizer, X)), r'kernel: the mask comes with .*call nnx.update\(')

  def test_an_equinox_model_goes_in_and_comes_out(self):
    eqx = pytest.importorskip('equinox')
    model = eqx.nn.MLP(16, 16, 16, 1, key=jax.random.key(0))  # holds its activation, which is no array
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x):
      return (jax.vmap(eqx.combine(params, static))(x) ** 2).mean()

    recipe = s24.bind(s24.recipes.ste('layers/.*/weight'), loss, params, X)
    tx, sparse = s24.sparse_training(optax.sgd(0.1), recipe), s24.sparsify(loss, recipe)

    @eqx.filter_jit
    def step(model, state, x, dense=False):
      params = eqx.filter(model, eqx.is_inexact_array)
      if dense:
        found, grads = eqx.filter_value_and_grad(lambda model: (jax.vmap(model)(x) ** 2).mean())(model)
      else:
        variables = s24.sparse_variables(params, state, recipe)
        found, grads = jax.value_and_grad(sparse)(params, variables, None, x)
      updates, state = tx.update(grads, state, params)
      return eqx.apply_updates(model, updates), state, found, 'done'

    state = tx.init(params)
    self.assertLen(s24.check_step(step, model, state, X).weights, 2)
    with self.assertRaisesRegex(ValueError, r'^2 of layers/\*/weight: the step reads it dense at'):
      s24.check_step(step, model, state, X, dense=True)


if __name__ == '__main__':
  absltest.main()
