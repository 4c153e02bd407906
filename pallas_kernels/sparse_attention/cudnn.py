"""Sparse attention by cuDNN's flash kernels, for the patterns that they can serve.

`local` is a sliding window. `strided` is causal attention within each of the c residues of the position, which become
part of the batch. The other two join two matmuls under one softmax, which these kernels cannot.
"""

import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import _device
from pallas_kernels.sparse_attention.blocks import by_pattern
from pallas_kernels.sparse_attention.patterns import Pattern

SERVED = ('full', 'local', 'strided')


def sparse_attention(q: Array, k: Array, v: Array, *, patterns: tuple[Pattern, ...], scale: float) -> Array:
  """The back end: `reference.sparse_attention` by cuDNN.

  Raises:
    NotImplementedError: no NVIDIA GPU of compute capability 8.0, a dtype of 32 bits, a pattern that it cannot serve, or
      shapes that this version of cuDNN refuses, forward or backward.
  """
  device = _device.current()
  if 2 not in device.arch.itemsizes:
    raise NotImplementedError(f'cuDNN flash attention needs compute capability 8.0, {device.name} has none')
  if q.dtype not in (jnp.bfloat16, jnp.float16):
    raise NotImplementedError(f'cuDNN flash attention takes bfloat16 and float16, found {q.dtype}')
  refused = sorted({pattern.kind for pattern in patterns} - set(SERVED))
  if refused:
    raise NotImplementedError(f'cuDNN serves {list(SERVED)}, found {refused}')

  def one(pattern: Pattern, q: Array, k: Array, v: Array) -> Array:
    if reason := _refusal(pattern, q.shape, k.shape, q.dtype, scale, device):
      raise NotImplementedError(f'cuDNN refuses {pattern}: {reason}')
    return attend(pattern, q, k, v, scale, 'cudnn')

  return by_pattern(q, k, v, patterns, one)


@functools.lru_cache(maxsize=256)
def _refusal(
  pattern: Pattern, q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: Any, scale: float, device: Any
) -> str | None:
  """Why cuDNN cannot run these shapes, None if it can: some of its limits show only when it compiles a graph.

  The device is part of the key, nothing else.
  """
  del device
  q, kv = jax.ShapeDtypeStruct(q_shape, dtype), jax.ShapeDtypeStruct(kv_shape, dtype)

  def step(q: Array, k: Array, v: Array, dy: Array) -> Any:
    return jax.vjp(lambda q, k, v: attend(pattern, q, k, v, scale, 'cudnn'), q, k, v)[1](dy)

  try:
    jax.jit(step).lower(q, kv, kv, q).compile()
  except (ValueError, RuntimeError) as e:  # NotImplementedError and JAX's own are RuntimeErrors
    if 'RESOURCE_EXHAUSTED' in str(e):  # of this moment, not of cuDNN: what is raised is not cached
      raise NotImplementedError(f'no memory to try cuDNN with: {str(e)[:300]}') from e
    return str(e)[:300]
  return None


def attend(pattern: Pattern, q: Array, k: Array, v: Array, scale: float, implementation: str) -> Array:
  """One pattern by `jax.nn.dot_product_attention`."""
  batch, length, _, _ = q.shape
  options: dict[str, Any] = dict(scale=scale, is_causal=True, implementation=implementation)
  if pattern.kind == 'local':
    return jax.nn.dot_product_attention(q, k, v, local_window_size=(pattern.window - 1, 0), **options)
  if pattern.kind == 'full':
    return jax.nn.dot_product_attention(q, k, v, **options)
  c = min(pattern.window, length)
  blocks = -(-length // c)

  def residues_first(x: Array) -> Array:
    x = jnp.pad(x, ((0, 0), (0, blocks * c - length), (0, 0), (0, 0)))
    return x.reshape(batch, blocks, c, *x.shape[2:]).swapaxes(1, 2).reshape(batch * c, blocks, *x.shape[2:])

  y = jax.nn.dot_product_attention(residues_first(q), residues_first(k), residues_first(v), **options)
  return y.reshape(batch, c, blocks, *y.shape[2:]).swapaxes(1, 2).reshape(batch, blocks * c, *y.shape[2:])[:, :length]
