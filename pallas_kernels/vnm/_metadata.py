"""How Triton reads metadata: 32 bits of it have four groups of a row, and the same four of the row eight below."""

import triton
import triton.language as tl


@triton.jit
def paired_rows(ROWS: tl.constexpr):
  """Rows [1, ROWS / 2, 2]: the two along the last axis share their metadata."""
  n = tl.arange(0, ROWS // 2)
  return (n // 8 * 16 + n % 8)[None, :, None] + 8 * tl.arange(0, 2)[None, None, :]


@triton.jit
def nibble(metadata, row, group, GROUPS: tl.constexpr):
  """The nibbles of rows and groups; `GROUPS` a row."""
  tile = row // 64 * (GROUPS // 16) + group // 16
  loaded = tl.load(metadata + tile * 128 + row % 64 // 16 * 32 + row % 8 * 4 + group % 16 // 4)
  return (loaded >> (row // 8 % 2 * 16 + group % 4 * 4).to(tl.uint32)) & 15


@triton.jit
def nibbles(loaded, bit):
  """The nibbles at a bit [G, 1] of loaded metadata [G, N], those of both rows along a new last axis."""
  loaded = loaded >> bit.to(tl.uint32)
  return (loaded[:, :, None] >> (16 * tl.arange(0, 2))[None, None, :].to(tl.uint32)) & 15
