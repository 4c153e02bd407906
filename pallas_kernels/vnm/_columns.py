"""Triton kernels that pack A along its columns where its columns are contiguous; `triton.py` launches them.

A [R, C] lies transposed in memory, [C, R]: a word holds two neighbouring rows of a column. A program has V rows by 16
groups of M columns. It reads all of them for the sums, and a second time, from the cache, the four columns that each
group kept: their places are addresses then, and nothing has to be selected. The output's rows are written in runs of 16
groups, which the compiler stages through shared memory. Programs go along R first: their reads are contiguous.
"""

import triton
import triton.language as tl

from pallas_kernels.vnm import _blocks as blocks


@triton.jit
def pack_columns(
  x, used, values, metadata, rows,
  R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr, SPREAD: tl.constexpr, PARTS: tl.constexpr,
  SQUARED_RELU: tl.constexpr, SELECT: tl.constexpr,
):  # fmt: skip
  """The pattern of x, or of relu(x)^2, and what it keeps of that. Rows that `used` has no bits for count as zeros."""
  dtype: tl.constexpr = x.dtype.element_ty
  group = tl.program_id(1) * 16 + tl.arange(0, 16)
  pair = _row_pairs(V, PARTS)
  at = x.to(tl.pointer_type(tl.uint32)) + pair
  bits = tl.full([], 0xFFFFFFFF, tl.uint32)
  if SELECT:
    bits = tl.load(used + pair)
  step: tl.constexpr = C // M if SPREAD else 1
  first = group if SPREAD else group * M  # column of a group's first member
  if M == 4:
    nothing = tl.zeros([16], tl.float32)  # all columns stay
    score = (nothing, nothing, nothing, nothing)
  elif M == 8:
    score = _scores(at, bits, first, step, R, dtype, SQUARED_RELU)
  else:
    score = (
      _scores(at, bits, first, step, R, dtype, SQUARED_RELU)
      + _scores(at, bits, first + 8 * step, step, R, dtype, SQUARED_RELU)
    )  # fmt: skip
  c0, c1, c2, c3 = blocks.best_columns(score, M)
  e0 = _entries(at, bits, first + c0.to(tl.int32) * step, R, dtype, SQUARED_RELU)
  e1 = _entries(at, bits, first + c1.to(tl.int32) * step, R, dtype, SQUARED_RELU)
  e2 = _entries(at, bits, first + c2.to(tl.int32) * step, R, dtype, SQUARED_RELU)
  e3 = _entries(at, bits, first + c3.to(tl.int32) * step, R, dtype, SQUARED_RELU)
  even, odd, nibbles = blocks.best_two_of_rows(e0, e1, e2, e3)
  _store_values(values, pair, even, odd, C, M)

  blocks.store_four(rows + tl.program_id(0) * (C // M * 4) + group * 4, first, c0, c1, c2, c3, step)

  # A thread has eight rows of a group: their nibbles are a word of 32 bits, laid down where `exchange` looks for it.
  shift = (4 * (tl.arange(0, V // 2 // PARTS) % 4)).to(tl.uint32)
  eight = tl.reshape(nibbles << shift[None, None, :], (16, PARTS, V // 8 // PARTS, 4))
  eight = tl.sum(eight, axis=3)
  octet = tl.arange(0, PARTS)[None, :, None] * (V // 8 // PARTS) + tl.arange(0, V // 8 // PARTS)[None, None, :]
  here = tl.program_id(0) * (V // 64)
  across: tl.constexpr = C // M // 16
  place = ((here + octet // 8) * across + tl.program_id(1)) * 128 + octet % 8 * 16
  tl.store(metadata + place + tl.arange(0, 16)[:, None, None], eight)
  blocks.exchange(metadata, here, across, V)


@triton.jit
def pack_columns_as(
  x, gradient, metadata, rows, values,
  R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr, SQUARED_RELU: tl.constexpr,
):  # fmt: skip
  """The gradient, or 2 gradient relu(x), under a pattern that is given: only what it keeps is read."""
  dtype: tl.constexpr = gradient.dtype.element_ty
  group = tl.program_id(1) * 16 + tl.arange(0, 16)
  pair = _row_pairs(V, PARTS)
  column = rows + tl.program_id(0) * (C // M * 4) + group * 4
  c0 = blocks.load_index(column, C)
  c1 = blocks.load_index(column + 1, C)
  c2 = blocks.load_index(column + 2, C)
  c3 = blocks.load_index(column + 3, C)

  row = 2 * (pair - tl.program_id(0) * (V // 2))
  tile = (tl.program_id(0) * (V // 64) + row // 64) * (C // M // 16) + tl.program_id(1)
  g = tl.arange(0, 16)[:, None, None]
  place = metadata + tile * 128 + row % 64 // 16 * 32 + row % 8 * 4 + g // 4
  shift = (row // 8 % 2 * 16 + g % 4 * 4).to(tl.uint32)
  nibbles = ((tl.load(place) >> shift) & 15) | ((tl.load(place + 4) >> shift) & 15) << 16

  at = gradient.to(tl.pointer_type(tl.uint32)) + pair
  even_pair, odd_pair = _at_places(at, c0, c1, c2, c3, nibbles, R)
  if SQUARED_RELU:
    even_x, odd_x = _at_places(x.to(tl.pointer_type(tl.uint32)) + pair, c0, c1, c2, c3, nibbles, R)
    even_pair = blocks.pull_back(even_x, even_pair, dtype)
    odd_pair = blocks.pull_back(odd_x, odd_pair, dtype)
  _store_values(values, pair, even_pair, odd_pair, C, M)


@triton.jit
def _row_pairs(V: tl.constexpr, PARTS: tl.constexpr):
  """This block's pairs of rows, [1, PARTS, V / 2 / PARTS]. Threads go along the last axis, then along groups, so a
  thread keeps all parts: more rows share the work of ranking columns."""
  size: tl.constexpr = V // 2 // PARTS
  return (
    tl.program_id(0) * (V // 2) + tl.arange(0, PARTS)[None, :, None] * size + tl.arange(0, size)[None, None, :]
  )


@triton.jit
def _entries(at, bits, column, R: tl.constexpr, dtype: tl.constexpr, SQUARED_RELU: tl.constexpr):
  """Pairs of rows of a column of each group, [16, PARTS, V / 2 / PARTS]."""
  e = tl.load(at + column[:, None, None] * (R // 2)) & bits
  if SQUARED_RELU:
    e = blocks.squared_relu(e, dtype)
  return e


@triton.jit
def _scores(at, bits, first, step: tl.constexpr, R: tl.constexpr, dtype: tl.constexpr, SQUARED_RELU: tl.constexpr):
  """Sums of magnitudes of eight members of each group, [16] each, reduced together."""
  a = _two_scores(at, bits, first, step, R, dtype, SQUARED_RELU)
  b = _two_scores(at, bits, first + 2 * step, step, R, dtype, SQUARED_RELU)
  c = _two_scores(at, bits, first + 4 * step, step, R, dtype, SQUARED_RELU)
  d = _two_scores(at, bits, first + 6 * step, step, R, dtype, SQUARED_RELU)
  ac, bd = tl.split(tl.sum(tl.join(tl.join(a, c), tl.join(b, d)), axis=1))  # [16, 2, 2]
  a, c = tl.split(ac)
  b, d = tl.split(bd)
  return tl.split(a) + tl.split(b) + tl.split(c) + tl.split(d)


@triton.jit
def _two_scores(at, bits, first, step: tl.constexpr, R: tl.constexpr, dtype: tl.constexpr, SQUARED_RELU: tl.constexpr):
  return tl.join(
    _score(at, bits, first, R, dtype, SQUARED_RELU), _score(at, bits, first + step, R, dtype, SQUARED_RELU)
  )


@triton.jit
def _score(at, bits, column, R: tl.constexpr, dtype: tl.constexpr, SQUARED_RELU: tl.constexpr):
  e = _entries(at, bits, column, R, dtype, SQUARED_RELU)
  low, high = blocks.widen(e if SQUARED_RELU else e & 0x7FFF7FFF, dtype)
  return tl.sum(low + high, axis=1)


@triton.jit
def _at_places(at, c0, c1, c2, c3, nibbles, R: tl.constexpr):
  """What both rows of each pair store of four columns, given their nibbles."""
  e0 = tl.load(at + c0[:, None, None] * (R // 2))
  e1 = tl.load(at + c1[:, None, None] * (R // 2))
  e2 = tl.load(at + c2[:, None, None] * (R // 2))
  e3 = tl.load(at + c3[:, None, None] * (R // 2))
  return blocks.chosen_of_rows(e0, e1, e2, e3, nibbles)


@triton.jit
def _store_values(values, pair, even, odd, C: tl.constexpr, M: tl.constexpr):
  to = values.to(tl.pointer_type(tl.uint32)) + 2 * pair * (C // M) + tl.program_id(1) * 16
  to = to + tl.arange(0, 16)[:, None, None]
  tl.store(to, even)
  tl.store(to + C // M, odd)
