"""Triton kernels that make the operand of the transpose from a V:N:M operand; `triton.py` launches them.

An operand [R, C] holds two entries of each row and group of M columns, a pair, and which: 0.28 times the dense array
at M = 8. A program of `transpose_pack` has V columns by 16 groups of M rows, spread: rows j R / M + g are the members
of group g.
A group's rows are ranked by sums of stored values, so the first pass moves no entry to its place. The second pass makes
M entries of each row that stays, two columns in a pair: two rows of the transpose. Its rows are written in
runs of 16 groups, which the compiler stages through shared memory. A program of `transpose_pack_24` has groups of four
neighbouring rows, all of which stay.
"""

import triton
import triton.language as tl

from pallas_kernels.vnm import _blocks as blocks
from pallas_kernels.vnm import _metadata


@triton.jit
def transpose_pack(
  values_in, metadata_in, tables, values, metadata, rows,
  R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr, SELECT: tl.constexpr,
):  # fmt: skip
  """The transpose's pattern and operand.

  `tables` has a nibble for each column of a block's group, a plane for every eight: which of the four kept ones it is,
  4 for a column of zeros. If `SELECT`, one more plane has ones in the bytes of those of the four that do not count as
  zeros.
  """
  dtype: tl.constexpr = values_in.dtype.element_ty
  source = values_in.to(tl.pointer_type(tl.uint32))
  group = (tl.program_id(0) * (V // M) + tl.arange(0, V // M))[None, :]  # of columns
  member = tl.program_id(1) * 16 + tl.arange(0, 16)  # of rows: the first of each group
  if M == 4:
    nothing = tl.zeros([16], tl.float32)  # all rows stay
    score = (nothing, nothing, nothing, nothing)
  else:
    at = source + member[:, None] * (C // M) + group
    used = tables + M // 8 * (R // V * (C // M)) + group
    places = metadata_in.to(tl.pointer_type(tl.uint8)) + _metadata.bytes_in_sixteen(V // M)
    score = _scores(at, places, used, 0, R, C, V, M, SELECT, dtype)
    if M == 16:
      score = score + _scores(at, places, used, 8, R, C, V, M, SELECT, dtype)
  r0, r1, r2, r3 = blocks.best_columns(score, M)
  blocks.store_four(rows + tl.program_id(0) * (R // M * 4) + member * 4, member, r0, r1, r2, r3, R // M)
  kept = _once(r0.to(tl.uint32) | r1.to(tl.uint32) << 4 | r2.to(tl.uint32) << 8 | r3.to(tl.uint32) << 12)
  kept = kept[:, None].to(tl.int32)
  first = member[:, None]
  e0 = _entries(source, metadata_in, tables, first + (kept & 15) * (R // M), group, R, C, V, M)
  e1 = _entries(source, metadata_in, tables, first + (kept >> 4 & 15) * (R // M), group, R, C, V, M)
  e2 = _entries(source, metadata_in, tables, first + (kept >> 8 & 15) * (R // M), group, R, C, V, M)
  e3 = _entries(source, metadata_in, tables, first + (kept >> 12 & 15) * (R // M), group, R, C, V, M)
  _keep(values, metadata, e0, e1, e2, e3, R // M, V, M)


@triton.jit
def transpose_pack_as(
  values_in, metadata_in, tables, metadata, rows, values,
  R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
  """The transpose's values under a pattern that is given."""
  source = values_in.to(tl.pointer_type(tl.uint32))
  group = (tl.program_id(0) * (V // M) + tl.arange(0, V // M))[None, :]
  member = (tl.program_id(1) * 16 + tl.arange(0, 16))[:, None]
  given = _metadata.load_transposed(metadata, R // M, V, M)
  at = rows + tl.program_id(0) * (R // M * 4) + member * 4
  e0 = _entries(source, metadata_in, tables, blocks.load_index(at, R), group, R, C, V, M)
  e1 = _entries(source, metadata_in, tables, blocks.load_index(at + 1, R), group, R, C, V, M)
  e2 = _entries(source, metadata_in, tables, blocks.load_index(at + 2, R), group, R, C, V, M)
  e3 = _entries(source, metadata_in, tables, blocks.load_index(at + 3, R), group, R, C, V, M)
  _keep_given(values, given, e0, e1, e2, e3, R // M, V, M)


@triton.jit
def transpose_pack_24(
  values_in, metadata_in, tables, values, metadata, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr
):
  """Two of four neighbours of the transpose: a program has 16 groups of M columns by 16 of four rows of a block."""
  e0 = _neighbours(values_in, metadata_in, tables, 0, R, C, V, M)
  e1 = _neighbours(values_in, metadata_in, tables, 1, R, C, V, M)
  e2 = _neighbours(values_in, metadata_in, tables, 2, R, C, V, M)
  e3 = _neighbours(values_in, metadata_in, tables, 3, R, C, V, M)
  _keep(values, metadata, e0, e1, e2, e3, R // 4, 16 * M, M)


@triton.jit
def transpose_pack_24_as(
  values_in, metadata_in, tables, metadata, values, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr
):
  """`transpose_pack_24` under a pattern that is given."""
  given = _metadata.load_transposed(metadata, R // 4, 16 * M, M)
  e0 = _neighbours(values_in, metadata_in, tables, 0, R, C, V, M)
  e1 = _neighbours(values_in, metadata_in, tables, 1, R, C, V, M)
  e2 = _neighbours(values_in, metadata_in, tables, 2, R, C, V, M)
  e3 = _neighbours(values_in, metadata_in, tables, 3, R, C, V, M)
  _keep_given(values, given, e0, e1, e2, e3, R // 4, 16 * M, M)


@triton.jit
def _neighbours(
  values, metadata, tables, j: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr
):
  """The entries of the j-th rows of 16 groups of four, whose metadata is one tile."""
  row = 4 * tl.arange(0, 16)[:, None] + j
  places = _metadata.bytes_in_tile(row, C // M)
  group = tl.program_id(0) * 16 + tl.arange(0, 16)[None, :]
  return _entries_at(
    values.to(tl.pointer_type(tl.uint32)), metadata.to(tl.pointer_type(tl.uint8)) + places, tables,
    tl.program_id(1) * 64 + row, group, R, C, V, M, 16 * M,
  )  # fmt: skip


@triton.jit
def _keep(values, metadata, e0, e1, e2, e3, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr):
  """Stores the best two of four rows: values and metadata of 16 of a column's `GROUPS` groups."""
  if M == 4:
    even, odd, nibbles = _four_columns(e0, e1, e2, e3, 0)
    _store_values(values, even, odd, 0, GROUPS, COLUMNS, M)
    shift = (8 * tl.arange(0, 2))[None, None, :].to(tl.uint32)
    nibbles = tl.sum(tl.reshape(nibbles, (16, COLUMNS // 8, 2)) << shift, axis=2)
    low, high = tl.split(tl.reshape(nibbles, (16, COLUMNS // 16, 2)))
  elif M == 8:
    nibbles = _eight_columns(values, e0, e1, e2, e3, 0, GROUPS, COLUMNS, M)
    low, high = tl.split(tl.reshape(nibbles, (16, COLUMNS // 16, 2)))
  else:
    low = _eight_columns(values, e0, e1, e2, e3, 0, GROUPS, COLUMNS, M)
    high = _eight_columns(values, e0, e1, e2, e3, 8, GROUPS, COLUMNS, M)
  _metadata.store_transposed(metadata, low, high, GROUPS, COLUMNS)


@triton.jit
def _keep_given(values, given, e0, e1, e2, e3, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr):
  """`_keep` of the values alone, where `given` says."""
  if M == 4:
    even, odd = _four_given(e0, e1, e2, e3, given, 0, COLUMNS, M)
    _store_values(values, even, odd, 0, GROUPS, COLUMNS, M)
  else:
    for part in tl.static_range(M // 8):
      even0, odd0 = _four_given(e0, e1, e2, e3, given, 4 * part, COLUMNS, M)
      even1, odd1 = _four_given(e0, e1, e2, e3, given, 4 * part + 2, COLUMNS, M)
      _store_values(values, tl.join(even0, even1), tl.join(odd0, odd1), 8 * part, GROUPS, COLUMNS, M)


@triton.jit
def _store_values(values, even, odd, first: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr):
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
def _once(x):
  """`x`, opaque: the compiler would rank rows again for each layout in which it wants the result."""
  return tl.inline_asm_elementwise('mov.b32 $0, $1;', '=r,r', [x], dtype=tl.uint32, is_pure=False, pack=1)


@triton.jit
def _selectors(places, V: tl.constexpr, M: tl.constexpr):
  """What takes the two bytes that each nibble names, twice each; above 16 bits is rubbish."""
  x = (places | places << 12) & 0x000F000F
  x = ((x | x << 6) & 0x03030303) * 0x11
  return tl.reshape(tl.join(x, x >> 16), (16, V // M))


@triton.jit
def _score(
  at, places, used, j: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr,
  SELECT: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
  """What the j-th members of 16 groups of rows hold in each group of columns; `at` is where the first are."""
  step: tl.constexpr = j * (R // M)
  pair = tl.load(at + step * (C // M)) & 0x7FFF7FFF
  if SELECT:
    # Whole tiles and blocks from one member to the next: the compiler then knows how far it is.
    if R // M % 64 == 0:
      place = places + _metadata.before_sixteen(tl.program_id(1), C // M) + _metadata.between(step, C // M)
    else:
      place = places + _metadata.before_sixteen(tl.program_id(1) + step // 16, C // M)
    block = tl.program_id(1) * 16 // V + step // V if R // M % V == 0 else (tl.program_id(1) * 16 + step) // V
    here = tl.load(used + block * (C // M))
    pair = pair & blocks.prmt(here, here, _selectors(tl.load(place).to(tl.uint32), V, M))
  low, high = blocks.widen(pair, dtype)
  return low + high


@triton.jit
def _scores(
  at, places, used, first: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr,
  SELECT: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
  """Sums of magnitudes of eight members of each group, [16] each, reduced together."""
  a = _two_scores(at, places, used, first, R, C, V, M, SELECT, dtype)
  b = _two_scores(at, places, used, first + 2, R, C, V, M, SELECT, dtype)
  c = _two_scores(at, places, used, first + 4, R, C, V, M, SELECT, dtype)
  d = _two_scores(at, places, used, first + 6, R, C, V, M, SELECT, dtype)
  ac, bd = tl.split(tl.sum(tl.join(tl.join(a, c), tl.join(b, d)), axis=1))  # [16, 2, 2]
  a, c = tl.split(ac)
  b, d = tl.split(bd)
  return tl.split(a) + tl.split(b) + tl.split(c) + tl.split(d)


@triton.jit
def _two_scores(
  at, places, used, j: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr,
  SELECT: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
  return tl.join(
    _score(at, places, used, j, R, C, V, M, SELECT, dtype), _score(at, places, used, j + 1, R, C, V, M, SELECT, dtype)
  )


@triton.jit
def _entries(source, metadata, tables, row, group, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr):
  """All M entries that rows have of groups, in M / 2 pairs; 16 rows whose numbers go on from a multiple of 16."""
  sixteen = metadata.to(tl.pointer_type(tl.uint8)) + _metadata.before_sixteen(row // 16, C // M)
  places = sixteen + _metadata.bytes_in_sixteen(V // M)
  return _entries_at(source, places, tables, row, group, R, C, V, M, V)


@triton.jit
def _entries_at(
  source, places, tables, row, group,
  R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
  """`_entries` of 16 rows and `COLUMNS` columns whose metadata, bytes of two groups, is at `places`."""
  places = tl.load(places).to(tl.uint32)
  nibble = tl.reshape(tl.join(places, places >> 4), (16, COLUMNS // M))
  pair = tl.load(source + row * (C // M) + group)
  # For each of the four kept columns two bytes of `pair`, or zeros, as a byte of selectors.
  four = 0x44444444 ^ _shifted(0x54, (nibble << 3) & 24) ^ _shifted(0x76, (nibble << 1) & 24)
  at = tables + row // V * (C // M) + group
  table = tl.load(at)
  if M == 4:
    return _scatter(pair, four, table)
  elif M == 8:
    return _eight_entries(pair, four, table)
  else:
    return _eight_entries(pair, four, table) + _eight_entries(pair, four, tl.load(at + R // V * (C // M)))


@triton.jit
def _eight_entries(pair, four, table):
  return _scatter(pair, four, table) + _scatter(pair, four, table >> 16)


@triton.jit
def _shifted(value: tl.constexpr, bits):
  return tl.full([], value, tl.uint32) << bits


@triton.jit
def _scatter(pair, four, table):
  """Four columns, in two pairs, by the low half of `table`."""
  selector = blocks.prmt(four, four * 0 + 0x44444444, table)
  return blocks.prmt(pair, pair * 0, selector), blocks.prmt(pair, pair * 0, selector >> 16)


@triton.jit
def _four_columns(e0, e1, e2, e3, i: tl.constexpr):
  """What four columns, pairs `i` and `i + 1`, store, even and odd ones, and their nibbles in 2 x 8 bits."""
  even0, odd0, nibbles0 = blocks.best_two_of_rows(e0[i], e1[i], e2[i], e3[i])
  even1, odd1, nibbles1 = blocks.best_two_of_rows(e0[i + 1], e1[i + 1], e2[i + 1], e3[i + 1])
  return tl.join(even0, even1), tl.join(odd0, odd1), nibbles0 | nibbles1 << 4


@triton.jit
def _eight_columns(
  values, e0, e1, e2, e3, first: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr
):
  """Stores what eight columns of each group keep, from `first` on; their nibbles, column 2 i + h at bit 4 i + 16 h."""
  even0, odd0, nibbles0 = _four_columns(e0, e1, e2, e3, first // 2)
  even1, odd1, nibbles1 = _four_columns(e0, e1, e2, e3, first // 2 + 2)
  _store_values(values, tl.join(even0, even1), tl.join(odd0, odd1), first, GROUPS, COLUMNS, M)
  return nibbles0 + (nibbles1 << 8)


@triton.jit
def _four_given(e0, e1, e2, e3, given, i: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr):
  """`_four_columns` with the nibbles given."""
  n0, n1 = _metadata.nibbles_of(given, 2 * i, COLUMNS, M), _metadata.nibbles_of(given, 2 * i + 2, COLUMNS, M)
  even0, odd0 = blocks.chosen_of_rows(e0[i], e1[i], e2[i], e3[i], n0)
  even1, odd1 = blocks.chosen_of_rows(e0[i + 1], e1[i + 1], e2[i + 1], e3[i + 1], n1)
  return tl.join(even0, even1), tl.join(odd0, odd1)
