"""Triton kernels that pack A along its rows; `triton.py` launches them.

A program has a block of V rows by 16 groups of M columns, 64 compact columns, so whole tiles of metadata, or by 8,
half tiles. A thread has whole groups of a few rows in its registers, so that the block is read once, and with every row
its neighbour 8 further down, which shares its metadata.
"""

import triton
import triton.language as tl

from pallas_kernels.vnm import _blocks as blocks
from pallas_kernels.vnm import _metadata


@triton.jit
def pack_rows(
  x, values, metadata, rows, inputs, counts,
  C: tl.constexpr, V: tl.constexpr, M: tl.constexpr, SQUARED_RELU: tl.constexpr, RESIDUALS: tl.constexpr,
  GROUPS: tl.constexpr,
):  # fmt: skip
  """The pattern of x, or of relu(x)^2, and what it keeps of that.

  With `RESIDUALS` also what it keeps of x itself, and how often each column is used, added to `counts`.
  """
  dtype: tl.constexpr = x.dtype.element_ty
  row, group = _places(V, GROUPS)
  raw = _load(x, row, group, C, M)
  pairs = raw
  if SQUARED_RELU:
    pairs = _squared_relu(raw, dtype)
  c0, c1, c2, c3 = blocks.best_columns(_scores(pairs, dtype, SQUARED_RELU), M)
  first, second = blocks.selectors(c0, c1, c2, c3, M)
  if RESIDUALS:
    # Squared once more after the choice, so that a thread need not hold all entries twice.
    raw_low, raw_high = blocks.pick(raw, (_rows_of(first), _rows_of(second)), M)
    low, high = raw_low, raw_high
    if SQUARED_RELU:
      low, high = _squared_relu((raw_low, raw_high), dtype)
  else:
    low, high = blocks.pick(pairs, (_rows_of(first), _rows_of(second)), M)
  nibble = blocks.best_two(low, high, not SQUARED_RELU)
  pair = blocks.chosen(low, high, nibble)
  tl.store(values.to(tl.pointer_type(tl.uint32)) + row * (C // M) + group, pair)

  _metadata.store_paired(metadata, nibble, C // M, V, GROUPS)

  member = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
  first_column = member * M
  if RESIDUALS:
    kept = blocks.chosen(raw_low, raw_high, nibble)
    tl.store(inputs.to(tl.pointer_type(tl.uint32)) + row * (C // M) + group, kept)
    uses = _uses(pair, nibble)
    tl.atomic_add(counts + first_column + c0.to(tl.int32), uses[0], sem='relaxed')
    tl.atomic_add(counts + first_column + c1.to(tl.int32), uses[1], sem='relaxed')
    tl.atomic_add(counts + first_column + c2.to(tl.int32), uses[2], sem='relaxed')
    tl.atomic_add(counts + first_column + c3.to(tl.int32), uses[3], sem='relaxed')
  to = rows + tl.program_id(1) * (C // M * 4) + member * 4
  tl.store(to, first_column + c0.to(tl.int32))
  tl.store(to + 1, first_column + c1.to(tl.int32))
  tl.store(to + 2, first_column + c2.to(tl.int32))
  tl.store(to + 3, first_column + c3.to(tl.int32))


@triton.jit
def pack_rows_as(
  x, gradient, metadata, rows, values, masked,
  C: tl.constexpr, V: tl.constexpr, M: tl.constexpr, SQUARED_RELU: tl.constexpr, MASKED: tl.constexpr,
  GROUPS: tl.constexpr,
):  # fmt: skip
  """The gradient, or 2 gradient relu(x), under a pattern that is given; x is what the pattern keeps of it."""
  dtype: tl.constexpr = gradient.dtype.element_ty
  row, group = _places(V, GROUPS)
  member = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
  at = rows + tl.program_id(1) * (C // M * 4) + member * 4
  c0 = (tl.load(at) % M).to(tl.uint32)
  c1 = (tl.load(at + 1) % M).to(tl.uint32)
  c2 = (tl.load(at + 2) % M).to(tl.uint32)
  c3 = (tl.load(at + 3) % M).to(tl.uint32)
  first, second = blocks.selectors(c0, c1, c2, c3, M)
  columns = (_rows_of(first), _rows_of(second))

  nibble = _metadata.load_paired(metadata, member[:, None], C // M, V)

  low, high = blocks.pick(_load(gradient, row, group, C, M), columns, M)
  pair = blocks.chosen(low, high, nibble)
  if SQUARED_RELU:
    kept = tl.load(x.to(tl.pointer_type(tl.uint32)) + row * (C // M) + group)
    pair = blocks.pull_back(kept, pair, dtype)
  tl.store(values.to(tl.pointer_type(tl.uint32)) + row * (C // M) + group, pair)
  if MASKED:
    _store_masked(masked, row, group, (c0, c1, c2, c3), nibble, pair, C, M)


@triton.jit
def _uses(pair, nibble):
  """Rows with an entry that is not zero, for each of four columns, [GROUPS]."""
  one = tl.full([], 1, tl.uint32)
  low = tl.where((pair & 0x7FFF) != 0, one << ((nibble & 3) << 3), 0).to(tl.uint32)
  high = tl.where((pair & 0x7FFF0000) != 0, one << ((nibble >> 2) << 3), 0).to(tl.uint32)
  a, b = tl.split(tl.sum(low + high, axis=1))  # a byte a column; 128 rows at most in either half
  return (
    ((a & 255) + (b & 255)).to(tl.int32), ((a >> 8 & 255) + (b >> 8 & 255)).to(tl.int32),
    ((a >> 16 & 255) + (b >> 16 & 255)).to(tl.int32), ((a >> 24) + (b >> 24)).to(tl.int32),
  )  # fmt: skip


@triton.jit
def _places(V: tl.constexpr, GROUPS: tl.constexpr):
  """`paired_rows`, and groups [GROUPS, 1, 1]: threads go along these."""
  row = _metadata.paired_rows(V)
  return tl.program_id(1) * V + row, tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)[:, None, None]


@triton.jit
def _rows_of(x):
  """The tensors of a tuple, one entry a group, along rows."""
  if len(x) == 1:
    return (x[0][:, None, None],)
  elif len(x) == 2:
    return x[0][:, None, None], x[1][:, None, None]
  else:
    return (
      x[0][:, None, None], x[1][:, None, None], x[2][:, None, None], x[3][:, None, None], x[4][:, None, None],
      x[5][:, None, None],
    )  # fmt: skip


@triton.jit
def _load(x, row, group, C: tl.constexpr, M: tl.constexpr):
  """The M / 2 pairs of each group, [GROUPS, V / 2, 2]."""
  quads = x.to(tl.pointer_type(tl.uint64)) + row * (C // 4) + group * (M // 4)
  if M == 4:
    q = tl.load(quads)
    return q.to(tl.uint32), (q >> 32).to(tl.uint32)
  elif M == 8:
    return _load8(quads)
  else:
    return _load8(quads) + _load8(quads + 2)


@triton.jit
def _load8(quads):
  """Four pairs from 16 contiguous bytes."""
  a, b = tl.split(tl.load(quads[:, :, :, None] + tl.arange(0, 2)[None, None, None, :]))
  return a.to(tl.uint32), (a >> 32).to(tl.uint32), b.to(tl.uint32), (b >> 32).to(tl.uint32)


@triton.jit
def _squared_relu(pairs, dtype: tl.constexpr):
  if len(pairs) == 2:
    return blocks.squared_relu(pairs[0], dtype), blocks.squared_relu(pairs[1], dtype)
  elif len(pairs) == 4:
    return _squared_relu((pairs[0], pairs[1]), dtype) + _squared_relu((pairs[2], pairs[3]), dtype)
  else:
    return (
      _squared_relu((pairs[0], pairs[1], pairs[2], pairs[3]), dtype)
      + _squared_relu((pairs[4], pairs[5], pairs[6], pairs[7]), dtype)
    )  # fmt: skip


@triton.jit
def _scores(pairs, dtype: tl.constexpr, POSITIVE: tl.constexpr):
  """The sum of magnitudes over all rows of the M columns, [GROUPS] each."""
  if len(pairs) == 2:
    nothing = tl.zeros([pairs[0].shape[0]], tl.float32)  # all columns stay
    return nothing, nothing, nothing, nothing
  elif len(pairs) == 4:
    return _sums(pairs, dtype, POSITIVE)
  else:
    return (
      _sums((pairs[0], pairs[1], pairs[2], pairs[3]), dtype, POSITIVE)
      + _sums((pairs[4], pairs[5], pairs[6], pairs[7]), dtype, POSITIVE)
    )  # fmt: skip


@triton.jit
def _sums(p, dtype: tl.constexpr, POSITIVE: tl.constexpr):
  """Eight sums, reduced together."""
  a = _both(p[0], dtype, POSITIVE)
  b = _both(p[1], dtype, POSITIVE)
  c = _both(p[2], dtype, POSITIVE)
  d = _both(p[3], dtype, POSITIVE)
  s = tl.sum(tl.join(tl.join(a, c), tl.join(b, d)), axis=1)  # [GROUPS, 2 halves, 2, 2]
  low, high = tl.split(s)
  ac_low, ac_high = low, high
  a_, c_ = tl.split(ac_low)
  b_, d_ = tl.split(ac_high)
  a0, a1 = tl.split(a_)
  b0, b1 = tl.split(b_)
  c0, c1 = tl.split(c_)
  d0, d1 = tl.split(d_)
  return a0, a1, b0, b1, c0, c1, d0, d1


@triton.jit
def _both(pair, dtype: tl.constexpr, POSITIVE: tl.constexpr):
  """Magnitudes [GROUPS, V / 2, 2], rows that share their metadata added up."""
  low, high = blocks.widen(pair if POSITIVE else pair & 0x7FFF7FFF, dtype)
  return tl.join(tl.sum(low, axis=2), tl.sum(high, axis=2))


@triton.jit
def _store_masked(masked, row, group, columns, nibble, pair, C: tl.constexpr, M: tl.constexpr):
  """The two entries at their columns, zeros around them."""
  lower = _at(nibble & 3, columns)
  upper = _at(nibble >> 2, columns)
  quads = masked.to(tl.pointer_type(tl.uint64)) + row * (C // 4) + group * (M // 4)
  if M == 4:
    tl.store(quads, blocks.quad(pair, lower, upper, 0))
  else:
    for half in tl.static_range(M // 8):
      a = blocks.quad(pair, lower, upper, 8 * half)
      b = blocks.quad(pair, lower, upper, 8 * half + 4)
      tl.store(quads[:, :, :, None] + 2 * half + tl.arange(0, 2)[None, None, None, :], tl.join(a, b))


@triton.jit
def _at(place, columns):
  """The column with this place, as a number of bits in a nibble table."""
  table = columns[0] | columns[1] << 4 | columns[2] << 8 | columns[3] << 12
  return (table[:, None, None] >> (place << 2)) & 15
