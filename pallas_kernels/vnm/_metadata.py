"""Where the metadata of an operand lies, for Triton kernels that read and write it: in `arch.REGISTER_ORDER`.

Of 16-bit values 32 bits have four neighbouring groups of a row, and the same four of the row eight below; a byte has
two groups. `triton_blocks/positions.py` is the same for kernels that go by 4x4 blocks. `ACROSS` is the groups of a row.
"""

import triton
import triton.language as tl

from pallas_kernels.vnm import _blocks as blocks


@triton.jit
def paired_rows(ROWS: tl.constexpr):
  """Rows [1, ROWS / 2, 2]: the two along the last axis share their metadata."""
  n = tl.arange(0, ROWS // 2)
  return (n // 8 * 16 + n % 8)[None, :, None] + 8 * tl.arange(0, 2)[None, None, :]


@triton.jit
def store_paired(metadata, nibble, ACROSS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
  """Stores the program's nibbles, of `paired_rows` and `GROUPS` groups: [GROUPS, ROWS / 2, 2]."""
  both = tl.sum(nibble << (16 * tl.arange(0, 2))[None, None, :].to(tl.uint32), axis=2)  # [GROUPS, ROWS / 2]
  both = tl.reshape(both, (GROUPS // 4, 4, ROWS // 2)) << (4 * tl.arange(0, 4))[None, :, None].to(tl.uint32)
  four = tl.program_id(0) * (GROUPS // 4) + tl.arange(0, GROUPS // 4)[:, None]
  tl.store(metadata + _paired_places(four, ACROSS, ROWS), tl.sum(both, axis=1))


@triton.jit
def load_paired(metadata, group, ACROSS: tl.constexpr, ROWS: tl.constexpr):
  """The nibbles of the program's `paired_rows` and of groups [G, 1]: [G, ROWS / 2, 2]."""
  return _nibbles(tl.load(metadata + _paired_places(group // 4, ACROSS, ROWS)), 4 * (group % 4))


@triton.jit
def load_sixteen(metadata, ACROSS: tl.constexpr, ROWS: tl.constexpr):
  """`load_paired` of 16 groups a program."""
  n = tl.arange(0, ROWS // 2)
  g = tl.arange(0, 16)
  tile = (tl.program_id(1) * (ROWS // 64) + n[None, :] // 32) * (ACROSS // 16) + tl.program_id(0)
  return _nibbles(tl.load(metadata + tile * 128 + n[None, :] % 32 * 4 + g[:, None] // 4), 4 * (g[:, None] % 4))


@triton.jit
def load_pairs_of(metadata, row, group, ACROSS: tl.constexpr):
  """The nibbles of rows [1, N], the upper ones of `paired_rows`, with the rows they share metadata with, and of groups
  [G]: [G, N, 2]."""
  tile = row // 64 * (ACROSS // 16) + group[:, None] // 16
  loaded = tl.load(metadata + tile * 128 + row % 64 // 16 * 32 + row % 8 * 4 + group[:, None] % 16 // 4)
  return _nibbles(loaded, (group % 4 * 4)[:, None])


@triton.jit
def load_each(metadata, row, group, ACROSS: tl.constexpr):
  """The nibbles of any rows and groups."""
  tile = row // 64 * (ACROSS // 16) + group // 16
  loaded = tl.load(metadata + tile * 128 + row % 64 // 16 * 32 + row % 8 * 4 + group % 16 // 4)
  return (loaded >> (row // 8 % 2 * 16 + group % 4 * 4).to(tl.uint32)) & 15


@triton.jit
def _paired_places(four, ACROSS: tl.constexpr, ROWS: tl.constexpr):
  """Where the metadata of the program's rows lies, of every four groups: [len(four), ROWS / 2]."""
  n = tl.arange(0, ROWS // 2)[None, :]
  tile = (tl.program_id(1) * (ROWS // 64) + n // 32) * (ACROSS // 16) + four // 4
  return tile * 128 + n % 32 * 4 + four % 4


@triton.jit
def _nibbles(loaded, bit):
  """The nibbles at a bit [G, 1] of loaded metadata [G, N], those of both rows along a new last axis."""
  loaded = loaded >> bit.to(tl.uint32)
  return (loaded[:, :, None] >> (16 * tl.arange(0, 2))[None, None, :].to(tl.uint32)) & 15


@triton.jit
def bytes_in_sixteen(GROUPS: tl.constexpr):
  """Bytes of 16 rows, from `before_sixteen` on, that have the program's groups two by two: [16, GROUPS / 2]."""
  two = tl.program_id(0) * (GROUPS // 2) + tl.arange(0, GROUPS // 2)[None, :]
  row = tl.arange(0, 16)[:, None]
  return two // 8 * 512 + row % 8 * 16 + two % 8 // 2 * 4 + row // 8 * 2 + two % 2


@triton.jit
def before_sixteen(i, ACROSS: tl.constexpr):
  """Bytes before the i-th 16 rows."""
  return i // 4 * (ACROSS // 16 * 512) + i % 4 * 128


@triton.jit
def between(STEP: tl.constexpr, ACROSS: tl.constexpr):
  """Bytes between rows that are `STEP` apart, a multiple of 64."""
  return STEP // 64 * (ACROSS // 16 * 512)


@triton.jit
def bytes_in_tile(row, ACROSS: tl.constexpr):
  """Bytes of rows [16, 1] of the program's 64 that have its 16 groups two by two: [16, 8]."""
  two = tl.arange(0, 8)[None, :]
  tile = tl.program_id(1) * (ACROSS // 16) + tl.program_id(0)
  return tile * 512 + row // 16 * 128 + row % 8 * 16 + row // 8 % 2 * 2 + two // 2 * 4 + two % 2


@triton.jit
def load_transposed(metadata, ACROSS: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr):
  """The transpose's metadata for the program's columns, before anything that takes time.

  32 bits have four groups of rows, of columns eight apart: [16, COLUMNS / 16] for each of eight columns, or
  nibbles for each of the four of a group if M is 4.
  """
  member = tl.arange(0, 16)[:, None]
  if M == 4:
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS // M)[None, :] * M
    group = tl.program_id(1) * 16 + member
    return (
      load_each(metadata, column, group, ACROSS), load_each(metadata, column + 1, group, ACROSS),
      load_each(metadata, column + 2, group, ACROSS), load_each(metadata, column + 3, group, ACROSS),
    )  # fmt: skip
  else:
    loaded = tl.load(metadata + _transposed_places(ACROSS, COLUMNS))
    loaded = tl.broadcast_to(loaded[:, None, :, :], (4, 4, COLUMNS // 16, 8))
    loaded = tl.reshape(loaded, (16, COLUMNS // 16, 8)) >> (member % 4 * 4)[:, :, None].to(tl.uint32)
    even, odd = tl.split(tl.reshape(loaded, (16, COLUMNS // 16, 4, 2)))
    e02, e13 = tl.split(tl.reshape(even, (16, COLUMNS // 16, 2, 2)))
    o02, o13 = tl.split(tl.reshape(odd, (16, COLUMNS // 16, 2, 2)))
    e0, e2 = tl.split(e02)
    e1, e3 = tl.split(e13)
    o0, o2 = tl.split(o02)
    o1, o3 = tl.split(o13)
    return e0, o0, e1, o1, e2, o2, e3, o3


@triton.jit
def nibbles_of(given, i: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr):
  """The nibbles of columns `i` and `i + 1` of each group, [16, COLUMNS / M], in the lowest bits of either half."""
  even, odd = given[i % 8], given[i % 8 + 1]
  if M == 8:
    both = tl.join(blocks.prmt(even, odd, 0x5410), blocks.prmt(even, odd, 0x7632))
    return tl.reshape(both, (16, COLUMNS // M))
  else:
    return blocks.prmt(even, odd, 0x7632 if i >= 8 else 0x5410)


@triton.jit
def store_transposed(metadata, low, high, ACROSS: tl.constexpr, COLUMNS: tl.constexpr):
  """The metadata of 16 groups, from nibbles of the lower and the upper eight of every 16 columns, [16, COLUMNS / 16].

  32 bits have columns n and n + 8 of four groups, which are added up: each has its own four bits of either half.
  """
  pairs = tl.join(blocks.prmt(low, high, 0x5410), blocks.prmt(low, high, 0x7632))[:, :, None, :]
  nibbles = (pairs >> (4 * tl.arange(0, 4))[None, None, :, None].to(tl.uint32)) & 0x000F000F
  nibbles = nibbles << (4 * (tl.arange(0, 16) % 4))[:, None, None, None].to(tl.uint32)
  nibbles = tl.reshape(nibbles, (4, 4, COLUMNS // 16, 8))
  tl.store(metadata + _transposed_places(ACROSS, COLUMNS), tl.sum(nibbles, axis=1))


@triton.jit
def _transposed_places(ACROSS: tl.constexpr, COLUMNS: tl.constexpr):
  """Where the program's metadata of the transpose lies: of four groups, of 16 columns, of columns n and n + 8."""
  sixteen = (tl.program_id(0) * (COLUMNS // 16) + tl.arange(0, COLUMNS // 16))[None, :, None]
  tile = (sixteen // 4 * (ACROSS // 16) + tl.program_id(1)) * 128
  return tile + sixteen % 4 * 32 + 4 * tl.arange(0, 8)[None, None, :] + tl.arange(0, 4)[:, None, None]
