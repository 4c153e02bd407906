"""The packing kernels that write float8: those of `_kernels` with a scale, and the dense array beside the operand.

They have bodies of their own: four entries are a word here, two there, and all that rounds, chooses and stores differs.
"""

import triton
import triton.language as tl

from pallas_kernels.pack import _kernels
from pallas_kernels.triton_blocks import blocks, blocks8, positions, sample


@triton.jit
def soft_threshold8_kernel(
  w, scale, values, metadata, dense,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
  GROUPS_DOWN: tl.constexpr,
):  # fmt: skip
  """scale S(w) packed along one axis, and in the layout of w."""
  place = blocks.tile(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
  batch = tl.program_id(1).to(tl.int64)
  x = blocks.entries(blocks.load_blocks(w + batch * ROWS * COLUMNS, place, COLUMNS))
  if GROUPS_DOWN:
    x = blocks.transpose(x)
  beta = tl.load(scale + batch)
  source: tl.constexpr = w.dtype.element_ty
  dtype: tl.constexpr = values.dtype.element_ty
  g = (
    _shrunk8(x[0], beta, source, dtype), _shrunk8(x[1], beta, source, dtype),
    _shrunk8(x[2], beta, source, dtype), _shrunk8(x[3], beta, source, dtype),
  )  # fmt: skip
  code = blocks8.keep8(g[0]) | blocks8.keep8(g[1]) << 4 | blocks8.keep8(g[2]) << 8 | blocks8.keep8(g[3]) << 12
  rows = g
  if GROUPS_DOWN:
    rows = blocks8.transpose8(g)
  blocks8.store_dense8(dense + batch * ROWS * COLUMNS, rows, place, ROWS, COLUMNS, False)
  pairs = blocks8.choose_all8(g, positions.nibbles(code))
  positions.store_one(pairs, code, values, metadata, place, batch, ROWS, COLUMNS, GROUPS_DOWN)


@triton.jit
def _shrunk8(x, beta, source: tl.constexpr, dtype: tl.constexpr):
  s = _kernels.shrunk(x, beta, source)
  return blocks8.positive_zeros8(blocks8.quad8(s[0], s[1], s[2], s[3], dtype))


@triton.jit
def mvue8_kernel(
  x, parameters, scale, values, metadata, dense,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
  """An MVUE sample of x, times half of `scale`, packed along its columns; and all of x, times `scale`."""
  place = blocks.tile(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
  batch = tl.program_id(1)
  words = blocks.load_blocks(x + batch.to(tl.int64) * ROWS * COLUMNS, place, COLUMNS)
  sample.sample_and_store8(
    blocks.entries(words), x.dtype.element_ty, parameters, tl.load(scale + batch), values, metadata, dense, place,
    batch, ROWS, COLUMNS,
  )  # fmt: skip
