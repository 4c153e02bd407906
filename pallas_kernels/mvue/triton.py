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
def _magnitude_bits(x, largest: tl.constexpr, dtype: tl.constexpr):
  """The 16 bits of a quarter magnitude, scaled back, clipped and rounded; zero stays zero."""
  bits = tl.minimum(x * 4.0, largest).to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
  return tl.where(x > 0, bits, 0)


@triton.jit
def sample(e0, e1, e2, e3, u, dtype: tl.constexpr):
  """The four sampled entries of a group as 16-bit patterns in uint32; those that are not kept have no magnitude bits.

  Where the reference tests start <= point < end for each interval, this tests point < end once and takes differences
  of neighbours: the same for all finite values.
  """
  largest: tl.constexpr = 65504.0 if dtype == tl.float16 else 3.3895313892515355e38
  nan: tl.constexpr = 0x7E00 if dtype == tl.float16 else 0x7FC0
  a0 = tl.abs(e0) * 0.25
  a1 = tl.abs(e1) * 0.25
  a2 = tl.abs(e2) * 0.25
  a3 = tl.abs(e3) * 0.25
  total = ((a0 + a1) + a2) + a3
  half = total * 0.5
  d0 = a0 > half
  d1 = a1 > half
  d2 = a2 > half
  d3 = a3 > half
  dominated = d0 | d1 | d2 | d3
  r0 = tl.where(d0, 0.0, a0)
  r1 = tl.where(d1, 0.0, a1)
  r2 = tl.where(d2, 0.0, a2)
  r3 = tl.where(d3, 0.0, a3)
  end1 = r0 + r1
  end2 = end1 + r2
  end3 = end2 + r3
  value = tl.where(dominated, end3, half)
  point = u * value
  # A dominant entry's rest has one point only: the second never falls below a negative bound.
  p0 = point < r0
  p1 = point < end1
  p2 = point < end2
  p3 = point < end3
  q0 = (point < r0 - half) & ~dominated
  q1 = (point < end1 - half) & ~dominated
  q2 = (point < end2 - half) & ~dominated
  q3 = (point < end3 - half) & ~dominated
  # At most one entry is dominant: two would sum to more than the total.
  own = _magnitude_bits(tl.where(d0, a0, tl.where(d1, a1, tl.where(d2, a2, a3))), largest, dtype)
  shared = _magnitude_bits(value, largest, dtype)
  v0 = tl.where(d0, own, tl.where(p0 | q0, shared, 0)) | _sign(e0)
  v1 = tl.where(d1, own, tl.where((p1 ^ p0) | (q1 ^ q0), shared, 0)) | _sign(e1)
  v2 = tl.where(d2, own, tl.where((p2 ^ p1) | (q2 ^ q1), shared, 0)) | _sign(e2)
  v3 = tl.where(d3, own, tl.where((p3 ^ p2) | (q3 ^ q2), shared, 0)) | _sign(e3)
  # A quarter of four finite magnitudes cannot overflow: the total is finite exactly when the entries are.
  finite = total < float('inf')
  v0 = tl.where(finite, v0, nan)
  v1 = tl.where(finite, v1, nan)
  v2 = tl.where(finite, v2, 0)
  v3 = tl.where(finite, v3, 0)
  return v0, v1, v2, v3


@triton.jit
def _sign(x):
  return (x.to(tl.uint32, bitcast=True) >> 16) & 0x8000


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
