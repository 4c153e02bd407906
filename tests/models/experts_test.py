"""Experts in one array, by batched and by ragged matmuls, and a module of Haiku."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import pytest

import sparse24_jax as s24
from tests.models.training import check_training, package

pytestmark = pytest.mark.slow
SHAPES = {'router': (16, 4), 'gate': (4, 16, 32), 'up': (4, 16, 32), 'down': (4, 32, 16)}


def batched(params, x):
  """Each expert sees all tokens, and the router weighs them."""
  weights = jax.nn.softmax(x @ params['router'])
  h = jax.nn.silu(jnp.einsum('td,edf->tef', x, params['gate'])) * jnp.einsum('td,edf->tef', x, params['up'])
  return jnp.einsum('tef,efd,te->td', h, params['down'], weights)


def ragged(params, x):
  """Each token goes to one expert; they are sorted by it."""
  scores = jax.nn.softmax(x @ params['router'])
  chosen = jnp.argmax(scores, axis=-1)
  order = jnp.argsort(chosen)
  sizes = jnp.bincount(chosen, length=4)
  x = x[order]
  h = jax.nn.silu(jax.lax.ragged_dot(x, params['gate'], sizes)) * jax.lax.ragged_dot(x, params['up'], sizes)
  y = jax.lax.ragged_dot(h, params['down'], sizes)[jnp.argsort(order)]
  return y * jnp.max(scores, axis=-1, keepdims=True)


class ExpertsTest(parameterized.TestCase):

  @parameterized.parameters(
    (batched, 'stacked 0, in 1, out 2'), (ragged, 'stacked 0, in 1, out 2')
  )
  def test_experts(self, layer, layout):
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    params = {name: 0.2 * jax.random.normal(k, SHAPES[name]) for name, k in zip(SHAPES, keys, strict=True)}
    x, y = jax.random.normal(jax.random.key(1), (2, 8, 16))

    def loss(params, x, y):
      return jnp.mean((layer(params, x) - y) ** 2)

    bound = s24.bind(s24.recipes.ste('gate|up|down'), loss, params, x, y)
    stacked_outputs = {'gate': 'in 1, out 0 2', 'up': 'in 1, out 0 2'} if layer is batched else {}
    expected = dict.fromkeys(('down', 'gate', 'up'), layout) | stacked_outputs
    check_training(bound, loss, params, x, y, expected=expected)


class HaikuTest(absltest.TestCase):

  def test_modules(self):
    hk = package('haiku')

    def forward(x):
      x = x + hk.MultiHeadAttention(2, 8, model_size=16, w_init=hk.initializers.VarianceScaling())(x, x, x)
      return x + hk.nets.MLP([32, 16])(x)

    model = hk.without_apply_rng(hk.transform(forward))
    x, y = jax.random.normal(jax.random.key(1), (2, 8, 16))
    params = model.init(jax.random.key(0), x)

    def loss(params, x, y):
      return jnp.mean((model.apply(params, x) - y) ** 2)

    bound = s24.bind(s24.recipes.ste('.*/w'), loss, params, x, y)
    names = [f'mlp/~/linear_{i}' for i in range(2)]
    names += [f'multi_head_attention/{name}' for name in ('key', 'linear', 'query', 'value')]
    check_training(bound, loss, params, x, y, expected={f'{name}/w': 'in 0, out 1' for name in names})


if __name__ == '__main__':
  absltest.main()
