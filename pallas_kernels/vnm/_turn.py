"""Triton kernels that read a V:N:M operand: that of its transpose, and single columns; `triton.py` launches them.

An operand [R, C] holds two entries of each row and group of M columns, a word, and which: 0.28 times the dense array
at M = 8. A program of `turn` has V columns by 16 groups of M rows, spread: rows j R / M + g are the members of group g.
What ranks a group's rows are sums of what is stored, so a first look takes no entry to its place. Of the rows that
stay a second look makes M entries each, pairs of columns to a word, and from there on it goes as in `_columns`.
"""

import triton
import triton.language as tl

from pallas_kernels.vnm import _blocks as blocks

_EVEN = tl.constexpr(0x5410)
_ODD = tl.constexpr(0x7632)


@triton.jit
def turn(
  values_in, words_in, columns, used, values, words, rows,
  R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr, SELECT: tl.constexpr,
):  # fmt: skip
  """The transpose's pattern and operand. `columns` has the four columns of a block, below M, a byte each; `used`, if
  `SELECT`, ones in the bytes of those that do not count as zeros."""
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
  tl.store(to, member + r0.to(tl.int32) * (R // M))
  tl.store(to + 1, member + r1.to(tl.int32) * (R // M))
  tl.store(to + 2, member + r2.to(tl.int32) * (R // M))
  tl.store(to + 3, member + r3.to(tl.int32) * (R // M))
  # Read again: addresses that come from all of the above cost the compiler half a minute.
  tl.debug_barrier()
  at = to[:, None]
  e0 = _entries(source, words_in, columns, used, tl.load(at), group, C, V, M, SELECT)
  e1 = _entries(source, words_in, columns, used, tl.load(at + 1), group, C, V, M, SELECT)
  e2 = _entries(source, words_in, columns, used, tl.load(at + 2), group, C, V, M, SELECT)
  e3 = _entries(source, words_in, columns, used, tl.load(at + 3), group, C, V, M, SELECT)
  # Eight neighbouring columns of a group have a word of nibbles, laid down where `exchange` looks for it.
  here = tl.program_id(0) * (V // 64)
  across: tl.constexpr = R // M // 16
  if M == 4:
    p0, n0 = _choose(e0[0], e1[0], e2[0], e3[0])
    p1, n1 = _choose(e0[1], e1[1], e2[1], e3[1])
    _store(values, tl.join(p0, p1), 0, R, V, M)
    nibbles = n0 | n1 << 8
  else:
    for part in tl.static_range(M // 8):
      p0, n0 = _choose(e0[4 * part], e1[4 * part], e2[4 * part], e3[4 * part])
      p1, n1 = _choose(e0[4 * part + 1], e1[4 * part + 1], e2[4 * part + 1], e3[4 * part + 1])
      p2, n2 = _choose(e0[4 * part + 2], e1[4 * part + 2], e2[4 * part + 2], e3[4 * part + 2])
      p3, n3 = _choose(e0[4 * part + 3], e1[4 * part + 3], e2[4 * part + 3], e3[4 * part + 3])
      _store(values, tl.join(tl.join(p0, p2), tl.join(p1, p3)), 8 * part, R, V, M)
      octet = tl.arange(0, V // M)[None, :] * (M // 8) + part
      place = ((here + octet // 8) * across + tl.program_id(1)) * 128 + octet % 8 * 16
      tl.store(words + place + tl.arange(0, 16)[:, None], n0 | n1 << 8 | n2 << 16 | n3 << 24)
  if M == 4:
    shift = (16 * tl.arange(0, 2))[None, None, :].to(tl.uint32)
    eight = tl.sum(tl.reshape(nibbles, (16, V // 8, 2)) << shift, axis=2)
    octet = tl.arange(0, V // 8)[None, :]
    place = ((here + octet // 8) * across + tl.program_id(1)) * 128 + octet % 8 * 16
    tl.store(words + place + tl.arange(0, 16)[:, None], eight)
  blocks.exchange(words, here, across, V)


@triton.jit
def turn_as(
  values_in, words_in, columns, words, rows, values,
  R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
  """The transpose's values under a pattern that is given."""
  source = values_in.to(tl.pointer_type(tl.uint32))
  group = (tl.program_id(0) * (V // M) + tl.arange(0, V // M))[None, :]
  member = (tl.program_id(1) * 16 + tl.arange(0, 16))[:, None]
  at = rows + tl.program_id(0) * (R // M * 4) + member * 4
  e0 = _entries(source, words_in, columns, columns, tl.load(at), group, C, V, M, False)
  e1 = _entries(source, words_in, columns, columns, tl.load(at + 1), group, C, V, M, False)
  e2 = _entries(source, words_in, columns, columns, tl.load(at + 2), group, C, V, M, False)
  e3 = _entries(source, words_in, columns, columns, tl.load(at + 3), group, C, V, M, False)
  if M == 4:
    p0 = _chosen(e0[0], e1[0], e2[0], e3[0], words, 0, R, V, M)
    p1 = _chosen(e0[1], e1[1], e2[1], e3[1], words, 2, R, V, M)
    _store(values, tl.join(p0, p1), 0, R, V, M)
  else:
    for part in tl.static_range(M // 8):
      p0 = _chosen(e0[4 * part], e1[4 * part], e2[4 * part], e3[4 * part], words, 8 * part, R, V, M)
      p1 = _chosen(
        e0[4 * part + 1], e1[4 * part + 1], e2[4 * part + 1], e3[4 * part + 1], words, 8 * part + 2, R, V, M
      )
      p2 = _chosen(
        e0[4 * part + 2], e1[4 * part + 2], e2[4 * part + 2], e3[4 * part + 2], words, 8 * part + 4, R, V, M
      )
      p3 = _chosen(
        e0[4 * part + 3], e1[4 * part + 3], e2[4 * part + 3], e3[4 * part + 3], words, 8 * part + 6, R, V, M
      )
      _store(values, tl.join(tl.join(p0, p2), tl.join(p1, p3)), 8 * part, R, V, M)


@triton.jit
def take_columns(
  values, words, rows, ids, out,
  C: tl.constexpr, V: tl.constexpr, M: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
  """Columns `ids` of the dense matrix: `ROWS` rows by `WIDTH` of the `COUNT` columns a program."""
  i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
  column = tl.load(ids + i)
  group = column // M
  at = rows + tl.program_id(0) * ROWS // V * (C // M * 4) + group * 4
  place = tl.where(tl.load(at) == column, 0, 4)  # 4: this block does not have it
  place = tl.where(tl.load(at + 1) == column, 1, place)
  place = tl.where(tl.load(at + 2) == column, 2, place)
  place = tl.where(tl.load(at + 3) == column, 3, place)[:, None, None].to(tl.uint32)
  # Columns first: threads go along them. Rows eight apart share a word.
  n = tl.arange(0, ROWS // 2)[None, :]
  row = tl.program_id(0) * ROWS + n // 8 * 16 + n % 8
  tile = row // 64 * (C // M // 16) + group[:, None] // 16
  word = tl.load(words + tile * 128 + row % 64 // 16 * 32 + row % 8 * 4 + group[:, None] % 16 // 4)
  word = word >> (group % 4 * 4)[:, None].to(tl.uint32)
  nibble = (word[:, :, None] >> (16 * tl.arange(0, 2))[None, None, :].to(tl.uint32)) & 15
  row = row[:, :, None] + 8 * tl.arange(0, 2)[None, None, :]
  pair = tl.load(values.to(tl.pointer_type(tl.uint32)) + row * (C // M) + group[:, None, None])
  entry = tl.where((nibble & 3) == place, pair & 0xFFFF, tl.where(nibble >> 2 == place, pair >> 16, 0))
  tl.store(out.to(tl.pointer_type(tl.uint16)) + row * COUNT + i[:, None, None], entry.to(tl.uint16))


@triton.jit
def _nibble(words, row, group, GROUPS: tl.constexpr):
  """The metadata of rows and groups; `GROUPS` a row."""
  tile = row // 64 * (GROUPS // 16) + group // 16
  word = tl.load(words + tile * 128 + row % 64 // 16 * 32 + row % 8 * 4 + group % 16 // 4)
  return (word >> (row // 8 % 2 * 16 + group % 4 * 4).to(tl.uint32)) & 15


@triton.jit
def _nibbles(words, row, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr):
  """The metadata of 16 rows and the program's groups. Four groups share a word, so it is read once for them."""
  four = tl.program_id(0) * (V // M // 4) + tl.arange(0, V // M // 4)[None, :]
  tile = row // 64 * (C // M // 16) + four // 4
  word = tl.load(words + tile * 128 + row % 64 // 16 * 32 + row % 8 * 4 + four % 4) >> (row // 8 % 2 * 16).to(tl.uint32)
  return tl.reshape(word[:, :, None] >> (4 * tl.arange(0, 4))[None, None, :].to(tl.uint32), (16, V // M)) & 15


@triton.jit
def _score(
  source, words, used, start, group, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr, SELECT: tl.constexpr,
  dtype: tl.constexpr,
):  # fmt: skip
  """What 16 rows hold in each group."""
  row = start + tl.arange(0, 16)[:, None]
  pair = tl.load(source + row * (C // M) + group) & 0x7FFF7FFF
  if SELECT:
    nibble = _nibbles(words, row, C, V, M)
    here = tl.load(used + start // V * (C // M) + group)
    pair = pair & blocks.prmt(here, here, (nibble & 3) * 0x11 + (nibble >> 2) * 0x1100)
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
def _entries(
  source, words, columns, used, row, group, C: tl.constexpr, V: tl.constexpr, M: tl.constexpr, SELECT: tl.constexpr
):
  """All M entries that rows have of groups, in M / 2 words."""
  nibble = _nibbles(words, row, C, V, M)
  pair = tl.load(source + row * (C // M) + group)
  if SELECT:
    here = tl.load(used + row // V * (C // M) + group)
    pair = pair & blocks.prmt(here, here, (nibble & 3) * 0x11 + (nibble >> 2) * 0x1100)
  table = tl.load(columns + row // V * (C // M) + group)
  at = blocks.prmt(table, table, (nibble & 3) + (nibble >> 2) * 0x10)
  return blocks.scatter(pair, at & 255, (at >> 8) & 255, M)


@triton.jit
def _choose(e0, e1, e2, e3):
  """What the two columns of each pair store, along a new last axis, and their nibbles, the first one's lowest."""
  low, high = blocks.prmt(e0, e1, _EVEN), blocks.prmt(e2, e3, _EVEN)
  even = blocks.best_two(low, high, True)
  first = blocks.chosen(low, high, even)
  low, high = blocks.prmt(e0, e1, _ODD), blocks.prmt(e2, e3, _ODD)
  odd = blocks.best_two(low, high, True)
  return tl.join(first, blocks.chosen(low, high, odd)), even | odd << 4


@triton.jit
def _chosen(
  e0, e1, e2, e3, words, i: tl.constexpr, R: tl.constexpr, V: tl.constexpr, M: tl.constexpr
):
  """`_choose` with the nibbles of columns `i` and `i + 1` of each group given."""
  even = blocks.chosen(blocks.prmt(e0, e1, _EVEN), blocks.prmt(e2, e3, _EVEN), _given(words, i, R, V, M))
  odd = blocks.chosen(blocks.prmt(e0, e1, _ODD), blocks.prmt(e2, e3, _ODD), _given(words, i + 1, R, V, M))
  return tl.join(even, odd)


@triton.jit
def _given(words, i: tl.constexpr, R: tl.constexpr, V: tl.constexpr, M: tl.constexpr):
  """The transpose's metadata for column `i` of each of the program's groups, [16, V / M]. Four groups of rows share a
  word, and so do columns eight apart."""
  if M == 4:
    column = tl.program_id(0) * V + tl.arange(0, V // M)[None, :] * M + i
    return _nibble(words, column, tl.program_id(1) * 16 + tl.arange(0, 16)[:, None], R // M)
  else:
    sixteen = tl.program_id(0) * (V // 16) + tl.arange(0, V // 16)[None, :]
    tile = sixteen // 4 * (R // M // 16) + tl.program_id(1)
    word = tl.load(words + tile * 128 + sixteen % 4 * 32 + i % 8 * 4 + tl.arange(0, 4)[:, None])  # [4, V / 16]
    four = (4 * tl.arange(0, 4))[None, :, None].to(tl.uint32)
    if M == 16:
      return tl.reshape(word[:, None, :] >> (four + i // 8 * 16), (16, V // M)) & 15
    else:
      half = (16 * tl.arange(0, 2))[None, None, None, :].to(tl.uint32)
      return tl.reshape(word[:, None, :, None] >> (four[:, :, :, None] + half), (16, V // M)) & 15


@triton.jit
def _store(values, pairs, first: tl.constexpr, R: tl.constexpr, V: tl.constexpr, M: tl.constexpr):
  """Columns of each group from `first` on: 2 x 2, or with M of 8 and more 2 x 2 x 2, of `pairs`' last axes."""
  group = tl.program_id(0) * (V // M) + tl.arange(0, V // M)[None, :]
  column = group * M + first
  at = column * (R // M) + tl.program_id(1) * 16 + tl.arange(0, 16)[:, None]
  two = tl.arange(0, 2)
  at = at[:, :, None] + two[None, None, :] * (R // M)
  if M == 4:
    at = at[:, :, :, None] + two[None, None, None, :] * (2 * (R // M))
  else:
    at = at[:, :, :, None] + two[None, None, None, :] * (4 * (R // M))
    at = at[:, :, :, :, None] + two[None, None, None, None, :] * (2 * (R // M))
  tl.store(values.to(tl.pointer_type(tl.uint32)) + at, pairs)
