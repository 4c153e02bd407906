"""google-tunix' models: nnx, einsum layers of their own beside `nnx.Linear`, remat, grouped queries, soft caps."""

from absl.testing import absltest, parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import pytest

import sparse24_jax as s24
from tests.models.training import check_training, package, random_like

llama3 = package('tunix.models.llama3.model')
qwen3 = package('tunix.models.qwen3.model')
gemma2 = package('tunix.models.gemma.model')
gemma3 = package('tunix.models.gemma3.model')
# What they use of Flax and JAX is their concern.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings('ignore::DeprecationWarning')]
SIZES = {
  'num_layers': 2, 'vocab_size': 32, 'embed_dim': 16, 'hidden_dim': 32, 'num_heads': 4, 'head_dim': 8,
  'num_kv_heads': 2, 'rope_theta': 10_000,
}  # fmt: skip
GEMMA = {name: size for name, size in SIZES.items() if name not in ('vocab_size', 'rope_theta')} | {
  'num_embed': 32, 'sliding_window_size': 4
}  # fmt: skip
GEMMA2 = GEMMA | {
  'final_logit_softcap': 30.0, 'attn_logits_soft_cap': 50.0, 'use_post_attn_norm': True, 'use_post_ffw_norm': True,
  'attention_types': (gemma2.AttentionType.LOCAL_SLIDING, gemma2.AttentionType.GLOBAL),
}  # fmt: skip
LAYER = {
  'attn/q_proj/w': 'in 0, out 1 2', 'attn/k_proj/w': 'in 0, out 1 2', 'attn/v_proj/w': 'in 0, out 1 2',
  'attn/o_proj/w': 'in 0 1, out 2', 'mlp/gate_proj/kernel': 'in 0, out 1', 'mlp/up_proj/kernel': 'in 0, out 1',
  'mlp/down_proj/kernel': 'in 0, out 1',
}  # fmt: skip
GEMMA_LAYER = {path: text for path, text in LAYER.items() if path.startswith('mlp')} | {
  'attn/q_einsum/w': 'in 1, out 0 2', 'attn/kv_einsum/w': 'in 2, out 0 1 3', 'attn/attn_vec_einsum/w': 'in 0 1, out 2',
}  # fmt: skip


class TunixTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(jax.numpy_rank_promotion('allow'))

  @parameterized.named_parameters(
    ('llama3', 'Llama3', llama3, SIZES | {'norm_eps': 1e-6}, 'DECODER', LAYER),
    ('qwen3', 'Qwen3', qwen3, SIZES | {'norm_eps': 1e-6}, 'NONE', LAYER),
    ('gemma2', 'Gemma', gemma2, GEMMA2, 'NONE', GEMMA_LAYER),
    ('gemma3', 'Gemma3', gemma3, GEMMA | {'param_dtype': jnp.float32}, 'NONE', GEMMA_LAYER),
  )
  def test_decoder(self, name, module, sizes, remat, layer):
    config = module.ModelConfig(**sizes, remat_config=module.RematConfig[remat])
    graph, params, rest = nnx.split(getattr(module, name)(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    params = random_like(params)
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 32)
    positions, mask = jnp.broadcast_to(jnp.arange(8), (2, 8)), jnp.broadcast_to(jnp.tri(8, dtype=bool), (2, 8, 8))

    def loss(params, tokens):
      logits, _ = nnx.merge(graph, params, rest, copy=True)(tokens, positions, None, mask)
      return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1))

    bound = s24.bind(s24.recipes.ste(r'layers/.*(_proj|einsum)/(w|kernel)'), loss, params, tokens)
    expected = {f'layers/{i}/{path}': text for i in range(2) for path, text in layer.items()}
    check_training(bound, loss, params, tokens, expected=expected)


if __name__ == '__main__':
  absltest.main()
