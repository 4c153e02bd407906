"""4x4 blocks in registers: how a kernel loads, transposes, rounds and stores them.

Kernels work on tiles of blocks, one block an element of the tensors, so that a thread holds all 16 entries of its block
in registers: groups along rows and along columns are then plain register names and nothing crosses threads but the
transposed stores, which the compiler stages through shared memory.

A row of four entries is held as their bits, each in a uint32, or in words, the first entry lowest: one word of float8,
two of 16-bit entries, four of float32. What is made of words goes by their number.

Tiles cover multiples of 16 x 16 blocks, 64 x 64 entries: the unit of the operand's metadata (see
`pallas_kernels.operand`).
"""

import triton
import triton.language as tl

from pallas_kernels.triton_blocks.ptx import prefetch, prmt, round_pair, round_quad


@triton.jit
def tile(rows: tl.constexpr, columns: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
  """The place of this program's tile, in blocks: (rows [tile_rows, 1], columns [1, tile_columns], which the array has,
  first row, first column)."""
  return tile_at(tl.program_id(0), rows, columns, tile_rows, tile_columns)


@triton.jit
def tile_at(n, rows: tl.constexpr, columns: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
  """The place of tile `n`."""
  across: tl.constexpr = (columns // 4 + tile_columns - 1) // tile_columns
  first_row = (n // across) * tile_rows
  first_column = (n % across) * tile_columns
  block_row = first_row + tl.arange(0, tile_rows)[:, None]
  block_column = first_column + tl.arange(0, tile_columns)[None, :]
  if rows % (4 * tile_rows) == 0 and columns % (4 * tile_columns) == 0:
    # A constant mask folds away.
    inside = tl.full((tile_rows, tile_columns), 1, tl.int1)
  else:
    inside = (block_row < rows // 4) & (block_column < columns // 4)
  return block_row, block_column, inside, first_row, first_column


@triton.jit
def moved(place, down: tl.constexpr, right: tl.constexpr):
  """`place`, some blocks further: the same tile of another part of an array."""
  return place[0] + down, place[1] + right, place[2], place[3] + down, place[4] + right


@triton.jit
def to_float(raw, dtype: tl.constexpr):
  """float32 from an entry's bits in uint32."""
  if dtype == tl.bfloat16:
    return (raw << 16).to(tl.float32, bitcast=True)
  elif dtype == tl.float16:
    return raw.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
  else:
    return raw.to(tl.float32, bitcast=True)


@triton.jit
def floats_row(x, source: tl.constexpr):
  return (
    to_float(x[0], source), to_float(x[1], source),
    to_float(x[2], source), to_float(x[3], source),
  )  # fmt: skip


@triton.jit
def floats(x, source: tl.constexpr):
  return floats_row(x[0], source), floats_row(x[1], source), floats_row(x[2], source), floats_row(x[3], source)


@triton.jit
def rounded_row(a, b, c, d, dtype: tl.constexpr):
  """Four float32 rounded to `dtype` of 16 or 8 bits, in words."""
  if dtype.primitive_bitwidth == 8:
    return (round_quad(a, b, c, d, dtype),)
  else:
    return round_pair(a, b, dtype), round_pair(c, d, dtype)


@triton.jit
def row_to_bits(a, b, c, d, dtype: tl.constexpr):
  """The bits of four float32 rounded to `dtype` of 16 bits."""
  return row_entries(rounded_row(a, b, c, d, dtype))


@triton.jit
def scaled(x, scale, source: tl.constexpr, dtype: tl.constexpr):
  """The rows of a block of entries' bits, times `scale`, in words of `dtype`."""
  return (
    _scaled_row(x[0], scale, source, dtype), _scaled_row(x[1], scale, source, dtype),
    _scaled_row(x[2], scale, source, dtype), _scaled_row(x[3], scale, source, dtype),
  )  # fmt: skip


@triton.jit
def _scaled_row(x, scale, source: tl.constexpr, dtype: tl.constexpr):
  return rounded_row(
    to_float(x[0], source) * scale, to_float(x[1], source) * scale,
    to_float(x[2], source) * scale, to_float(x[3], source) * scale, dtype,
  )  # fmt: skip


@triton.jit
def load_row(pointer, row, block_column, columns: tl.constexpr, inside):
  """Four neighbouring entries of `row` as two (16-bit dtypes) or four words, zeros outside."""
  quads = pointer.to(tl.pointer_type(tl.uint64))
  if pointer.dtype.element_ty.primitive_bitwidth == 16:
    x = tl.load(quads + row * (columns // 4) + block_column, mask=inside, other=0)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)
  else:
    at = quads + row * (columns // 2) + 2 * block_column
    x = tl.load(at, mask=inside, other=0)
    y = tl.load(at + 1, mask=inside, other=0)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32), y.to(tl.uint32), (y >> 32).to(tl.uint32)


@triton.jit
def load_blocks(pointer, place, columns: tl.constexpr):
  """The words of each block: a tuple of four rows. Entries stay packed until they are used, which saves registers."""
  return (
    load_row(pointer, 4 * place[0], place[1], columns, place[2]),
    load_row(pointer, 4 * place[0] + 1, place[1], columns, place[2]),
    load_row(pointer, 4 * place[0] + 2, place[1], columns, place[2]),
    load_row(pointer, 4 * place[0] + 3, place[1], columns, place[2]),
  )


@triton.jit
def fetch_ahead(
  pointer, rows: tl.constexpr, columns: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
  ahead: tl.constexpr,
):  # fmt: skip
  """Has the GPU bring a tile into its L2 cache, where the program finds it that comes so many after this one.

  Few warps are at work at once, since each holds its blocks in registers, and those that wait for memory compute
  nothing.
  """
  size: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
  lines: tl.constexpr = 4 * tile_columns * size // 128
  place = tile_at(tl.program_id(0) + ahead, rows, columns, tile_rows, tile_columns)
  line = tl.arange(0, 4 * tile_rows * lines)
  row = 4 * place[3] + line // lines
  column = 4 * place[4] + (line % lines) * (128 // size)
  there = (row < rows) & (column < columns)
  prefetch((pointer + (row.to(tl.int64) * columns + column)).to(tl.int64), there.to(tl.uint32))


@triton.jit
def row_entries(words):
  """The bits of the four entries of a row, as uint32."""
  if len(words) == 2:
    return words[0] & 0xFFFF, words[0] >> 16, words[1] & 0xFFFF, words[1] >> 16
  else:
    return words


@triton.jit
def entries(words):
  """The bits of the 16 entries of a block: a tuple of four rows of four uint32."""
  return row_entries(words[0]), row_entries(words[1]), row_entries(words[2]), row_entries(words[3])


@triton.jit
def store_row(pointer, row, block_column, columns: tl.constexpr, inside, x):
  """Inverse of `load_row` for 16-bit arrays."""
  quads = pointer.to(tl.pointer_type(tl.uint64))
  low = (x[0] | x[1] << 16).to(tl.uint64)
  high = (x[2] | x[3] << 16).to(tl.uint64)
  tl.store(quads + row * (columns // 4) + block_column, low | high << 32, mask=inside)


@triton.jit
def transpose(x):
  """A block's entries with rows and columns exchanged: only names change."""
  return (
    (x[0][0], x[1][0], x[2][0], x[3][0]),
    (x[0][1], x[1][1], x[2][1], x[3][1]),
    (x[0][2], x[1][2], x[2][2], x[3][2]),
    (x[0][3], x[1][3], x[2][3], x[3][3]),
  )


@triton.jit
def narrow_words(words, source: tl.constexpr, dtype: tl.constexpr):
  """The rows of a block, as `load_blocks` gives them, in `dtype` of 16 bits."""
  if source == dtype:
    return words
  else:
    return (
      _narrow_row(words[0], source, dtype), _narrow_row(words[1], source, dtype),
      _narrow_row(words[2], source, dtype), _narrow_row(words[3], source, dtype),
    )  # fmt: skip


@triton.jit
def _narrow_row(words, source: tl.constexpr, dtype: tl.constexpr):
  x = row_entries(words)
  return (
    round_pair(to_float(x[0], source), to_float(x[1], source), dtype),
    round_pair(to_float(x[2], source), to_float(x[3], source), dtype),
  )


@triton.jit
def transposed_words(w):
  """The columns of a block in words, from its rows."""
  if len(w[0]) == 1:
    # Pairs of bytes first, then pairs of pairs.
    a, b, c, d = w[0][0], w[1][0], w[2][0], w[3][0]
    even0 = (a & 0x00FF00FF) | (b & 0x00FF00FF) << 8
    even1 = (c & 0x00FF00FF) | (d & 0x00FF00FF) << 8
    odd0 = ((a >> 8) & 0x00FF00FF) | (b & 0xFF00FF00)
    odd1 = ((c >> 8) & 0x00FF00FF) | (d & 0xFF00FF00)
    return (
      ((even0 & 0xFFFF) | even1 << 16,), ((odd0 & 0xFFFF) | odd1 << 16,),
      (even0 >> 16 | (even1 & 0xFFFF0000),), (odd0 >> 16 | (odd1 & 0xFFFF0000),),
    )  # fmt: skip
  else:
    return _columns(w[0][0], w[1][0], w[2][0], w[3][0]) + _columns(w[0][1], w[1][1], w[2][1], w[3][1])


@triton.jit
def _columns(a, b, c, d):
  """Two columns from the words of four rows."""
  return (prmt(a, b, 0x5410), prmt(c, d, 0x5410)), (prmt(a, b, 0x7632), prmt(c, d, 0x7632))


@triton.jit
def nonzero_code(w):
  """Bit 4 i + j where entry (i, j) of a block in words, of 16 or 8 bits, is not zero."""
  if len(w[0]) == 1:
    return _nonzero_bytes(w[0]) | _nonzero_bytes(w[1]) << 4 | _nonzero_bytes(w[2]) << 8 | _nonzero_bytes(w[3]) << 12
  else:
    return (
      _nonzero_row(w[0]) >> 28 | (_nonzero_row(w[1]) >> 24) & 0xF0 | (_nonzero_row(w[2]) >> 20) & 0xF00
      | (_nonzero_row(w[3]) >> 16) & 0xF000
    )  # fmt: skip


@triton.jit
def _nonzero_bytes(row):
  lanes = (((row[0] & 0x7F7F7F7F) + 0x7F7F7F7F) >> 7) & 0x01010101
  return (lanes | lanes >> 7 | lanes >> 14 | lanes >> 21) & 0xF


@triton.jit
def positive_zeros(row):
  """A row of float8 with -0.0 made 0.0, which is what a free position must hold."""
  return (row[0] & (((row[0] & 0x7F7F7F7F) + 0x7F7F7F7F) | 0x7F7F7F7F),)


@triton.jit
def _nonzero_row(row):
  """Marks non-zeros in the upper four bits; below is rubbish. The product brings the upper bits of bytes together."""
  low = (row[0] & 0x7FFF7FFF) + 0x7FFF7FFF
  high = (row[1] & 0x7FFF7FFF) + 0x7FFF7FFF
  return (prmt(low, high, 0x7531) & 0x80808080) * 0x00204081


@triton.jit
def zero_free(w, code):
  """A block's rows in words, of 16 or 8 bits, zero where `code` does not keep entries."""
  if len(w[0]) == 1:
    return (
      _zero_bytes(w[0], code), _zero_bytes(w[1], code >> 4),
      _zero_bytes(w[2], code >> 8), _zero_bytes(w[3], code >> 12),
    )  # fmt: skip
  else:
    bits = code | code << 15
    return _zero_row(w[0], bits), _zero_row(w[1], bits >> 4), _zero_row(w[2], bits >> 8), _zero_row(w[3], bits >> 12)


@triton.jit
def _zero_bytes(row, code):
  # The product puts each of the lowest four bits into a byte.
  return (row[0] & (((code & 0xF) * 0x00204081 & 0x01010101) * 0xFF),)


@triton.jit
def _zero_row(row, bits):
  return row[0] & ((bits & 0x00010001) * 0xFFFF), row[1] & (((bits >> 2) & 0x00010001) * 0xFFFF)


@triton.jit
def store_values(
  values, pairs, place, rows: tl.constexpr, columns: tl.constexpr, transposed: tl.constexpr,
  together: tl.constexpr = False,
):  # fmt: skip
  """Writes the values of an operand; pairs[g] are those of group g of each block."""
  if values.dtype.element_ty.primitive_bitwidth == 8:
    store_groups(values.to(tl.pointer_type(tl.uint16)), pairs, place, rows, columns, transposed, together)
  else:
    store_groups(values.to(tl.pointer_type(tl.uint32)), pairs, place, rows, columns, transposed, together)


@triton.jit
def store_rows(x, w, place, rows: tl.constexpr, columns: tl.constexpr, transposed: tl.constexpr):
  """Writes blocks to a float8 array, or their columns `w` to its transpose."""
  items = (w[0][0], w[1][0], w[2][0], w[3][0])
  store_groups(x.to(tl.pointer_type(tl.uint32)), items, place, rows, columns, transposed)


@triton.jit
def store_groups(
  at, items, place, rows: tl.constexpr, columns: tl.constexpr, transposed: tl.constexpr,
  together: tl.constexpr = False,
):  # fmt: skip
  """Writes items[g], one pointee for group g of each block.

  Groups lie along the rows of the array, or along its columns if `transposed`: then neighbouring threads hold pairs
  that are far apart, and the compiler exchanges them through shared memory so that each row is written in one run, all
  four `together` or one after the other.
  """
  if transposed:  # noqa: SIM108
    at = at + 4 * place[1] * (rows // 4) + place[0]
  else:
    at = at + 4 * place[0] * (columns // 4) + place[1]
  step: tl.constexpr = (rows if transposed else columns) // 4
  if transposed and together:
    two = tl.arange(0, 2) * step
    at = at[:, :, None, None] + 2 * two[None, None, :, None] + two[None, None, None, :]
    x = tl.join(tl.join(items[0], items[2]), tl.join(items[1], items[3]))
    tl.store(at, x.to(at.dtype.element_ty), mask=place[2][:, :, None, None])
  else:
    for g in tl.static_range(4):
      tl.store(at + g * step, items[g].to(at.dtype.element_ty), mask=place[2])
