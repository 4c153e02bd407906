"""An encoder-decoder for translation; blocks as in `gpt2`, and in the decoder attention to what the encoder made.

B batch, S source positions, T target positions, D embedding, H heads, K head size, V vocabulary. Paths read
``encoder/h_0/mlp/c_fc/kernel``, ``decoder/h_0/cross/attn/q_proj/kernel``. Source, target and output share one
embedding.

Vaswani et al., arXiv 1706.03762, of which 'base' has the sizes; normalised before each branch and with learnt
positions, as is usual since.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from experiments.runs.models.gpt2 import Attention, Block, embedding, enter_stream, GPT2Config, layer_norm, MLP
from experiments.runs.models.layers import attend, dense, run_blocks, sized, unembed


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslatorConfig(GPT2Config):
  """The fields of `GPT2Config`: `num_layers` for encoder and decoder each, `seq_len` for both sides."""

  bias: bool = True

  def __post_init__(self):
    super().__post_init__()
    if self.attention_pattern is not None:
      raise ValueError('attention_pattern is not for a translator')
    if not (self.tied and self.causal and self.ffn_order == 'sequence'):
      raise ValueError("a translator takes tied=True, causal=True (of its decoder) and ffn_order='sequence'")


SIZES: Mapping[str, Mapping[str, int]] = {
  'nano': dict(num_layers=2, num_heads=4, embed_dim=64, seq_len=64),
  'micro': dict(num_layers=3, num_heads=4, embed_dim=128, seq_len=64),
  'base': dict(num_layers=6, num_heads=8, embed_dim=512, seq_len=256),
}


def make_config(size: str, *, vocab_size: int, **overrides: Any) -> TranslatorConfig:
  """Returns the configuration of a named size; ValueError for one that is not known, or sizes that do not fit.

  >>> make_config('base', vocab_size=32000).hidden_dim
  2048
  """
  return sized(TranslatorConfig, SIZES, size, vocab_size=vocab_size, **overrides)


class CrossAttention(nn.Module):
  """Attention of the target to the first `lengths` positions of the encoded source."""

  config: GPT2Config

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array, memory_BxSxD: jax.Array, lengths_B: jax.Array) -> jax.Array:
    cfg = self.config
    dim = cfg.embed_dim

    def heads(y: jax.Array) -> jax.Array:
      return y.reshape(*y.shape[:-1], cfg.num_heads, dim // cfg.num_heads)

    q_BxTxHxK = heads(dense(cfg, dim, 'q_proj')(x_BxTxD))
    kv_BxSx2D = dense(cfg, 2 * dim, 'kv_proj')(memory_BxSxD)
    k_BxSxHxK, v_BxSxHxK = map(heads, jnp.split(kv_BxSx2D, 2, axis=-1))
    everything = dataclasses.replace(cfg, causal=False)
    y_BxTxHxK = attend(everything, None, q_BxTxHxK, k_BxSxHxK, v_BxSxHxK, lengths_B)
    return dense(cfg, dim, 'c_proj', residual=True)(y_BxTxHxK.reshape(x_BxTxD.shape))


class Cross(nn.Module):
  """The branch of a decoder block that looks at the source."""

  config: GPT2Config

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array, memory_BxSxD: jax.Array, lengths_B: jax.Array) -> jax.Array:
    return CrossAttention(self.config, name='attn')(layer_norm(self.config, 'ln')(x_BxTxD), memory_BxSxD, lengths_B)


class DecoderBlock(nn.Module):
  """A block of `gpt2` with a branch for the source between its two."""

  config: GPT2Config
  deterministic: bool = True
  pattern: Any = None

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array, memory_BxSxD: jax.Array, lengths_B: jax.Array) -> jax.Array:
    cfg = self.config
    drop = nn.Dropout(cfg.dropout, deterministic=self.deterministic)
    x_BxTxD = x_BxTxD + drop(Attention(cfg, name='attn')(layer_norm(cfg, 'ln_1')(x_BxTxD)))
    x_BxTxD = x_BxTxD + drop(Cross(cfg, name='cross')(x_BxTxD, memory_BxSxD, lengths_B))
    return x_BxTxD + drop(MLP(cfg, name='mlp')(layer_norm(cfg, 'ln_2')(x_BxTxD)))


class Stack(nn.Module):
  """Positions, blocks and a last normalisation: the encoder, or the decoder."""

  config: GPT2Config
  block: Any
  deterministic: bool = True

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array, *others: jax.Array) -> jax.Array:
    cfg = self.config
    x_BxTxD = enter_stream(cfg, self.deterministic, x_BxTxD)
    return layer_norm(cfg, 'ln_f')(run_blocks(self.block, cfg, self.deterministic, x_BxTxD, *others))


class Translator(nn.Module):
  """An encoder-decoder transformer."""

  config: TranslatorConfig
  deterministic: bool = True

  @nn.compact
  def __call__(self, source_BxS: jax.Array, lengths_B: jax.Array, target_BxT: jax.Array) -> jax.Array:
    """Returns logits [B, T, V]: position t of the target predicts its token t + 1."""
    cfg = self.config
    wte = embedding(cfg, cfg.vocab_size, 'wte')
    encoder = Stack(dataclasses.replace(_plain(cfg), causal=False), Block, self.deterministic, name='encoder')
    decoder = Stack(_plain(cfg), DecoderBlock, self.deterministic, name='decoder')
    memory_BxSxD = encoder(wte(source_BxS), lengths_B)
    x_BxTxD = decoder(wte(target_BxT), memory_BxSxD, lengths_B)
    return unembed(x_BxTxD, wte.embedding.astype(cfg.dtype), jnp.dtype(cfg.logits_dtype))


def _plain(config: TranslatorConfig) -> GPT2Config:
  """The configuration of the blocks; unlike the translator, its encoder is not causal."""
  return GPT2Config(**{field.name: getattr(config, field.name) for field in dataclasses.fields(GPT2Config)})
