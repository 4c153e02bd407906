"""GPT-2 in Flax linen; tensor names carry shapes.

B batch, T positions, D embedding, H heads, K head size, F hidden size of the feed-forward layer, V vocabulary.
Parameter paths read ``h_0/attn/c_attn/kernel``, ``h_0/mlp/c_fc/kernel``, ``h_0/mlp/c_proj/kernel``; with
``scan_layers`` they read ``h/mlp/c_fc/kernel`` and every parameter has a leading layer axis.

Radford et al., Language Models are Unsupervised Multitask Learners, 2019; the bias-free variant, with decay on
matrices only, is the one that the 2:4 pre-training papers train.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any, Literal

from flax import linen as nn
import jax
from jax.experimental import layout
import jax.numpy as jnp

from experiments.runs.models.layers import attend, check_patterns, dense, INIT_STD, rotate, run_blocks, sized, unembed

LAYER_NORM_EPSILON = 1e-5
_ROPE_THETA = 10_000.0
_MLPS = ('gelu', 'relu2', 'geglu', 'swiglu')


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config:
  """Everything that decides the shapes and the arithmetic of a GPT-2.

  Attributes:
    vocab_size: rows of the (tied) token embedding.
    seq_len: longest sequence; rows of the position embedding.
    num_layers: transformer blocks.
    num_heads: attention heads; must divide `embed_dim`.
    embed_dim: width D of the residual stream.
    bias: whether linear and normalisation layers have a bias.
    mlp: 'gelu', 'relu2' (squared ReLU), or the gated 'geglu' and 'swiglu', which add a matrix `c_gate`.
    ffn_width: hidden size of the feed-forward layer as a multiple of 4 D; 0.5 is the half-width baseline.
    dropout: probability on embeddings and on both residual branches.
    dtype: compute dtype.
    param_dtype: dtype of the stored parameters.
    logits_dtype: of what the model returns; 'bfloat16' halves the largest arrays of a step, see `layers.cross_entropy`.
    residual_dtype: of the residual stream; None is `dtype`.
    positions: 'learnt' has an embedding of each, 'rotary' turns queries and keys, see `layers.rotate`.
    tied: the output matrix is the token embedding; else one of its own, which starts at zero.
    scale_embeddings: multiply embeddings by sqrt(D) where they enter the residual stream. At their initial 0.02 what
      the first blocks add is several times as large in a wide model, and learning is unstable (Takase et al., Spike
      No More, arXiv 2312.16903).
    qk_norm: normalise queries and keys, by head and each with one scale for all heads, before they are compared.
    remat: recompute each block in the backward pass; 'dots' all but its matmuls.
    scan_layers: one `lax.scan` over stacked layers instead of a Python loop.
    attention: `implementation` of `jax.nn.dot_product_attention`: 'xla', 'cudnn' or None.
    attention_pattern: None is full causal attention; else what is attended to in all heads and layers, a
      `s24.AttentionPattern` say. A tuple has one entry a layer: None, a pattern, or a tuple of one a head.
    ffn_order: what neighbours are to the feed-forward layer, which matters to patterns of sparse activations only:
      'sequence' is tokens that follow each other, 'position' is tokens of different sequences at the same position. A
      block of tokens then knows nothing of what follows them, if the sequences of a step are whole blocks.
    causal: whether a token attends to itself and those before it, or to all: an encoder, such as BERT is.
  """

  vocab_size: int
  seq_len: int
  num_layers: int
  num_heads: int
  embed_dim: int
  bias: bool = False
  mlp: str = 'gelu'
  ffn_width: float = 1.0
  dropout: float = 0.0
  dtype: str = 'float32'
  param_dtype: str = 'float32'
  logits_dtype: str = 'float32'
  residual_dtype: str | None = None
  positions: Literal['learnt', 'rotary'] = 'learnt'
  tied: bool = True
  scale_embeddings: bool = False
  qk_norm: bool = False
  remat: bool | Literal['dots'] = False
  scan_layers: bool = False
  attention: Literal['xla', 'cudnn'] | None = 'xla'
  ffn_order: Literal['sequence', 'position'] = 'sequence'
  attention_pattern: Any = None
  causal: bool = True

  def __post_init__(self):
    if self.embed_dim % self.num_heads:
      raise ValueError(f'embed_dim {self.embed_dim} is not divisible by num_heads {self.num_heads}')
    if self.mlp not in _MLPS:
      raise ValueError(f'mlp is {self.mlp!r}; known: {", ".join(_MLPS)}')
    if self.positions not in ('learnt', 'rotary'):
      raise ValueError(f"positions is {self.positions!r}; known: 'learnt', 'rotary'")
    if self.ffn_order not in ('sequence', 'position'):
      raise ValueError(f"ffn_order is {self.ffn_order!r}; known: 'sequence', 'position'")
    if not math.isclose(self.hidden_dim, 4 * self.embed_dim * self.ffn_width) or self.hidden_dim < 1:
      raise ValueError(f'ffn_width {self.ffn_width} times 4 x embed_dim {self.embed_dim} is not a whole hidden size')
    check_patterns(self)

  @property
  def hidden_dim(self) -> int:
    """Hidden size F of the feed-forward layer."""
    return round(4 * self.embed_dim * self.ffn_width)


SIZES: Mapping[str, Mapping[str, int]] = {
  'nano': dict(num_layers=2, num_heads=4, embed_dim=64, seq_len=64),
  'micro': dict(num_layers=4, num_heads=4, embed_dim=128, seq_len=128),
  'small': dict(num_layers=6, num_heads=6, embed_dim=384, seq_len=256),
  '124m': dict(num_layers=12, num_heads=12, embed_dim=768, seq_len=1024),
  '350m': dict(num_layers=24, num_heads=16, embed_dim=1024, seq_len=1024),
  '774m': dict(num_layers=36, num_heads=20, embed_dim=1280, seq_len=1024),
  '1300m': dict(num_layers=24, num_heads=16, embed_dim=2048, seq_len=1024),
  '1558m': dict(num_layers=48, num_heads=25, embed_dim=1600, seq_len=1024),
  'wide': dict(num_layers=6, num_heads=32, embed_dim=4096, seq_len=1024),
}


def make_config(size: str, *, vocab_size: int, **overrides: Any) -> GPT2Config:
  """Returns the configuration of a named size.

  Args:
    size: a key of `SIZES`.
    vocab_size: rows of the token embedding.
    **overrides: any other field of `GPT2Config`.

  Raises:
    ValueError: an unknown size, or sizes that do not fit together.

  >>> make_config('124m', vocab_size=50304).hidden_dim
  3072
  """
  return sized(GPT2Config, SIZES, size, vocab_size=vocab_size, **overrides)


def layer_norm(config: GPT2Config, name: str) -> nn.LayerNorm:
  """Layer normalisation with GPT-2's epsilon."""
  return nn.LayerNorm(
    epsilon=LAYER_NORM_EPSILON,
    use_bias=config.bias,
    dtype=config.dtype,
    param_dtype=jnp.dtype(config.param_dtype),
    name=name,
  )


def activate(mlp: str, up: jax.Array, gate: jax.Array | None) -> jax.Array:
  """The feed-forward non-linearity; `gate` is given for the gated kinds only."""
  match mlp:
    case 'gelu':
      return jax.nn.gelu(up)
    case 'relu2':
      return jnp.square(jax.nn.relu(up))
    case 'geglu':
      return jax.nn.gelu(gate) * up
    case _:
      return jax.nn.silu(gate) * up


class Attention(nn.Module):
  """Self-attention with one matrix for query, key and value; see `pattern_of` for the pattern."""

  config: GPT2Config
  pattern: Any = None

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array, lengths_B: jax.Array | None = None) -> jax.Array:
    cfg = self.config
    batch, length, dim = x_BxTxD.shape
    qkv_BxTx3D = dense(cfg, 3 * dim, 'c_attn')(x_BxTxD)
    # Indexing a [B, T, 3, H, K] instead would add three padded arrays in the backward.
    heads = batch, length, cfg.num_heads, dim // cfg.num_heads
    q_BxTxHxK, k_BxTxHxK, v_BxTxHxK = (part.reshape(heads) for part in jnp.split(qkv_BxTx3D, 3, axis=-1))
    if cfg.qk_norm:
      q_BxTxHxK, k_BxTxHxK = layer_norm(cfg, 'q_norm')(q_BxTxHxK), layer_norm(cfg, 'k_norm')(k_BxTxHxK)
    if cfg.positions == 'rotary':
      q_BxTxHxK, k_BxTxHxK = rotate(q_BxTxHxK, _ROPE_THETA), rotate(k_BxTxHxK, _ROPE_THETA)
    y_BxTxHxK = attend(cfg, self.pattern, q_BxTxHxK, k_BxTxHxK, v_BxTxHxK, lengths_B)
    return dense(cfg, dim, 'c_proj', residual=True)(y_BxTxHxK.reshape(batch, length, dim))


class MLP(nn.Module):
  """The feed-forward layer: the two (gated: three) matrices that the recipes make sparse."""

  config: GPT2Config

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    cfg = self.config
    gated = cfg.mlp in ('geglu', 'swiglu')
    gate_BxTxF = dense(cfg, cfg.hidden_dim, 'c_gate')(x_BxTxD) if gated else None
    up_BxTxF = dense(cfg, cfg.hidden_dim, 'c_fc')(x_BxTxD)
    h_BxTxF = activate(cfg.mlp, up_BxTxF, gate_BxTxF)
    return dense(cfg, x_BxTxD.shape[-1], 'c_proj', residual=True)(h_BxTxF)


class Block(nn.Module):
  """One pre-LN transformer block."""

  config: GPT2Config
  deterministic: bool = True
  pattern: Any = None

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array, lengths_B: jax.Array | None = None) -> jax.Array:
    cfg = self.config
    if cfg.ffn_order == 'position':
      # Or XLA would hold the stream in that order, too, and transpose it for all else that reads it.
      x_BxTxD = layout.with_layout_constraint(x_BxTxD, layout.Layout(major_to_minor=(0, 1, 2)))
    drop = nn.Dropout(cfg.dropout, deterministic=self.deterministic)
    x_BxTxD = x_BxTxD + drop(Attention(cfg, self.pattern, name='attn')(layer_norm(cfg, 'ln_1')(x_BxTxD), lengths_B))
    mlp, h_BxTxD = MLP(cfg, name='mlp'), layer_norm(cfg, 'ln_2')(x_BxTxD)
    if cfg.ffn_order == 'sequence':
      return x_BxTxD + drop(mlp(h_BxTxD))
    h_TxBxD = jnp.swapaxes(h_BxTxD, 0, 1)
    z_TxBxD = mlp(h_TxBxD.reshape(-1, h_TxBxD.shape[-1])).reshape(h_TxBxD.shape)
    return x_BxTxD + drop(jnp.swapaxes(z_TxBxD, 0, 1))


def embedding(config: GPT2Config, rows: int, name: str, *, std: float = INIT_STD) -> nn.Embed:
  """An embedding that is looked up, and its gradients summed, in the dtype of the parameters.

  In bfloat16 the sum would leave out what is small against it, and a GPU adds to the rows of frequent tokens one at a
  time.
  """
  init = nn.initializers.normal(std) if std else nn.initializers.zeros
  dtype = jnp.dtype(config.param_dtype)
  return nn.Embed(rows, config.embed_dim, dtype=dtype, param_dtype=dtype, embedding_init=init, name=name)


def enter_stream(config: GPT2Config, deterministic: bool, x_BxTxD: jax.Array) -> jax.Array:
  """The residual stream: embedded positions are added, if they are learnt, and dropout and dtype are the model's."""
  length = x_BxTxD.shape[1]
  if length > config.seq_len:
    raise ValueError(f'tokens have {length} positions on axis -1; the model takes at most {config.seq_len}')
  if config.positions == 'learnt':
    x_BxTxD += embedding(config, config.seq_len, 'wpe')(jnp.arange(length))[None]
  if config.scale_embeddings:
    x_BxTxD = math.sqrt(config.embed_dim) * x_BxTxD
  x_BxTxD = x_BxTxD.astype(config.residual_dtype or config.dtype)
  return nn.Dropout(config.dropout, deterministic=deterministic)(x_BxTxD)


def embed_tokens(config: GPT2Config, deterministic: bool, tokens_BxT: jax.Array) -> tuple[jax.Array, nn.Embed]:
  """The residual stream of tokens, and the embedding that they have."""
  wte = embedding(config, config.vocab_size, 'wte')
  return enter_stream(config, deterministic, wte(tokens_BxT)), wte


class GPT2(nn.Module):
  """A GPT-2 language model with a tied output matrix; with `causal=False` an encoder that fills gaps, as BERT does.

  Attributes:
    config: sizes and arithmetic.
    deterministic: False switches dropout on, which then needs an rng named 'dropout'.
  """

  config: GPT2Config
  deterministic: bool = True

  @nn.compact
  def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
    """Returns logits [B, T, V] for int32 tokens [B, T]; position t predicts token t + 1."""
    cfg = self.config
    x_BxTxD, wte = embed_tokens(cfg, self.deterministic, tokens_BxT)
    x_BxTxD = run_blocks(Block, cfg, self.deterministic, x_BxTxD)
    x_BxTxD = layer_norm(cfg, 'ln_f')(x_BxTxD)
    head = wte if cfg.tied else embedding(cfg, cfg.vocab_size, 'head', std=0.0)
    table_VxD = head.embedding.astype(cfg.dtype)
    return unembed(x_BxTxD, table_VxD, jnp.dtype(cfg.logits_dtype))
