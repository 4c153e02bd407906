"""`s24.linen.Sparse24MLP`: the Dense layers that it replaces, and one op where one policy serves all its kernels."""

import functools
from unittest import mock

from absl.testing import absltest, parameterized
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax.binding import transform

D, HIDDEN = 16, 64
X = jax.random.normal(jax.random.key(0), (2, 8, D))
KEY = jax.random.key(2)
ACTIVATIONS = {
  'gelu': nn.gelu, 'silu': nn.silu, 'relu': nn.relu, 'squared_relu': lambda z: nn.relu(z) ** 2,
}  # fmt: skip
STE, FST = s24.DotPolicy(s24.magnitude()), s24.DotPolicy(s24.transposable(), input_grad='sparse')
MVUE = s24.DotPolicy(s24.magnitude(), weight_grad='mvue')
KERNELS = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue', implementation='dense')


class Layers(nn.Module):
  """What a user would write."""

  activation: str = 'gelu'
  gated: bool = False
  use_bias: bool = False
  dtype: object = None
  names: tuple[str, ...] = ('up', 'down', 'gate')

  @nn.compact
  def __call__(self, x):
    dense = functools.partial(nn.Dense, use_bias=self.use_bias, dtype=self.dtype)
    up = dense(HIDDEN, name=self.names[0])
    down, act = dense(x.shape[-1], name=self.names[1]), ACTIVATIONS[self.activation]
    return down(act(dense(HIDDEN, name=self.names[2])(x)) * up(x) if self.gated else act(up(x)))


class Inside(nn.Module):
  """Either of them in a model."""

  mlp: nn.Module

  @nn.compact
  def __call__(self, x):
    return x + self.mlp(x)


class Layer(nn.Module):
  dtype: object

  @nn.compact
  def __call__(self, x, _):
    return x + s24.linen.Sparse24MLP(HIDDEN, activation='relu', dtype=self.dtype, name='mlp')(x), None


class Stack(nn.Module):
  dtype: object

  @nn.compact
  def __call__(self, x):
    axes, rngs = {'params': 0, 'sparse24': 0}, {'params': True, 'mvue': True}
    return nn.scan(nn.remat(Layer), axes, split_rngs=rngs, length=2)(self.dtype, name='h')(x, None)[0]


def recipe_of(*policies: s24.DotPolicy, rules=('.*kernel',)) -> s24.Recipe:
  return s24.Recipe('r', tuple(s24.Rule(rule, policy) for rule, policy in zip(rules, policies, strict=True)))


@functools.cache
def init(model):
  params = jax.jit(model.init)(jax.random.key(3), X)['params']
  # Biases start at zero; here they count.
  return jax.tree.map(lambda a: a if a.ndim > 1 else jax.random.normal(KEY, a.shape) / 4, params)


def variables(params, recipe, **kwargs):
  opt_state = jax.jit(s24.sparse_training(optax.sgd(0.1), recipe).init)(params)
  return s24.sparse_variables(params, opt_state, recipe, **kwargs)


def gradient(model, recipe, params, states, x=X, rngs=None):
  sparse = s24.sparsify(model, recipe)

  def loss(params):
    y = sparse.apply({'params': params, 'sparse24': states}, x, rngs=rngs)
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))

  return jax.jit(jax.value_and_grad(loss))(params)


def assert_trees_equal(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def assert_trees_close(found, expected, tolerance=1e-5):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, expected)


def spy():
  return mock.patch.object(transform, 'ffn', wraps=transform.ffn)


class DenseTest(parameterized.TestCase):

  @parameterized.product(activation=list(ACTIVATIONS), gated=(False, True), use_bias=(False, True))
  @pytest.mark.few(4)
  def test_is_the_layers_that_it_replaces(self, activation, gated, use_bias):
    kwargs = dict(activation=activation, gated=gated, use_bias=use_bias)
    mlp, layers = s24.linen.Sparse24MLP(HIDDEN, **kwargs), Layers(**kwargs)
    fresh = [jax.jit(m.init)(jax.random.key(3), X)['params'] for m in (mlp, layers)]
    assert_trees_equal(*fresh)
    self.assertEqual(set(fresh[0]), {'up', 'down'} | ({'gate'} if gated else set()))
    params = init(layers)
    found, expected = (jax.jit(m.apply)({'params': params}, X) for m in (mlp, layers))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)

  def test_names_features_and_inits(self):
    names = ('c_fc', 'c_proj', 'c_gate')
    ones, twos = nn.initializers.constant(1), nn.initializers.constant(2)
    mlp = s24.linen.Sparse24MLP(
      HIDDEN, features=8, gated=True, names=names, kernel_init=ones, out_kernel_init=twos, param_dtype=jnp.bfloat16
    )
    params = mlp.init(KEY, X)['params']
    self.assertEqual({k: v['kernel'].shape for k, v in params.items()},
                     {'c_fc': (D, HIDDEN), 'c_proj': (HIDDEN, 8), 'c_gate': (D, HIDDEN)})  # fmt: skip
    self.assertEqual({k: float(v['kernel'].max()) for k, v in params.items()}, {'c_fc': 1, 'c_proj': 2, 'c_gate': 1})
    self.assertEqual({v['kernel'].dtype for v in params.values()}, {jnp.dtype(jnp.bfloat16)})
    with self.assertRaisesRegex(ValueError, 'must name'):
      s24.linen.Sparse24MLP(HIDDEN, gated=True, names=names[:2]).init(KEY, X)

  def test_bfloat16(self):
    kwargs = dict(dtype=jnp.bfloat16, use_bias=True)
    mlp, layers = s24.linen.Sparse24MLP(HIDDEN, **kwargs), Layers(**kwargs)
    params = init(layers)
    found, expected = (m.apply({'params': params}, X) for m in (mlp, layers))
    self.assertEqual((found.dtype, params['up']['kernel'].dtype), (jnp.bfloat16, jnp.float32))
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), rtol=2e-2, atol=2e-2)


class SparseTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('one_policy', (STE,), ('.*kernel',), True, False),
    ('one_policy_gated', (FST,), ('.*kernel',), True, True),
    ('two_policies', (STE, FST), ('.*up/kernel', '.*(down|gate)/kernel'), False, True),
    ('one_map_is_dense', (STE,), ('.*down/kernel',), False, False),
  )
  def test_under_sparsify_is_the_layers_with_the_same_rules(self, policies, rules, fused, gated):
    mlp = Inside(s24.linen.Sparse24MLP(HIDDEN, gated=gated, use_bias=True))
    layers = Inside(Layers(gated=gated, use_bias=True))
    params, recipe = init(layers), recipe_of(*policies, rules=rules)
    states = variables(params, recipe)
    with spy() as ffn:
      found = gradient(mlp, recipe, params, states)
    self.assertEqual(ffn.called, fused)
    assert_trees_close(found, gradient(layers, recipe, params, states))
    dense = jax.jit(lambda p: jnp.sum(jnp.sin(mlp.apply({'params': p}, X))))(params)
    self.assertGreater(abs(float(found[0] - dense)), 1e-3)

  @pytest.mark.slow
  def test_maps_of_different_rules_draw_differently(self):
    """Up and gate of equal weights have equal gradients, by relu(z) z: only the key of a role tells samples apart."""
    mlp = Inside(s24.linen.Sparse24MLP(HIDDEN, gated=True, activation='relu'))
    recipe = recipe_of(MVUE, STE, rules=('.*(up|gate)/kernel', '.*down/kernel'))
    maps = init(mlp)['mlp']
    params = {'mlp': maps | {'gate': maps['up']}}
    states = variables(params, recipe)
    one, again, other = (
      gradient(mlp, recipe, params, states, rngs={'mvue': jax.random.key(i)})[1]['mlp'] for i in (0, 0, 1)
    )
    assert_trees_equal(one, again)
    self.assertTrue((one['up']['kernel'] != one['gate']['kernel']).any())
    for role in ('up', 'gate'):
      self.assertTrue((one[role]['kernel'] != other[role]['kernel']).any())
    np.testing.assert_allclose(one['down']['kernel'], other['down']['kernel'], rtol=1e-5, atol=1e-5)

  @parameterized.parameters('kernel', 'gradient')
  def test_refuses(self, what):
    mlp = Inside(s24.linen.Sparse24MLP(HIDDEN))
    params, recipe = init(mlp), recipe_of(MVUE)
    states = variables(params, recipe)
    if what == 'kernel':
      states['mlp'].pop('down')
      with self.assertRaisesRegex(ValueError, "mlp/down/kernel: no state; .*collection 'sparse24'"):
        s24.sparsify(mlp, recipe).apply({'params': params, 'sparse24': states}, X)
    else:
      with self.assertRaisesRegex(ValueError, r"needs a random key.*rngs=\{'mvue': key\}"):
        gradient(mlp, recipe, params, states)

  def test_dense_phase_is_the_plain_module(self):
    mlp, recipe = s24.linen.Sparse24MLP(HIDDEN), recipe_of(STE)
    self.assertEqual(s24.sparsify(s24.sparsify(mlp, recipe), recipe, phase='dense'), mlp)

  @pytest.mark.slow
  def test_packed_variables(self):
    """Packed once by `sparse_variables`, read by the block: the same as packing in the layer."""
    mlp = Inside(s24.linen.Sparse24MLP(HIDDEN, activation='squared_relu', dtype=jnp.bfloat16))
    params, recipe = init(mlp), recipe_of(KERNELS)
    x, rngs = X.astype(jnp.bfloat16), {'mvue': KEY}
    packed, bare = (variables(params, recipe, pack=pack) for pack in (True, False))
    self.assertIsInstance(packed['mlp']['up']['kernel'], s24.PackedWeight)
    self.assertEqual(bare['mlp']['up']['kernel'].dtype, jnp.bool_)
    assert_trees_equal(packed['mlp']['up']['kernel'].state, bare['mlp']['up']['kernel'])
    self.assertIsInstance(variables(params, recipe)['mlp']['down']['kernel'], s24.PackedWeight)  # a kernel is named
    one, other = (gradient(mlp, recipe, params, states, x, rngs) for states in (packed, bare))
    assert_trees_close(one, other, 1e-2)

  @parameterized.named_parameters(('state', STE, None), ('packed', KERNELS, jnp.bfloat16))
  def test_scan_over_layers(self, policy, dtype):
    """Collection and rng go through nn.scan and nn.remat; a layer alone is a slice of the stack."""
    mlp = s24.linen.Sparse24MLP(HIDDEN, activation='relu', dtype=dtype)
    stack, recipe = Stack(dtype), recipe_of(policy)
    params, x = init(stack), X if dtype is None else X.astype(dtype)
    states = variables(params, recipe)
    with spy() as ffn:
      value, grads = gradient(stack, recipe, params, states, x, {'mvue': KEY})
    self.assertTrue(ffn.called)
    self.assertEqual(jax.tree.map(jnp.shape, grads), jax.tree.map(jnp.shape, params))
    single, out = s24.sparsify(mlp, recipe), x
    for i in range(2):
      own = jax.tree.map(lambda a, i=i: a[i], {'params': params['h']['mlp'], 'sparse24': states['h']['mlp']})
      out = out + jax.jit(single.apply)(own, out)
    np.testing.assert_allclose(value, jnp.sum(jnp.sin(out.astype(jnp.float32))), rtol=1e-2)


if __name__ == '__main__':
  absltest.main()
