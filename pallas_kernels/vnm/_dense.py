"""Triton kernels that write an operand, 2:4 or V:N:M, or columns of it, as dense arrays; `triton.py` launches them."""

import triton
import triton.language as tl

from pallas_kernels.vnm import _blocks as blocks
from pallas_kernels.vnm import _metadata


@triton.jit
def expand_rows(values, metadata, dense, K: tl.constexpr, ROWS: tl.constexpr):
  """A program writes `ROWS` rows of 64 columns. Dense arrays are what matmuls read that have another sparse side."""
  row, group, nibble = _places(metadata, K // 4, ROWS)
  pair = tl.load(values.to(tl.pointer_type(tl.uint32)) + row * (K // 4) + group)
  quads = dense.to(tl.pointer_type(tl.uint64)) + row * (K // 4) + group
  tl.store(quads, blocks.quad(pair, nibble & 3, nibble >> 2, 0))


@triton.jit
def scatter_rows(
  values, metadata, rows, dense, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr
):
  """A program puts what `ROWS` rows of 16 groups store where the index says, into zeros."""
  row, group, nibble = _places(metadata, C // M, ROWS)
  nibble = nibble.to(tl.int32)
  pair = tl.load(values.to(tl.pointer_type(tl.uint32)) + row * (C // M) + group)
  index = rows + tl.program_id(1) * ROWS // V * (C // M * 4) + group * 4
  to = dense.to(tl.pointer_type(tl.uint16)) + row * C
  tl.store(to + blocks.load_index(index + (nibble & 3), C), pair.to(tl.uint16))
  tl.store(to + blocks.load_index(index + (nibble >> 2), C), (pair >> 16).to(tl.uint16))


@triton.jit
def take_columns(
  values, metadata, rows, ids, out,
  C: tl.constexpr, V: tl.constexpr, M: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
  """Columns `ids` of the dense matrix: `ROWS` rows by `WIDTH` of the `COUNT` columns a program."""
  i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
  column = tl.load(ids + i)
  group = column // M
  at = rows + tl.program_id(1) * ROWS // V * (C // M * 4) + group * 4
  place = tl.where(tl.load(at) == column, 0, 4)  # 4: this block does not have it
  place = tl.where(tl.load(at + 1) == column, 1, place)
  place = tl.where(tl.load(at + 2) == column, 2, place)
  place = tl.where(tl.load(at + 3) == column, 3, place)[:, None, None].to(tl.uint32)
  # Columns first: threads go along them. Rows eight apart share their metadata.
  n = tl.arange(0, ROWS // 2)[None, :]
  row = tl.program_id(1) * ROWS + n // 8 * 16 + n % 8
  nibble = _metadata.load_pairs_of(metadata, row, group, C // M)
  row = row[:, :, None] + 8 * tl.arange(0, 2)[None, None, :]
  pair = tl.load(values.to(tl.pointer_type(tl.uint32)) + row * (C // M) + group[:, None, None])
  entry = tl.where((nibble & 3) == place, pair & 0xFFFF, tl.where(nibble >> 2 == place, pair >> 16, 0))
  at = out.to(tl.pointer_type(tl.uint16)) + row * COUNT + i[:, None, None]
  tl.store(at, entry.to(tl.uint16), mask=(i < COUNT)[:, None, None])


@triton.jit
def _places(metadata, GROUPS: tl.constexpr, ROWS: tl.constexpr):
  """Of a program's `ROWS` rows by 16 groups: rows [1, ROWS / 2, 2], groups [16, 1, 1], and their nibbles."""
  row = _metadata.paired_rows(ROWS) + tl.program_id(1) * ROWS
  group = tl.program_id(0) * 16 + tl.arange(0, 16)[:, None, None]
  return row, group, _metadata.load_sixteen(metadata, GROUPS, ROWS)
