"""Philox uniforms and the exact MVUE sampler as Triton device functions, one group of four an element.

Bit for bit the reference: no division, and every product is by a power of two or stands alone, so contraction to fused
multiply-adds rounds nothing differently.
"""

import triton
import triton.language as tl


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
  """Four uint32 words for each counter; see `pallas_kernels.mvue.philox`."""
  for _ in tl.static_range(10):
    # One 64-bit product is one wide multiply; the high and low halves apart would be two, the high one slow.
    p0 = c0.to(tl.uint64) * 0xD2511F53
    p1 = c2.to(tl.uint64) * 0xCD9E8D57
    c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
    c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
    c1 = p1.to(tl.uint32)
    c3 = p0.to(tl.uint32)
    k0 = k0 + 0x9E3779B9
    k1 = k1 + 0xBB67AE85
  return c0, c1, c2, c3


@triton.jit
def uniform(word):
  """float32 in [0, 1) from a uint32."""
  return (word >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def sample(e0, e1, e2, e3, u, exact: tl.constexpr, dtype: tl.constexpr):
  """A sample of a group of float32 entries: the two stored values in one uint32, and which entries they are.

  Args:
    e0: float32 entries, to e3.
    u: the group's uniform.
    exact: whether `dtype` represents the entries exactly.
    dtype: the result's, bfloat16 or float16.

  Returns:
    (low value | high value << 16, 4-bit code); a group with a NaN or an infinity keeps NaN in its first two.
  """
  low, high, finite, code = sample_floats(e0, e1, e2, e3, u, 1.0, exact, dtype)
  pair = _bits(low, dtype) | _bits(high, dtype) << 16
  return tl.where(finite, pair, 0x7E007E00 if dtype == tl.float16 else 0x7FC07FC0).to(tl.uint32), code


@triton.jit
def sample_floats(e0, e1, e2, e3, u, scale, exact: tl.constexpr, dtype: tl.constexpr):
  """`sample` before the last rounding.

  Where the reference tests start <= point < end for each interval, this finds the interval of a point by comparing with
  the ends alone: the same for all finite values, and the last interval needs no test. The two kept entries are chosen
  first and made into values after, which is half the work of making four values and choosing two.

  Args:
    e0: float32 entries, to e3.
    u: the group's uniform.
    scale: what the sample is multiplied by before it is rounded to float8; unused with 16-bit types.
    exact: whether `dtype` represents the entries exactly.
    dtype: what the values will be rounded to: bfloat16, float16, float8e4nv or float8e5.

  Returns:
    (low value, high value, whether all entries are finite, 4-bit code): float32 values, scaled but not clipped in the
    float8 case; of a group that is not finite the values are undefined and the code names the first two.
  """
  narrow: tl.constexpr = dtype.primitive_bitwidth == 8
  if narrow:
    largest: tl.constexpr = 3.4028234663852886e38
    tiny: tl.constexpr = 2.0**-17 if dtype == tl.float8e5 else 2.0**-10
  else:
    largest: tl.constexpr = 65504.0 if dtype == tl.float16 else 3.3895313892515355e38
    # What rounds to zero in `dtype` is not kept.
    tiny: tl.constexpr = 2.0**-25 if dtype == tl.float16 else 2.0**-134
  a0 = tl.abs(e0) * 0.25
  a1 = tl.abs(e1) * 0.25
  a2 = tl.abs(e2) * 0.25
  a3 = tl.abs(e3) * 0.25
  total = ((a0 + a1) + a2) + a3
  half = total * 0.5
  # At most one entry is dominant: two would sum to more than the total.
  d0 = a0 > half
  d1 = a1 > half
  d2 = a2 > half
  d3 = a3 > half
  end0 = tl.where(d0, 0.0, a0)
  end1 = end0 + tl.where(d1, 0.0, a1)
  end2 = end1 + tl.where(d2, 0.0, a2)
  rest = end2 + tl.where(d3, 0.0, a3)
  owner = tl.where(d0, 1, tl.where(d1, 2, tl.where(d2, 4, tl.where(d3, 8, 0))))
  dominated = owner != 0
  value = tl.where(dominated, rest, half)
  point = u * value
  first = tl.where(point < end0, 1, tl.where(point < end1, 2, tl.where(point < end2, 4, 8)))
  second = tl.where(point < end0 - half, 1, tl.where(point < end1 - half, 2, tl.where(point < end2 - half, 4, 8)))
  shared = tl.minimum(value * 4.0, largest)
  if narrow:
    shared = shared * scale
  drawn = tl.where(shared > tiny, first | tl.where(dominated, 0, second), 0)
  if narrow:
    heaviest = tl.maximum(tl.maximum(tl.abs(e0), tl.abs(e1)), tl.maximum(tl.abs(e2), tl.abs(e3)))
    owner = tl.where(heaviest * scale > tiny, owner, 0)
  elif not exact:
    e0 = tl.clamp(e0, -largest, largest)
    e1 = tl.clamp(e1, -largest, largest)
    e2 = tl.clamp(e2, -largest, largest)
    e3 = tl.clamp(e3, -largest, largest)
    heaviest = tl.maximum(tl.maximum(tl.abs(e0), tl.abs(e1)), tl.maximum(tl.abs(e2), tl.abs(e3)))
    owner = tl.where(heaviest > tiny, owner, 0)
  # A quarter of four finite magnitudes cannot overflow: the total is finite exactly when the entries are.
  finite = total < float('inf')
  code = tl.where(finite, drawn | owner, 3).to(tl.uint32)

  b0 = (code & 1) != 0
  b1 = (code & 2) != 0
  b2 = (code & 4) != 0
  b3 = (code & 8) != 0
  low = tl.where(b0, e0, tl.where(b1 & (b2 | b3), e1, tl.where(b2 & b3, e2, 0.0)))
  high = tl.where(b3, e3, tl.where(b2, e2, tl.where(b1, e1, 0.0)))
  # Of two kept entries the dominant one is the larger. Kept entries are never zero, free positions are.
  low_owns = dominated & (tl.abs(low) > tl.abs(high))
  low_value = _value(low, low_owns, shared, scale, narrow)
  high_value = _value(high, dominated & ~low_owns, shared, scale, narrow)
  return low_value, high_value, finite, code


@triton.jit
def _value(entry, owns, shared, scale, narrow: tl.constexpr):
  """A dominant entry as it is, another as the shared magnitude with its sign, a free position as zero; scaled."""
  bits = shared.to(tl.uint32, bitcast=True) | (entry.to(tl.uint32, bitcast=True) & 0x80000000)
  drawn = tl.where(entry == 0, 0.0, bits.to(tl.float32, bitcast=True))
  if narrow:
    entry = entry * scale
  return tl.where(owns, entry, drawn)


@triton.jit
def _bits(x, dtype: tl.constexpr):
  return x.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def block_uniforms(parameters, place, batch, columns: tl.constexpr):
  """Four uniforms a 4x4 block, one a group: of its columns if `columns`, else of its rows.

  `parameters` points to uint32 [5]: two seed words, then batch, group and quad of the array's first group.
  """
  k0 = tl.load(parameters)
  k1 = tl.load(parameters + 1)
  batch = tl.load(parameters + 2) + batch.to(tl.uint32)
  group = tl.load(parameters + 3) + (place[0] if columns else place[1]).to(tl.uint32)
  quad = tl.load(parameters + 4) + (place[1] if columns else place[0]).to(tl.uint32)
  # The four counters must have one shape for the rounds to mix them.
  zero = (place[0] * 0 + place[1] * 0).to(tl.uint32)
  w0, w1, w2, w3 = philox4x32(quad + zero, group + zero, batch + zero, zero, k0, k1)
  return uniform(w0), uniform(w1), uniform(w2), uniform(w3)
