"""The oracle of `gpt2`, written in nnx: the same parameter tree and the same logits.

Layers are attributes named ``h_0``, ``h_1``, ... so that a recipe's path patterns mean the same in both.
"""

import math

from flax import nnx
import jax
import jax.numpy as jnp

from experiments.models.gpt2 import activate, GPT2Config, LAYER_NORM_EPSILON
from experiments.models.layers import INIT_STD, unembed


def linear(config: GPT2Config, d_in: int, d_out: int, rngs: nnx.Rngs, *, residual: bool = False) -> nnx.Linear:
  """A linear layer; those that write to the residual stream start smaller by sqrt(2 L)."""
  std = INIT_STD / math.sqrt(2 * config.num_layers) if residual else INIT_STD
  return nnx.Linear(
    d_in,
    d_out,
    use_bias=config.bias,
    dtype=config.dtype,
    param_dtype=config.param_dtype,
    kernel_init=nnx.initializers.normal(std),
    rngs=rngs,
  )


def layer_norm(config: GPT2Config, rngs: nnx.Rngs) -> nnx.LayerNorm:
  """Layer normalisation with GPT-2's epsilon."""
  return nnx.LayerNorm(
    config.embed_dim,
    epsilon=LAYER_NORM_EPSILON,
    use_bias=config.bias,
    dtype=config.dtype,
    param_dtype=config.param_dtype,
    rngs=rngs,
  )


class Attention(nnx.Module):
  """Causal self-attention with one matrix for query, key and value."""

  def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
    self.config = config
    self.c_attn = linear(config, config.embed_dim, 3 * config.embed_dim, rngs)
    self.c_proj = linear(config, config.embed_dim, config.embed_dim, rngs, residual=True)

  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    cfg = self.config
    batch, length, dim = x_BxTxD.shape
    heads = batch, length, cfg.num_heads, dim // cfg.num_heads
    q_BxTxHxK, k_BxTxHxK, v_BxTxHxK = (part.reshape(heads) for part in jnp.split(self.c_attn(x_BxTxD), 3, axis=-1))
    y_BxTxHxK = jax.nn.dot_product_attention(
      q_BxTxHxK, k_BxTxHxK, v_BxTxHxK, is_causal=True, implementation=cfg.attention
    )
    return self.c_proj(y_BxTxHxK.reshape(batch, length, dim))


class MLP(nnx.Module):
  """The feed-forward layer: the two (gated: three) matrices that the recipes make sparse."""

  def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
    self.config = config
    if config.mlp in ('geglu', 'swiglu'):
      self.c_gate = linear(config, config.embed_dim, config.hidden_dim, rngs)
    self.c_fc = linear(config, config.embed_dim, config.hidden_dim, rngs)
    self.c_proj = linear(config, config.hidden_dim, config.embed_dim, rngs, residual=True)

  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    gate_BxTxF = self.c_gate(x_BxTxD) if self.config.mlp in ('geglu', 'swiglu') else None
    return self.c_proj(activate(self.config.mlp, self.c_fc(x_BxTxD), gate_BxTxF))


class Block(nnx.Module):
  """One pre-LN transformer block."""

  def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
    self.ln_1 = layer_norm(config, rngs)
    self.attn = Attention(config, rngs=rngs)
    self.ln_2 = layer_norm(config, rngs)
    self.mlp = MLP(config, rngs=rngs)

  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    x_BxTxD = x_BxTxD + self.attn(self.ln_1(x_BxTxD))
    return x_BxTxD + self.mlp(self.ln_2(x_BxTxD))


class GPT2(nnx.Module):
  """A GPT-2 language model with a tied output matrix; see `gpt2.GPT2`."""

  def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
    if config.positions != 'learnt':
      raise ValueError(f'positions={config.positions!r} is for the linen model; the nnx twin learns positions')
    if not config.tied:
      raise ValueError('tied=False is for the linen model; the nnx twin has one matrix for input and output')
    linen_only = ('scan_layers', 'dropout', 'attention_pattern', 'qk_norm', 'scale_embeddings', 'fp8_linear')
    for option in (*linen_only, 'residual_dtype'):
      if getattr(config, option):
        raise ValueError(f'{option}={getattr(config, option)} is for the linen model; the nnx twin has no {option}')
    if config.ffn_order != 'sequence':
      raise ValueError(f'ffn_order={config.ffn_order!r} is for the linen model; the nnx twin takes tokens in sequence')
    self.config = config
    embed = dict(dtype=config.param_dtype, param_dtype=config.param_dtype, rngs=rngs)  # as in the linen model
    init = nnx.initializers.normal(INIT_STD)
    self.wte = nnx.Embed(config.vocab_size, config.embed_dim, embedding_init=init, **embed)
    self.wpe = nnx.Embed(config.seq_len, config.embed_dim, embedding_init=init, **embed)
    for i in range(config.num_layers):
      setattr(self, f'h_{i}', Block(config, rngs=rngs))
    self.ln_f = layer_norm(config, rngs)

  def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
    """Returns float32 logits [B, T, V] for int32 tokens [B, T]; position t predicts token t + 1."""
    cfg = self.config
    length = tokens_BxT.shape[-1]
    if length > cfg.seq_len:
      raise ValueError(f'tokens have {length} positions on axis -1; the model takes at most {cfg.seq_len}')
    x_BxTxD = (self.wte(tokens_BxT) + self.wpe(jnp.arange(length))[None]).astype(cfg.dtype)
    apply = nnx.remat(lambda block, x: block(x)) if cfg.remat else (lambda block, x: block(x))
    for i in range(cfg.num_layers):
      x_BxTxD = apply(getattr(self, f'h_{i}'), x_BxTxD)
    x_BxTxD = self.ln_f(x_BxTxD)
    table_VxD = self.wte.embedding[...].astype(cfg.dtype)
    return unembed(x_BxTxD, table_VxD)
