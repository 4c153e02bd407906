"""How Triton kernels read and write the memory of a transposed operand: its values and its metadata."""

import triton
import triton.language as tl

from pallas_kernels.vnm import _blocks as blocks
from pallas_kernels.vnm._metadata import nibble


@triton.jit
def given_metadata(metadata, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr):
  """The transpose's metadata for the program's columns, before anything that takes time.

  32 bits have four groups of rows, of columns eight apart: [16, COLUMNS / 16] for each of eight columns, or
  nibbles for each of the four of a group if M is 4.
  """
  member = tl.arange(0, 16)[:, None]
  if M == 4:
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS // M)[None, :] * M
    group = tl.program_id(1) * 16 + member
    return (
      nibble(metadata, column, group, GROUPS), nibble(metadata, column + 1, group, GROUPS),
      nibble(metadata, column + 2, group, GROUPS), nibble(metadata, column + 3, group, GROUPS),
    )  # fmt: skip
  else:
    loaded = tl.load(metadata + _metadata_places(GROUPS, COLUMNS))
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
def store(values, even, odd, first: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr):
  """Columns of each group from `first` on, 2 along the last axis of `even` and `odd`, or with M of 8 and more 2 x 2."""
  group = tl.program_id(0) * (COLUMNS // M) + tl.arange(0, COLUMNS // M)[None, :]
  column = group * M + first
  at = column * GROUPS + tl.program_id(1) * 16 + tl.arange(0, 16)[:, None]
  two = tl.arange(0, 2)
  at = at[:, :, None] + two[None, None, :] * (2 * GROUPS)
  if M > 4:
    at = at[:, :, :, None] + two[None, None, None, :] * (4 * GROUPS)
    at = at[:, :, :, :, None] + two[None, None, None, None, :] * GROUPS
  else:
    at = at[:, :, :, None] + two[None, None, None, :] * GROUPS
  tl.store(values.to(tl.pointer_type(tl.uint32)) + at, tl.join(even, odd))


@triton.jit
def store_metadata(metadata, low, high, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
  """The metadata of 16 groups, from nibbles of the lower and the upper eight of every 16 columns, [16, COLUMNS / 16].

  32 bits have columns n and n + 8 of four groups, which are added up: each has its own four bits of either half.
  """
  pairs = tl.join(blocks.prmt(low, high, 0x5410), blocks.prmt(low, high, 0x7632))[:, :, None, :]
  nibbles = (pairs >> (4 * tl.arange(0, 4))[None, None, :, None].to(tl.uint32)) & 0x000F000F
  nibbles = nibbles << (4 * (tl.arange(0, 16) % 4))[:, None, None, None].to(tl.uint32)
  tl.store(metadata + _metadata_places(GROUPS, COLUMNS), tl.sum(tl.reshape(nibbles, (4, 4, COLUMNS // 16, 8)), axis=1))


@triton.jit
def _metadata_places(GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
  """Where the program's metadata of the transpose lies: of four groups, of 16 columns, of columns n and n + 8."""
  sixteen = (tl.program_id(0) * (COLUMNS // 16) + tl.arange(0, COLUMNS // 16))[None, :, None]
  tile = (sixteen // 4 * (GROUPS // 16) + tl.program_id(1)) * 128
  return tile + sixteen % 4 * 32 + 4 * tl.arange(0, 8)[None, None, :] + tl.arange(0, 4)[:, None, None]
