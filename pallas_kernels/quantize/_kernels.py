"""The Triton kernel of `quantize`, on 4x4 blocks."""

import triton
import triton.language as tl

from pallas_kernels.triton_blocks import blocks, blocks8


@triton.jit
def quantize_kernel(
  x, scale, plain, transposed,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
  PLAIN: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
  """x times `scale` in float8, in its own layout and transposed."""
  place = blocks.tile(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
  batch = tl.program_id(1).to(tl.int64)
  offset = batch * ROWS * COLUMNS
  e = blocks.entries(blocks.load_blocks(x + offset, place, COLUMNS))
  dtype: tl.constexpr = plain.dtype.element_ty
  quads = blocks8.scaled8(e, tl.load(scale + batch), x.dtype.element_ty, dtype)
  if PLAIN:
    blocks8.store_dense8(plain + offset, quads, place, ROWS, COLUMNS, False)
  if TRANSPOSED:
    blocks8.store_dense8(transposed + offset, blocks8.transpose8(quads), place, ROWS, COLUMNS, True)
