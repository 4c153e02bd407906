"""The backward of activations in Triton, with the MVUE pack of its result in one pass.

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

from pallas_kernels import _triton, activations
from pallas_kernels.operand import metadata_shape, SparseOperand
from pallas_kernels.pack.reference import Packed
from pallas_kernels.triton_blocks import blocks, launch, ptx, sample

Array = jax.Array

# 0.5 (1 + tanh(y)) is the sigmoid of 2 y.
GELU: tl.constexpr = tl.constexpr(2 * activations.GELU)
GELU_CUBE: tl.constexpr = tl.constexpr(activations.GELU_CUBE)
NORMAL_0, NORMAL_1, NORMAL_2, NORMAL_3, NORMAL_4 = map(tl.constexpr, activations.NORMAL)
NORMAL_STEP: tl.constexpr = tl.constexpr(activations.NORMAL_STEP)
HALF_ROOT: tl.constexpr = tl.constexpr(math.sqrt(0.5))
DENSITY: tl.constexpr = tl.constexpr(1 / math.sqrt(2 * math.pi))
LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))


@triton.jit
def _sigmoid2(x):
  """The sigmoid of x / log2(e)."""
  return ptx.reciprocal(1.0 + ptx.exp2(-x))


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
  """(activation, derivative) of float32 z."""
  if ACTIVATION == 'silu':
    s = _sigmoid2(z * LOG2_E)
    value = z * s
    return value, s + value * (1.0 - s)
  elif ACTIVATION == 'gelu':
    square = z * z
    s = _sigmoid2(z * (GELU * LOG2_E + (GELU * LOG2_E * GELU_CUBE) * square))
    value = z * s
    return value, s + value * (1.0 - s) * (GELU + (GELU * 3 * GELU_CUBE) * square)
  elif ACTIVATION == 'gelu_exact':
    # `activations._normal`.
    t = tl.abs(z) * HALF_ROOT
    k = ptx.reciprocal(1.0 + NORMAL_STEP * t)
    bell = ptx.exp2(-(t * t) * LOG2_E)
    series = NORMAL_0 * k
    series = (series + NORMAL_1) * k
    series = (series + NORMAL_2) * k
    series = (series + NORMAL_3) * k
    tail = 0.5 * ((series + NORMAL_4) * k) * bell
    share = tl.where(z < 0, tail, 1.0 - tail)
    return z * share, share + z * (bell * DENSITY)
  elif ACTIVATION == 'relu':
    return tl.where(z <= 0, 0.0, z), tl.where(z > 0, 1.0, 0.0)
  else:
    r = tl.where(z <= 0, 0.0, z)
    return r * r, 2.0 * r


@triton.jit
def backward_kernel(
  dh, z, parameters, dz, values, metadata,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
  ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
  """dz from dh [ROWS, COLUMNS] and z, and the MVUE pack of dz along tokens, the rows.

  z and dz hold gate and up side by side if GATED.
  """
  place = blocks.tile(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
  _backward(dh, z, parameters, None, dz, values, metadata, place, ROWS, COLUMNS, ACTIVATION, GATED)


@triton.jit
def backward_scaled_kernel(
  dh, z, parameters, scale, dz, values, metadata,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
  ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
  """`backward_kernel` with dz and its pack in float8: what `mvue_scaled_kernel` makes of the dz in the dtype of z."""
  place = blocks.tile(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
  _backward(dh, z, parameters, scale, dz, values, metadata, place, ROWS, COLUMNS, ACTIVATION, GATED)


@triton.jit
def _backward(
  dh, z, parameters, scale, dz, values, metadata, place, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
  ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
  columns: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
  source: tl.constexpr = z.dtype.element_ty
  r, r_up, above = _gradients(dh, z, place, source, COLUMNS, ACTIVATION, GATED)
  factor = None if scale is None else tl.load(scale)
  if GATED:
    _finish(r_up, source, parameters, factor, dz, values, metadata, above, ROWS, columns)
  _finish(r, source, parameters, factor, dz, values, metadata, place, ROWS, columns)


@triton.jit
def _gradients(
  dh, z, place, dtype: tl.constexpr, COLUMNS: tl.constexpr,
  ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
  """(blocks of dz, those of its half for up and their place if GATED), as bits of `dtype`."""
  columns: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
  d = blocks.entries(blocks.load_blocks(dh, place, COLUMNS))
  g = blocks.entries(blocks.load_blocks(z, place, columns))
  above = blocks.moved(place, 0, COLUMNS // 4)
  if GATED:
    u = blocks.entries(blocks.load_blocks(z, above, columns))
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
  r, source: tl.constexpr, parameters, scale, dz, values, metadata, place, rows: tl.constexpr, columns: tl.constexpr
):  # fmt: skip
  """Stores the blocks `r` of dz and packs a sample of them."""
  if scale is None:
    for i in tl.static_range(4):
      blocks.store_row(dz, 4 * place[0] + i, place[1], columns, place[2], r[i])
  sample.sample_and_store(
    r, source, parameters, scale, values, metadata, dz, place, tl.program_id(1), rows, columns
  )


@triton.jit
def _gated_row(d, g, u, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
  """Bits of (gate's gradients, up's gradients) of four entries."""
  a0, b0 = _gated(d[0], g[0], u[0], dtype, ACTIVATION)
  a1, b1 = _gated(d[1], g[1], u[1], dtype, ACTIVATION)
  a2, b2 = _gated(d[2], g[2], u[2], dtype, ACTIVATION)
  a3, b3 = _gated(d[3], g[3], u[3], dtype, ACTIVATION)
  return blocks.row_to_bits(a0, a1, a2, a3, dtype), blocks.row_to_bits(b0, b1, b2, b3, dtype)


@triton.jit
def _gated(d, g, u, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
  d = blocks.to_float(d, dtype)
  value, slope = activate(blocks.to_float(g, dtype), ACTIVATION)
  return d * blocks.to_float(u, dtype) * slope, d * value


@triton.jit
def _plain_row(d, g, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
  return blocks.row_to_bits(
    _plain(d[0], g[0], dtype, ACTIVATION),
    _plain(d[1], g[1], dtype, ACTIVATION),
    _plain(d[2], g[2], dtype, ACTIVATION),
    _plain(d[3], g[3], dtype, ACTIVATION),
    dtype,
  )


@triton.jit
def _plain(d, g, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
  _, slope = activate(blocks.to_float(g, dtype), ACTIVATION)
  return blocks.to_float(d, dtype) * slope


def activation_backward_pack(
  dh: Array, z: Array, key: Array, scale: Array | None = None, *, activation: str, gated: bool,
  origin: tuple[Any, Any, Any], dtype: jnp.dtype, config: launch.Config | None = None,
) -> Packed:  # fmt: skip
  """See `api.activation_backward_pack`."""
  if z.dtype not in (jnp.bfloat16, jnp.float16):
    raise NotImplementedError(f'the Triton activations take bfloat16 or float16, found {z.dtype}')
  launch.check_size(z)
  if scale is not None:
    launch.check_float8()
  rows, columns = dh.shape
  if rows % 4 or columns % 4 or (gated and columns % 64):
    raise NotImplementedError(
      f'the Triton backward takes whole 4x4 blocks, with a gate 64 features, found {dh.shape}'
    )
  tokens, features = z.shape
  if config is None:
    config = launch.Config() if scale is None or gated else launch.Config(tile_columns=32, num_warps=8)
  config = _within_a_half(config, columns) if gated else config
  kernel, scales = (backward_kernel, []) if scale is None else (backward_scaled_kernel, [scale.reshape(1)])
  dz, values, metadata = _triton.call(
    kernel, dh, z, launch.draw_parameters(key, origin), *scales,
    out_shape=[
      jax.ShapeDtypeStruct(z.shape, dtype),
      jax.ShapeDtypeStruct((features, tokens // 2), dtype),
      jax.ShapeDtypeStruct(metadata_shape(features, tokens), jnp.uint32),
    ],
    grid=config.grid(1, rows, columns), num_warps=config.num_warps,
    ACTIVATION=activation, GATED=gated, **config.constants(rows, columns),
  )  # fmt: skip
  return Packed(SparseOperand(values, metadata), dz)


def _within_a_half(config: launch.Config, columns: int) -> launch.Config:
  """`config`, or tiles of 64 columns where wider ones reach past the gate's half: they would write metadata of up."""
  if columns % (4 * config.tile_columns) == 0:
    return config
  warps = max(1, config.num_warps * 16 // config.tile_columns)
  return dataclasses.replace(config, tile_columns=16, num_warps=warps)
