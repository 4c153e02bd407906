"""A Llama-like decoder in Flax linen; tensor names carry shapes.

B batch, T positions, D embedding, H query heads, G key-value heads, K head size, F hidden size of the feed-forward
layer, V vocabulary. Parameter paths read ``h_0/attn/q_proj/kernel``, ``h_0/mlp/c_gate/kernel``,
``h_0/mlp/c_fc/kernel``, ``h_0/mlp/c_proj/kernel`` and ``lm_head/kernel``; with ``scan_layers`` ``h/mlp/c_fc/kernel``
and every parameter of a block has a leading layer axis. The feed-forward matrices have GPT-2's names, so that one path
serves both models.

Touvron et al., arXiv 2302.13971: RMSNorm before each branch, rotary positions (Su et al., arXiv 2104.09864), SwiGLU
(Shazeer, arXiv 2002.05202), no bias, an output matrix of its own; key-value heads may be fewer than query heads
(Ainslie et al., arXiv 2305.13245).
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, Literal

from flax import linen as nn
import jax
import jax.numpy as jnp

from experiments.runs.models.layers import attend, check_patterns, dense, INIT_STD, rotate, run_blocks, sized, unembed


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
  """Everything that decides the shapes and the arithmetic of a Llama-like model.

  Attributes:
    vocab_size: rows of the token embedding and columns of the output matrix.
    seq_len: longest sequence.
    num_layers: transformer blocks.
    num_heads: query heads; must divide `embed_dim` into heads of even size.
    num_kv_heads: key and value heads, each shared by `num_heads / num_kv_heads` query heads.
    embed_dim: width D of the residual stream.
    hidden_dim: hidden size F of the feed-forward layer.
    rope_theta: base of the rotary wavelengths.
    norm_epsilon: of RMSNorm.
    dropout: probability on both residual branches; the published models have none.
    dtype: compute dtype.
    logits_dtype: of what the model returns, see `gpt2.GPT2Config`.
    param_dtype: dtype of the stored parameters.
    remat: recompute each block in the backward pass; 'dots' all but its matmuls.
    scan_layers: one `lax.scan` over stacked layers instead of a Python loop.
    attention: `implementation` of `jax.nn.dot_product_attention`: 'xla', 'cudnn' or None.
    attention_pattern: None is full causal attention; else what is attended to in all heads and layers, a
      `s24.AttentionPattern` say. A tuple has one entry a layer: None, a pattern, or a tuple of one a head.
  """

  vocab_size: int
  seq_len: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  embed_dim: int
  hidden_dim: int
  rope_theta: float = 10_000.0
  norm_epsilon: float = 1e-5
  dropout: float = 0.0
  dtype: str = 'float32'
  param_dtype: str = 'float32'
  logits_dtype: str = 'float32'
  remat: bool | Literal['dots'] = False
  scan_layers: bool = False
  attention: Literal['xla', 'cudnn'] | None = 'xla'
  attention_pattern: Any = None

  def __post_init__(self):
    if self.embed_dim % (2 * self.num_heads):
      raise ValueError(f'embed_dim {self.embed_dim} over num_heads {self.num_heads} is not a whole even head size')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(f'num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}')
    check_patterns(self)

  @property
  def head_dim(self) -> int:
    """Size K of a head."""
    return self.embed_dim // self.num_heads


# '1b' and '3b' have the sizes of Llama 3.2, but for the output matrix, which is tied to the embedding there.
SIZES: Mapping[str, Mapping[str, int]] = {
  'nano': dict(num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=64, hidden_dim=192, seq_len=64),
  '1b': dict(num_layers=16, num_heads=32, num_kv_heads=8, embed_dim=2048, hidden_dim=8192, seq_len=2048),
  '3b': dict(num_layers=28, num_heads=24, num_kv_heads=8, embed_dim=3072, hidden_dim=8192, seq_len=2048),
}


def make_config(size: str, *, vocab_size: int, **overrides: Any) -> LlamaConfig:
  """Returns the configuration of a named size.

  Args:
    size: a key of `SIZES`.
    vocab_size: rows of the token embedding.
    **overrides: any other field of `LlamaConfig`.

  Raises:
    ValueError: an unknown size, or sizes that do not fit together.

  >>> make_config('3b', vocab_size=32000).head_dim
  128
  """
  return sized(LlamaConfig, SIZES, size, vocab_size=vocab_size, **overrides)


def rms_norm(config: LlamaConfig, name: str) -> nn.RMSNorm:
  """Normalisation by the root of the mean square, with a learned scale."""
  return nn.RMSNorm(
    epsilon=config.norm_epsilon, dtype=config.dtype, param_dtype=jnp.dtype(config.param_dtype), name=name
  )


class Attention(nn.Module):
  """Causal self-attention with rotary positions and shared key-value heads."""

  config: LlamaConfig
  pattern: Any = None

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    cfg = self.config
    batch, length, dim = x_BxTxD.shape

    def heads(name: str, count: int) -> jax.Array:
      return dense(cfg, count * cfg.head_dim, name)(x_BxTxD).reshape(batch, length, count, cfg.head_dim)

    q_BxTxHxK = rotate(heads('q_proj', cfg.num_heads), cfg.rope_theta)
    k_BxTxGxK = rotate(heads('k_proj', cfg.num_kv_heads), cfg.rope_theta)
    v_BxTxGxK = heads('v_proj', cfg.num_kv_heads)
    y_BxTxHxK = attend(cfg, self.pattern, q_BxTxHxK, k_BxTxGxK, v_BxTxGxK)
    return dense(cfg, dim, 'o_proj', residual=True)(y_BxTxHxK.reshape(batch, length, dim))


class MLP(nn.Module):
  """SwiGLU: the three matrices that the recipes make sparse."""

  config: LlamaConfig

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    cfg = self.config
    gate_BxTxF = dense(cfg, cfg.hidden_dim, 'c_gate')(x_BxTxD)
    up_BxTxF = dense(cfg, cfg.hidden_dim, 'c_fc')(x_BxTxD)
    return dense(cfg, x_BxTxD.shape[-1], 'c_proj', residual=True)(jax.nn.silu(gate_BxTxF) * up_BxTxF)


class Block(nn.Module):
  """One pre-norm transformer block."""

  config: LlamaConfig
  deterministic: bool = True
  pattern: Any = None

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    cfg = self.config
    drop = nn.Dropout(cfg.dropout, deterministic=self.deterministic)
    x_BxTxD = x_BxTxD + drop(Attention(cfg, self.pattern, name='attn')(rms_norm(cfg, 'ln_1')(x_BxTxD)))
    return x_BxTxD + drop(MLP(cfg, name='mlp')(rms_norm(cfg, 'ln_2')(x_BxTxD)))


class Head(nn.Module):
  """The output matrix."""

  config: LlamaConfig

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    cfg = self.config
    shape = (cfg.embed_dim, cfg.vocab_size)
    kernel_DxV = self.param('kernel', nn.initializers.normal(INIT_STD), shape, jnp.dtype(cfg.param_dtype))
    return unembed(x_BxTxD, kernel_DxV.astype(cfg.dtype).T, jnp.dtype(cfg.logits_dtype))


class Llama(nn.Module):
  """A Llama-like language model.

  Attributes:
    config: sizes and arithmetic.
    deterministic: False switches dropout on, which then needs an rng named 'dropout'.
  """

  config: LlamaConfig
  deterministic: bool = True

  @nn.compact
  def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
    """Returns logits [B, T, V] for int32 tokens [B, T]; position t predicts token t + 1."""
    cfg = self.config
    length = tokens_BxT.shape[-1]
    if length > cfg.seq_len:
      raise ValueError(f'tokens have {length} positions on axis -1; the model takes at most {cfg.seq_len}')
    wte = nn.Embed(
      cfg.vocab_size,
      cfg.embed_dim,
      dtype=jnp.dtype(cfg.param_dtype),  # see `gpt2.GPT2`
      param_dtype=jnp.dtype(cfg.param_dtype),
      embedding_init=nn.initializers.normal(INIT_STD),
      name='wte',
    )
    x_BxTxD = wte(tokens_BxT).astype(cfg.dtype)
    x_BxTxD = rms_norm(cfg, 'ln_f')(run_blocks(Block, cfg, self.deterministic, x_BxTxD))
    return Head(cfg, name='lm_head')(x_BxTxD)
