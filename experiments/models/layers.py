"""What the models here are made of; a `config` is that of any of them. Tensor names carry shapes, see `gpt2`."""

import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.sparse_attention.api import sparse_attention
import sparse24_jax as s24
from sparse24_jax.attention import check_attention

INIT_STD = 0.02


def check_patterns(config: Any) -> None:
  """ValueError unless there is an entry a layer and a pattern a head, and one for all where the layers are scanned."""
  patterns = config.attention_pattern
  check_attention('attention_pattern', patterns)
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


def attend(config: Any, pattern: Any, q_BxTxHxK: jax.Array, k_BxTxGxK: jax.Array, v_BxTxGxK: jax.Array) -> jax.Array:
  """Causal attention [B, T, H, K], under a pattern if there is one."""
  if pattern is None:
    return jax.nn.dot_product_attention(
      q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, is_causal=True, implementation=config.attention
    )
  implementation = None if config.attention == 'cudnn' else 'blocks'
  return sparse_attention(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, patterns=pattern, implementation=implementation)


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


def fused_mlp(config: Any, hidden: int, mlp: str) -> nn.Module:
  """The library's feed-forward layer, with the parameters of the model's own."""
  return s24.linen.Sparse24MLP(
    hidden,
    activation={'relu2': 'squared_relu', 'geglu': 'gelu', 'swiglu': 'silu'}.get(mlp, mlp),
    gated=mlp in ('geglu', 'swiglu'),
    use_bias=getattr(config, 'bias', False),
    dtype=config.dtype,
    param_dtype=jnp.dtype(config.param_dtype),
    kernel_init=nn.initializers.normal(INIT_STD),
    out_kernel_init=nn.initializers.normal(INIT_STD / math.sqrt(2 * config.num_layers)),
    names=('c_fc', 'c_proj', 'c_gate'),
    name='mlp',
  )


@jax.custom_vjp
def unembed(x_BxTxD: jax.Array, table_VxD: jax.Array) -> jax.Array:
  """float32 logits [B, T, V]; the cotangent is rounded to the dtype of `x`, or its products would run in float32."""
  return jnp.einsum('btd,vd->btv', x_BxTxD, table_VxD, preferred_element_type=jnp.float32)


def _unembed_fwd(x_BxTxD, table_VxD):
  return unembed(x_BxTxD, table_VxD), (x_BxTxD, table_VxD)


def _unembed_bwd(residuals, cotangent_BxTxV):
  x_BxTxD, table_VxD = residuals
  cotangent_BxTxV = cotangent_BxTxV.astype(x_BxTxD.dtype)
  return (
    jnp.einsum('btv,vd->btd', cotangent_BxTxV, table_VxD),
    jnp.einsum('btv,btd->vd', cotangent_BxTxV, x_BxTxD),
  )


unembed.defvjp(_unembed_fwd, _unembed_bwd)


def run_blocks(block: Any, config: Any, deterministic: bool, x_BxTxD: jax.Array) -> jax.Array:
  """The layers of a model, `block(config, deterministic, pattern)` each: h_0, h_1, ... in turn, or h scanned."""
  # Inside a scan the loop already keeps XLA from undoing the recomputation.
  block = nn.remat(block, prevent_cse=not config.scan_layers) if config.remat else block
  if not config.scan_layers:
    for i in range(config.num_layers):
      x_BxTxD = block(config, deterministic, pattern_of(config, i), name=f'h_{i}')(x_BxTxD)
    return x_BxTxD
  scan = nn.scan(
    lambda layer, carry, _: (layer(carry), None),
    # 'activations' is what `experiments.runs.activations` measures.
    variable_axes={'params': 0, 'sparse24': 0, 'activations': 0},
    split_rngs={'params': True, 'mvue': True, 'dropout': True},
    length=config.num_layers,
  )
  return scan(block(config, deterministic, pattern_of(config, 0), name='h'), x_BxTxD, None)[0]


def param_count(params: Any) -> int:
  """Number of scalars in a parameter tree (arrays or shapes)."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
