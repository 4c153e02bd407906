"""Linen modules of Gemma's shape: einsum with weights of four axes, gate and up in one array of either order.

Written here; gemma's own package, which brings TensorFlow along, has `google_gemma_test`.
"""

from absl.testing import absltest, parameterized
from flax import linen as nn
import jax
import jax.numpy as jnp
import pytest

import sparse24_jax as s24
from tests.models.training import check_training, random_like

pytestmark = pytest.mark.slow


class Einsum(nn.Module):
  """A weight and whatever einsum its caller names, as in `gemma.gm.nn`."""

  shape: tuple
  weight_name: str = 'w'

  @nn.compact
  def __call__(self, equation, x):
    return jnp.einsum(equation, x, self.param(self.weight_name, nn.initializers.normal(), self.shape))


class Attention(nn.Module):
  """Grouped queries, keys and values in one array; or all three, where there are as many heads."""

  kv_heads: int

  @nn.compact
  def __call__(self, x):
    if self.kv_heads == 2:
      q, k, v = Einsum((3, 2, 16, 8), name='qkv_einsum')('BTD,SNDH->SBTNH', x)
    else:
      q = Einsum((2, 16, 8), name='q_einsum')('BTD,NDH->BTNH', x)
      k, v = Einsum((2, 1, 16, 8), name='kv_einsum')('BSD,CKDH->CBSKH', x)
      k, v = (jnp.repeat(a, 2, axis=2) for a in (k, v))
    probs = jax.nn.softmax(jnp.einsum('BTNH,BSNH->BNTS', q, k))
    encoded = jnp.einsum('BNTS,BSNH->BTNH', probs, v)
    return Einsum((2, 8, 16), name='attn_vec_einsum')('BTNH,NHD->BTD', encoded)


class FeedForward(nn.Module):
  """Parameters of two sublayers in the scope of their parent."""

  transposed: bool

  @nn.compact
  def __call__(self, x):
    gating = Einsum((2, 32, 16) if self.transposed else (2, 16, 32), weight_name='gating_einsum')
    nn.share_scope(self, gating)
    gate = gating('...F,NHF->...NH' if self.transposed else '...F,NFH->...NH', x)
    linear = Einsum((32, 16), weight_name='linear')
    nn.share_scope(self, linear)
    return linear('...H,HF->...F', nn.gelu(gate[..., 0, :]) * gate[..., 1, :])


class Block(nn.Module):
  """Attention and feed-forward."""

  kv_heads: int
  transposed: bool

  @nn.compact
  def __call__(self, x):
    x = x + Attention(self.kv_heads, name='attn')(x)
    return x + FeedForward(self.transposed, name='mlp')(x)


class GemmaTest(parameterized.TestCase):

  @parameterized.parameters((1, True), (2, False))
  def test_block(self, kv_heads, transposed):
    model = Block(kv_heads, transposed)
    x, y = jax.random.normal(jax.random.key(1), (2, 2, 8, 16))
    params = random_like(jax.eval_shape(model.init, jax.random.key(0), x)['params'])

    def loss(params, x, y):
      return jnp.mean((model.apply({'params': params}, x) - y) ** 2)

    bound = s24.bind(s24.recipes.ste('(attn|mlp)/.*'), loss, params, x, y)
    if kv_heads == 1:
      # Of an axis of length one, the only head, it does not matter what it is.
      expected = {'attn/q_einsum/w': 'in 1, out 0 2', 'attn/kv_einsum/w': 'stacked 1, in 2, out 0 3'}
    else:
      expected = {'attn/qkv_einsum/w': 'in 2, out 0 1 3'}
    expected |= {
      'attn/attn_vec_einsum/w': 'in 0 1, out 2',
      'mlp/gating_einsum': 'in 2, out 0 1' if transposed else 'in 1, out 0 2',
      'mlp/linear': 'in 0, out 1',
    }
    check_training(bound, loss, params, x, y, expected=expected)


if __name__ == '__main__':
  absltest.main()
