"""Triton kernels that read a V:N:M operand: that of its transpose, and single columns; `triton.py` launches them.

An operand [R, C] holds two entries of each row and group of M columns, a word, and which: 0.28 times the dense array
at M = 8. A program of `turn` has V columns by 16 groups of M rows, spread: rows j R / M + g are the members of group g.
What ranks a group's rows are sums of what is stored, so a first look takes no entry to its place. Of the rows that
stay a second look makes M entries each, pairs of columns to a word, and from there on it goes as in `_columns`.
"""

import triton
import triton.language as tl

from pallas_kernels.vnm import _blocks as blocks


@triton.jit
def turn(
  values_in, words_in, tables, used, values, words, rows,
  R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr, SELECT: tl.constexpr,
):  # fmt: skip
  """The transpose's pattern and operand.

  `tables` has a nibble for each column of a block's group: which of the four kept ones it is, 4 for a column of zeros.
  `used`, if `SELECT`, has ones in the bytes of those of the four that do not count as zeros.
  """
  dtype: tl.constexpr = values_in.dtype.element_ty
  source = values_in.to(tl.pointer_type(tl.uint32))
  group = (tl.program_id(0) * (V // M) + tl.arange(0, V // M))[None, :]  # of columns
  member = tl.program_id(1) * 16 + tl.arange(0, 16)  # of rows: the first of each group
  if M == 4:
    nothing = tl.zeros([16], tl.float32)  # all rows stay
    score = (nothing, nothing, nothing, nothing)
  elif M == 8:
    score = _scores(source, words_in, used, group, 0, R, C, V, M, SELECT, dtype)
  else:
    score = (
      _scores(source, words_in, used, group, 0, R, C, V, M, SELECT, dtype)
      + _scores(source, words_in, used, group, 8, R, C, V, M, SELECT, dtype)
    )  # fmt: skip
  r0, r1, r2, r3 = blocks.best_columns(score, M)
  to = rows + tl.program_id(0) * (R // M * 4) + member * 4
  blocks.store_four(to, member, r0, r1, r2, r3, R // M)
  # Read again: addresses that come from all of the above cost the compiler half a minute and more.
  tl.debug_barrier()
  at = to[:, None]
  e0 = _entries(source, words_in, tables, tl.load(at), group, C, V, M)
  e1 = _entries(source, words_in, tables, tl.load(at + 1), group, C, V, M)
  e2 = _entries(source, words_in, tables, tl.load(at + 2), group, C, V, M)
  e3 = _entries(source, words_in, tables, tl.load(at + 3), group, C, V, M)
  # Eight neighbouring columns have a word of nibbles, laid down where `exchange` looks for it.
  here = tl.program_id(0) * (V // 64)
  across: tl.constexpr = R // M // 16
  if M == 4:
    even, odd, nibbles = _four_columns(e0, e1, e2, e3, 0)
    _store(values, even, odd, 0, R, V, M)
    shift = (8 * tl.arange(0, 2))[None, None, :].to(tl.uint32)
    eight = tl.sum(tl.reshape(nibbles, (16, V // 8, 2)) << shift, axis=2)
    octet = tl.arange(0, V // 8)[None, :]
    place = ((here + octet // 8) * across + tl.program_id(1)) * 128 + octet % 8 * 16
    tl.store(words + place + tl.arange(0, 16)[:, None], eight)
  else:
    for part in tl.static_range(M // 8):
      even0, odd0, nibbles0 = _four_columns(e0, e1, e2, e3, 4 * part)
      even1, odd1, nibbles1 = _four_columns(e0, e1, e2, e3, 4 * part + 2)
      _store(values, tl.join(even0, even1), tl.join(odd0, odd1), 8 * part, R, V, M)
      octet = tl.arange(0, V // M)[None, :] * (M // 8) + part
      place = ((here + octet // 8) * across + tl.program_id(1)) * 128 + octet % 8 * 16
      tl.store(words + place + tl.arange(0, 16)[:, None], nibbles0 | nibbles1 << 8)
  blocks.exchange(words, here, across, V)


@triton.jit
def turn_as(
  values_in, words_in, tables, words, rows, values,
  R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
  """The transpose's values under a pattern that is given."""
  source = values_in.to(tl.pointer_type(tl.uint32))
  group = (tl.program_id(0) * (V // M) + tl.arange(0, V // M))[None, :]
  member = (tl.program_id(1) * 16 + tl.arange(0, 16))[:, None]
  given = _given(words, R, V, M)
  at = rows + tl.program_id(0) * (R // M * 4) + member * 4
  e0 = _entries(source, words_in, tables, tl.load(at), group, C, V, M)
  e1 = _entries(source, words_in, tables, tl.load(at + 1), group, C, V, M)
  e2 = _entries(source, words_in, tables, tl.load(at + 2), group, C, V, M)
  e3 = _entries(source, words_in, tables, tl.load(at + 3), group, C, V, M)
  if M == 4:
    even, odd = _four_given(e0, e1, e2, e3, given, 0, V, M)
    _store(values, even, odd, 0, R, V, M)
  else:
    for part in tl.static_range(M // 8):
      even0, odd0 = _four_given(e0, e1, e2, e3, given, 4 * part, V, M)
      even1, odd1 = _four_given(e0, e1, e2, e3, given, 4 * part + 2, V, M)
      _store(values, tl.join(even0, even1), tl.join(odd0, odd1), 8 * part, R, V, M)


@triton.jit
def take_columns(
  values, words, rows, ids, out,
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
  # Columns first: threads go along them. Rows eight apart share a word.
  n = tl.arange(0, ROWS // 2)[None, :]
  row = tl.program_id(1) * ROWS + n // 8 * 16 + n % 8
  tile = row // 64 * (C // M // 16) + group[:, None] // 16
  word = tl.load(words + tile * 128 + row % 64 // 16 * 32 + row % 8 * 4 + group[:, None] % 16 // 4)
  word = word >> (group % 4 * 4)[:, None].to(tl.uint32)
  nibble = (word[:, :, None] >> (16 * tl.arange(0, 2))[None, None, :].to(tl.uint32)) & 15
  row = row[:, :, None] + 8 * tl.arange(0, 2)[None, None, :]
  pair = tl.load(values.to(tl.pointer_type(tl.uint32)) + row * (C // M) + group[:, None, None])
  entry = tl.where((nibble & 3) == place, pair & 0xFFFF, tl.where(nibble >> 2 == place, pair >> 16, 0))
  at = out.to(tl.pointer_type(tl.uint16)) + row * COUNT + i[:, None, None]
  tl.store(at, entry.to(tl.uint16), mask=(i < COUNT)[:, None, None])


@triton.jit
def _nibble(words, row, group, GROUPS: tl.constexpr):
  """The metadata of rows and groups; `GROUPS` a row."""
  tile = row // 64 * (GROUPS // 16) + group // 16
  word = tl.load(words + tile * 128 + row % 64 // 16 * 32 + row % 8 * 4 + group % 16 // 4)
  return (word >> (row // 8 % 2 * 16 + group % 4 * 4).to(tl.uint32)) & 15


@triton.jit
def _nibbles(words, row, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr):
  """The metadata of 16 rows and the program's groups. Four groups share a word, so it is read once for them."""
  word = _four_groups(words, row, C, V, M)
  return tl.reshape(word[:, :, None] >> (4 * tl.arange(0, 4))[None, None, :].to(tl.uint32), (16, V // M)) & 15


@triton.jit
def _selectors(words, row, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr):
  """`_nibbles`, as what takes the two bytes that they name, twice each; above 16 bits is rubbish."""
  word = _four_groups(words, row, C, V, M)
  two = tl.arange(0, 2).to(tl.uint32)
  # Two groups at a time.
  x = word[:, :, None] >> (8 * two)[None, None, :]
  x = (x | x << 12) & 0x000F000F
  x = ((x | x << 6) & 0x03030303) * 0x11
  return tl.reshape(x[:, :, :, None] >> (16 * two)[None, None, None, :], (16, V // M))


@triton.jit
def _four_groups(words, row, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr):
  """What 16 rows have of every four groups, a nibble a group in 16 bits."""
  four = tl.program_id(0) * (V // M // 4) + tl.arange(0, V // M // 4)[None, :]
  tile = row // 64 * (C // M // 16) + four // 4
  word = tl.load(words + tile * 128 + row % 64 // 16 * 32 + row % 8 * 4 + four % 4)
  return blocks.prmt(word, word * 0, (0x4410 + row // 8 % 2 * 0x22).to(tl.uint32))


@triton.jit
def _score(
  source, words, used, start, group, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr, SELECT: tl.constexpr,
  dtype: tl.constexpr,
):  # fmt: skip
  """What 16 rows hold in each group."""
  row = start + tl.arange(0, 16)[:, None]
  pair = tl.load(source + row * (C // M) + group) & 0x7FFF7FFF
  if SELECT:
    here = tl.load(used + start // V * (C // M) + group)
    pair = pair & blocks.prmt(here, here, _selectors(words, row, C, V, M))
  low, high = blocks.widen(pair, dtype)
  return low + high


@triton.jit
def _scores(
  source, words, used, group, first: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
  M: tl.constexpr, SELECT: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
  """Sums of magnitudes of eight members of each group, [16] each, reduced together."""
  row = tl.program_id(1) * 16 + first * (R // M)
  a = _two_scores(source, words, used, row, group, R, C, V, M, SELECT, dtype)
  b = _two_scores(source, words, used, row + 2 * (R // M), group, R, C, V, M, SELECT, dtype)
  c = _two_scores(source, words, used, row + 4 * (R // M), group, R, C, V, M, SELECT, dtype)
  d = _two_scores(source, words, used, row + 6 * (R // M), group, R, C, V, M, SELECT, dtype)
  ac, bd = tl.split(tl.sum(tl.join(tl.join(a, c), tl.join(b, d)), axis=1))  # [16, 2, 2]
  a, c = tl.split(ac)
  b, d = tl.split(bd)
  return tl.split(a) + tl.split(b) + tl.split(c) + tl.split(d)


@triton.jit
def _two_scores(
  source, words, used, row, group, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr,
  SELECT: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
  return tl.join(
    _score(source, words, used, row, group, C, V, M, SELECT, dtype),
    _score(source, words, used, row + R // M, group, C, V, M, SELECT, dtype),
  )


@triton.jit
def _entries(source, words, tables, row, group, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr):
  """All M entries that rows have of groups, in M / 2 words."""
  nibble = _nibbles(words, row, C, V, M)
  pair = tl.load(source + row * (C // M) + group)
  # For each of the four kept columns two bytes of `pair`, or zeros, as a byte of selectors.
  four = 0x44444444 ^ _shifted(0x54, (nibble << 3) & 24) ^ _shifted(0x76, (nibble << 1) & 24)
  at = row // V * (C // M) + group
  if M == 16:
    table = tl.load(tables.to(tl.pointer_type(tl.uint64)) + at)
    low, high = table.to(tl.uint32), (table >> 32).to(tl.uint32)
    return (
      _scatter(pair, four, low) + _scatter(pair, four, low >> 16)
      + _scatter(pair, four, high) + _scatter(pair, four, high >> 16)
    )  # fmt: skip
  else:
    table = tl.load(tables + at)
    if M == 8:
      return _scatter(pair, four, table) + _scatter(pair, four, table >> 16)
    else:
      return _scatter(pair, four, table)


@triton.jit
def _shifted(value: tl.constexpr, bits):
  return tl.full([], value, tl.uint32) << bits


@triton.jit
def _scatter(pair, four, table):
  """Four columns, in two words, by the low half of `table`."""
  selector = blocks.prmt(four, four * 0 + 0x44444444, table)
  return blocks.prmt(pair, pair * 0, selector), blocks.prmt(pair, pair * 0, selector >> 16)


@triton.jit
def _four_columns(e0, e1, e2, e3, i: tl.constexpr):
  """What four columns, words `i` and `i + 1`, store, even and odd ones, and their nibbles in 2 x 8 bits."""
  even0, odd0, nibbles0 = blocks.best_two_of_rows(e0[i], e1[i], e2[i], e3[i])
  even1, odd1, nibbles1 = blocks.best_two_of_rows(e0[i + 1], e1[i + 1], e2[i + 1], e3[i + 1])
  return tl.join(even0, even1), tl.join(odd0, odd1), nibbles0 | nibbles1 << 4


@triton.jit
def _four_given(e0, e1, e2, e3, given, i: tl.constexpr, V: tl.constexpr, M: tl.constexpr):
  """`_four_columns` with the nibbles given."""
  n0, n1 = _nibbles_of(given, 2 * i, V, M), _nibbles_of(given, 2 * i + 2, V, M)
  even0, odd0 = blocks.chosen_of_rows(e0[i], e1[i], e2[i], e3[i], n0)
  even1, odd1 = blocks.chosen_of_rows(e0[i + 1], e1[i + 1], e2[i + 1], e3[i + 1], n1)
  return tl.join(even0, even1), tl.join(odd0, odd1)


@triton.jit
def _given(words, R: tl.constexpr, V: tl.constexpr, M: tl.constexpr):
  """The transpose's metadata for the program's columns, before anything that takes time.

  Four groups of rows share a word, and so do columns eight apart: [16, V / 16] for each of eight columns, or nibbles
  for each of the four of a group if M is 4.
  """
  member = tl.arange(0, 16)[:, None]
  if M == 4:
    column = tl.program_id(0) * V + tl.arange(0, V // M)[None, :] * M
    group = tl.program_id(1) * 16 + member
    return (
      _nibble(words, column, group, R // M), _nibble(words, column + 1, group, R // M),
      _nibble(words, column + 2, group, R // M), _nibble(words, column + 3, group, R // M),
    )  # fmt: skip
  else:
    sixteen = tl.program_id(0) * (V // 16) + tl.arange(0, V // 16)[None, :]
    tile = sixteen // 4 * (R // M // 16) + tl.program_id(1)
    at = words + tile * 128 + sixteen % 4 * 32 + member // 4
    shift = (member % 4 * 4).to(tl.uint32)
    return (
      tl.load(at) >> shift, tl.load(at + 4) >> shift, tl.load(at + 8) >> shift, tl.load(at + 12) >> shift,
      tl.load(at + 16) >> shift, tl.load(at + 20) >> shift, tl.load(at + 24) >> shift, tl.load(at + 28) >> shift,
    )  # fmt: skip


@triton.jit
def _nibbles_of(given, i: tl.constexpr, V: tl.constexpr, M: tl.constexpr):
  """Those of columns `i` and `i + 1` of each group, [16, V / M], in the lowest bits of either half."""
  even, odd = given[i % 8], given[i % 8 + 1]
  if M == 8:
    both = tl.join(blocks.prmt(even, odd, 0x5410), blocks.prmt(even, odd, 0x7632))
    return tl.reshape(both, (16, V // M))
  else:
    return blocks.prmt(even, odd, 0x7632 if i >= 8 else 0x5410)


@triton.jit
def _store(values, even, odd, first: tl.constexpr, R: tl.constexpr, V: tl.constexpr, M: tl.constexpr):
  """Columns of each group from `first` on, 2 along the last axis of `even` and `odd`, or with M of 8 and more 2 x 2."""
  group = tl.program_id(0) * (V // M) + tl.arange(0, V // M)[None, :]
  column = group * M + first
  at = column * (R // M) + tl.program_id(1) * 16 + tl.arange(0, 16)[:, None]
  two = tl.arange(0, 2)
  at = at[:, :, None] + two[None, None, :] * (2 * (R // M))
  if M > 4:
    at = at[:, :, :, None] + two[None, None, None, :] * (4 * (R // M))
    at = at[:, :, :, :, None] + two[None, None, None, None, :] * (R // M)
  else:
    at = at[:, :, :, None] + two[None, None, None, :] * (R // M)
  tl.store(values.to(tl.pointer_type(tl.uint32)) + at, tl.join(even, odd))
