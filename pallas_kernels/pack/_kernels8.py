"""The packing kernels that write float8: those of `_kernels` with a scale, and the dense array beside the operand.

They have bodies of their own: four entries are a word here, two there, and all that rounds, chooses and stores differs.
"""

import triton
import triton.language as tl

from pallas_kernels.mvue import _sample
from pallas_kernels.mvue import triton as mvue
from pallas_kernels.pack import _blocks, _blocks8, _kernels


@triton.jit
def soft_threshold8_kernel(
  w, scale, values, metadata, dense,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
  GROUPS_DOWN: tl.constexpr,
):  # fmt: skip
  """scale S(w) packed along one axis, and in the layout of w."""
  place = _blocks.tile(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
  batch = tl.program_id(1).to(tl.int64)
  x = _blocks.entries(_blocks.load_blocks(w + batch * ROWS * COLUMNS, place, COLUMNS))
  if GROUPS_DOWN:
    x = _blocks.transpose(x)
  beta = tl.load(scale + batch)
  source: tl.constexpr = w.dtype.element_ty
  dtype: tl.constexpr = values.dtype.element_ty
  g = (
    _shrunk8(x[0], beta, source, dtype), _shrunk8(x[1], beta, source, dtype),
    _shrunk8(x[2], beta, source, dtype), _shrunk8(x[3], beta, source, dtype),
  )  # fmt: skip
  code = _blocks8.keep8(g[0]) | _blocks8.keep8(g[1]) << 4 | _blocks8.keep8(g[2]) << 8 | _blocks8.keep8(g[3]) << 12
  rows = g
  if GROUPS_DOWN:
    rows = _blocks8.transpose8(g)
  _blocks8.store_dense8(dense + batch * ROWS * COLUMNS, rows, place, ROWS, COLUMNS, False)
  pairs = _blocks8.choose_all8(g, _blocks.nibbles(code))
  _kernels.store_one(pairs, code, values, metadata, place, batch, ROWS, COLUMNS, GROUPS_DOWN)


@triton.jit
def _shrunk8(x, beta, source: tl.constexpr, dtype: tl.constexpr):
  s = _kernels.shrunk(x, beta, source)
  return _blocks8.positive_zeros8(_blocks8.quad8(s[0], s[1], s[2], s[3], dtype))


@triton.jit
def mvue8_kernel(
  x, parameters, scale, values, metadata, dense,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
  """An MVUE sample of x, times half of `scale`, packed along its columns; and all of x, times `scale`."""
  place = _blocks.tile(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
  batch = tl.program_id(1)
  blocks = _blocks.load_blocks(x + batch.to(tl.int64) * ROWS * COLUMNS, place, COLUMNS)
  sample_and_store8(
    _blocks.entries(blocks), x.dtype.element_ty, parameters, tl.load(scale + batch), values, metadata, dense, place,
    batch, ROWS, COLUMNS,
  )  # fmt: skip


@triton.jit
def sample_and_store8(
  e, source: tl.constexpr, parameters, scale, values, metadata, dense, place, batch,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
  """MVUE of the blocks `e` (bits) along their columns and its operand; and the blocks, in their own layout."""
  dtype: tl.constexpr = values.dtype.element_ty
  far = batch.to(tl.int64)
  quads = _blocks8.scaled8(e, scale, source, dtype)
  _blocks8.store_dense8(dense + far * ROWS * COLUMNS, quads, place, ROWS, COLUMNS, False)
  u = mvue.block_uniforms(parameters, place, batch)
  # Sampled values go up to half the sum of their group, twice the largest entry.
  half = scale * 0.5
  pairs, nibbles = _sample.sample_block8(_kernels.floats(_blocks.transpose(e), source), u, half, dtype)
  _kernels.store_chosen(pairs, nibbles, values, metadata, place, far, ROWS, COLUMNS, True)
