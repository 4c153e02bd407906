"""What the packers compute, in plain jnp: masks and samples from their own references, then the kernel's operand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels._program import traced_once
from pallas_kernels.operand import SparseOperand, to_operand
from pallas_kernels.two_of_four import mvue, prune, transposable

Array = jax.Array

FLOAT8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
# A sample of a group is at most half of the sum of its magnitudes, which is twice the largest of them.
MVUE_HEADROOM = 2.0


@functools.partial(jax.tree_util.register_dataclass, data_fields=['rows', 'columns', 'codes'], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class PackedPair:
  """A weight [..., R, C] under a transposable mask, packed for both of its matmuls.

  Attributes:
    rows: operand of w, groups along its last axis: values [..., R, C/2].
    columns: operand of the transpose of w, groups along its last axis but one: values [..., C, R/2].
    codes: uint16 [..., R/4, C/4]; bit 4 i + j says that entry (i, j) of a 4x4 block is kept.
  """

  rows: SparseOperand
  columns: SparseOperand
  codes: Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=['operand', 'dense'], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Packed:
  """What one pass makes of a matrix, for its sparse matmul and for its dense one.

  Attributes:
    operand: the sparse operand.
    dense: what the dense matmul reads, where the pass writes it, as it does in float8; else None.
  """

  operand: SparseOperand
  dense: Array | None = None


@traced_once()
def mask_codes(mask: Array) -> Array:
  """uint16 [..., R/4, C/4] from a bool mask [..., R, C]."""
  planes = transposable.block_planes(mask).astype(jnp.uint16)
  bit = jnp.arange(16, dtype=jnp.uint16).reshape((1,) * (planes.ndim - 4) + (4, 4, 1, 1))
  return jnp.sum(planes << bit, axis=(-4, -3), dtype=jnp.uint16)


@traced_once()
def code_mask(codes: Array) -> Array:
  """Inverse of `mask_codes`."""
  bit = jnp.arange(16, dtype=jnp.uint16).reshape((1,) * (codes.ndim - 2) + (4, 4, 1, 1))
  return transposable.join_planes((jnp.expand_dims(codes, (-4, -3)) >> bit) & 1 == 1)


@traced_once('dtype')
def transposable_pack(w: Array, *, dtype: jnp.dtype) -> PackedPair:
  """See `api.transposable_pack`."""
  return masked_pack(w, mask_codes(transposable.transposable_mask(w)), dtype=dtype)


@traced_once('dtype')
def masked_pack(w: Array, codes: Array, scale: Array | None = None, *, dtype: jnp.dtype) -> PackedPair:
  """See `api.masked_pack`."""
  mask = code_mask(codes)
  values = w.astype(dtype) if scale is None else saturated(w.astype(jnp.float32) * scale[..., None, None], dtype)
  rows = to_operand(formats.compress_unchecked(values, mask, axis=-1))
  columns = to_operand(formats.compress_unchecked(values, mask, axis=-2))
  return PackedPair(rows, columns, codes)


@traced_once('axis', 'dtype')
def soft_threshold_pack(w: Array, scale: Array, *, axis: int, dtype: jnp.dtype) -> Packed:
  """See `api.soft_threshold_pack`."""
  soft = prune.soft_threshold(w, axis=axis).astype(jnp.float32) * scale[..., None, None]
  if not is_float8(dtype):
    return Packed(_pack_nonzeros(soft.astype(dtype), axis))
  projected = saturated(soft, dtype)
  projected = jnp.where(_nonzero(projected), projected, jnp.zeros((), dtype))
  return Packed(_pack_nonzeros(projected, axis), projected)


def mvue_pack(
  x: Array, key: Array, scale: Array | None = None, *,
  origin: tuple[Array | int, Array | int, Array | int], dtype: jnp.dtype,
) -> Packed:  # fmt: skip
  """See `api.mvue_pack`."""
  wide = x.astype(jnp.float32)
  sample = mvue.mvue24(wide, key, axis=-2, origin=origin)
  if scale is None:
    return Packed(_pack_nonzeros(saturated(sample, dtype), -2))
  scale = scale[..., None, None]
  operand = _pack_nonzeros(saturated(sample * (scale * jnp.float32(1 / MVUE_HEADROOM)), dtype), -2)
  return Packed(operand, saturated(wide * scale, dtype))


def is_float8(dtype: jnp.dtype) -> bool:
  """Whether `dtype` is one of the float8 types that tensor cores read."""
  return dtype in FLOAT8


@traced_once('dtype')
def saturated(x: Array, dtype: jnp.dtype) -> Array:
  """float32 to `dtype`: to nearest even; values beyond the largest, infinities included, become it; NaN stays NaN."""
  largest = jnp.float32(jnp.finfo(dtype).max)
  return jnp.clip(x, -largest, largest).astype(dtype)


def _nonzero(x: Array) -> Array:
  # By bits: XLA's GPU compiler compares what `x` was before it was rounded, which may not be zero where `x` is.
  bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
  return jax.lax.bitcast_convert_type(x, bits) << 1 != 0


def _pack_nonzeros(x: Array, axis: int) -> SparseOperand:
  return to_operand(formats.compress_unchecked(x, _nonzero(x), axis=axis))
