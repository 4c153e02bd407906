"""Positions of the values that blocks keep: from codes to nibbles, and stored as the metadata of an operand.

This is the order of `arch.REGISTER_ORDER`, see `operand.py`.
"""

import triton
import triton.language as tl

from pallas_kernels.triton_blocks.blocks import store_values
from pallas_kernels.triton_blocks.ptx import prmt


@triton.jit
def transpose_code(code):
  """Bit 4 i + j to bit 4 j + i, by two swaps of off-diagonal squares."""
  t = (code ^ (code >> 3)) & 0x0A0A
  code = code ^ t ^ (t << 3)
  t = (code ^ (code >> 6)) & 0x00CC
  return code ^ t ^ (t << 6)


@triton.jit
def nibbles(code):
  """Metadata nibbles of four groups at once: nibble g of the result from bits 4 g .. 4 g + 3 of the keep code.

  Groups that keep fewer than two are filled up with their lowest free positions. Bit planes of `low | high << 2`:
  low is 1 where 1 is the first kept of two, 2 where 2 and 3 are kept, else 0; high is 3, 2 or 1.
  """
  b0 = code
  b1 = code >> 1
  b2 = code >> 2
  b3 = code >> 3
  low0 = (b0 ^ 0xFFFF) & b1 & (b2 | b3) & 0x1111
  low1 = ((b0 | b1) ^ 0xFFFF) & b2 & b3 & 0x1111
  high0 = (b3 | (b2 ^ 0xFFFF)) & 0x1111
  high1 = (b3 | b2) & 0x1111
  return low0 + low1 * 2 + high0 * 4 + high1 * 8


@triton.jit
def nibbles_of_two(code):
  """`nibbles` of groups that keep two each; above its 16 bits `code` may hold rubbish, the result does not."""
  right = code >> 1
  left = code << 1
  # Bit 0: 1 is the first kept; bit 2: 3, or 1 is the second. Bit 1: neither 0 nor 1; bit 3: 2 or 3.
  even = (right & (code ^ 0xFFFFFFFF) & 0x1111) | ((right | (code ^ 0xFFFFFFFF)) & 0xEEEEEEEE)
  odd = (left | code) ^ 0x2222
  return (even & 0x5555) | (odd & 0xAAAA)


@triton.jit
def selectors(nibbles, base: tl.constexpr):
  """Byte selectors of two groups, 16 bits each, from nibbles: `base` and two bytes on for each step of either half."""
  x = (nibbles | nibbles << 12) & 0x000F000F
  x = (x | x << 6) & 0x03030303
  return x * 0x22 + base


@triton.jit
def choose_all(groups, nibbles):
  """The two stored values of each of four groups, given in words, in one uint32 by the groups' metadata.

  Free positions that fill up a group must hold zero.
  """
  if len(groups[0]) == 1:
    return (
      _choose_bytes(groups[0][0], nibbles, 0), _choose_bytes(groups[1][0], nibbles, 4),
      _choose_bytes(groups[2][0], nibbles, 8), _choose_bytes(groups[3][0], nibbles, 12),
    )  # fmt: skip
  else:
    # Byte permutations: no predicates, of which a thread has seven.
    first = selectors(nibbles & 0xFF, 0x10101010)
    second = selectors(nibbles >> 8, 0x10101010)
    return (
      prmt(groups[0][0], groups[0][1], first), prmt(groups[1][0], groups[1][1], first >> 16),
      prmt(groups[2][0], groups[2][1], second), prmt(groups[3][0], groups[3][1], second >> 16),
    )  # fmt: skip


@triton.jit
def _choose_bytes(group, nibbles, at: tl.constexpr):
  """The two stored float8 of a group, by the metadata nibble at bit `at`, in the low 16 bits."""
  low = (group >> (((nibbles >> at) & 3) << 3)) & 0xFF
  high = (group >> (((nibbles >> (at + 2)) & 3) << 3)) & 0xFF
  return low | high << 8


# 32 bits of metadata join nibbles of eight blocks, which up to eight threads hold. 16 bits a block times the 256 blocks
# of a 64 x 64 tile are just the 512 bytes of its metadata. So the blocks' nibbles are first laid down there, where the
# eight lie side by side, and exchanged in place between two barriers. Reductions across threads took twice the
# instructions.


@triton.jit
def scatter_nibbles(
  metadata, nibble, place, rows: tl.constexpr, columns: tl.constexpr, transposed: tl.constexpr, bits: tl.constexpr
):
  """Lays down the nibbles of all blocks; blocks outside the array describe padding, positions 0 and 1.

  Args:
    metadata: of the operand.
    nibble: metadata of each block's four groups.
    place: the tile.
    rows: of the array.
    columns: of the array.
    transposed: whether the operand is that of the transpose.
    bits: of a value, 16 or 8.
  """
  across: tl.constexpr = ((rows if transposed else columns) + 63) // 64
  line = place[1] if transposed else place[0]
  group = place[0] if transposed else place[1]
  pair = (line % 16) // 4 * 2 + line % 2
  if bits == 16:
    # [warp, row pair, quarter of k64, row half, group of the quarter]
    position = (pair * 4 + (group % 16) // 4) * 8 + (line % 4) // 2 * 4 + group % 4
  else:
    # [warp, row pair, half of k64, row half, group of the half]
    position = (pair * 4 + (group % 16) // 8 * 2 + (line % 4) // 2) * 8 + group % 8
  at = (line // 16 * across + group // 16) * 256 + position
  there = (place[0] < 16 * ((rows + 63) // 64)) & (place[1] < 16 * ((columns + 63) // 64))
  nibble = tl.where(place[2], nibble, 0x4444).to(tl.uint16)
  tl.store(metadata.to(tl.pointer_type(tl.uint16)) + at, nibble, mask=there | place[2])


@triton.jit
def gather_metadata(metadata, tile_shape: tl.constexpr, place, rows: tl.constexpr, columns: tl.constexpr,
                    transposed: tl.constexpr):  # fmt: skip
  """This tile's metadata from the nibbles laid down: (its 32-bit words, where they go, which exist)."""
  across: tl.constexpr = ((rows if transposed else columns) + 63) // 64
  down: tl.constexpr = ((columns if transposed else rows) + 63) // 64
  tiles: tl.constexpr = tile_shape[0] * tile_shape[1] // 256
  group_tiles: tl.constexpr = tile_shape[0 if transposed else 1] // 16
  n = tl.arange(0, 128 * tiles)
  line = (place[4] if transposed else place[3]) // 16 + n // 128 // group_tiles
  group = (place[3] if transposed else place[4]) // 16 + n // 128 % group_tiles
  there = (group < across) & (line < down)
  # Word 32 warp + 16 pair + 4 row + quarter takes the 16 bytes at ((warp, pair), quarter).
  thread = n % 128
  at = (line * across + group) * 128
  source = metadata.to(tl.pointer_type(tl.uint64)) + at // 2 + (thread // 16 * 4 + thread % 4) * 2
  first = tl.load(source, mask=there, other=0)
  second = tl.load(source + 1, mask=there, other=0)
  shift = (thread // 4 % 4 * 4).to(tl.uint32)
  return _fold(first, shift) | _fold(second, shift) << 16, at + thread, there


@triton.jit
def _fold(x, shift):
  """One nibble from each 16-bit lane of a uint64, side by side in 16 bits."""
  low = x.to(tl.uint32) >> shift
  high = (x >> 32).to(tl.uint32) >> shift
  return (low & 0xF) | ((low >> 12) & 0xF0) | ((high & 0xF) << 8) | ((high >> 4) & 0xF000)


@triton.jit
def store_metadata(
  metadata, nibble, place, rows: tl.constexpr, columns: tl.constexpr, transposed: tl.constexpr, bits: tl.constexpr
):
  """Writes the positions of one operand, with values of `bits` bits, of an array of `rows` x `columns`."""
  scatter_nibbles(metadata, nibble, place, rows, columns, transposed, bits)
  tl.debug_barrier()
  word, at, there = gather_metadata(metadata, nibble.shape, place, rows, columns, transposed)
  tl.debug_barrier()
  tl.store(metadata + at, word, mask=there)


@triton.jit
def store_metadata_pair(
  row_metadata, row_nibble, column_metadata, column_nibble, place, rows: tl.constexpr, columns: tl.constexpr,
  bits: tl.constexpr,
):  # fmt: skip
  """Writes the positions of both operands, with values of `bits` bits, under the same two barriers."""
  scatter_nibbles(row_metadata, row_nibble, place, rows, columns, False, bits)
  scatter_nibbles(column_metadata, column_nibble, place, rows, columns, True, bits)
  tl.debug_barrier()
  row_word, row_at, row_there = gather_metadata(row_metadata, row_nibble.shape, place, rows, columns, False)
  column_word, column_at, column_there = gather_metadata(column_metadata, row_nibble.shape, place, rows, columns, True)
  tl.debug_barrier()
  tl.store(row_metadata + row_at, row_word, mask=row_there)
  tl.store(column_metadata + column_at, column_word, mask=column_there)


@triton.jit
def store_one(
  pairs, nibbles, values, metadata, place, batch,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS_DOWN: tl.constexpr,
):  # fmt: skip
  """One operand from the stored pairs of a block's groups and their metadata."""
  half: tl.constexpr = ROWS * COLUMNS // 2
  size: tl.constexpr = ((ROWS + 63) // 64) * ((COLUMNS + 63) // 64) * 128
  store_values(values + batch * half, pairs, place, ROWS, COLUMNS, GROUPS_DOWN)
  bits: tl.constexpr = values.dtype.element_ty.primitive_bitwidth
  store_metadata(metadata + batch * size, nibbles, place, ROWS, COLUMNS, GROUPS_DOWN, bits)
