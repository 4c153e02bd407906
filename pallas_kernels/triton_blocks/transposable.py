"""The transposable mask of 4x4 blocks as a Triton device function, one block an element of each tensor.

The search of `two_of_four/transposable.py`: the same additions in the same order, the same comparisons, so the same
pattern bit for bit, ties included. 28 comparisons and 63 additions a block. Comparisons give 0.0 or 1.0, and codes are
whole numbers in float32 that multiply-adds choose: those have a unit of their own, while comparisons and selections
share one that is half as fast.
"""

import triton
import triton.language as tl

from pallas_kernels.triton_blocks import ptx
from pallas_kernels.two_of_four import transposable as reference

LIMIT: tl.constexpr = tl.constexpr(reference.LIMIT)
NAN: tl.constexpr = tl.constexpr(reference.NAN)
# Added to a whole number it puts that number in the low bits.
_NUMBER = tl.constexpr(8388608.0)


@triton.jit
def bounded_magnitude(x):
  """|x| with infinities at the limit and NaN far below zero, as the reference ranks them."""
  return tl.where(x != x, -NAN, tl.minimum(tl.abs(x), LIMIT))  # noqa: PLR0124


@triton.jit
def _choose(best, other):
  """The one of two (score, code) with the higher score, the first of equals."""
  return tl.maximum(best[0], other[0]), tl.fma(ptx.greater(other[0], best[0]), other[1] - best[1], best[1])


@triton.jit
def _both(x, y):
  """Two choices that have no entry in common."""
  return x[0] + y[0], x[1] + y[1]


@triton.jit
def _crossed(first, second, i: tl.constexpr, j: tl.constexpr, up: tl.constexpr, down: tl.constexpr):
  """Column i of `first` and j of `second`, or j of `first` and i of `second`: the better, with its code, by the codes
  `up` and `down` of column 0 of either."""
  one: tl.constexpr = float((up << i) + (down << j))
  change: tl.constexpr = float((up << j) + (down << i) - (up << i) - (down << j))
  x = first[i] + second[j]
  y = first[j] + second[i]
  return tl.maximum(x, y), tl.fma(ptx.greater(y, x), change, one)


@triton.jit
def _split(a, upper, lower, i: tl.constexpr, j: tl.constexpr, k: tl.constexpr, m: tl.constexpr):
  """The best choices of columns in pairs i, j and k, m: (one that the halves do not share; for the upper half, for the
  lower half, one that shares all four; for a block whose halves share one pair)."""
  whole = _crossed(upper, lower, i, j, 0x0011, 0x1100)
  other_whole = _crossed(upper, lower, k, m, 0x0011, 0x1100)
  top = _crossed(a[0], a[1], i, j, 0x0001, 0x0010)
  other_top = _crossed(a[0], a[1], k, m, 0x0001, 0x0010)
  bottom = _crossed(a[2], a[3], i, j, 0x0100, 0x1000)
  other_bottom = _crossed(a[2], a[3], k, m, 0x0100, 0x1000)
  one_shared = _choose(_both(other_whole, _both(top, bottom)), _both(whole, _both(other_top, other_bottom)))
  return _both(whole, other_whole), _both(top, other_top), _both(bottom, other_bottom), one_shared


@triton.jit
def best_codes(a):
  """uint32 a block, bit 4 i + j for entry (i, j), from the bounded magnitudes `a`: a tuple of four rows of four.

  Above its 16 bits is rubbish, none of it in the lowest eight of them.
  """
  upper = a[0][0] + a[1][0], a[0][1] + a[1][1], a[0][2] + a[1][2], a[0][3] + a[1][3]
  lower = a[2][0] + a[3][0], a[2][1] + a[3][1], a[2][2] + a[3][2], a[2][3] + a[3][3]
  whole, top, bottom, best = _split(a, upper, lower, 0, 1, 2, 3)
  best = _choose(whole, best)
  whole, other_top, other_bottom, one_shared = _split(a, upper, lower, 0, 2, 1, 3)
  best = _choose(_choose(best, whole), one_shared)
  best = _choose(best, _both(_choose(top, other_top), _choose(bottom, other_bottom)))
  _, _, _, one_shared = _split(a, upper, lower, 0, 3, 1, 2)
  best = _choose(best, one_shared)
  return (best[1] + _NUMBER).to(tl.uint32, bitcast=True)


@triton.jit
def nan_code(x):
  """Bit 4 i + j where entry (i, j) of the float32 block `x` is NaN: no pattern keeps it."""
  code = tl.zeros(x[0][0].shape, tl.uint32)
  for i in tl.static_range(4):
    for j in tl.static_range(4):
      code = code | tl.where(x[i][j] != x[i][j], 1 << (4 * i + j), 0).to(tl.uint32)
  return code
