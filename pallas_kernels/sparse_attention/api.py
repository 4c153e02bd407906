"""Causal self-attention under a sparse pattern a head.

Back ends: `reference` (dense, masked: the meaning), `blocks` (skips what a pattern leaves out, plain XLA operations,
any device), and for NVIDIA from compute capability 8.0 `triton` (flash kernels over the parts of any pattern) and
`cudnn` (the library's flash kernels, for full, local and strided heads).
"""

from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels import _dispatch
from pallas_kernels.sparse_attention.blocks import by_pattern
from pallas_kernels.sparse_attention.patterns import heads_of, KINDS, Pattern

__all__ = ['Pattern', 'sparse_attention']

Array = jax.Array

BACKENDS = {
  name: f'pallas_kernels.sparse_attention.{name}:sparse_attention'
  for name in ('reference', 'blocks', 'triton', 'cudnn')
}
# By what was measured on an H100, for each kind by itself. cuDNN on strided heads means very short sequences, which
# nobody has timed: only on demand.
CANDIDATES = dict.fromkeys(KINDS, ('triton', 'blocks')) | {
  'full': ('cudnn', 'triton', 'blocks'), 'local': ('triton', 'cudnn', 'blocks'),
}  # fmt: skip


def sparse_attention(
  q: Array, k: Array, v: Array, *, patterns: Any, scale: float | None = None, implementation: str | None = None
) -> Array:
  """softmax(scale q k^T where the pattern attends) v, for each head under its own causal pattern.

  Args:
    q: [B, T, H, K], float32, bfloat16 or float16.
    k: [B, T, G, K], same dtype; G divides H, head h reads key-value head h div (H / G).
    v: [B, T, G, K], same dtype.
    patterns: a `Pattern` for all heads, or a sequence of H of them. Anything with its fields `kind` and `window` will
      do.
    scale: of the scores; 1 / sqrt(K) if None.
    implementation: 'reference', 'blocks', 'triton', 'cudnn', or None: for each pattern by itself the first that takes
      it, on NVIDIA GPUs cuDNN for full heads and Triton for others, elsewhere blocks.

  Returns:
    [B, T, H, K], dtype of `q`; scores and softmax are float32. Forward mode (`jax.jvp`, `jax.jacfwd`) needs
    implementation='blocks' or 'reference': 'triton' and 'cudnn' have gradients in reverse mode only.

  Raises:
    ValueError: shapes, dtypes or patterns do not fit, or the named implementation refuses.

  Source: Child et al., arXiv 1904.10509; Liu et al., arXiv 2408.11746 (hybrid sparse attention).

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.sparse_attention.api import Pattern, sparse_attention
  >>> x = jnp.ones((1, 8, 2, 4))
  >>> sparse_attention(x, x, x, patterns=[Pattern('local', 2), Pattern('fixed', 4)]).shape
  (1, 8, 2, 4)
  """
  _check(q, k, v)
  each = heads_of(patterns, q.shape[2])
  scale = q.shape[-1] ** -0.5 if scale is None else scale

  def call(q: Array, k: Array, v: Array, each: tuple[Pattern, ...], names: Sequence[str]) -> Array:
    return _dispatch.dispatch(
      'sparse_attention', BACKENDS, implementation, names, q, k, v, patterns=each, scale=scale
    )

  if implementation is not None:
    return call(q, k, v, each, ())
  each = tuple(_simplest(pattern, q.shape[1]) for pattern in each)
  return by_pattern(
    q, k, v, each, lambda pattern, q, k, v: call(q, k, v, (pattern,) * q.shape[2], CANDIDATES[pattern.kind])
  )


def _simplest(pattern: Pattern, length: int) -> Pattern:
  """A window that holds the whole sequence leaves nothing out; `'full'` has no window."""
  full = pattern.kind == 'full' or (pattern.kind != 'strided' and pattern.window >= length)
  return Pattern('full') if full else pattern


def _check(q: Array, k: Array, v: Array) -> None:
  for name, x in (('q', q), ('k', k), ('v', v)):
    if x.ndim != 4:
      raise ValueError(f'{name} must be [batch, positions, heads, head size], found shape {x.shape}')
    if x.dtype != q.dtype or x.dtype.name not in ('float32', 'bfloat16', 'float16'):
      raise ValueError(f'{name} is {x.dtype}; q, k and v must have one dtype: float32, bfloat16 or float16')
  if k.shape != v.shape or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
    raise ValueError(f'k and v must be [batch, positions, groups, size] to fit q {q.shape}, found {k.shape}, {v.shape}')
  if not k.shape[2] or q.shape[2] % k.shape[2]:
    raise ValueError(f'k has {k.shape[2]} heads on axis 2; accepted is a divisor of the {q.shape[2]} of q')
  if not q.shape[1]:
    raise ValueError(f'q of shape {q.shape} has no positions on axis 1')
