"""The packing kernels in Triton; `triton.py` launches them.

All share the tile of `blocks`; what differs is where the keep code of a block comes from: the transposable search,
given codes, the soft threshold, or MVUE sampling.
"""

import triton
import triton.language as tl

from pallas_kernels.triton_blocks import blocks, positions, ptx, sample, transposable


@triton.jit
def transposable_kernel(
  w, row_values, row_metadata, column_values, column_metadata, codes, special,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
  AHEAD: tl.constexpr,
):  # fmt: skip
  """Best transposable pattern of each block, both operands under it, and its code.

  For ordinary numbers only: where it meets a NaN, an infinity or a number whose sums could overflow it raises the flag
  `special`, and `repair_kernel` does the work again. Both ways in one kernel cost half as many registers again, and the
  bounds alone a third more instructions, in a kernel that those limit.
  """
  place = blocks.tile(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
  source: tl.constexpr = w.dtype.element_ty
  batch = tl.program_id(1)
  weight = w + batch.to(tl.int64) * ROWS * COLUMNS
  if AHEAD:
    blocks.fetch_ahead(weight, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, AHEAD)
  words = blocks.load_blocks(weight, place, COLUMNS)
  if source == tl.float32:
    tl.debug_barrier()  # keeps the compiler from loading half of them when the first half has come, and registers
  x = blocks.entries(words)
  a = _magnitudes(x, source)
  # Not what it is in a NaN's place.
  ordinary = _sum(a[0], a[1]) + _sum(a[2], a[3]) < transposable.LIMIT
  code = transposable.best_codes(a)
  tl.store(special + tl.zeros_like(code), 1, mask=ordinary == 0)
  _finish(
    blocks.narrow_words(words, source, row_values.dtype.element_ty), code, row_values, row_metadata,
    column_values, column_metadata, codes, place, batch, ROWS, COLUMNS, source != tl.float32, True,
  )  # fmt: skip


@triton.jit
def repair_kernel(
  w, special, row_values_, row_metadata_, column_values_, column_metadata_, codes_,
  row_values, row_metadata, column_values, column_metadata, codes,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
  TILES: tl.constexpr,
):  # fmt: skip
  """`transposable_kernel` for any numbers, in place, if the flag is up; a few programs walk over all tiles."""
  source: tl.constexpr = w.dtype.element_ty
  batch = tl.program_id(1)
  n = tl.program_id(0)
  end = tl.load(special) * TILES  # nothing if the flag is down
  while n < end:
    place = blocks.tile_at(n, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
    words = blocks.load_blocks(w + batch.to(tl.int64) * ROWS * COLUMNS, place, COLUMNS)
    x = blocks.entries(words)
    free = transposable.nan_code(blocks.floats(x, source))
    code = transposable.best_codes(_bounded(x, source)) & (free ^ 0xFFFF)
    # With fewer than two kept, a free position is stored: as zero.
    x = blocks.zero_free(blocks.narrow_words(words, source, row_values.dtype.element_ty), code)
    _finish(
      x, code, row_values, row_metadata, column_values, column_metadata, codes, place, batch, ROWS, COLUMNS,
      source != tl.float32, False,
    )  # fmt: skip
    n += tl.num_programs(0)


@triton.jit
def _finish(
  x, code, row_values, row_metadata, column_values, column_metadata, codes, place, batch,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
  """Stores codes and operands of a tile."""
  batch = batch.to(tl.int64)
  at = batch * (ROWS // 4) * (COLUMNS // 4) + place[0] * (COLUMNS // 4) + place[1]
  tl.store(codes + at, code.to(tl.uint16), mask=place[2])
  _store_both(
    x, code, row_values, row_metadata, column_values, column_metadata, place, batch, ROWS, COLUMNS, TOGETHER, TWO
  )


@triton.jit
def masked_kernel(
  w, codes, row_values, row_metadata, column_values, column_metadata,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
  """Both operands in 16 bits under given codes."""
  place = blocks.tile(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
  batch = tl.program_id(1).to(tl.int64)
  words = blocks.load_blocks(w + batch * ROWS * COLUMNS, place, COLUMNS)
  code = _load_code(codes, place, batch, ROWS, COLUMNS)
  x = blocks.zero_free(blocks.narrow_words(words, w.dtype.element_ty, row_values.dtype.element_ty), code)
  _store_both(
    x, code, row_values, row_metadata, column_values, column_metadata, place, batch, ROWS, COLUMNS, False, False
  )  # fmt: skip


@triton.jit
def masked_scaled_kernel(
  w, codes, scale, row_values, row_metadata, column_values, column_metadata,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
  """Both operands of w times `scale`, in float8, under given codes."""
  place = blocks.tile(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
  batch = tl.program_id(1).to(tl.int64)
  x = blocks.entries(blocks.load_blocks(w + batch * ROWS * COLUMNS, place, COLUMNS))
  code = _load_code(codes, place, batch, ROWS, COLUMNS)
  x = blocks.scaled(x, tl.load(scale + batch), w.dtype.element_ty, row_values.dtype.element_ty)
  _store_both(
    blocks.zero_free(x, code), code, row_values, row_metadata, column_values, column_metadata, place, batch, ROWS,
    COLUMNS, False, False,
  )  # fmt: skip


@triton.jit
def _load_code(codes, place, batch, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
  at = batch * (ROWS // 4) * (COLUMNS // 4) + place[0] * (COLUMNS // 4) + place[1]
  return tl.load(codes + at, mask=place[2], other=0).to(tl.uint32)


@triton.jit
def soft_threshold_kernel(
  w, scale, values, metadata, dense,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
  GROUPS_DOWN: tl.constexpr,
):  # fmt: skip
  """scale S(w) packed along one axis: the rows of the array, or its columns if GROUPS_DOWN.

  In float8 it is also written to `dense`, in the layout of w; in 16 bits that is None.
  """
  place = blocks.tile(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
  batch = tl.program_id(1).to(tl.int64)
  x = blocks.entries(blocks.load_blocks(w + batch * ROWS * COLUMNS, place, COLUMNS))
  if GROUPS_DOWN:
    x = blocks.transpose(x)
  beta = tl.load(scale + batch)
  source: tl.constexpr = w.dtype.element_ty
  dtype: tl.constexpr = values.dtype.element_ty
  g = (
    _shrunk_row(x[0], beta, source, dtype), _shrunk_row(x[1], beta, source, dtype),
    _shrunk_row(x[2], beta, source, dtype), _shrunk_row(x[3], beta, source, dtype),
  )  # fmt: skip
  code = blocks.nonzero_code(g)
  if dense is not None:
    rows = blocks.transposed_words(g) if GROUPS_DOWN else g
    blocks.store_rows(dense + batch * ROWS * COLUMNS, rows, place, ROWS, COLUMNS, False)
  nibbles = positions.nibbles(code)
  pairs = positions.choose_all(g, nibbles)
  positions.store_one(pairs, nibbles, values, metadata, place, batch, ROWS, COLUMNS, GROUPS_DOWN)


@triton.jit
def mvue_kernel(
  x, parameters, values, metadata,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
  """An MVUE sample of x in 16 bits, packed along its columns."""
  place = blocks.tile(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
  batch = tl.program_id(1)
  words = blocks.load_blocks(x + batch.to(tl.int64) * ROWS * COLUMNS, place, COLUMNS)
  sample.sample_and_store(
    blocks.entries(words), x.dtype.element_ty, parameters, None, values, metadata, None, place, batch, ROWS, COLUMNS
  )  # fmt: skip


@triton.jit
def mvue_scaled_kernel(
  x, parameters, scale, values, metadata, dense,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
  """An MVUE sample of x in float8, times half of `scale`, packed along its columns; and all of x, times `scale`.

  A kernel of its own: arrays go by place, inputs first, so only an output at the end can be left out.
  """
  place = blocks.tile(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
  batch = tl.program_id(1)
  words = blocks.load_blocks(x + batch.to(tl.int64) * ROWS * COLUMNS, place, COLUMNS)
  sample.sample_and_store(
    blocks.entries(words), x.dtype.element_ty, parameters, tl.load(scale + batch), values, metadata, dense, place,
    batch, ROWS, COLUMNS,
  )  # fmt: skip


@triton.jit
def _magnitude(x, source: tl.constexpr):
  if source == tl.bfloat16:
    return tl.abs(ptx.as_float(x << 16))
  elif source == tl.float32:
    return tl.abs(ptx.as_float(x))
  else:
    return tl.abs(blocks.to_float(x, source))


@triton.jit
def _magnitudes_row(x, source: tl.constexpr):
  return _magnitude(x[0], source), _magnitude(x[1], source), _magnitude(x[2], source), _magnitude(x[3], source)


@triton.jit
def _magnitudes(x, source: tl.constexpr):
  """What `_bounded` gives where no entry is special; the absolute value is part of the additions that use it."""
  return (
    _magnitudes_row(x[0], source), _magnitudes_row(x[1], source),
    _magnitudes_row(x[2], source), _magnitudes_row(x[3], source),
  )  # fmt: skip


@triton.jit
def _sum(row, other):
  """The sum of two rows; the search adds their columns, too."""
  return ((row[0] + other[0]) + (row[1] + other[1])) + ((row[2] + other[2]) + (row[3] + other[3]))


@triton.jit
def _bounded_row(x):
  return (
    transposable.bounded_magnitude(x[0]), transposable.bounded_magnitude(x[1]),
    transposable.bounded_magnitude(x[2]), transposable.bounded_magnitude(x[3]),
  )  # fmt: skip


@triton.jit
def _bounded(x, source: tl.constexpr):
  x = blocks.floats(x, source)
  return _bounded_row(x[0]), _bounded_row(x[1]), _bounded_row(x[2]), _bounded_row(x[3])


@triton.jit
def _shrunk_row(x, beta, source: tl.constexpr, dtype: tl.constexpr):
  """`_shrunk` in words of `dtype`."""
  s = _shrunk(x, beta, source)
  row = blocks.rounded_row(s[0], s[1], s[2], s[3], dtype)
  return blocks.positive_zeros(row) if dtype.primitive_bitwidth == 8 else row


@triton.jit
def _shrunk(x, beta, source: tl.constexpr):
  """beta sign(x) max(|x| - t, 0) in float32 for one group; t and the difference are rounded to the input's dtype."""
  e0 = blocks.to_float(x[0], source)
  e1 = blocks.to_float(x[1], source)
  e2 = blocks.to_float(x[2], source)
  e3 = blocks.to_float(x[3], source)
  a0 = tl.abs(e0)
  a1 = tl.abs(e1)
  a2 = tl.abs(e2)
  a3 = tl.abs(e3)
  t = tl.minimum(
    tl.maximum(tl.minimum(a0, a1), tl.minimum(a2, a3)), tl.minimum(tl.maximum(a0, a1), tl.maximum(a2, a3))
  )
  together = (a0 + a1) + (a2 + a3)
  nan = together != together  # noqa: PLR0124
  poison = float('nan')
  # The maximum makes zero of the NaN that infinity less infinity is.
  soft = (
    tl.maximum(a0 - t, 0.0), tl.maximum(a1 - t, 0.0), tl.maximum(a2 - t, 0.0), tl.maximum(a3 - t, 0.0),
  )  # fmt: skip
  if source != tl.float32:
    soft = blocks.floats_row(blocks.row_to_bits(soft[0], soft[1], soft[2], soft[3], source), source)
  return (
    tl.where(nan, poison, _signed(e0, soft[0]) * beta), tl.where(nan, poison, _signed(e1, soft[1]) * beta),
    tl.where(nan, 0.0, _signed(e2, soft[2]) * beta), tl.where(nan, 0.0, _signed(e3, soft[3]) * beta),
  )  # fmt: skip


@triton.jit
def _signed(e, soft):
  return tl.where(e < 0, -soft, soft)


@triton.jit
def _store_both(
  x, code, row_values, row_metadata, column_values, column_metadata, place, batch,
  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
  """Both operands of the blocks with rows `x`, in words, under `code`.

  `TWO`: all groups keep two. In those that keep fewer, entries that are not kept must be zero: some are stored.
  """
  half: tl.constexpr = ROWS * COLUMNS // 2
  size: tl.constexpr = ((ROWS + 63) // 64) * ((COLUMNS + 63) // 64) * 128
  if TWO:
    across = positions.nibbles_of_two(code)
    down = positions.nibbles_of_two(positions.transpose_code(code))
  else:
    across = positions.nibbles(code)
    down = positions.nibbles(positions.transpose_code(code))
  blocks.store_values(row_values + batch * half, positions.choose_all(x, across), place, ROWS, COLUMNS, False)
  blocks.store_values(
    column_values + batch * half, positions.choose_all(blocks.transposed_words(x), down), place, ROWS, COLUMNS, True,
    TOGETHER,
  )
  bits: tl.constexpr = row_values.dtype.element_ty.primitive_bitwidth
  positions.store_metadata_pair(
    row_metadata + batch * size, across, column_metadata + batch * size, down, place, ROWS, COLUMNS, bits
  )
