"""The meaning of the V:N:M ops, in plain jnp: mask, pack of the squared ReLU, and matmul."""

import dataclasses
import itertools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels._program import traced_once
from pallas_kernels.activations import ACTIVATIONS
from pallas_kernels.operand import from_operand, SparseOperand, to_operand
from pallas_kernels.two_of_four.prune import ranks
from pallas_kernels.vnm import format as fmt
from pallas_kernels.vnm.format import (
  check_blocks,
  check_groups,
  compress_columns,
  CompressedVNM,
  decompress_operand,
  KEPT,
  to_vnm_operand,
  VNMOperand,
)

# Columns of a block up to which all pairs are compared.
_PAIRS_UP_TO = 16


@traced_once('v', 'n', 'm')
def vnm_mask(x: Array, *, v: int, n: int = 2, m: int) -> Array:
  """Per block of `v` rows the four best of each `m` columns, and the `n` best of these in each row.

  Columns are ranked by the sum of magnitudes over the block's rows, taken in float32; entries by magnitude. Among
  equals the lower index stays. A NaN ranks above everything, so that it passes and can be seen.

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
  if m > _PAIRS_UP_TO:
    return _entries(x, best_columns(x, v=v, m=m), v=v, n=n, m=m)
  columns = _largest(_column_scores(x, v=v, m=m), KEPT)[..., None, :, :]
  order = _order(x.reshape(*x.shape[:-2], -1, v, x.shape[-1] // m, m))
  return _largest(jnp.where(columns, order, -1), n).reshape(x.shape)


def _largest(x: Array, n: int) -> Array:
  """Marks the `n` largest of the last axis; ties go to the lower index. A sort takes a GPU many times as long."""
  entries = [x[..., i] for i in range(x.shape[-1])]
  beaten_by = [jnp.zeros(x.shape[:-1], jnp.int8) for _ in entries]
  for i, j in itertools.combinations(range(len(entries)), 2):
    later_wins = entries[j] > entries[i]
    beaten_by[i] += later_wins.astype(jnp.int8)
    beaten_by[j] += jnp.logical_not(later_wins).astype(jnp.int8)
  return jnp.stack([b < n for b in beaten_by], axis=-1)


def best_columns(x: Array, *, v: int, m: int) -> Array:
  """The four columns that each block keeps, ascending: int32 [..., R/V, C/M, 4]."""
  return jnp.sort(jax.lax.top_k(_column_scores(x, v=v, m=m), KEPT)[1], axis=-1)


def _column_scores(x: Array, *, v: int, m: int) -> Array:
  """Sums of magnitudes of the columns of each block, float32 [..., R/V, C/M, M]."""
  *lead, rows, columns = x.shape
  size = jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x).astype(jnp.float32))
  return size.reshape(*lead, rows // v, v, columns // m, m).sum(axis=-3)


def _order(blocks: Array) -> Array:
  """Integers in the order of magnitudes, a NaN above everything."""
  order = ranks(blocks)
  return jnp.where(jnp.isnan(blocks), jnp.iinfo(order.dtype).max, order)


def _entries(x: Array, ids: Array, *, v: int, n: int, m: int) -> Array:
  """The `n` best entries of each row of each block among the columns `ids`."""
  *lead, rows, columns = x.shape
  blocks = x.reshape(*lead, rows // v, v, columns // m, m)
  order = jnp.where(_members(ids, m)[..., None, :, :], _order(blocks), -1)
  return _members(jax.lax.top_k(order, n)[1], m).reshape(x.shape)


def _members(ids: Array, m: int) -> Array:
  """bool [..., m]: which of 0 to m - 1 are among `ids` [..., k]."""
  return jnp.any(ids[..., None] == jax.lax.broadcasted_iota(ids.dtype, (*ids.shape, m), ids.ndim), axis=-2)


def squared_relu(x: Array) -> Array:
  """relu(x)^2 in float32, rounded once; a NaN passes. On a CPU XLA takes squares below 2^-126 for zero."""
  return _squared_relu_and_slope(x)[0].astype(x.dtype)


def _squared_relu_and_slope(x: Array) -> tuple[Array, Array]:
  return ACTIVATIONS['squared_relu'].value_and_slope(x.astype(jnp.float32))


@traced_once('v', 'm', 'activation', 'masked', 'residuals')
def vnm_pack(
  x: Array, *, v: int, m: int, activation: str | None = None, gradient: Array | None = None,
  pattern: VNMOperand | None = None, masked: bool = False, residuals: bool = False,
) -> tuple[VNMOperand, Array | None, Array | None, Array | None]:
  """See `api.vnm_pack`."""
  if gradient is not None and pattern is not None:
    check_groups(pattern, False, name='pattern')
    if activation == 'squared_relu':
      _, slope = _squared_relu_and_slope(decompress_operand(_with_values(pattern, x)))
      gradient = (gradient.astype(jnp.float32) * slope).astype(x.dtype)
    a = _pack_as(gradient, pattern)
    return a, decompress_operand(a) if masked else None, None, None
  a = _pack(squared_relu(x) if activation == 'squared_relu' else x, v=v, m=m)
  if not residuals:
    return a, None, None, None
  counts = jnp.sum(decompress_operand(a) != 0, axis=0, dtype=jnp.int32)
  return a, None, _pack_as(x, a).compact.values, counts


def _pack(x: Array, *, v: int, m: int) -> VNMOperand:
  ids = best_columns(x, v=v, m=m)
  return to_vnm_operand(compress_columns(x, _entries(x, ids, v=v, n=2, m=m), ids, v=v, m=m))


def _with_values(a: VNMOperand, values: Array) -> VNMOperand:
  return dataclasses.replace(a, compact=SparseOperand(values, a.compact.metadata))


def _pack_as(x: Array, pattern: VNMOperand) -> VNMOperand:
  """What a given pattern keeps of `x`."""
  r, k = x.shape
  blocks = x.reshape(r // pattern.v, pattern.v, k)
  kept = jnp.take_along_axis(blocks, pattern.rows[:, None, :], axis=-1).reshape(r, -1)
  return _with_values(pattern, _kept_values(kept, pattern.compact))


def _kept_values(x: Array, pattern: SparseOperand) -> Array:
  """What is stored of `x` under a 2:4 pattern."""
  open_form = from_operand(pattern)
  ones = dataclasses.replace(open_form, values=jnp.ones_like(open_form.values))
  return formats.compress(x, formats.expand(ones) != 0, axis=-1).values


@traced_once()
def transpose_pack(a: VNMOperand, *, used: Array | None, pattern: VNMOperand | None) -> VNMOperand:
  """See `api.transpose_pack`."""
  check_groups(a, False)
  x = decompress_operand(a).T
  if pattern is not None:
    return _pack_as(x, pattern)
  x = x if used is None else jnp.where(used[:, None], x, jnp.zeros((), x.dtype))
  order = jnp.arange(x.shape[1], dtype=jnp.int32).reshape(a.m, -1).T.reshape(-1)  # members of a group beside each other
  b = _pack(x[:, order], v=a.v, m=a.m)
  return VNMOperand(b.compact, order[b.rows], a.m, spread=True)


@traced_once()
def transpose_pack_24(a: VNMOperand, *, used: Array | None, pattern: SparseOperand | None) -> SparseOperand:
  """See `api.transpose_pack_24`."""
  check_groups(a, False)
  x = decompress_operand(a).T
  if pattern is not None:
    return SparseOperand(_kept_values(x, pattern), pattern.metadata)
  x = x if used is None else jnp.where(used[:, None], x, jnp.zeros((), x.dtype))
  return to_operand(formats.compress(x, vnm_mask(x, v=1, m=4), axis=-1))


@traced_once()
def take_columns(a: VNMOperand, columns: Array) -> Array:
  """See `api.take_columns`."""
  check_groups(a, False)
  return decompress_operand(a)[:, columns]


def expand(operand: SparseOperand | VNMOperand) -> Array:
  """See `api.expand`."""
  return decompress_operand(operand) if isinstance(operand, VNMOperand) else formats.expand(from_operand(operand))


@traced_once('out_dtype', 'out_layout')
def vnm_matmul(a: CompressedVNM | VNMOperand, b: Array, *, out_dtype: Any, out_layout: str) -> Array:
  """D[r, n] = sum_k A[r, k] B[k, n] in float32, rounded once at the end; see `api.vnm_matmul`."""
  d = jnp.dot(_dense(a).astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
  return (d if out_layout == 'mn' else d.T).astype(out_dtype)


def _dense(a: CompressedVNM | VNMOperand) -> Array:
  return decompress_operand(a) if isinstance(a, VNMOperand) else fmt.expand(a)
