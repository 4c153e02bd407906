"""Google's own `gemma`, of linen: a whole transformer of two layers, and the experts of Gemma 4."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse24_jax as s24
from tests.models.training import check_training, package, random_like

gemma = package('gemma')
gm = package('gemma.gm')
pytestmark = pytest.mark.slow


def transformer(transposed, kv_heads):
  kinds = (gm.nn.AttentionType.LOCAL_SLIDING, gm.nn.AttentionType.GLOBAL)
  config = gm.nn.config.TransformerConfig(
    num_embed=32, embed_dim=16, hidden_dim=32, num_heads=2, head_dim=8, num_kv_heads=kv_heads,
    final_logit_softcap=None, use_post_attn_norm=True, use_post_ffw_norm=True, attention_types=kinds,
    sliding_window_size=4, transpose_gating_einsum=transposed, use_qk_norm=True,
  )  # fmt: skip
  return gm.nn.Transformer(config=config, dtype=jnp.float32, tokens='tokens')


class GemmaTest(parameterized.TestCase):

  @parameterized.parameters((True, 2), (False, 1))
  def test_transformer(self, transposed, kv_heads):
    model = transformer(transposed, kv_heads)
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 32, (2, 8)), jnp.int32)
    params = random_like(jax.eval_shape(model.init, jax.random.key(0), tokens)['params'])

    def loss(params, tokens):
      logits = model.apply({'params': params}, tokens).logits
      scores = jax.nn.log_softmax(logits[:, :-1])
      return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    bound = s24.bind(s24.recipes.ste('layer_.*/(attn|mlp)/(?!.*norm).*'), loss, params, tokens)
    layer = {
      'attn/attn_vec_einsum/w': 'in 0 1, out 2',
      'mlp/gating_einsum': 'in 2, out 0 1' if transposed else 'in 1, out 0 2',
      'mlp/linear': 'in 0, out 1',
    }
    layer |= (
      {'attn/qkv_einsum/w': 'in 2, out 0 1 3'} if kv_heads == 2 else
      # Of an axis of length one, the only head, it does not matter what it is.
      {'attn/q_einsum/w': 'in 1, out 0 2', 'attn/kv_einsum/w': 'stacked 1, in 2, out 0 3'}
    )  # fmt: skip
    expected = {f'layer_{i}/{path}': layout for i in range(2) for path, layout in layer.items()}
    for i in range(2):
      self.assertEqual([use.role for use in bound[f'layer_{i}/mlp/gating_einsum'].uses], ['gate_up'])
    check_training(bound, loss, params, tokens, expected=expected)


if __name__ == '__main__':
  absltest.main()
