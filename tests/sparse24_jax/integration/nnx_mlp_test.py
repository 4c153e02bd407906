"""`s24.nnx.Sparse24MLP`: three `nnx.Linear`, and one op where one policy serves them."""

import functools
from unittest import mock

from absl.testing import absltest, parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax.binding import transform

D, HIDDEN = 16, 64
X = jax.random.normal(jax.random.key(0), (2, 8, D))
ACTIVATIONS = {
  'gelu': nnx.gelu, 'silu': nnx.silu, 'relu': nnx.relu, 'squared_relu': lambda z: nnx.relu(z) ** 2,
}  # fmt: skip
STE, FST = s24.DotPolicy(s24.magnitude()), s24.DotPolicy(s24.transposable(), input_grad='sparse')
MVUE = s24.DotPolicy(s24.magnitude(), weight_grad='mvue')
KERNELS = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue', implementation='dense')


class Layers(nnx.Module):
  """What a user would write."""

  def __init__(self, *, activation='gelu', gated=False, use_bias=False, dtype=None, rngs):
    linear = functools.partial(nnx.Linear, use_bias=use_bias, dtype=dtype, rngs=rngs)
    self.up, self.down = linear(D, HIDDEN), linear(HIDDEN, D)
    self.gate = linear(D, HIDDEN) if gated else None
    self.activation = activation

  def __call__(self, x):
    act = ACTIVATIONS[self.activation]
    return self.down(act(self.up(x)) if self.gate is None else act(self.gate(x)) * self.up(x))


def both(**kwargs):
  """The module and the layers, with equal parameters; biases count."""
  models = s24.nnx.Sparse24MLP(D, HIDDEN, rngs=nnx.Rngs(0), **kwargs), Layers(rngs=nnx.Rngs(0), **kwargs)
  for model in models:
    for linear in (model.up, model.down, model.gate):
      if linear is not None and linear.bias is not None:
        linear.bias[...] = jnp.linspace(-1, 1, linear.bias.shape[0])
  return models


def recipe_of(*policies: s24.DotPolicy, rules=('.*kernel',)) -> s24.Recipe:
  return s24.Recipe('r', tuple(s24.Rule(rule, policy) for rule, policy in zip(rules, policies, strict=True)))


def gradient(model, x=X):
  @nnx.jit
  def run(model):
    def loss(m):
      return jnp.sum(jnp.sin(m(x).astype(jnp.float32)))
    return nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.Param))(model)

  value, grads = run(model)
  return value, nnx.to_pure_dict(grads)


def assert_trees_equal(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def assert_trees_close(found, expected, tolerance=1e-5):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, expected)


def spy():
  return mock.patch.object(transform, 'ffn', wraps=transform.ffn)


class DenseTest(parameterized.TestCase):

  @parameterized.product(activation=list(ACTIVATIONS), gated=(False, True))
  def test_is_the_layers_that_it_replaces(self, activation, gated):
    mlp, layers = both(activation=activation, gated=gated, use_bias=True)
    params = [nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (mlp, layers)]
    assert_trees_equal(*params)
    self.assertEqual(set(params[0]), {'up', 'down'} | ({'gate'} if gated else set()))
    with spy() as ffn:
      np.testing.assert_allclose(mlp(X), layers(X), rtol=1e-5, atol=1e-5)
    self.assertFalse(ffn.called)

  def test_bfloat16(self):
    mlp, layers = both(dtype=jnp.bfloat16)
    self.assertEqual((mlp(X).dtype, mlp.up.kernel.dtype), (jnp.bfloat16, jnp.float32))
    np.testing.assert_array_equal(mlp(X), layers(X))


class SparseTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('one_policy', (STE,), ('.*kernel',), True, False),
    ('one_policy_gated', (FST,), ('.*kernel',), True, True),
    ('two_policies', (STE, FST), ('up/kernel', '(down|gate)/kernel'), False, True),
    ('one_map_is_dense', (STE,), ('down/kernel',), False, False),
  )
  def test_under_sparsify_is_the_layers_with_the_same_rules(self, policies, rules, fused, gated):
    mlp, layers = both(gated=gated, use_bias=True)
    recipe = recipe_of(*policies, rules=rules)
    with spy() as ffn:
      found = gradient(s24.sparsify(mlp, recipe))
    self.assertEqual(ffn.called, fused)
    assert_trees_close(found, gradient(s24.sparsify(layers, recipe)))
    self.assertGreater(abs(float(found[0] - gradient(mlp)[0])), 1e-3)

  def test_samples_belong_to_the_stream(self):
    mlp, _ = both()
    first, again, other = (s24.sparsify(mlp, recipe_of(MVUE), rngs=nnx.Rngs(mvue=i)) for i in (0, 0, 1))
    one = gradient(first)[1]
    assert_trees_equal(one, gradient(again)[1])
    for different in (gradient(other)[1], gradient(first)[1]):  # another seed; the stream has moved on
      self.assertTrue((one['up']['kernel'] != different['up']['kernel']).any())

  def test_a_gradient_needs_a_stream(self):
    with self.assertRaisesRegex(ValueError, 'needs a random key'):
      gradient(s24.sparsify(both()[0], recipe_of(MVUE)))

  def test_dense_phase_is_the_plain_model(self):
    mlp, _ = both()
    back = s24.sparsify(s24.sparsify(mlp, recipe_of(STE)), recipe_of(STE), phase='dense')
    np.testing.assert_array_equal(back(X), mlp(X))
    del back.sparse24  # the mark of a dense phase
    self.assertEqual(nnx.graphdef(back), nnx.graphdef(mlp))

  @pytest.mark.slow
  def test_packed_variables(self):
    """Brought into the model by `nnx.update`, read by the block; then bare states again."""
    mlp, _ = both(activation='squared_relu', dtype=jnp.bfloat16)
    recipe, params = recipe_of(KERNELS), nnx.state(mlp, nnx.Param)
    opt_state = jax.jit(s24.sparse_training(optax.sgd(0.1), recipe).init)(params)
    grads = []
    for pack in (True, False):
      sparse = s24.sparsify(mlp, recipe, rngs=nnx.Rngs(mvue=3))
      nnx.update(sparse, s24.sparse_variables(nnx.state(sparse, nnx.Param), opt_state, recipe, pack=pack))
      held = sparse.sparse24.read()['up/kernel']
      self.assertIsInstance(held, s24.PackedWeight if pack else jax.Array)
      with spy() as ffn:
        grads.append(gradient(sparse, X.astype(jnp.bfloat16)))
      self.assertTrue(ffn.called)
    assert_trees_close(grads[0], grads[1], 1e-2)
    nnx.update(sparse, s24.sparse_variables(params, opt_state, recipe, pack=True))
    self.assertIsInstance(sparse.sparse24.read()['down/kernel'], s24.PackedWeight)


if __name__ == '__main__':
  absltest.main()
