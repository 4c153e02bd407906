"""The meaning of the V:N:M ops, in plain jnp: mask, pack of the squared ReLU, and matmul."""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.prune.reference import ranks
from pallas_kernels.vnm.format import (
  check_blocks,
  compress_columns,
  CompressedVNM,
  decompress,
  decompress_operand,
  KEPT,
  to_vnm_operand,
  VNMOperand,
)


def vnm_mask(x: Array, *, v: int, n: int = 2, m: int) -> Array:
  """Per block of `v` rows the four best of each `m` columns, and the `n` best of these in each row.

  Columns are ranked by the sum of magnitudes over the block's rows, taken in float32; entries by magnitude. Of equals
  the lower index stays. A NaN ranks above everything, so that it passes and can be seen.

  Args:
    x: [..., R, C], whole blocks; float32, bfloat16 or float16.
    v: rows of a block.
    n: 2.
    m: columns of a block, 4 to 256; `m=4` is plain 2:4.

  Returns:
    bool, shape of `x`, two True in each row of each block.

  Source: the format and its sizes, Castro et al., "VENOM", SC'23 (arXiv 2310.02065); columns by their sums of
  magnitudes in place of its search over all quadruples.

  >>> x = jnp.array([[1.0, 0, 9, 0, 0, 5, 4, 3], [0, 0, 8, 0, 0, 1, 7, 2]])
  >>> vnm_mask(x, v=2, m=8).astype(int).tolist()
  [[0, 0, 1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 1, 0]]
  """
  check_blocks(x, v, n, m)
  formats.check_floating(x, 'x')
  return _entries(x, best_columns(x, v=v, m=m), v=v, n=n, m=m)


def best_columns(x: Array, *, v: int, m: int) -> Array:
  """The four columns that each block keeps, ascending: int32 [..., R/V, C/M, 4]."""
  *lead, rows, columns = x.shape
  size = jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x).astype(jnp.float32))
  score = size.reshape(*lead, rows // v, v, columns // m, m).sum(axis=-3)
  return jnp.sort(jax.lax.top_k(score, KEPT)[1], axis=-1)


def _entries(x: Array, ids: Array, *, v: int, n: int, m: int) -> Array:
  """The `n` best entries of each row of each block among the columns `ids`."""
  *lead, rows, columns = x.shape
  blocks = x.reshape(*lead, rows // v, v, columns // m, m)
  order = ranks(blocks)
  order = jnp.where(jnp.isnan(blocks), jnp.iinfo(order.dtype).max, order)
  order = jnp.where(_members(ids, m)[..., None, :, :], order, -1)
  return _members(jax.lax.top_k(order, n)[1], m).reshape(x.shape)


def _members(ids: Array, m: int) -> Array:
  """bool [..., m]: which of 0 to m - 1 are among `ids` [..., k]."""
  return jnp.any(ids[..., None] == jax.lax.broadcasted_iota(ids.dtype, (*ids.shape, m), ids.ndim), axis=-2)


def squared_relu(x: Array) -> Array:
  """relu(x)^2 in float32, rounded once; a NaN passes."""
  r = _relu(x)
  return (r * r).astype(x.dtype)


def _relu(x: Array) -> Array:
  x = x.astype(jnp.float32)
  return jnp.where(x <= 0, 0.0, x)


def vnm_pack(
  x: Array, *, v: int, m: int, axis: int = -1, spread: bool = False, activation: str | None = None,
  gradient: Array | None = None, pattern: VNMOperand | None = None, masked: bool = False,
) -> tuple[VNMOperand, Array | None]:
  """See `api.vnm_pack`."""
  del pattern  # it is found again
  y = packed = squared_relu(x) if activation == 'squared_relu' else x
  if gradient is not None:
    packed = gradient
    if activation == 'squared_relu':
      packed = (2 * gradient.astype(jnp.float32) * _relu(x)).astype(x.dtype)
  order = jnp.arange(x.shape[axis], dtype=jnp.int32)
  if axis == -2:
    y, packed = y.T, packed.T
  if spread:
    order = order.reshape(m, -1).T.reshape(-1)
    y, packed = y[:, order], packed[:, order]
  ids = best_columns(y, v=v, m=m)
  kept = _entries(y, ids, v=v, n=2, m=m)
  a = to_vnm_operand(compress_columns(packed, kept, ids, v=v, m=m))
  dense = None
  if masked:
    dense = jnp.where(kept, packed, jnp.zeros((), x.dtype))
    dense = dense.at[:, order].set(dense, unique_indices=True) if spread else dense
    dense = dense.T if axis == -2 else dense
  return VNMOperand(a.compact, order[a.rows], m), dense


def vnm_matmul(a: CompressedVNM | VNMOperand, b: Array, *, out_dtype: Any, out_layout: str) -> Array:
  """D[r, n] = sum_k A[r, k] B[k, n] in float32, rounded once at the end; see `api.vnm_matmul`."""
  d = jnp.dot(_dense(a).astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
  return (d if out_layout == 'mn' else d.T).astype(out_dtype)


def dense_vnm_matmul(a: CompressedVNM | VNMOperand, b: Array, *, out_dtype: Any, out_layout: str) -> Array:
  """`vnm_matmul` on the dense tensor cores, after decompression."""
  d = jnp.dot(_dense(a), b, preferred_element_type=jnp.float32)
  return (d if out_layout == 'mn' else d.T).astype(out_dtype)


def _dense(a: CompressedVNM | VNMOperand) -> Array:
  return decompress_operand(a) if isinstance(a, VNMOperand) else decompress(a)
