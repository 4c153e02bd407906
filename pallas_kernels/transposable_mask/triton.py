"""The transposable mask of 4x4 blocks as a Triton device function, one block an element of each tensor.

Meets in the middle like `reference.py`: the same additions in the same order, the same comparisons, so the same pattern
bit for bit, ties included. The loops below are unrolled at compile time; 52 comparisons and 115 additions a block.
"""

import triton
import triton.language as tl

from pallas_kernels.formats import PAIRS
from pallas_kernels.transposable_mask import reference
from pallas_kernels.transposable_mask.reference import _complement, _HALVES


def _flatten(classes: list[list[tuple[int, int]]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Choices as 6 p + q in one row, and where each class starts (and the last one ends)."""
  starts = [0]
  for choices in classes:
    starts.append(starts[-1] + len(choices))
  return tuple(6 * p + q for choices in classes for p, q in choices), tuple(starts)


_upper, _upper_starts = _flatten(list(_HALVES.values()))
_lower, _lower_starts = _flatten([_HALVES[_complement(counts)] for counts in _HALVES])

CLASSES: tl.constexpr = tl.constexpr(len(_HALVES))
UPPER: tl.constexpr = tl.constexpr(_upper)
UPPER_STARTS: tl.constexpr = tl.constexpr(_upper_starts)
LOWER: tl.constexpr = tl.constexpr(_lower)
LOWER_STARTS: tl.constexpr = tl.constexpr(_lower_starts)
PAIR_BITS: tl.constexpr = tl.constexpr(tuple(sum(1 << i for i in pair) for pair in PAIRS))
LIMIT: tl.constexpr = tl.constexpr(reference.LIMIT)
NAN: tl.constexpr = tl.constexpr(reference.NAN)


@triton.jit
def bounded_magnitude(x):
  """|x| with infinities at the limit and NaN far below zero, as the reference ranks them."""
  return tl.where(x != x, -NAN, tl.minimum(tl.abs(x), LIMIT))  # noqa: PLR0124


@triton.jit
def _pair_sums(row):
  return row[0] + row[1], row[0] + row[2], row[0] + row[3], row[1] + row[2], row[1] + row[3], row[2] + row[3]


@triton.jit
def _best_half(first, second, choices: tl.constexpr, start: tl.constexpr, end: tl.constexpr):
  """Score and 8-bit code of the first best of choices[start:end] for two rows."""
  best = first[choices[start] // 6] + second[choices[start] % 6]
  code = tl.full(best.shape, PAIR_BITS[choices[start] // 6] | PAIR_BITS[choices[start] % 6] << 4, tl.uint32)
  for k in tl.static_range(start + 1, end):
    score = first[choices[k] // 6] + second[choices[k] % 6]
    code = tl.where(score > best, PAIR_BITS[choices[k] // 6] | PAIR_BITS[choices[k] % 6] << 4, code)
    best = tl.maximum(best, score)
  return best, code


@triton.jit
def best_codes(a):
  """uint32 a block, bit 4 i + j for entry (i, j), from the bounded magnitudes `a`: a tuple of four rows of four."""
  s0 = _pair_sums(a[0])
  s1 = _pair_sums(a[1])
  s2 = _pair_sums(a[2])
  s3 = _pair_sums(a[3])
  upper_score, upper = _best_half(s0, s1, UPPER, UPPER_STARTS[0], UPPER_STARTS[1])
  lower_score, lower = _best_half(s2, s3, LOWER, LOWER_STARTS[0], LOWER_STARTS[1])
  best = upper_score + lower_score
  for c in tl.static_range(1, CLASSES):
    upper_score, upper_code = _best_half(s0, s1, UPPER, UPPER_STARTS[c], UPPER_STARTS[c + 1])
    lower_score, lower_code = _best_half(s2, s3, LOWER, LOWER_STARTS[c], LOWER_STARTS[c + 1])
    score = upper_score + lower_score
    better = score > best
    best = tl.maximum(best, score)
    upper = tl.where(better, upper_code, upper)
    lower = tl.where(better, lower_code, lower)
  return upper | lower << 8


@triton.jit
def nan_code(x):
  """Bit 4 i + j where entry (i, j) of the float32 block `x` is NaN: no pattern keeps it."""
  code = tl.zeros(x[0][0].shape, tl.uint32)
  for i in tl.static_range(4):
    for j in tl.static_range(4):
      code = code | tl.where(x[i][j] != x[i][j], 1 << (4 * i + j), 0).to(tl.uint32)
  return code
