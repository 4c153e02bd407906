"""The general V:N:M packing kernel in Triton, for any strides and V; `triton.py` launches it.

It works entry by entry, 60 instructions each where `_rows` and `_columns` need 10.
"""

import triton
import triton.language as tl


@triton.jit
def pack_kernel(
  x, gradient, given_metadata, given_rows, values, metadata, rows, masked,
  R: tl.constexpr, C: tl.constexpr, ROW_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr, V: tl.constexpr,
  M: tl.constexpr, SPREAD: tl.constexpr, SQUARED_RELU: tl.constexpr, GRADIENT: tl.constexpr,
  MASKED: tl.constexpr,
):  # fmt: skip
  """One block of V rows by 16 groups of M columns: 64 columns of the compact array, so one tile of words for 64 rows.

  The pattern is that of relu(x)^2, or of x. What is packed is that; or, with a gradient, under the pattern given,
  `2 gradient relu(x)`, the cotangent of x, or the gradient itself. `masked` takes the same as a dense array, zero
  outside the pattern.
  """
  group = tl.program_id(0) * 16 + tl.arange(0, 16)[:, None]
  member = tl.arange(0, M)[None, :]
  column = member * (C // M) + group if SPREAD else group * M + member  # [16, M]

  if GRADIENT:
    at = given_rows + tl.program_id(1) * (C // M * 4) + group * 4
    place = tl.where(column == tl.load(at), 0, -1)
    for i in tl.static_range(1, 4):
      place = tl.where(column == tl.load(at + i), i, place)
  else:
    place = _best_columns(x, column, ROW_STRIDE, COLUMN_STRIDE, V, M, SQUARED_RELU)

  for i in range(V // 64):
    _pack_rows(
      x, gradient, given_metadata, values, metadata, masked, i, column, place, C, ROW_STRIDE, COLUMN_STRIDE, V, M,
      SQUARED_RELU, GRADIENT, MASKED,
    )  # fmt: skip
  if not GRADIENT:
    # Which row of B each kept column multiplies.
    index = tl.where(place[:, :, None] == tl.arange(0, 4)[None, None, :], column[:, :, None], 0)
    to = rows + tl.program_id(1) * (C // M * 4) + group * 4 + tl.arange(0, 4)[None, :]
    tl.store(to, tl.sum(index, axis=1))


@triton.jit
def _best_columns(
  x, column, ROW_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr, V: tl.constexpr, M: tl.constexpr,
  SQUARED_RELU: tl.constexpr,
):  # fmt: skip
  """Of each column its place among the four best of its group, or -1: [16, M]."""
  # 64 rows at a time fit a thread's registers; the second look at them finds them in the cache.
  score = tl.zeros((16, M), tl.float32)
  for i in range(V // 64):
    e = _activate(tl.load(x + _places(i, column, ROW_STRIDE, COLUMN_STRIDE, V)), SQUARED_RELU)
    wide = e.to(tl.float32)
    score += tl.sum(tl.where(wide != wide, float('inf'), tl.abs(wide)), axis=0)  # noqa: PLR0124

  # The four best columns of a group: fewer than four beat them. Places among them, in order.
  beats = (score[:, None, :] > score[:, :, None]) | (
    (score[:, None, :] == score[:, :, None]) & (tl.arange(0, M)[None, None, :] < tl.arange(0, M)[None, :, None])
  )
  chosen = tl.sum(beats.to(tl.int32), axis=2) < 4
  return tl.where(chosen, tl.cumsum(chosen.to(tl.int32), axis=1) - 1, -1)


@triton.jit
def _places(i, column, ROW_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr, V: tl.constexpr):
  """Where 64 rows of the block lie in memory, from the i-th 64 on."""
  row = tl.program_id(1) * V + i * 64 + tl.arange(0, 64)
  return row[:, None, None] * ROW_STRIDE + column[None, :, :] * COLUMN_STRIDE


@triton.jit
def _relu(e):
  wide = e.to(tl.float32)
  return tl.where(wide <= 0, 0.0, wide)  # a NaN passes


@triton.jit
def _activate(e, SQUARED_RELU: tl.constexpr):
  if SQUARED_RELU:
    positive = _relu(e)
    return (positive * positive).to(e.dtype)
  else:
    return e


@triton.jit
def _pack_rows(
  x, gradient, given_metadata, values, metadata, masked, i, column, place,
  C: tl.constexpr, ROW_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr, V: tl.constexpr, M: tl.constexpr,
  SQUARED_RELU: tl.constexpr, GRADIENT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
  """Values and words of 64 rows."""
  at = _places(i, column, ROW_STRIDE, COLUMN_STRIDE, V)
  raw = tl.load(x + at)
  e = _activate(raw, SQUARED_RELU)
  packed = e
  if GRADIENT:
    packed = tl.load(gradient + at)
    if SQUARED_RELU:
      packed = (2.0 * packed.to(tl.float32) * _relu(raw)).to(e.dtype)
  # 16 bits of what is stored beside 15 bits to rank it by; one sum picks both from a column.
  wide = e.to(tl.float32)
  key = tl.where(wide != wide, 0x7FFF, e.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF)  # noqa: PLR0124
  both = key << 16 | packed.to(tl.uint16, bitcast=True).to(tl.int32)
  e0 = _pick(both, place, 0)
  e1 = _pick(both, place, 1)
  e2 = _pick(both, place, 2)
  e3 = _pick(both, place, 3)  # [64, 16]

  tile = (tl.program_id(1) * (V // 64) + i) * (C // M // 16) + tl.program_id(0)
  if GRADIENT:
    row, quarter = tl.arange(0, 64)[:, None], tl.arange(0, 16)[None, :]
    word = tl.load(given_metadata + tile * 128 + row // 16 * 32 + row % 8 * 4 + quarter // 4)
    nibble = (word >> (row // 8 % 2 * 16 + quarter % 4 * 4).to(tl.uint32)).to(tl.int32) & 15
    low = nibble & 3
    high = nibble >> 2
  else:
    low, high = _best_two(e0 >> 16, e1 >> 16, e2 >> 16, e3 >> 16)
  first = tl.where(low == 0, e0, tl.where(low == 1, e1, e2)) & 0xFFFF
  second = tl.where(high == 3, e3, tl.where(high == 2, e2, e1)) & 0xFFFF

  row = (tl.program_id(1) * V + i * 64 + tl.arange(0, 64))[:, None]
  pair = values.to(tl.pointer_type(tl.uint32)) + row * (C // M) + tl.program_id(0) * 16 + tl.arange(0, 16)[None, :]
  tl.store(pair, (first | second << 16).to(tl.uint32, bitcast=True))
  if MASKED:
    kept = (place[None, :, :] == low[:, :, None]) | (place[None, :, :] == high[:, :, None])
    tl.store(masked + at, tl.where(kept, packed, 0.0))
  if not GRADIENT:
    # Words in the order of the sparse operand: 16 bits of row g of a warp's rows, and of row g + 8.
    shift = 4 * (tl.arange(0, 16) % 4)
    quarter = tl.sum(tl.reshape((low | high << 2) << shift[None, :], (64, 4, 4)), axis=2)
    halves = tl.reshape(quarter, (4, 2, 8, 4)) << (16 * tl.arange(0, 2))[None, :, None, None]
    word = tl.reshape(tl.sum(halves, axis=1), (128,))
    tl.store(metadata + tile * 128 + tl.arange(0, 128), word.to(tl.uint32, bitcast=True))


@triton.jit
def _best_two(k0, k1, k2, k3):
  """Positions of the two largest, ascending. Later entries win when strictly larger."""
  w01 = (k1 > k0).to(tl.int32)
  w02 = (k2 > k0).to(tl.int32)
  w03 = (k3 > k0).to(tl.int32)
  w12 = (k2 > k1).to(tl.int32)
  w13 = (k3 > k1).to(tl.int32)
  w23 = (k3 > k2).to(tl.int32)
  keep0 = w01 + w02 + w03 < 2
  keep1 = (1 - w01) + w12 + w13 < 2
  keep2 = (1 - w02) + (1 - w12) + w23 < 2
  low = tl.where(keep0, 0, tl.where(keep1, 1, 2))
  high = tl.where((1 - w03) + (1 - w13) + (1 - w23) < 2, 3, tl.where(keep2, 2, 1))
  return low, high


@triton.jit
def _pick(entries, place, i: tl.constexpr):
  """Of each row and group the entry whose column has place `i`."""
  return tl.sum(tl.where((place == i)[None, :, :], entries, 0), axis=2)
