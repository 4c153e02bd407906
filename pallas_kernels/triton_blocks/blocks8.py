"""Triton device functions for blocks of float8: a row of four entries is one uint32, the first entry lowest."""

import triton
import triton.language as tl

from pallas_kernels.triton_blocks import blocks


@triton.jit
def quad8(a, b, c, d, dtype: tl.constexpr):
  """Four float32 rounded to float8 `dtype` in one uint32, the first lowest.

  To nearest even; what is beyond the largest value, infinities included, becomes the largest; NaN stays NaN.
  """
  if dtype == tl.float8e4nv:
    return tl.inline_asm_elementwise(
      '{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;'
      ' mov.b32 $0, {low, high}; }', '=r,f,f,f,f', [a, b, c, d], dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip
  else:
    return tl.inline_asm_elementwise(
      '{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;'
      ' mov.b32 $0, {low, high}; }', '=r,f,f,f,f', [a, b, c, d], dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def scaled_row8(x, scale, source: tl.constexpr, dtype: tl.constexpr):
  """Four entries' bits, times `scale`, as four float8."""
  return quad8(
    blocks.to_float(x[0], source) * scale, blocks.to_float(x[1], source) * scale,
    blocks.to_float(x[2], source) * scale, blocks.to_float(x[3], source) * scale, dtype,
  )  # fmt: skip


@triton.jit
def scaled8(x, scale, source: tl.constexpr, dtype: tl.constexpr):
  """The rows of a block, times `scale`, as float8."""
  return (
    scaled_row8(x[0], scale, source, dtype), scaled_row8(x[1], scale, source, dtype),
    scaled_row8(x[2], scale, source, dtype), scaled_row8(x[3], scale, source, dtype),
  )  # fmt: skip


@triton.jit
def transpose8(q):
  """Exchanges rows and columns of a block of bytes, a row a uint32: pairs of bytes first, then pairs of pairs."""
  even0 = (q[0] & 0x00FF00FF) | (q[1] & 0x00FF00FF) << 8
  even1 = (q[2] & 0x00FF00FF) | (q[3] & 0x00FF00FF) << 8
  odd0 = ((q[0] >> 8) & 0x00FF00FF) | (q[1] & 0xFF00FF00)
  odd1 = ((q[2] >> 8) & 0x00FF00FF) | (q[3] & 0xFF00FF00)
  return (
    (even0 & 0xFFFF) | even1 << 16, (odd0 & 0xFFFF) | odd1 << 16,
    even0 >> 16 | (even1 & 0xFFFF0000), odd0 >> 16 | (odd1 & 0xFFFF0000),
  )  # fmt: skip


@triton.jit
def positive_zeros8(q):
  """Four float8 with -0.0 made 0.0, which is what a free position must hold."""
  return q & (((q & 0x7F7F7F7F) + 0x7F7F7F7F) | 0x7F7F7F7F)


@triton.jit
def keep8(q):
  """4-bit code of the float8 that are not zero, of four."""
  lanes = (((q & 0x7F7F7F7F) + 0x7F7F7F7F) >> 7) & 0x01010101
  return (lanes | lanes >> 7 | lanes >> 14 | lanes >> 21) & 0xF


@triton.jit
def choose8(group, nibble, at: tl.constexpr):
  """The two stored values of a group of bytes, by the metadata nibble at bit `at`, in the low 16 bits of a uint32."""
  low = (group >> (((nibble >> at) & 3) << 3)) & 0xFF
  high = (group >> (((nibble >> (at + 2)) & 3) << 3)) & 0xFF
  return low | high << 8


@triton.jit
def choose_all8(groups, nibble):
  """`choose8` for the four groups of a block."""
  return (
    choose8(groups[0], nibble, 0), choose8(groups[1], nibble, 4),
    choose8(groups[2], nibble, 8), choose8(groups[3], nibble, 12),
  )  # fmt: skip


@triton.jit
def store_dense8(x, quads, place, rows: tl.constexpr, columns: tl.constexpr, transposed: tl.constexpr):
  """Writes a float8 array, or its transpose; quads[g] is row (column) g of each block."""
  blocks.store_groups(x.to(tl.pointer_type(tl.uint32)), quads, place, rows, columns, transposed)
