"""Philox uniforms as Triton device functions, bit for bit the reference; `sample` draws with them."""

import triton
import triton.language as tl


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
  """Four uint32 words for each counter; see `pallas_kernels.two_of_four.philox`."""
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
def block_uniforms(parameters, place, batch):
  """Four uniforms a 4x4 block, one a column.

  `parameters` points to uint32 [5]: two seed words, then batch, group and quad of the array's first group.
  """
  k0 = tl.load(parameters)
  k1 = tl.load(parameters + 1)
  batch = tl.load(parameters + 2) + batch.to(tl.uint32)
  group = tl.load(parameters + 3) + place[0].to(tl.uint32)
  quad = tl.load(parameters + 4) + place[1].to(tl.uint32)
  # The four counters must have one shape for the rounds to mix them.
  zero = (place[0] * 0 + place[1] * 0).to(tl.uint32)
  w0, w1, w2, w3 = philox4x32(quad + zero, group + zero, batch + zero, zero, k0, k1)
  return uniform(w0), uniform(w1), uniform(w2), uniform(w3)
