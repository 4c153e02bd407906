"""Triton kernels that write an operand, 2:4 or V:N:M, out as a dense array; `triton.py` launches them."""

import triton
import triton.language as tl

from pallas_kernels.vnm import _blocks as blocks


@triton.jit
def expand_rows(values, words, dense, K: tl.constexpr, ROWS: tl.constexpr):
  """A program writes `ROWS` rows of 64 columns. Dense arrays are what products read that have another sparse side."""
  n = tl.arange(0, ROWS // 2)
  row = (n // 8 * 16 + n % 8)[None, :, None] + 8 * tl.arange(0, 2)[None, None, :] + tl.program_id(1) * ROWS
  g = tl.arange(0, 16)
  group = tl.program_id(0) * 16 + g[:, None, None]
  tile = (tl.program_id(1) * (ROWS // 64) + n[None, :] // 32) * (K // 64) + tl.program_id(0)
  word = tl.load(words + tile * 128 + n[None, :] % 32 * 4 + g[:, None] // 4) >> (4 * (g[:, None] % 4)).to(tl.uint32)
  nibble = (word[:, :, None] >> (16 * tl.arange(0, 2))[None, None, :].to(tl.uint32)) & 15
  pair = tl.load(values.to(tl.pointer_type(tl.uint32)) + row * (K // 4) + group)
  quads = dense.to(tl.pointer_type(tl.uint64)) + row * (K // 4) + group
  tl.store(quads, blocks.quad(pair, nibble & 3, nibble >> 2, 0))


@triton.jit
def scatter_rows(
  values, words, rows, dense, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr
):
  """A program puts what `ROWS` rows of 16 groups store where the index says, into zeros."""
  n = tl.arange(0, ROWS // 2)
  row = (n // 8 * 16 + n % 8)[None, :, None] + 8 * tl.arange(0, 2)[None, None, :] + tl.program_id(1) * ROWS
  g = tl.arange(0, 16)
  group = tl.program_id(0) * 16 + g[:, None, None]
  tile = (tl.program_id(1) * (ROWS // 64) + n[None, :] // 32) * (C // M // 16) + tl.program_id(0)
  word = tl.load(words + tile * 128 + n[None, :] % 32 * 4 + g[:, None] // 4) >> (4 * (g[:, None] % 4)).to(tl.uint32)
  nibble = ((word[:, :, None] >> (16 * tl.arange(0, 2))[None, None, :].to(tl.uint32)) & 15).to(tl.int32)
  pair = tl.load(values.to(tl.pointer_type(tl.uint32)) + row * (C // M) + group)
  index = rows + tl.program_id(1) * ROWS // V * (C // M * 4) + group * 4
  to = dense.to(tl.pointer_type(tl.uint16)) + row * C
  tl.store(to + tl.load(index + (nibble & 3)), pair.to(tl.uint16))
  tl.store(to + tl.load(index + (nibble >> 2)), (pair >> 16).to(tl.uint16))
