"""Triton device functions of the V:N:M packers. Entries stay in pairs, two 16-bit ones in 32 bits.

A pair is never taken apart to be moved: byte permutations (`prmt`) pick two entries out of two pairs in one
instruction. Which ones is the same for all rows of a block, so the selectors are made once.
"""

import triton
import triton.language as tl

from pallas_kernels.triton_blocks.ptx import prmt

_ALL = tl.constexpr(0xFFFFFFFF)


@triton.jit
def load_index(at, SIZE: tl.constexpr):
  """An int32 below `SIZE`: an index from elsewhere that is not, negative or too large, becomes the last one."""
  return tl.minimum(tl.load(at).to(tl.uint32, bitcast=True), SIZE - 1).to(tl.int32, bitcast=True)


@triton.jit
def squared_relu(pair, dtype: tl.constexpr):
  """relu(x)^2 of both entries, rounded once, subnormal squares too; a NaN passes.

  The reference squares in float32 and rounds that. The float32 square is exact but far below half of the smallest
  subnormal number, so that both agree for every x, except where XLA takes float32 below 2^-126 for zero: its CPU does.
  """
  if dtype == tl.bfloat16:
    return tl.inline_asm_elementwise(
      '{ .reg .b32 r, z; mov.b32 z, 0; max.NaN.bf16x2 r, $1, z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, r, r, z; }',
      '=r,r', [pair], dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip
  else:
    return tl.inline_asm_elementwise(
      '{ .reg .b32 r, z; mov.b32 z, 0; max.NaN.f16x2 r, $1, z; mul.rn.f16x2 $0, r, r; }',
      '=r,r', [pair], dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def widen(pair, dtype: tl.constexpr):
  """Both entries as float32."""
  if dtype == tl.bfloat16:
    low = (pair << 16).to(tl.float32, bitcast=True)
    high = (pair & 0xFFFF0000).to(tl.float32, bitcast=True)
  else:
    low = pair.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
  return low, high


@triton.jit
def narrow(low, high, dtype: tl.constexpr):
  """Inverse of `widen`, rounding."""
  return (
    low.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
    | high.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
  )


@triton.jit
def pull_back(x, gradient, dtype: tl.constexpr):
  """2 gradient relu(x), for pairs."""
  x0, x1 = widen(x, dtype)
  g0, g1 = widen(gradient, dtype)
  return narrow(2.0 * g0 * tl.where(x0 <= 0, 0.0, x0), 2.0 * g1 * tl.where(x1 <= 0, 0.0, x1), dtype)


@triton.jit
def best_columns(score, M: tl.constexpr):
  """The four columns with the largest scores, ascending; of equals the lower. NaN counts as infinite.

  Args:
    score: M tensors of one shape, not negative.
    M: 4, 8 or 16.
  """
  if M == 4:
    zero = tl.zeros(score[0].shape, tl.uint32)
    return zero, zero + 1, zero + 2, zero + 3
  elif M == 8:
    return _best_by_pairs(score, M)
  else:
    return _best_by_rank(score, M)


@triton.jit
def _best_by_pairs(score, M: tl.constexpr):
  """All pairs are compared: 28 of them at M = 8."""
  ones: tl.constexpr = 0x11111111
  # How many beat each column, a nibble a column. A NaN is the largest of all as an integer, so is made infinite.
  beaten = tl.zeros(score[0].shape, tl.uint32)
  for i in tl.static_range(M):
    for j in tl.static_range(i + 1, M):
      later = _order(score[j]) > _order(score[i])
      beaten += tl.where(later, tl.full([], 1 << (4 * i), tl.uint32), tl.full([], 1 << (4 * j), tl.uint32))
  kept = (((beaten >> 2) | (beaten >> 3)) & ones) ^ ones
  # The product adds up all lower nibbles: how many are kept up to each column.
  upto = kept * ones
  return _below(upto, 0, ones, M), _below(upto, 1, ones, M), _below(upto, 2, ones, M), _below(upto, 3, ones, M)


@triton.jit
def _order(score):
  bits = score.to(tl.int32, bitcast=True)
  return tl.minimum(bits, 0x7F800000)


@triton.jit
def _below(upto, p: tl.constexpr, ones: tl.constexpr, M: tl.constexpr):
  """How many nibbles are `p` or less, of nibbles up to 4: the place of the next one."""
  few = (((upto + (7 - p) * ones) >> 3) & ones) ^ ones
  return ((few * ones) >> (4 * M - 4)).to(tl.uint32)


@triton.jit
def _best_by_rank(score, M: tl.constexpr):
  """The fourth largest score first, by merging sorted fours, then every column that reaches it: a bit a column.

  That takes fewer instructions than 120 comparisons. Ties with the fourth go to the lower columns.
  """
  a = _sorted4(score[0], score[1], score[2], score[3])
  b = _sorted4(score[4], score[5], score[6], score[7])
  c = _sorted4(score[8], score[9], score[10], score[11])
  d = _sorted4(score[12], score[13], score[14], score[15])
  m0, m1, m2, m3 = _larger_four(_resorted4(_larger_four(a, b)), _resorted4(_larger_four(c, d)))
  fourth = tl.minimum(tl.minimum(m0, m1), tl.minimum(m2, m3))
  above = tl.zeros(score[0].shape, tl.uint32)
  equal = above
  for i in tl.static_range(M):
    above += tl.where(_order(score[i]) > fourth, tl.full([], 1 << i, tl.uint32), 0).to(tl.uint32)
    equal += tl.where(_order(score[i]) == fourth, tl.full([], 1 << i, tl.uint32), 0).to(tl.uint32)
  few = (m0 > fourth).to(tl.int32) + (m1 > fourth).to(tl.int32)
  few += (m2 > fourth).to(tl.int32) + (m3 > fourth).to(tl.int32)
  rest1 = equal & (equal - 1)
  rest2 = rest1 & (rest1 - 1)
  rest3 = rest2 & (rest2 - 1)
  rest4 = rest3 & (rest3 - 1)
  kept = above | (equal ^ tl.where(few == 3, rest1, tl.where(few == 2, rest2, tl.where(few == 1, rest3, rest4))))
  next1 = kept & (kept - 1)
  next2 = next1 & (next1 - 1)
  next3 = next2 & (next2 - 1)
  return _bit(kept ^ next1), _bit(next1 ^ next2), _bit(next2 ^ next3), _bit(next3)


@triton.jit
def _bit(power):
  """The exponent of a power of two."""
  return (power.to(tl.float32).to(tl.uint32, bitcast=True) >> 23) - 127


@triton.jit
def _sorted4(a, b, c, d):
  """Scores as integers, the largest first."""
  a, b, c, d = _order(a), _order(b), _order(c), _order(d)
  a, b = tl.maximum(a, b), tl.minimum(a, b)
  c, d = tl.maximum(c, d), tl.minimum(c, d)
  a, c = tl.maximum(a, c), tl.minimum(a, c)
  b, d = tl.maximum(b, d), tl.minimum(b, d)
  return a, tl.maximum(b, c), tl.minimum(b, c), d


@triton.jit
def _larger_four(x, y):
  """The four largest of two sorted fours, as a bitonic sequence."""
  return tl.maximum(x[0], y[3]), tl.maximum(x[1], y[2]), tl.maximum(x[2], y[1]), tl.maximum(x[3], y[0])


@triton.jit
def _resorted4(x):
  """A bitonic sequence of four, the largest first."""
  a, c = tl.maximum(x[0], x[2]), tl.minimum(x[0], x[2])
  b, d = tl.maximum(x[1], x[3]), tl.minimum(x[1], x[3])
  return tl.maximum(a, b), tl.minimum(a, b), tl.maximum(c, d), tl.minimum(c, d)


@triton.jit
def pick(pairs, columns, M: tl.constexpr):
  """Entries of the four `columns`, in two pairs, from the M / 2 pairs of a group; see `selectors`."""
  if M == 4:
    return pairs[0], pairs[1]
  else:
    first, second = columns
    last: tl.constexpr = M // 2 - 1
    low = prmt(pairs[0], pairs[1], first[0])
    high = prmt(pairs[last - 1], pairs[last], second[0])
    for i in tl.static_range(1, M // 2 - 2):
      low = prmt(low, pairs[i + 1], first[i])
      high = prmt(high, pairs[last - 1 - i], second[i])
    return low, high


@triton.jit
def selectors(c0, c1, c2, c3, M: tl.constexpr):
  """Byte selectors with which `pick` goes through the pairs: for columns 0 and 1, upwards from the first two pairs, for
  2 and 3, downwards from the last two. Column 0 is never among the last three, column 3 never among the first."""
  last: tl.constexpr = M // 2 - 1
  if M == 4:
    return (c0,), (c0,)
  elif M == 8:
    return (_start(c0, c1), _next(c0, c1, 2)), (_start(c2, c3), _next(c2, c3, last - 2))
  else:
    return (
      (_start(c0, c1), _next(c0, c1, 2), _next(c0, c1, 3), _next(c0, c1, 4), _next(c0, c1, 5), _next(c0, c1, 6)),
      (_start(c2, c3), _next(c2, c3, 5), _next(c2, c3, 4), _next(c2, c3, 3), _next(c2, c3, 2), _next(c2, c3, 1)),
    )  # fmt: skip


@triton.jit
def _start(a, b):
  return 0x1010 + 0x22 * ((a & 3) + ((b & 3) << 8))


@triton.jit
def _next(a, b, pair: tl.constexpr):
  """Keeps what is there unless the column lies in this pair."""
  low = tl.where((a >> 1) == pair, 0x54 + 0x22 * (a & 1), 0x10)
  high = tl.where((b >> 1) == pair, 0x54 + 0x22 * (b & 1), 0x32)
  return low | high << 8


@triton.jit
def best_two(low, high, SIGNED: tl.constexpr):
  """The metadata nibble of the two largest magnitudes of four entries in two pairs; of equals the earlier stay.

  Each entry becomes its magnitude beside its index, counted backwards; six comparisons leave the best two.
  """
  if SIGNED:
    low = low & 0x7FFF7FFF
    high = high & 0x7FFF7FFF
  k0 = low << 16 | 3
  k1 = low & 0xFFFF0000 | 2
  k2 = high << 16 | 1
  k3 = high & 0xFFFF0000
  a = tl.maximum(k0, k1)
  b = tl.maximum(k2, k3)
  c = tl.maximum(tl.minimum(k0, k1), tl.minimum(k2, k3))
  best = tl.maximum(a, b) & 3
  second = tl.maximum(tl.minimum(a, b), c) & 3
  return 15 - tl.maximum(best, second) - 4 * tl.minimum(best, second)


@triton.jit
def best_two_of_rows(e0, e1, e2, e3):
  """`best_two` and `chosen` for four rows of pairs, along whose halves lie two columns.

  Both columns at once: with its sign bit set, a magnitude less another keeps that bit where it is not the smaller.
  At most one of three comparisons may be lost.

  Returns:
    What the lower and the upper column store, and their nibbles in the lowest bits of either half.
  """
  m1 = e1 & 0x7FFF7FFF
  m2 = e2 & 0x7FFF7FFF
  m3 = e3 & 0x7FFF7FFF
  b0 = e0 | 0x80008000
  b1 = e1 | 0x80008000
  b2 = e2 | 0x80008000
  g01, g02, g03 = b0 - m1, b0 - m2, b0 - m3
  g12, g13, g23 = b1 - m2, b1 - m3, b2 - m3
  k0 = _of_sign(_majority(g01, g02, g03))
  k1 = _of_sign(_majority(g01 ^ _ALL, g12, g13))
  k3 = _of_sign(_majority(g03, g13, g23) ^ _ALL)
  both = k0 & k1
  first = (k0 & e0) | ((k0 ^ _ALL) & ((k1 & e1) | ((k1 ^ _ALL) & e2)))
  second = (k3 & e3) | ((k3 ^ _ALL) & ((both & e1) | ((both ^ _ALL) & e2)))
  nibbles = 0x000A000A ^ (k0 & 0x00020002) ^ (k1 & 0x00030003) ^ (k3 & 0x00040004) ^ (both & 0x000F000F)
  return prmt(first, second, 0x5410), prmt(first, second, 0x7632), nibbles


@triton.jit
def _majority(a, b, c):
  return (a & b) | (c & (a | b))


@triton.jit
def _of_sign(x):
  """All bits of a half, as its highest."""
  return prmt(x, x, 0xBB99)


@triton.jit
def chosen_of_rows(e0, e1, e2, e3, nibbles):
  """What two columns store, as in `best_two_of_rows`, whose nibbles lie in the lowest bits of either half."""
  selector = (nibbles & 0x00030003) * 0x22 + (nibbles & 0x000C000C) * 0x880 + 0x10101010
  return (
    prmt(prmt(e0, e1, 0x5410), prmt(e2, e3, 0x5410), selector),
    prmt(prmt(e0, e1, 0x7632), prmt(e2, e3, 0x7632), selector >> 16),
  )  # fmt: skip


@triton.jit
def chosen(low, high, nibble):
  """The two entries that a nibble names, as one pair."""
  return prmt(low, high, 0x1010 + 0x22 * ((nibble & 3) | (nibble & 12) << 6))


@triton.jit
def quad(pair, lower, upper, first: tl.constexpr):
  """Four dense entries from column `first` on: the two of `pair` at the columns `lower` and `upper`, zeros beside them.

  Bytes 4 to 7 of the permutation are zero.
  """
  selector = 0x44444444 ^ _byte(0x54, lower, first) ^ _byte(0x76, upper, first)
  low = prmt(pair, selector * 0, selector)
  high = prmt(pair, selector * 0, selector >> 16)
  return low.to(tl.uint64) | high.to(tl.uint64) << 32


@triton.jit
def _byte(value: tl.constexpr, column, first: tl.constexpr):
  inside = (column >> 2) == first // 4
  return tl.where(inside, tl.full([], value, tl.uint32) << ((column & 3) << 3), 0).to(tl.uint32)


@triton.jit
def store_four(to, first, c0, c1, c2, c3, step: tl.constexpr):
  """Members of each group to four neighbouring places: as one array, which takes one way through shared memory."""
  two = tl.arange(0, 2)
  four = tl.join(tl.join(c0, c2), tl.join(c1, c3)).to(tl.int32)
  to = to[:, None, None] + 2 * two[None, :, None] + two[None, None, :]
  tl.store(to, first[:, None, None] + four * step)
