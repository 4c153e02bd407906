"""The exact MVUE sampler of a 4x4 block as Triton device functions, bit for bit the reference.

A group has two values at most: the magnitude that the drawn entries share, and a dominant entry. They are rounded
once, and what is stored is picked from their bytes by permutations, whose selectors are made for the four groups at
once: bit i of a lane of eight says whether entry i is kept, bit 4 + i whether it is the dominant one.

Comparisons give 0.0 or 1.0 and are counted by multiply-adds, which are twice as fast as selections and need no
predicates, of which a thread has seven. Every product is by a power of two, by 0 or 1, or stands alone.
"""

import triton
import triton.language as tl

from pallas_kernels.triton_blocks import blocks, ptx
from pallas_kernels.triton_blocks.positions import selectors, store_one
from pallas_kernels.triton_blocks.uniforms import block_uniforms

# Added to a whole number it puts that number in the low bits.
_NUMBER = tl.constexpr(8388608.0)
_LANES = tl.constexpr(0x01010101)
_ONES = tl.constexpr(0xFFFFFFFF)


@triton.jit
def sample_and_store(
  e, source: tl.constexpr, parameters, scale, values, metadata, dense, place, batch,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
  """MVUE of the blocks `e` (bits) along their columns and its operand.

  In float8 everything is multiplied by `scale`, the sample by half of it, and the blocks are written to `dense`, in
  their own layout; in 16 bits neither is read.
  """
  dtype: tl.constexpr = values.dtype.element_ty
  far = batch.to(tl.int64)
  if dtype.primitive_bitwidth == 8:
    rows = blocks.scaled(e, scale, source, dtype)
    blocks.store_rows(dense + far * ROWS * COLUMNS, rows, place, ROWS, COLUMNS, False)
  u = block_uniforms(parameters, place, batch)
  e = blocks.floats(blocks.transpose(e), source)
  if dtype.primitive_bitwidth == 8:
    # Sampled values go up to half the sum of their group, twice the largest entry.
    pairs, nibbles = sample_bytes(e, u, scale * 0.5, dtype)
  else:
    pairs, nibbles = sample_halves(e, u, source == dtype, dtype)
  store_one(pairs, nibbles, values, metadata, place, far, ROWS, COLUMNS, True)


@triton.jit
def sample_halves(e, u, exact: tl.constexpr, dtype: tl.constexpr):
  """Samples of the four groups of a block in 16 bits.

  Args:
    e: four tuples of float32 entries, a group each.
    u: four uniforms.
    exact: whether `dtype` represents the entries exactly.
    dtype: bfloat16 or float16; what is beyond its range saturates.

  Returns:
    (four uint32 with the two stored values of each group; the metadata nibbles of the four groups). A group with a NaN
    or an infinity keeps NaN in its first two.
  """
  low0, high0, own0, kept0 = _group_halves(e[0], u[0], exact, dtype)
  low1, high1, own1, kept1 = _group_halves(e[1], u[1], exact, dtype)
  low2, high2, own2, kept2 = _group_halves(e[2], u[2], exact, dtype)
  low3, high3, own3, kept3 = _group_halves(e[3], u[3], exact, dtype)
  positions, low_own, high_own, low_free, high_free = _choices(kept0, kept1, kept2, kept3)
  nibbles = _narrow_lanes(positions)
  # Positions of the drawn pair in a word with the dominant entry and zeros: 0, 1 or 4, 5 or 6, 7; 2, 3 at first.
  change = _narrow_lanes(
    (low_free & _LANES) + ((low_own | low_free) & _LANES) * 2 + (high_own & _LANES) * 4 + (high_free & _LANES) * 8
  )
  a01 = selectors(nibbles & 0xFF, 0x10101010)
  a23 = selectors(nibbles >> 8, 0x10101010)
  b01 = selectors(change & 0xFF, 0x32103210)
  b23 = selectors(change >> 8, 0x32103210)
  pairs = (
    ptx.prmt(ptx.prmt(low0, high0, a01), own0, b01), ptx.prmt(ptx.prmt(low1, high1, a01 >> 16), own1, b01 >> 16),
    ptx.prmt(ptx.prmt(low2, high2, a23), own2, b23), ptx.prmt(ptx.prmt(low3, high3, a23 >> 16), own3, b23 >> 16),
  )  # fmt: skip
  return pairs, nibbles


@triton.jit
def sample_bytes(e, u, scale, dtype: tl.constexpr):
  """Samples of the four groups of a block in float8.

  Args:
    e: four tuples of float32 entries, a group each.
    u: four uniforms.
    scale: finite float32 below 2^126, what a sample is multiplied by before it is rounded; beyond range it saturates.
    dtype: float8e4nv or float8e5.

  Returns:
    As `sample_halves`, the stored values in the low 16 bits.
  """
  # Overflow would make NaN of a zero.
  wide = tl.minimum(scale * 4.0, 3.4028234663852886e38)
  bytes0, own0, kept0 = _group_bytes(e[0], u[0], scale, wide, dtype)
  bytes1, own1, kept1 = _group_bytes(e[1], u[1], scale, wide, dtype)
  bytes2, own2, kept2 = _group_bytes(e[2], u[2], scale, wide, dtype)
  bytes3, own3, kept3 = _group_bytes(e[3], u[3], scale, wide, dtype)
  positions, low_own, high_own, low_free, high_free = _choices(kept0, kept1, kept2, kept3)
  # A value is byte 0 to 3, its entry with the shared magnitude; or 5, the dominant entry; or 6 or 7, a free position.
  low = ((positions | low_own) & _LANES) + (((positions >> 1 & (low_own ^ _ONES)) | low_free) & _LANES) * 2
  high = ((positions >> 2 | high_own) & _LANES) + (((positions >> 3 & (high_own ^ _ONES)) | high_free) & _LANES) * 2
  low += ((low_own | low_free) & _LANES) * 4
  high += ((high_own | high_free) & _LANES) * 4
  selector = low + high * 16
  pairs = (
    ptx.prmt(bytes0, own0, selector), ptx.prmt(bytes1, own1, selector >> 8),
    ptx.prmt(bytes2, own2, selector >> 16), ptx.prmt(bytes3, own3, selector >> 24),
  )  # fmt: skip
  return pairs, _narrow_lanes(positions)


@triton.jit
def _group_halves(e, u, exact: tl.constexpr, dtype: tl.constexpr):
  """(the shared magnitude with the signs of entries 0 and 1, of 2 and 3; the dominant entry, zeros above it; which are
  kept, in the low byte)."""
  largest: tl.constexpr = 65504.0 if dtype == tl.float16 else 3.3895313892515355e38
  # What rounds to zero is not kept: 2^-25 and less, or 2^-134, by bits, since as a literal that is a double.
  tiny: tl.constexpr = 0x33000000 if dtype == tl.float16 else 0x8000
  zero = tl.full([], 0, tl.uint32)
  value, poison, drawn, owner, own = _draw(e, u)
  shared = tl.minimum(value * 4.0, largest) + poison
  drawn = tl.where(_bits(shared) <= tiny, zero, drawn)
  if not exact:
    own = tl.clamp(own, -largest, largest)
    owner = tl.where((_bits(own) & 0x7FFFFFFF) > tiny, owner, zero)
  made = ptx.round_pair(shared, own, dtype)
  both = ptx.prmt(made, made, 0x1010)
  low = (ptx.prmt(_bits(e[0]), _bits(e[1]), 0x7632) & 0x80008000) | both
  high = (ptx.prmt(_bits(e[2]), _bits(e[3]), 0x7632) & 0x80008000) | both
  return low, high, made >> 16, drawn | owner


@triton.jit
def _group_bytes(e, u, scale, wide, dtype: tl.constexpr):
  """(the shared magnitude with the sign of each entry, four bytes; the dominant entry in byte 1, zeros above it; which
  are kept, in the low byte)."""
  tiny: tl.constexpr = 2.0**-17 if dtype == tl.float8e5 else 2.0**-10
  zero = tl.full([], 0, tl.uint32)
  value, poison, drawn, owner, own = _draw(e, u)
  # Clipped to a quarter of the range of float32.
  shared = tl.fma(tl.minimum(value, 8.507058665963221e37), wide, poison)
  drawn = tl.where(shared <= tiny, zero, drawn)
  own = own * scale
  owner = tl.where(tl.abs(own) > tiny, owner, zero)
  made = ptx.round_pair(shared, own, dtype)
  top = ptx.prmt(ptx.prmt(_bits(e[0]), _bits(e[1]), 0x73), ptx.prmt(_bits(e[2]), _bits(e[3]), 0x73), 0x5410)
  return (top & 0x80808080) | ptx.prmt(made, made, 0), made, drawn | owner


@triton.jit
def _draw(e, u):
  """The decision for a group.

  Where the reference tests start <= point < end for each interval, this finds the interval of a point by comparing with
  the ends alone: the same for all finite values, and one interval needs no test. Ends are in quarters, so that no sum
  overflows; the reference rounds quarters of float32 entries below 2^-124, this does not.

  Returns:
    (a quarter of the magnitude that drawn entries get; what makes it NaN in a group that is not finite, else zero;
    which are drawn and which is dominant, in the low byte, rubbish above; the dominant entry): what is drawn of a group
    that is not finite is its first two.
  """
  a0 = tl.abs(e[0])
  a1 = tl.abs(e[1])
  a2 = tl.abs(e[2])
  a3 = tl.abs(e[3])
  total = tl.fma(a3, 0.25, tl.fma(a2, 0.25, tl.fma(a1, 0.25, a0 * 0.25)))
  half = total * 0.5
  # At most one entry is more than half of the sum. The bound may overflow where none could be.
  bound = total * 2.0
  d0 = ptx.greater(a0, bound)
  d1 = ptx.greater(a1, bound)
  d2 = ptx.greater(a2, bound)
  d3 = ptx.greater(a3, bound)
  end0 = a0 * tl.fma(d0, -0.25, 0.25)
  end1 = tl.fma(a1, tl.fma(d1, -0.25, 0.25), end0)
  end2 = tl.fma(a2, tl.fma(d2, -0.25, 0.25), end1)
  rest = tl.fma(a3, tl.fma(d3, -0.25, 0.25), end2)
  dominated = rest < total
  value = tl.where(dominated, rest, half)
  poison = total - total
  point = tl.fma(u, value, poison)
  owner = _bits(tl.fma(d3, 136.0, tl.fma(d2, 68.0, tl.fma(d1, 34.0, tl.fma(d0, 17.0, _NUMBER)))))
  first = ptx.at_least(point, end0) + (_NUMBER + 1.0)
  first = _bits(tl.fma(ptx.at_least(point, end2), 4.0, tl.fma(ptx.at_least(point, end1), 2.0, first)))
  second = (_NUMBER + 2.0) - ptx.greater(end0 - half, point)
  second = tl.fma(ptx.at_least(point, end1 - half), 2.0, second)
  second = _bits(tl.fma(ptx.at_least(point, end2 - half), 4.0, second))
  own = tl.fma(d3, e[3], tl.fma(d2, e[2], tl.fma(d1, e[1], d0 * e[0])))
  return value, poison, first | tl.where(dominated, tl.full([], 0, tl.uint32), second), owner, own


@triton.jit
def _bits(x):
  return x.to(tl.uint32, bitcast=True)


@triton.jit
def _choices(kept0, kept1, kept2, kept3):
  """A byte a group: (metadata nibble; in bit 0, with rubbish above, whether the lower, the higher of the two stored is
  the dominant one; whether the lower, the higher is a free position).

  Groups that keep fewer than two are filled up with their lowest free positions, as in `positions.nibbles`.
  """
  b0 = ptx.prmt(ptx.prmt(kept0, kept1, 0x40), ptx.prmt(kept2, kept3, 0x40), 0x5410)
  b1 = b0 >> 1
  b2 = b0 >> 2
  b3 = b0 >> 3
  both = b2 & b3
  later = b2 | b3
  low0 = (b0 ^ _ONES) & b1 & later
  low1 = ((b0 | b1) ^ _ONES) & both
  high0 = b3 | (b2 ^ _ONES)
  positions = (low0 & _LANES) + (low1 & _LANES) * 2 + (high0 & _LANES) * 4 + (later & _LANES) * 8
  # Bit 4 + i of a lane, at bit 0.
  o1 = b0 >> 5
  o2 = b0 >> 6
  low_own = b0 >> 4 | (o1 & later) | (o2 & b3)
  high_own = b0 >> 7 | (o2 & (b3 ^ _ONES)) | (o1 & (later ^ _ONES))
  return positions, low_own, high_own, (b0 | (b1 & later) | both) ^ _ONES, (b1 | later) ^ _ONES


@triton.jit
def _narrow_lanes(x):
  """Nibbles from lanes of eight to lanes of four bits, 16 in all."""
  x = x | x >> 4
  return ptx.prmt(x, x * 0, 0x4420)
