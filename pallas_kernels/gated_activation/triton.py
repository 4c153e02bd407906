"""Gated activations in Triton: forward, backward, and backward with the MVUE pack of its result in one pass.

The backward is memory-bound and its result is read three times if the pack is a kernel of its own (written, read by the
input-gradient matmul, read by the packer); fused, the packer's read goes away.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _triton
from pallas_kernels.mosaic import _ptx
from pallas_kernels.pack import _blocks, _kernels, _kernels8
from pallas_kernels.pack import triton as pack
from pallas_kernels.pack.reference import Packed8
from pallas_kernels.sparse_matmul.operand import SparseOperand, words_shape

Array = jax.Array

GELU: tl.constexpr = tl.constexpr(2 * math.sqrt(2 / math.pi))
LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))


@triton.jit
def _sigmoid2(x):
  """The sigmoid of x / log2(e)."""
  return _ptx.reciprocal(1.0 + _ptx.exp2(-x))


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
  """(activation, derivative) of float32 z."""
  if ACTIVATION == 'silu':
    s = _sigmoid2(z * LOG2_E)
    value = z * s
    return value, s + value * (1.0 - s)
  elif ACTIVATION == 'gelu':
    square = z * z
    s = _sigmoid2(z * (GELU * LOG2_E + (GELU * LOG2_E * 0.044715) * square))
    value = z * s
    return value, s + value * (1.0 - s) * (GELU + (GELU * 0.134145) * square)
  elif ACTIVATION == 'relu':
    return tl.maximum(z, 0.0), tl.where(z > 0, 1.0, 0.0)
  else:
    r = tl.maximum(z, 0.0)
    return r * r, 2.0 * r


@triton.jit
def forward_kernel(
  z, h, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOWN: tl.constexpr, SIZE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
  """h [ROWS, COLUMNS] from z, which holds gate and up side by side, or one above the other if DOWN."""
  # In whole lines of the array: lines of COLUMNS, or one long line if the halves are contiguous.
  per_line: tl.constexpr = (COLUMNS + SIZE - 1) // SIZE
  line = (tl.program_id(0) // per_line).to(tl.int64)
  at = (tl.program_id(0) % per_line) * SIZE + tl.arange(0, SIZE)
  there = at < COLUMNS
  if DOWN:
    gate = z + line * COLUMNS + at
    up = gate + tl.cast(ROWS, tl.int64) * COLUMNS
  else:
    gate = z + line * 2 * COLUMNS + at
    up = gate + COLUMNS
  value, _ = activate(tl.load(gate, mask=there, other=0).to(tl.float32), ACTIVATION)
  result = value * tl.load(up, mask=there, other=0).to(tl.float32)
  tl.store(h + line * COLUMNS + at, result.to(h.dtype.element_ty), mask=there)


@triton.jit
def backward_kernel(
  dh, z, parameters, dz, values, words,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
  ACTIVATION: tl.constexpr, GATED: tl.constexpr, DOWN: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
  """dz from dh [ROWS, COLUMNS] and z, and the MVUE pack of dz along tokens if PACK.

  Features are the columns, or the rows if DOWN; z and dz hold gate and up along them if GATED.
  """
  place = _blocks.tile(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
  rows: tl.constexpr = 2 * ROWS if GATED and DOWN else ROWS
  columns: tl.constexpr = 2 * COLUMNS if GATED and not DOWN else COLUMNS
  r, r_up, above = _gradients(dh, z, place, dz.dtype.element_ty, ROWS, COLUMNS, ACTIVATION, GATED, DOWN)
  if GATED:
    _finish(r_up, parameters, dz, values, words, above, rows, columns, DOWN, PACK)
  _finish(r, parameters, dz, values, words, place, rows, columns, DOWN, PACK)


@triton.jit
def backward8_kernel(
  dh, z, parameters, scale, dz, values, words,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
  ACTIVATION: tl.constexpr, GATED: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
  """`backward_kernel` with dz and its pack in float8: what `mvue8_kernel` makes of the dz in the dtype of z."""
  place = _blocks.tile(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
  rows: tl.constexpr = 2 * ROWS if GATED and DOWN else ROWS
  columns: tl.constexpr = 2 * COLUMNS if GATED and not DOWN else COLUMNS
  source: tl.constexpr = z.dtype.element_ty
  r, r_up, above = _gradients(dh, z, place, source, ROWS, COLUMNS, ACTIVATION, GATED, DOWN)
  factor = tl.load(scale)
  if GATED:
    _kernels8.sample_and_store8(
      r_up, source, parameters, factor, values, words, dz, above, tl.program_id(1), rows, columns, not DOWN, True
    )
  _kernels8.sample_and_store8(
    r, source, parameters, factor, values, words, dz, place, tl.program_id(1), rows, columns, not DOWN, True
  )


@triton.jit
def _gradients(
  dh, z, place, dtype: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
  ACTIVATION: tl.constexpr, GATED: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
  """(blocks of dz, those of its half for up and their place if GATED), as bits of `dtype`."""
  columns: tl.constexpr = 2 * COLUMNS if GATED and not DOWN else COLUMNS
  d = _blocks.entries(_blocks.load_blocks(dh, place, COLUMNS))
  g = _blocks.entries(_blocks.load_blocks(z, place, columns))
  above = _blocks.moved(place, ROWS // 4 if DOWN else 0, 0 if DOWN else COLUMNS // 4)
  if GATED:
    u = _blocks.entries(_blocks.load_blocks(z, above, columns))
    r0 = _gated_row(d[0], g[0], u[0], dtype, ACTIVATION)
    r1 = _gated_row(d[1], g[1], u[1], dtype, ACTIVATION)
    r2 = _gated_row(d[2], g[2], u[2], dtype, ACTIVATION)
    r3 = _gated_row(d[3], g[3], u[3], dtype, ACTIVATION)
    return (r0[0], r1[0], r2[0], r3[0]), (r0[1], r1[1], r2[1], r3[1]), above
  else:
    r = (
      _plain_row(d[0], g[0], dtype, ACTIVATION),
      _plain_row(d[1], g[1], dtype, ACTIVATION),
      _plain_row(d[2], g[2], dtype, ACTIVATION),
      _plain_row(d[3], g[3], dtype, ACTIVATION),
    )
    return r, r, above


@triton.jit
def _finish(
  r, parameters, dz, values, words, place, rows: tl.constexpr, columns: tl.constexpr,
  DOWN: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
  """Stores the blocks `r` of dz and packs a sample of them."""
  for i in tl.static_range(4):
    _blocks.store_row(dz, 4 * place[0] + i, place[1], columns, place[2], r[i])
  if PACK:
    _kernels.sample_and_store(
      r, dz.dtype.element_ty, parameters, values, words, place, tl.program_id(1), rows, columns, not DOWN
    )


@triton.jit
def _gated_row(d, g, u, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
  """Bits of (gate's gradients, up's gradients) of four entries."""
  a0, b0 = _gated(d[0], g[0], u[0], dtype, ACTIVATION)
  a1, b1 = _gated(d[1], g[1], u[1], dtype, ACTIVATION)
  a2, b2 = _gated(d[2], g[2], u[2], dtype, ACTIVATION)
  a3, b3 = _gated(d[3], g[3], u[3], dtype, ACTIVATION)
  return _blocks.row_to_bits(a0, a1, a2, a3, dtype), _blocks.row_to_bits(b0, b1, b2, b3, dtype)


@triton.jit
def _gated(d, g, u, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
  d = _blocks.to_float(d, dtype)
  value, slope = activate(_blocks.to_float(g, dtype), ACTIVATION)
  return d * _blocks.to_float(u, dtype) * slope, d * value


@triton.jit
def _plain_row(d, g, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
  return _blocks.row_to_bits(
    _plain(d[0], g[0], dtype, ACTIVATION),
    _plain(d[1], g[1], dtype, ACTIVATION),
    _plain(d[2], g[2], dtype, ACTIVATION),
    _plain(d[3], g[3], dtype, ACTIVATION),
    dtype,
  )


@triton.jit
def _plain(d, g, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
  _, slope = activate(_blocks.to_float(g, dtype), ACTIVATION)
  return _blocks.to_float(d, dtype) * slope


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
  """Entries a program takes, and its warps."""

  size: int = 2048
  num_warps: int = 8


def gated_activation(z: Array, *, activation: str, axis: int, config: ForwardConfig | None = None) -> Array:
  """See `api.gated_activation`."""
  config = config or ForwardConfig()
  _check(z)
  rows, columns = (z.shape[0] // 2, z.shape[1]) if axis == -2 else (z.shape[0], z.shape[1] // 2)
  # Halves one above the other are contiguous: any line length will do, and long lines waste no tail.
  lines, length = (1, rows * columns) if axis == -2 else (rows, columns)
  (h,) = _triton.call(
    forward_kernel, z, out_shape=[jax.ShapeDtypeStruct((rows, columns), z.dtype)],
    grid=(lines * -(-length // config.size),), num_warps=config.num_warps,
    ROWS=lines, COLUMNS=length, DOWN=axis == -2, SIZE=config.size, ACTIVATION=activation,
  )  # fmt: skip
  return h


def activation_backward(
  dh: Array, z: Array, *, activation: str, gated: bool, axis: int, config: pack.Config | None = None
) -> Array:
  """See `api.activation_backward`."""
  return _backward(dh, z, None, (0, 0, 0), activation, gated, axis, config or pack.Config())[0]


def activation_backward_pack(
  dh: Array, z: Array, key: Array, *, activation: str, gated: bool, axis: int, origin: tuple[Any, Any, Any],
  config: pack.Config | None = None,
) -> tuple[Array, SparseOperand]:  # fmt: skip
  """See `api.activation_backward_pack`."""
  config = config or _default_config(gated)
  dz, values, words = _backward(dh, z, key, origin, activation, gated, axis, config)
  return dz, SparseOperand(values, words)


def activation_backward_pack8(
  dh: Array, z: Array, key: Array, scale: Array, *, activation: str, gated: bool, axis: int,
  origin: tuple[Any, Any, Any], dtype: jnp.dtype, config: pack.Config | None = None,
) -> Packed8:  # fmt: skip
  """See `api.activation_backward_pack8`."""
  pack.check_float8()
  config = config or pack.Config(tile_columns=32, num_warps=16 if gated else 8)
  dz, values, words = _backward(dh, z, key, origin, activation, gated, axis, config, scale, dtype)
  return Packed8(SparseOperand(values, words), dz)


def _default_config(gated: bool) -> pack.Config:
  # Two halves at once need twice the registers a block: one block a thread.
  return pack.Config(num_warps=8 if gated else 4)


def _backward(
  dh: Array, z: Array, key: Array | None, origin: tuple[Any, Any, Any], activation: str, gated: bool, axis: int,
  config: pack.Config, scale: Array | None = None, dtype: jnp.dtype | None = None,
) -> tuple[Array, ...]:  # fmt: skip
  """(dz, values, words), in float8 if there is a `scale`; the last two mean nothing without a `key`."""
  _check(z)
  rows, columns = dh.shape
  if rows % 4 or columns % 4 or (gated and key is not None and dh.shape[axis] % 64):
    raise NotImplementedError(
      f'the Triton backward takes whole 4x4 blocks, with a gate and a pack 64 features, found {dh.shape}'
    )
  packing = key is not None
  dtype = z.dtype if dtype is None else dtype
  features, tokens = (z.shape[0], z.shape[1]) if axis == -2 else (z.shape[1], z.shape[0])
  structs = [
    jax.ShapeDtypeStruct(z.shape, dtype),
    jax.ShapeDtypeStruct((features, tokens // 2) if packing else (1,), dtype),
    jax.ShapeDtypeStruct(words_shape(features, tokens) if packing else (1,), jnp.uint32),
  ]
  parameters = pack.draw_parameters(key, origin) if key is not None else jnp.zeros((1,), jnp.uint32)
  options = dict(
    out_shape=structs, grid=config.grid(1, rows, columns), num_warps=config.num_warps,
    ACTIVATION=activation, GATED=gated, DOWN=axis == -2, **config.constants(rows, columns),
  )  # fmt: skip
  if scale is None:
    return _triton.call(backward_kernel, dh, z, parameters, PACK=packing, **options)
  return _triton.call(backward8_kernel, dh, z, parameters, scale.astype(jnp.float32).reshape(1), **options)


def _check(z: Array) -> None:
  if z.dtype not in (jnp.bfloat16, jnp.float16):
    raise NotImplementedError(f'the Triton activations take bfloat16 or float16, found {z.dtype}')
  pack.check_size(z)
