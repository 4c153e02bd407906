"""A dense phase lifts the sparsity, not the precision: layers in FP8 are then dense ones in FP8."""

import re

from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparse24_jax as s24
from tests.draws import gaussian

FP8 = s24.DotPolicy(precision='fp8')
FST = s24.recipes.transposable_srste('.*/kernel', masked_decay=1e-4)
FST_FP8 = s24.recipes.transposable_srste('.*/kernel', masked_decay=1e-4, fp8=True)
DENSE_FP8 = s24.Recipe('dense_fp8', (s24.Rule('.*/kernel', FP8),))
D, HIDDEN = 8, 16
PARAMS = {
  name: {'kernel': gaussian(i, shape)}
  for i, (name, shape) in enumerate({'up': (D, HIDDEN), 'down': (HIDDEN, D)}.items())
}
X = gaussian(7, (4, D))


def function(params, x):
  return jax.nn.gelu(x @ params['up']['kernel']) @ params['down']['kernel']


class LinenModel(nn.Module):
  @nn.compact
  def __call__(self, x):
    up, down = nn.Dense(HIDDEN, use_bias=False, name='up'), nn.Dense(D, use_bias=False, name='down')
    return down(nn.gelu(up(x)))


class NnxModel(nnx.Module):
  def __init__(self):
    self.up = nnx.Linear(D, HIDDEN, use_bias=False, rngs=nnx.Rngs(0))
    self.down = nnx.Linear(HIDDEN, D, use_bias=False, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.down(nnx.gelu(self.up(x)))


def nnx_model(params=PARAMS):
  model = NnxModel()
  nnx.update(model, params)
  return model


def by_function(recipe, phase):
  sparse = s24.sparsify(function, recipe, phase=phase)
  return lambda params, x: sparse(params, {}, None, x)


def by_bound_function(recipe, phase):
  return by_function(s24.bind(recipe, function, PARAMS, X), phase)


def by_function_of_a_model(recipe, phase):
  sparse = s24.sparsify(lambda model, x: model(x), recipe, phase=phase)
  return lambda params, x: sparse(nnx_model(params), {}, None, x)


def by_linen(recipe, phase):
  model = s24.sparsify(LinenModel(), recipe, phase=phase)
  return lambda params, x: model.apply({'params': params}, x)


def by_nnx(recipe, phase):
  graphdef, state = nnx.split(s24.sparsify(nnx_model(), recipe, phase=phase))

  def f(params, x):
    model = nnx.merge(graphdef, state, copy=True)
    nnx.update(model, params)
    return model(x)

  return f


DOORS = by_function, by_bound_function, by_function_of_a_model, by_linen, by_nnx


def program(f):
  """What a loss and its gradients compute, as text."""
  made = jax.make_jaxpr(jax.value_and_grad(lambda p, x: jnp.sum(f(p, x) ** 2), argnums=(0, 1)))(PARAMS, X)
  return re.sub(r'0x[0-9a-f]+', '', str(made))


class DensePhaseFp8Test(parameterized.TestCase):

  @parameterized.parameters(*((door,) for door in DOORS))
  def test_layers_in_fp8_are_dense_ones_in_fp8(self, door):
    found, expected, plain = (
      program(door(recipe, phase)) for recipe, phase in ((FST_FP8, 'dense'), (DENSE_FP8, 'sparse'), (FST, 'dense'))
    )
    self.assertEqual(found, expected)
    for largest in ('448.0', '57344.0'):  # of e4m3 and e5m2
      self.assertIn(largest, found)
      self.assertNotIn(largest, plain)
    self.assertEqual(program(door(DENSE_FP8, 'dense')), expected)

  def test_to_the_bit_what_dot_gives(self):
    """With the formats that a GPU has."""
    policy = s24.DotPolicy(s24.transposable(), 'sparse', 'mvue', precision='fp8', implementation='dense')
    recipe, x = s24.Recipe('own', (s24.Rule('w', policy),)), X.astype(jnp.bfloat16)
    params, phases = {'w': PARAMS['up']['kernel'].astype(jnp.bfloat16)}, (s24.Phase('dense', 1.0),)
    watched = s24.Recipe('own', recipe.rules, phases=phases)
    dense = s24.DotPolicy(precision='fp8', implementation='dense')

    def gradients(f):
      return jax.value_and_grad(lambda w, x: jnp.sum(f(w, x).astype(jnp.float32) ** 2), argnums=(0, 1))

    expected = gradients(lambda w, x: s24.dot(x, w, policy=dense))
    for each in (recipe, watched):
      f = s24.sparsify(lambda p, x: x @ p['w'], each, phase='dense')
      ours = gradients(lambda w, x, f=f: f({'w': w}, {}, None, x))
      jax.tree.map(np.testing.assert_array_equal, ours(params['w'], x), expected(params['w'], x))
    text = str(jax.make_jaxpr(ours)(params['w'], x))
    self.assertIn('f8_e4m3', text)
    self.assertIn('f8_e5m2', text)

  def test_what_names_sparse_matmuls_does_not_bind_a_dense_phase(self):
    """On a CPU 'sparse' raises in a sparse phase."""
    policy = s24.DotPolicy(s24.transposable(), 'sparse', 'mvue', precision='fp8', implementation='sparse')
    recipe = s24.Recipe('own', (s24.Rule('w', policy),), phases=(s24.Phase('sparse', 0.5), s24.Phase('dense', 0.5)))
    x = X.astype(jnp.bfloat16)
    params = {'w': PARAMS['up']['kernel'].astype(jnp.bfloat16)}
    found = s24.sparsify(lambda p, x: x @ p['w'], recipe, phase='dense')(params, {}, None, x)
    np.testing.assert_array_equal(found, s24.dot(x, params['w'], policy=s24.DotPolicy(precision='fp8')))

  def test_each_rule_keeps_its_precision(self):
    sparse, sampled = s24.DotPolicy(s24.magnitude()), s24.DotPolicy(s24.soft_threshold_projection(), precision='fp8')
    rules = s24.Rule('a', s24.DotPolicy()), s24.Rule('b', sparse), s24.Rule('c', FP8), s24.Rule('.', sampled)
    recipe = s24.Recipe('own', rules, 0.1, phases=(s24.Phase('sparse', 0.5), s24.Phase('dense', 0.5)))
    params = {name: gaussian(i, (8, 8)) for i, name in enumerate('abcd')}

    def f(p, x):
      return x @ p['a'] @ p['b'] @ p['c'] @ p['d']

    def expected(p, x):
      return s24.dot(s24.dot(x @ p['a'] @ p['b'], p['c'], policy=FP8), p['d'], policy=FP8)

    for each in (recipe, s24.bind(recipe, f, params, X)):
      found = s24.sparsify(f, each, phase='dense')(params, {}, None, X)
      np.testing.assert_array_equal(found, expected(params, X))
    self.assertEqual([weight.path for weight in each.in_dense_phase().weights], ['c', 'd'])
    self.assertEqual(each.in_dense_phase().layouts, s24.Recipe('', each.in_dense_phase().rules).layouts)

  def test_without_fp8_it_is_the_plain_model(self):
    self.assertIsNone(s24.bind(FST, function, PARAMS, X).in_dense_phase())
    found = s24.sparsify(function, FST, phase='dense')
    self.assertEqual(program(lambda p, x: found(p, {}, None, x)), program(function))
    self.assertEqual(s24.sparsify(LinenModel(), FST, phase='dense'), LinenModel())
    self.assertNotEqual(s24.sparsify(LinenModel(), FST_FP8, phase='dense'), LinenModel())
    self.assertIs(type(s24.sparsify(nnx_model(), FST, phase='dense')), NnxModel)

  def test_it_takes_no_states(self):
    state = s24.sparse_training(optax.sgd(0.1), FST_FP8).init(PARAMS)
    sparse, dense = (s24.sparse_variables(PARAMS, state, FST_FP8, phase=phase) for phase in ('sparse', 'dense'))
    self.assertEqual(dense, {})
    with self.assertRaisesRegex(ValueError, "^phase: .* made for phase 'dense', and is given sparse states"):
      s24.sparsify(function, FST_FP8, phase='dense')(PARAMS, sparse, None, X)
    linen = s24.sparsify(LinenModel(), FST_FP8, phase='dense')
    with self.assertRaisesRegex(ValueError, "^down/kernel, up/kernel: .* phase 'dense', .*sparse_variables the phase"):
      linen.apply({'params': PARAMS, 'sparse24': sparse}, X)
    self.assertEqual(linen.apply({'params': PARAMS, 'sparse24': dense}, X).shape, X.shape)
    self.assertEqual(s24.sparsify(s24.sparsify(linen, FST_FP8), FST, phase='dense'), LinenModel())

  def test_an_nnx_model_of_both_phases(self):
    plain = nnx_model()
    params = nnx.state(plain, nnx.Param)
    state = s24.sparse_training(optax.sgd(0.1), FST_FP8).init(params)
    sparse = s24.sparsify(plain, FST_FP8, rngs=nnx.Rngs(mvue=0))
    model = s24.sparsify(sparse, FST_FP8, phase='dense')
    self.assertEqual(jax.tree.structure(nnx.state(model)), jax.tree.structure(nnx.state(plain)))
    nnx.update(model, s24.sparse_variables(params, state, FST_FP8, phase='dense'))
    found = model(X)
    np.testing.assert_array_equal(found, s24.sparsify(plain, DENSE_FP8)(X))
    with self.assertRaisesRegex(ValueError, "^phase: .* not sparsified in this phase, 'dense'"):
      nnx.update(model, s24.sparse_variables(params, state, FST_FP8))
    with self.assertRaisesRegex(ValueError, 'Linear.__call__ of a sparsified model was called from outside'):
      model.up(X)
    outer = nnx.Sequential(model)
    with self.assertRaisesRegex(ValueError, r"\['layers/0'\] of the model are sparsified by themselves"):
      s24.sparsify(outer, FST_FP8, phase='dense')
    np.testing.assert_array_equal(s24.sparsify(model, FST, phase='dense')(X), plain(X))
    np.testing.assert_array_equal(s24.sparsify(model, FST_FP8)(X), sparse(X))

  def test_a_step_has_the_update_of_a_dense_phase(self):
    tx = {phase: s24.sparse_training(optax.sgd(0.1), FST_FP8, phase=phase) for phase in ('sparse', 'dense')}
    f = s24.sparsify(function, FST_FP8, phase='dense')

    def step(params, opt_state, x):
      variables = s24.sparse_variables(params, opt_state, FST_FP8, phase='dense')
      grads = jax.grad(lambda p: jnp.sum(f(p, variables, None, x) ** 2))(params)
      updates, opt_state = tx['dense'].update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    found = s24.check_step(step, PARAMS, tx['sparse'].init(PARAMS), X)
    self.assertEqual((found.phase, found.fp8), ('dense', {'up/kernel', 'down/kernel'}))


if __name__ == '__main__':
  absltest.main()
