"""How Triton reads the words of positions: a word has four groups of a row and of that eight below it."""

import triton
import triton.language as tl


@triton.jit
def rows_of_words(ROWS: tl.constexpr):
  """Rows [1, ROWS / 2, 2], those of a word along the last axis."""
  n = tl.arange(0, ROWS // 2)
  return (n // 8 * 16 + n % 8)[None, :, None] + 8 * tl.arange(0, 2)[None, None, :]


@triton.jit
def nibble(metadata, row, group, GROUPS: tl.constexpr):
  """The nibbles of rows and groups; `GROUPS` a row."""
  tile = row // 64 * (GROUPS // 16) + group // 16
  word = tl.load(metadata + tile * 128 + row % 64 // 16 * 32 + row % 8 * 4 + group % 16 // 4)
  return (word >> (row // 8 % 2 * 16 + group % 4 * 4).to(tl.uint32)) & 15


@triton.jit
def nibbles(word, bit):
  """The nibbles at a bit [G, 1] of words [G, N], those of both rows along a new last axis."""
  word = word >> bit.to(tl.uint32)
  return (word[:, :, None] >> (16 * tl.arange(0, 2))[None, None, :].to(tl.uint32)) & 15
