"""Layers of the models here; `config` is that of any of them. Tensor names carry shapes, see `gpt2`."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import contextvars
import functools
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.sparse_attention.api import sparse_attention
from sparse24_jax.attention import check_attention

INIT_STD = 0.02
_rows: contextvars.ContextVar[jax.sharding.Sharding | None] = contextvars.ContextVar('rows', default=None)


def sized[Config](
  kind: Callable[..., Config], sizes: Mapping[str, Mapping[str, int]], size: str, /, **fields: Any
) -> Config:
  """The configuration of a named size but for `fields`; ValueError for one that is not known."""
  if size not in sizes:
    raise ValueError(f'size is {size!r}; known: {", ".join(sizes)}')
  return kind(**{**sizes[size], **fields})


@contextlib.contextmanager
def rows_split(sharding: jax.sharding.Sharding | None) -> Iterator[None]:
  """Models that are traced here keep `[B, ...]` in this sharding: what layers hand on, and what attention reads.

  Without this constraint XLA may move the activations and not the weights, as it did in a scan over layers; and cuDNN
  takes queries, keys and values only if they are split alike, and neither along positions nor inside of a head. The
  rest of a layer is left to XLA, and with None all of it.
  """
  token = _rows.set(sharding)
  try:
    yield
  finally:
    _rows.reset(token)


def _keep_rows(x: jax.Array) -> jax.Array:
  """The array `[B, ...]` in the sharding of `rows_split`."""
  sharding = _rows.get()
  return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def check_patterns(config: Any) -> None:
  """ValueError unless there is an entry a layer and a pattern a head, and one for all where the layers are scanned."""
  patterns = config.attention_pattern
  check_attention('attention_pattern', patterns)
  if patterns is not None and not getattr(config, 'causal', True):
    raise ValueError('attention_pattern is of causal attention; with causal=False there is none')
  if isinstance(patterns, tuple):
    if len(patterns) != config.num_layers:
      raise ValueError(f'attention_pattern has {len(patterns)} entries; accepted is one a layer, {config.num_layers}')
    if config.scan_layers and len(set(patterns)) > 1:
      raise ValueError('attention_pattern differs between layers, which scan_layers runs as one')
    for layer, heads in enumerate(patterns):
      if isinstance(heads, tuple) and len(heads) != config.num_heads:
        raise ValueError(
          f'attention_pattern of layer {layer} has {len(heads)} entries; accepted is one a head, {config.num_heads}'
        )


def pattern_of(config: Any, layer: int) -> Any:
  """The attention pattern of a layer: None, one pattern, or one a head."""
  patterns = config.attention_pattern
  return patterns[layer] if isinstance(patterns, tuple) else patterns


def attend(
  config: Any,
  pattern: Any,
  q_BxTxHxK: jax.Array,
  k_BxSxGxK: jax.Array,
  v_BxSxGxK: jax.Array,
  lengths_B: jax.Array | None = None,
) -> jax.Array:
  """Attention [B, T, H, K], causal unless `config.causal` is False, under a pattern if there is one.

  The first `lengths` keys of each sequence are attended to, or all.
  """
  q_BxTxHxK, k_BxSxGxK, v_BxSxGxK = map(_keep_rows, (q_BxTxHxK, k_BxSxGxK, v_BxSxGxK))
  if pattern is None:
    return jax.nn.dot_product_attention(
      q_BxTxHxK,
      k_BxSxGxK,
      v_BxSxGxK,
      key_value_seq_lengths=lengths_B,
      is_causal=getattr(config, 'causal', True),
      implementation=config.attention,
    )
  implementation = None if config.attention == 'cudnn' else 'blocks'
  return sparse_attention(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, patterns=pattern, implementation=implementation)


def rotate(x_BxTxHxK: jax.Array, theta: float) -> jax.Array:
  """Rotary positions: turns each pair (i, i + K/2) of a head by the angle t theta^(-2i/K) at position t.

  Scores of queries and keys so turned depend on their distance alone. Angles are float32.

  >>> import jax.numpy as jnp
  >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
  >>> rotate(jnp.tile(x, (1, 2, 1, 1)), 10_000.0)[0, 1, 0].round(4).tolist()  # cos 1, sin 1
  [0.5403..., 0.8414...]
  """
  length, half = x_BxTxHxK.shape[1], x_BxTxHxK.shape[-1] // 2
  frequency_K2 = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle_TxK2 = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency_K2[None]
  cos, sin = jnp.cos(angle_TxK2)[None, :, None], jnp.sin(angle_TxK2)[None, :, None]
  a, b = jnp.split(x_BxTxHxK.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BxTxHxK.dtype)


def dense(config: Any, features: int, name: str, *, residual: bool = False) -> nn.Dense:
  """A linear layer, biased if the model is; those that write to the residual stream start smaller by sqrt(2 L)."""
  std = INIT_STD / math.sqrt(2 * config.num_layers) if residual else INIT_STD
  return nn.Dense(
    features,
    use_bias=getattr(config, 'bias', False),
    dtype=config.dtype,
    param_dtype=jnp.dtype(config.param_dtype),
    kernel_init=nn.initializers.normal(std),
    name=name,
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def unembed(x_BxTxD: jax.Array, table_VxD: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
  """Logits [B, T, V]; the cotangent is rounded to the dtype of `x`, or its matmuls would run in float32."""
  return jnp.einsum('btd,vd->btv', x_BxTxD, table_VxD, preferred_element_type=jnp.float32).astype(dtype)


def _unembed_fwd(x_BxTxD, table_VxD, dtype):
  return unembed(x_BxTxD, table_VxD, dtype), (x_BxTxD, table_VxD)


def _unembed_bwd(dtype, residuals, cotangent_BxTxV):
  del dtype
  x_BxTxD, table_VxD = residuals
  cotangent_BxTxV = cotangent_BxTxV.astype(x_BxTxD.dtype)
  return (
    jnp.einsum('btv,vd->btd', cotangent_BxTxV, table_VxD),
    jnp.einsum('btv,btd->vd', cotangent_BxTxV, x_BxTxD),
  )


unembed.defvjp(_unembed_fwd, _unembed_bwd)


@jax.custom_vjp
def cross_entropy(logits_BxTxV: jax.Array, targets_BxT: jax.Array) -> jax.Array:
  """-log softmax(logits)[target], float32 [B, T].

  Sums and exponentials are float32 whatever the dtype of the logits, and no float32 array of their size is kept: in
  bfloat16 they and their cotangent are the largest arrays of a step with a large vocabulary.

  >>> round(float(cross_entropy(jnp.zeros((1, 1, 4)), jnp.zeros((1, 1), jnp.int32))[0, 0]), 4)
  1.3863
  """
  return _cross_entropy_fwd(logits_BxTxV, targets_BxT)[0]


def _cross_entropy_fwd(logits_BxTxV, targets_BxT):
  wide_BxTxV = logits_BxTxV.astype(jnp.float32)
  lse_BxT = jax.nn.logsumexp(wide_BxTxV, axis=-1)
  at_BxT = jnp.take_along_axis(logits_BxTxV, targets_BxT[..., None], axis=-1)[..., 0].astype(jnp.float32)
  return lse_BxT - at_BxT, (logits_BxTxV, lse_BxT, targets_BxT)


def _cross_entropy_bwd(residuals, cotangent_BxT):
  logits_BxTxV, lse_BxT, targets_BxT = residuals
  share_BxTxV = jnp.exp(logits_BxTxV.astype(jnp.float32) - lse_BxT[..., None])
  is_target_BxTxV = jax.lax.broadcasted_iota(jnp.int32, logits_BxTxV.shape, 2) == targets_BxT[..., None]
  cotangent_BxTxV = cotangent_BxT[..., None] * (share_BxTxV - is_target_BxTxV)
  return cotangent_BxTxV.astype(logits_BxTxV.dtype), None


cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def run_blocks(block: Any, config: Any, deterministic: bool, x_BxTxD: jax.Array, *others: Any) -> jax.Array:
  """The layers of a model, `block(config, deterministic, pattern)` each: h_0, h_1, ... in turn, or h scanned.

  Each is called with the stream and the same `others`.
  """
  # Inside a scan the loop already keeps XLA from undoing the recomputation.
  if config.remat:
    # 'dots' keeps what matmuls made, so that only what is cheap is computed again.
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if config.remat == 'dots' else None
    block = nn.remat(block, prevent_cse=not config.scan_layers, policy=policy)
  if not config.scan_layers:
    for i in range(config.num_layers):
      x_BxTxD = _keep_rows(block(config, deterministic, pattern_of(config, i), name=f'h_{i}')(x_BxTxD, *others))
    return x_BxTxD
  scan = nn.scan(
    lambda layer, carry, _: (_keep_rows(layer(carry, *others)), None),
    # 'activations' is what `experiments.runs.activations` measures, and by what.
    variable_axes={'params': 0, 'activations': 0, 'probe_params': 0, 'probe_states': 0},
    split_rngs={'params': True, 'mvue': True, 'dropout': True},
    length=config.num_layers,
  )
  return scan(block(config, deterministic, pattern_of(config, 0), name='h'), x_BxTxD, None)[0]


def param_count(params: Any) -> int:
  """Number of scalars in a parameter tree (arrays or shapes)."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
