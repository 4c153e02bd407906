"""Packers in Triton: portable to every GPU from sm_80 on, each one pass over its input."""

from collections.abc import Sequence
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _triton
from pallas_kernels.operand import metadata_shape, SparseOperand
from pallas_kernels.pack._kernels import (
  masked_kernel,
  masked_scaled_kernel,
  mvue_kernel,
  mvue_scaled_kernel,
  repair_kernel,
  soft_threshold_kernel,
  transposable_kernel,
)
from pallas_kernels.pack.reference import is_float8, Packed, PackedPair
from pallas_kernels.triton_blocks.launch import check_float8, check_size, Config, draw_parameters

Array = jax.Array

# Programs of the repair kernel, which as a rule have nothing to do: two a multiprocessor of the largest GPUs.
REPAIRERS = 288
# A search of 16-bit weights has the tile fetched of the program that comes so many later: an H200 is 7% faster by it,
# half as much with twice the distance. Other kernels here gain less than 5%, or lose (LOG.md, 36); other GPUs were not
# timed.
_AHEAD = 512


def transposable_pack(w: Array, *, dtype: jnp.dtype, config: Config | None = None) -> PackedPair:
  """See `api.transposable_pack`."""
  batches, rows, columns = _shape(w, dtype)
  config = config or Config(num_warps=4 if w.dtype == jnp.float32 else 2)
  grid = config.grid(batches, rows, columns)
  structs = [
    *pair_structs(w.shape, dtype),
    jax.ShapeDtypeStruct((*w.shape[:-2], rows // 4, columns // 4), jnp.uint16),
  ]
  constants = config.constants(rows, columns)
  ahead = 0 if w.dtype == jnp.float32 else _AHEAD
  *made, special = _triton.call(
    transposable_kernel, w, out_shape=[*structs, jax.ShapeDtypeStruct((1,), jnp.int32)], grid=grid,
    zeroed_outputs=(len(structs),), num_warps=config.num_warps, AHEAD=ahead, **constants,
  )  # fmt: skip
  *operands, codes = _triton.call(
    repair_kernel, w, special, *made, out_shape=structs, grid=(min(grid[0], REPAIRERS), batches),
    num_warps=4, input_output_aliases={2 + i: i for i in range(len(structs))}, TILES=grid[0], **constants,
  )  # fmt: skip
  return _pair(operands, codes)


def masked_pack(
  w: Array, codes: Array, scale: Array | None = None, *, dtype: jnp.dtype, config: Config | None = None
) -> PackedPair:
  """See `api.masked_pack`."""
  config = config or Config(num_warps=4 if scale is None else 2)
  batches, rows, columns = _shape(w, dtype)
  kernel, scales = (masked_kernel, ()) if scale is None else (masked_scaled_kernel, (scale.reshape(-1),))
  operands = _triton.call(
    kernel, w, codes, *scales,
    out_shape=pair_structs(w.shape, dtype),
    grid=config.grid(batches, rows, columns), num_warps=config.num_warps, **config.constants(rows, columns),
  )  # fmt: skip
  return _pair(operands, codes)


def soft_threshold_pack(
  w: Array, scale: Array, *, axis: int, dtype: jnp.dtype, config: Config | None = None
) -> Packed:
  """See `api.soft_threshold_pack`."""
  float8 = is_float8(dtype)
  wide = float8 and w.dtype == jnp.float32
  config = config or Config(num_warps=2 if axis == -2 and not wide else 4)
  absent = {} if float8 else {'dense': None}
  return _packed(soft_threshold_kernel, w, [scale.reshape(-1)], axis, dtype, config, GROUPS_DOWN=axis == -2, **absent)


def mvue_pack(
  x: Array, key: Array, scale: Array | None = None, *, origin: tuple[Any, Any, Any], dtype: jnp.dtype,
  config: Config | None = None,
) -> Packed:  # fmt: skip
  """See `api.mvue_pack`."""
  drawn = draw_parameters(key, origin)
  if scale is None:
    return _packed(mvue_kernel, x, [drawn], -2, dtype, config or Config(num_warps=2))
  return _packed(mvue_scaled_kernel, x, [drawn, scale.reshape(-1)], -2, dtype, config or Config(tile_columns=32))


def _packed(
  kernel: Any, x: Array, more: Sequence[Array], axis: int, dtype: jnp.dtype, config: Config, **constants: Any
) -> Packed:
  batches, rows, columns = _shape(x, dtype)
  values, metadata, *dense = _triton.call(
    kernel, x, *more, out_shape=structs(x.shape, dtype, axis),
    grid=config.grid(batches, rows, columns), num_warps=config.num_warps,
    **constants, **config.constants(rows, columns),
  )  # fmt: skip
  return Packed(SparseOperand(values, metadata), *dense)


def _shape(x: Array, dtype: jnp.dtype) -> tuple[int, int, int]:
  """(batches, rows, columns), or NotImplementedError with what the kernels lack."""
  rows, columns = x.shape[-2:]
  if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
    raise NotImplementedError(f'the Triton packers read bfloat16, float16 or float32, found {x.dtype}')
  if is_float8(dtype):
    check_float8()
  elif dtype not in (jnp.bfloat16, jnp.float16):
    raise NotImplementedError(f'the Triton packers write 16-bit values or float8, found {dtype}')
  if rows % 4 or columns % 4:
    raise NotImplementedError(f'the Triton packers take whole 4x4 blocks, found {rows} x {columns}')
  check_size(x)
  return math.prod(x.shape[:-2]), rows, columns


def structs(shape: tuple[int, ...], dtype: jnp.dtype, axis: int) -> list[jax.ShapeDtypeStruct]:
  """Values and metadata of one operand of an array, and in float8 the array."""
  return _of_operand(shape, dtype, axis) + ([jax.ShapeDtypeStruct(shape, dtype)] if is_float8(dtype) else [])


def pair_structs(shape: tuple[int, ...], dtype: jnp.dtype) -> list[jax.ShapeDtypeStruct]:
  """Values and metadata of both operands."""
  return _of_operand(shape, dtype, -1) + _of_operand(shape, dtype, -2)


def _of_operand(shape: tuple[int, ...], dtype: jnp.dtype, axis: int) -> list[jax.ShapeDtypeStruct]:
  *lead, rows, columns = shape
  m, k = (columns, rows) if axis == -2 else (rows, columns)
  return [
    jax.ShapeDtypeStruct((*lead, m, k // 2), dtype),
    jax.ShapeDtypeStruct((*lead, *metadata_shape(m, k)), jnp.uint32),
  ]


def _pair(operands: Sequence[Array], codes: Array) -> PackedPair:
  return PackedPair(SparseOperand(*operands[:2]), SparseOperand(*operands[2:]), codes)
