"""Models whose matched weights stayed dense, or whose masks came out as weights, silently: right now, or refused."""

from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import sparse24_jax as s24
from tests.draws import gaussian, parameters

X = gaussian(0, (6, 16))
INIT = nn.initializers.normal()


class Nested(nn.Module):
  """One parameter that is a nested dictionary."""

  @nn.compact
  def __call__(self, x):
    def init(key):
      return {'up': {'w': INIT(key, (16, 32))}, 'down': {'w': INIT(key, (32, 16))}}

    mlp = self.param('mlp', init)
    return nn.relu(x @ mlp['up']['w']) @ mlp['down']['w']


class Blocks(nn.Module):
  """Layers in one parameter, scanned by hand."""

  @nn.compact
  def __call__(self, x):
    blocks = self.param('blocks', lambda key: {'w': INIT(key, (3, 16, 16)), 'b': jnp.ones((3, 16))})
    return jax.lax.scan(lambda x, p: (nn.relu(x @ p['w'] + p['b'][None]), None), x, blocks)[0]


class Mlp(nnx.Module):
  """Sublayers, for the bridge."""

  def __init__(self, *, rngs):
    self.up, self.down = (nnx.Linear(16, 16, use_bias=False, rngs=rngs) for _ in range(2))

  def __call__(self, x):
    return self.down(nnx.relu(self.up(x)))


class Einsum(nn.Module):
  """A weight and an einsum of its caller's, as gemma's."""

  @nn.compact
  def __call__(self, x):
    return jnp.einsum('td,ndh->tnh', x, self.param('w', INIT, (2, 16, 8)))


class Conv1D(nn.Module):
  """Has a kernel [out, in] that the forward transposes, as in Hugging Face's GPT-2."""

  @nn.compact
  def __call__(self, x):
    kernel = self.param('kernel', INIT, (32, 16))
    return jax.lax.dot_general(x, kernel.transpose(), (((1,), (0,)), ((), ())))


def kept(w, axis=-2):
  """The larger two of each four along an axis, in NumPy."""
  w = np.moveaxis(np.asarray(w, np.float64), axis, -1)
  groups = w.reshape(*w.shape[:-1], -1, 4)
  found = groups * (np.argsort(np.argsort(-np.abs(groups), axis=-1), axis=-1) < 2)
  return np.moveaxis(found.reshape(w.shape), -1, axis)


def relu(x):
  return np.maximum(x, 0)


def of_blocks(p, x):
  for w, b in zip(kept(p['blocks']['w']), p['blocks']['b'], strict=True):
    x = relu(x @ w + np.asarray(b))
  return x


ROWS = {
  'nested': (Nested(), lambda p, x: relu(x @ kept(p['mlp']['up']['w'])) @ kept(p['mlp']['down']['w'])),
  'scanned_by_hand': (Blocks(), of_blocks),
  'bridged': (
    nnx.bridge.to_linen(Mlp), lambda p, x: relu(x @ kept(p['up']['kernel'])) @ kept(p['down']['kernel'])
  ),
  'einsum': (Einsum(), lambda p, x: np.einsum('td,ndh->tnh', x, kept(p['w']))),
  'conv1d': (Conv1D(), lambda p, x: x @ kept(p['kernel'], -1).T),
}  # fmt: skip


class RowsTest(parameterized.TestCase):

  @parameterized.parameters(*ROWS)
  def test_linen(self, name):
    """The wrapped model, by the recipe alone, and by the one that is bound."""
    model, expected = ROWS[name]
    params = parameters(model, X)
    recipe = s24.recipes.ste('.*(w|kernel)')
    bound = s24.bind(recipe, lambda p, x: model.apply({'params': p}, x), params, X)
    for given in (bound,) if name in ('einsum', 'conv1d') else (recipe, bound):
      variables = {'params': params, 'sparse24': s24.sparse_variables(params, None, given)}
      found = s24.sparsify(model, given).apply(variables, X)
      np.testing.assert_allclose(found, expected(params, np.asarray(X, np.float64)), rtol=1e-3, atol=1e-7)
    if name in ('einsum', 'conv1d'):
      where = r'w of shape \(2, 16, 8\): .* in 1, out 0 2' if name == 'einsum' else r'kernel of .*: .* in 1, out 0'
      with self.assertRaisesRegex(ValueError, where + '.*bind'):
        s24.sparsify(model, recipe).apply(variables, X)

  def test_frozen_weights_that_a_rule_matches(self):
    """Sparse as the others; no gradient reaches them."""
    params = dict(zip(('base', 'own'), gaussian(1, (2, 16, 16)), strict=True))

    def f(p, x):
      return x @ jax.lax.stop_gradient(p['base']) @ p['own']

    bound = s24.bind(s24.recipes.ste('.*'), f, params, X)
    sparse, variables = s24.sparsify(f, bound), s24.sparse_variables(params, None, bound)
    y, pullback = jax.vjp(lambda p: sparse(p, variables, None, X), params)
    h = np.asarray(X, np.float64) @ kept(params['base'])
    np.testing.assert_allclose(y, h @ kept(params['own']), rtol=1e-4, atol=1e-4)
    (grads,) = pullback(jnp.ones_like(y))
    np.testing.assert_allclose(grads['own'], h.T @ np.ones(y.shape), rtol=1e-3, atol=1e-4)
    self.assertFalse(grads['base'].any())

  def test_experts_that_are_gathered_are_refused_by_name(self):
    """Each token's own matrix, looked up: no array of whole matrices meets a matmul once each."""
    params, chosen = {'experts': jnp.ones((4, 16, 8))}, jnp.array([0, 3, 3, 1, 2, 0])

    def f(p, x, chosen):
      return jnp.einsum('td,tdf->tf', x, p['experts'][chosen])

    with self.assertRaisesRegex(ValueError, r'experts of shape \(4, 16, 8\): gather at .*rows_test.*with_dense'):
      s24.bind(s24.recipes.ste('experts'), f, params, X, chosen)


if __name__ == '__main__':
  absltest.main()
