"""Flax's own layers, linen and nnx, through functions of parameters."""

from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import pytest

import sparse24_jax as s24
from tests.models.training import check_training, random_like

pytestmark = pytest.mark.slow


class Block(nn.Module):
  """One layer of a transformer, as a body of `nn.scan`."""

  @nn.compact
  def __call__(self, x, _):
    x = x + nn.MultiHeadDotProductAttention(num_heads=2, name='attention')(nn.LayerNorm()(x))
    h = nn.Dense(32, name='up')(nn.LayerNorm()(x))
    return x + nn.Dense(16, name='down')(nn.gelu(h)), None


class NnxBlock(nnx.Module):
  """One layer of a transformer of every linear layer that nnx has."""

  def __init__(self, rngs):
    self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=16, decode=False, rngs=rngs)
    self.up = nnx.LinearGeneral(16, (2, 16), rngs=rngs)
    self.down = nnx.LinearGeneral((2, 16), 16, axis=(-2, -1), rngs=rngs)
    self.mix = nnx.Einsum('btd,fd->btf', (16, 16), (16,), rngs=rngs)
    self.out = nnx.Linear(16, 16, rngs=rngs)

  def __call__(self, x):
    x = x + self.attention(x)
    x = x + self.down(nnx.silu(self.up(x)))
    return self.out(nnx.relu(self.mix(x)))


class FlaxTest(parameterized.TestCase):

  @parameterized.parameters(0, 1)
  def test_linen_layers_scanned_over_an_axis(self, axis):
    model = nn.scan(Block, variable_axes={'params': axis}, split_rngs={'params': True}, length=2)()
    x, y = jax.random.normal(jax.random.key(1), (2, 2, 8, 16))
    params = model.init(jax.random.key(0), x, None)['params']

    def loss(params, x, y):
      return jnp.mean((model.apply({'params': params}, x, None)[0] - y) ** 2)

    bound = s24.bind(s24.recipes.ste('.*/kernel'), loss, params, x, y)
    scanned = f'stacked {axis}, in {1 - axis}, '
    # Parameters of fewer axes than the scanned one cannot be: kernels have two or three beside it.
    expected = {f'attention/{name}/kernel': scanned + 'out 2 3' for name in ('query', 'key', 'value')}
    expected['attention/out/kernel'] = 'stacked 0, in 1 2, out 3' if axis == 0 else 'stacked 1, in 0 2, out 3'
    expected |= {f'{name}/kernel': scanned + 'out 2' for name in ('up', 'down')}
    check_training(bound, loss, params, x, y, expected=expected)

  def test_nnx(self):
    graph, params, rest = nnx.split(NnxBlock(nnx.Rngs(0)), nnx.Param, ...)
    params = random_like(params)
    x, y = jax.random.normal(jax.random.key(1), (2, 2, 8, 16))

    def loss(params, x, y):
      return jnp.mean((nnx.merge(graph, params, rest, copy=True)(x) - y) ** 2)

    bound = s24.bind(s24.recipes.ste('.*/kernel'), loss, params, x, y)
    expected = {f'attention/{name}/kernel': 'in 0, out 1 2' for name in ('query', 'key', 'value')}
    expected |= {
      'attention/out/kernel': 'in 0 1, out 2',
      'up/kernel': 'in 0, out 1 2',
      'down/kernel': 'in 0 1, out 2',
      'mix/kernel': 'in 1, out 0',
      'out/kernel': 'in 0, out 1',
    }
    check_training(bound, loss, params, x, y, expected=expected)


if __name__ == '__main__':
  absltest.main()
