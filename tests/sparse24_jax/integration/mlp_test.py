"""`Sparse24MLP` of linen and of nnx: the layers that it replaces, dense and sparse."""

import functools
from unittest import mock

from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse24_jax as s24
from sparse24_jax.binding import transform
from tests.draws import parameters

D, HIDDEN = 16, 64
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, D), np.float32))
ACTIVATIONS = {
  'gelu': nn.gelu, 'silu': nn.silu, 'relu': nn.relu, 'squared_relu': lambda z: nn.relu(z) ** 2,
}  # fmt: skip
STE, FST = s24.DotPolicy(s24.magnitude()), s24.DotPolicy(s24.transposable(), input_grad='sparse')
BFLOAT16 = dict(dtype=jnp.bfloat16, activation='gelu', gated=False, use_bias=True)


class LinenLayers(nn.Module):
  """What a user would write."""

  activation: str
  gated: bool
  use_bias: bool
  dtype: object = None

  @nn.compact
  def __call__(self, x):
    dense, act = functools.partial(nn.Dense, use_bias=self.use_bias, dtype=self.dtype), ACTIVATIONS[self.activation]
    up, down = dense(HIDDEN, name='up'), dense(D, name='down')
    return down(act(dense(HIDDEN, name='gate')(x)) * up(x) if self.gated else act(up(x)))


class NnxLayers(nnx.Module):
  """The same in nnx."""

  def __init__(self, *, activation, gated, use_bias, dtype=None, rngs):
    linear = functools.partial(nnx.Linear, use_bias=use_bias, dtype=dtype, rngs=rngs)
    self.up, self.down = linear(D, HIDDEN), linear(HIDDEN, D)
    self.gate = linear(D, HIDDEN) if gated else None
    self.activation = ACTIVATIONS[activation]

  def __call__(self, x):
    return self.down(self.activation(self.up(x)) if self.gate is None else self.activation(self.gate(x)) * self.up(x))


def linen_pair(**kwargs):
  """(fresh parameters, function of parameters) of the module and of the layers."""
  modules = s24.linen.Sparse24MLP(HIDDEN, **kwargs), LinenLayers(**kwargs)
  return [(parameters(m, X), lambda p, m=m: m.apply({'params': p}, X)) for m in modules]


def nnx_pair(**kwargs):
  """The same of the nnx module."""
  found = []
  for model in (s24.nnx.Sparse24MLP(D, HIDDEN, rngs=nnx.Rngs(0), **kwargs), NnxLayers(rngs=nnx.Rngs(0), **kwargs)):
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    found.append((
      nnx.to_pure_dict(params),
      lambda p, graph=graph, params=params, rest=rest: nnx.merge(graph, _replaced(params, p), rest)(X),
    ))  # fmt: skip
  return found


def _replaced(params, values):
  return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(values))


PAIRS = {'linen': linen_pair, 'nnx': nnx_pair}


class Sparse24MLPTest(parameterized.TestCase):

  # Each two of the four at all their values.
  @parameterized.parameters(
    ('linen', 'gelu', False, True), ('linen', 'gelu', False, False), ('linen', 'gelu', True, True),
    ('linen', 'silu', True, False), ('linen', 'relu', False, True), ('linen', 'squared_relu', True, True),
    ('nnx', 'gelu', True, False), ('nnx', 'silu', False, True), ('nnx', 'relu', True, False),
    ('nnx', 'squared_relu', False, False),
  )
  @pytest.mark.few(3)
  def test_is_the_layers_that_it_replaces(self, pair, activation, gated, use_bias):
    (params, mlp), (expected, layers) = PAIRS[pair](activation=activation, gated=gated, use_bias=use_bias)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    self.assertEqual(set(params), {'up', 'down'} | ({'gate'} if gated else set()))
    params = jax.tree.map(lambda a: a if a.ndim > 1 else jnp.linspace(-1, 1, a.size), params)  # biases count
    found, expected = jax.jit(lambda p: (mlp(p), layers(p)))(params)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)

  @parameterized.parameters(*PAIRS)
  @pytest.mark.few
  def test_bfloat16(self, pair):
    (params, mlp), (_, layers) = PAIRS[pair](**BFLOAT16)
    self.assertEqual((mlp(params).dtype, params['up']['kernel'].dtype), (jnp.bfloat16, jnp.float32))
    np.testing.assert_array_equal(mlp(params), layers(params))

  @parameterized.product(pair=list(PAIRS), case=(
    ((STE,), ('.*kernel',), True, False),
    ((FST,), ('.*kernel',), True, True),
    ((STE, FST), ('up/kernel', '(down|gate)/kernel'), False, True),
    ((STE,), ('down/kernel',), False, False),
  ))  # fmt: skip
  @pytest.mark.few(2)
  def test_under_sparsify_is_the_layers_with_the_same_rules(self, pair, case):
    policies, rules, fused, gated = case
    recipe = s24.Recipe('r', tuple(s24.Rule(rule, policy) for rule, policy in zip(rules, policies, strict=True)))
    (params, mlp), (_, layers) = PAIRS[pair](activation='gelu', gated=gated, use_bias=True)

    def gradient(forward):
      sparse = s24.sparsify(lambda p: jnp.sum(jnp.sin(forward(p))), recipe)
      return jax.jit(jax.value_and_grad(sparse))(params, s24.sparse_variables(params, None, recipe), None)

    with mock.patch.object(transform, 'ffn_at', wraps=transform.ffn_at) as ffn:
      found = gradient(mlp)
    self.assertEqual(ffn.called, fused)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, gradient(layers))
    self.assertGreater(abs(float(found[0] - jnp.sum(jnp.sin(mlp(params))))), 1e-3)

  def test_names_features_and_inits_of_linen(self):
    names = ('c_fc', 'c_proj', 'c_gate')
    ones, twos = nn.initializers.constant(1), nn.initializers.constant(2)
    mlp = s24.linen.Sparse24MLP(
      HIDDEN, features=8, gated=True, names=names, kernel_init=ones, out_kernel_init=twos, param_dtype=jnp.bfloat16
    )
    params = jax.jit(mlp.init)(jax.random.key(2), X)['params']
    self.assertEqual({k: v['kernel'].shape for k, v in params.items()},
                     {'c_fc': (D, HIDDEN), 'c_proj': (HIDDEN, 8), 'c_gate': (D, HIDDEN)})  # fmt: skip
    self.assertEqual({k: float(v['kernel'].max()) for k, v in params.items()}, {'c_fc': 1, 'c_proj': 2, 'c_gate': 1})
    self.assertEqual({v['kernel'].dtype for v in params.values()}, {jnp.dtype(jnp.bfloat16)})
    with self.assertRaisesRegex(ValueError, 'must name up, down and gate'):
      s24.linen.Sparse24MLP(HIDDEN, gated=True, names=names[:2]).init(jax.random.key(2), X)


if __name__ == '__main__':
  absltest.main()
