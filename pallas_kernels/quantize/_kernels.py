"""The Triton kernel of `quantize`, on 4x4 blocks."""

import triton
import triton.language as tl

from pallas_kernels.triton_blocks import blocks


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
  rows = blocks.scaled(e, tl.load(scale + batch), x.dtype.element_ty, dtype)
  if PLAIN:
    blocks.store_rows(plain + offset, rows, place, ROWS, COLUMNS, False)
  if TRANSPOSED:
    blocks.store_rows(transposed + offset, blocks.transposed_words(rows), place, ROWS, COLUMNS, True)
