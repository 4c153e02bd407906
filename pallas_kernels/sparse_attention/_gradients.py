"""The backward of `_kernels`: gradients of queries by tiles of queries, those of keys and values by tiles of keys.

With dy the cotangent of y, weights P and delta the sum of dy y over a head's size, the gradient of the scores is
P (dy v^T - delta); Dao et al., arXiv 2205.14135, algorithm 4.
"""

import triton
import triton.language as tl

from pallas_kernels.sparse_attention._kernels import attended, keys_of, LOG2E, place, rows, store_rows


@triton.jit
def queries_of(j0, j1, n0, COUNT: tl.constexpr, PART: tl.constexpr, WINDOW: tl.constexpr):
  """Queries [begin, end) of a part, in its view of COUNT, for keys of positions j0 to j1, the first n0 in theirs."""
  if PART == 'near':
    return j0, tl.minimum(j1 + WINDOW, COUNT)
  elif PART == 'own':
    return j0, tl.minimum((j1 // WINDOW + 1) * WINDOW, COUNT)
  elif PART == 'last':
    return (n0 + 1) * WINDOW, n0 * 0 + COUNT
  elif PART == 'far':
    return n0 + 1, n0 * 0 + COUNT
  else:
    return n0, n0 * 0 + COUNT


@triton.jit
def _query_gradient(
  dquery, query, dy, log, delta, k, v, i, begin, end, offset, STRIDE: tl.constexpr, PART: tl.constexpr,
  LENGTH: tl.constexpr, ROW: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
  COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
  """Adds what a part's keys give to the gradient of a tile of queries, before its scale."""
  for n in tl.range(begin, end, COLUMNS, num_stages=STAGES):
    j = (n + tl.arange(0, COLUMNS)) * STRIDE + offset
    key = rows(k, j, LENGTH, ROW, SIZE)
    value = rows(v, j, LENGTH, ROW, SIZE)
    scores = tl.dot(query, tl.trans(key)) * (SCALE * LOG2E)
    weights = tl.where(attended(i[:, None], j[None, :], PART, WINDOW), tl.exp2(scores - log[:, None]), 0.0)
    dscores = weights * (tl.dot(dy, tl.trans(value)) - delta[:, None])
    dquery = tl.dot(dscores.to(key.dtype), key, dquery)
  return dquery


@triton.jit
def queries_kernel(
  q, k, v, dy, log, delta, dq_before, dq, PART: tl.constexpr, JOINED: tl.constexpr, LAST: tl.constexpr,
  LENGTH: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr,
  STRIDE: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
  """dq of one part, and of `last` with it if LAST; and what was there before if JOINED.

  `log` and `delta`, the sum of dy y over the head's size, are float32 [B, HEADS, LENGTH].
  """
  batch, head, tile, residue = place(HEADS, STRIDE)
  row: tl.constexpr = HEADS * SIZE
  kv_row: tl.constexpr = GROUPS * SIZE
  i0 = tile * ROWS * STRIDE + residue
  i = i0 + tl.arange(0, ROWS) * STRIDE
  i1 = tl.minimum(i0 + (ROWS - 1) * STRIDE, LENGTH - 1)
  start = batch * LENGTH * row + head * SIZE
  keys = batch * LENGTH * kv_row + head // (HEADS // GROUPS) * SIZE
  logs = (batch * HEADS + head) * LENGTH + i
  query = rows(q + start, i, LENGTH, row, SIZE)
  cotangent = rows(dy + start, i, LENGTH, row, SIZE)
  logarithm = tl.load(log + logs, mask=i < LENGTH, other=0)
  mean = tl.load(delta + logs, mask=i < LENGTH, other=0)
  result = tl.zeros([ROWS, SIZE], tl.float32)
  if LAST:
    begin, end = keys_of(i0, i1, i1, 'last', WINDOW)
    result = _query_gradient(
      result, query, cotangent, logarithm, mean, k + keys, v + keys, i, begin, end, WINDOW - 1, WINDOW, 'last',
      LENGTH, kv_row, SIZE, WINDOW, SCALE, COLUMNS, STAGES,
    )  # fmt: skip
  begin, end = keys_of(i0, i1, (i1 - residue) // STRIDE, PART, WINDOW)
  result = _query_gradient(
    result, query, cotangent, logarithm, mean, k + keys, v + keys, i, begin, end, residue, STRIDE, PART,
    LENGTH, kv_row, SIZE, WINDOW, SCALE, COLUMNS, STAGES,
  )  # fmt: skip
  result *= SCALE
  if JOINED:
    result += rows(dq_before + start, i, LENGTH, row, SIZE).to(tl.float32)
  store_rows(dq + start, i, result, LENGTH, row, SIZE)


@triton.jit
def keys_kernel(
  q, k, v, dy, log, delta, dk_before, dv_before, dk, dv, dq, PART: tl.constexpr, JOINED: tl.constexpr,
  WITH_DQ: tl.constexpr, LENGTH: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
  WINDOW: tl.constexpr, STRIDE: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
  STAGES: tl.constexpr,
):  # fmt: skip
  """dk and dv of one part, summed over the heads of a group.

  If JOINED is 'all' it adds `dk_before` and `dv_before`, if 'last' those, float32 [B, LENGTH div WINDOW, GROUPS, SIZE],
  to the last position of each block. WITH_DQ says that COLUMNS hold all keys of a residue: then dq comes from here too.
  """
  batch, group, tile, residue = place(GROUPS, STRIDE)
  row: tl.constexpr = HEADS * SIZE
  kv_row: tl.constexpr = GROUPS * SIZE
  shared: tl.constexpr = HEADS // GROUPS
  # Queries and keys of a column share their stride.
  count: tl.constexpr = (LENGTH + STRIDE - 1) // STRIDE
  n0 = tile * COLUMNS
  j0 = n0 * STRIDE + residue
  j = j0 + tl.arange(0, COLUMNS) * STRIDE
  j1 = tl.minimum(j0 + (COLUMNS - 1) * STRIDE, LENGTH - 1)
  keys = batch * LENGTH * kv_row + group * SIZE
  key = rows(k + keys, j, LENGTH, kv_row, SIZE)
  value = rows(v + keys, j, LENGTH, kv_row, SIZE)
  dkey = tl.zeros([COLUMNS, SIZE], tl.float32)
  dvalue = tl.zeros([COLUMNS, SIZE], tl.float32)
  begin, end = queries_of(j0, j1, n0, count, PART, WINDOW)
  if WITH_DQ:
    # A query without keys has a gradient to be written too.
    begin = begin * 0
  for h in tl.range(group * shared, (group + 1) * shared):
    start = batch * LENGTH * row + h * SIZE
    logs = (batch * HEADS + h) * LENGTH
    for n in tl.range(begin, end, ROWS, num_stages=STAGES):
      i = (n + tl.arange(0, ROWS)) * STRIDE + residue
      query = rows(q + start, i, LENGTH, row, SIZE)
      cotangent = rows(dy + start, i, LENGTH, row, SIZE)
      dkey, dvalue, dscores = _key_gradients(
        dkey, dvalue, key, value, query, cotangent, log + logs, delta + logs, i, j, PART, LENGTH, WINDOW, SCALE
      )
      if WITH_DQ:
        store_rows(dq + start, i, tl.dot(tl.trans(dscores), key) * SCALE, LENGTH, row, SIZE)
  dkey *= SCALE
  if JOINED == 'all':
    dkey += rows(dk_before + keys, j, LENGTH, kv_row, SIZE).to(tl.float32)
    dvalue += rows(dv_before + keys, j, LENGTH, kv_row, SIZE).to(tl.float32)
  elif JOINED == 'last':
    blocks: tl.constexpr = (LENGTH - 1) // WINDOW
    here = tl.where(j % WINDOW == WINDOW - 1, j // WINDOW, blocks)
    compact = batch * blocks * kv_row + group * SIZE
    dkey += rows(dk_before + compact, here, blocks, kv_row, SIZE)
    dvalue += rows(dv_before + compact, here, blocks, kv_row, SIZE)
  store_rows(dk + keys, j, dkey, LENGTH, kv_row, SIZE)
  store_rows(dv + keys, j, dvalue, LENGTH, kv_row, SIZE)


@triton.jit
def _key_gradients(
  dkey, dvalue, key, value, query, cotangent, log, delta, i, j, PART: tl.constexpr, LENGTH: tl.constexpr,
  WINDOW: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  """Adds what a tile of queries gives to the gradients of a tile of keys; and the scores', [keys, queries]."""
  logarithm = tl.load(log + i, mask=i < LENGTH, other=0)
  mean = tl.load(delta + i, mask=i < LENGTH, other=0)
  scores = tl.dot(key, tl.trans(query)) * (SCALE * LOG2E)
  weights = tl.where(attended(i[None, :], j[:, None], PART, WINDOW), tl.exp2(scores - logarithm[None, :]), 0.0)
  dvalue = tl.dot(weights.to(cotangent.dtype), cotangent, dvalue)
  dscores = weights * (tl.dot(value, tl.trans(cotangent)) - mean[None, :])
  dscores = dscores.to(query.dtype)
  return tl.dot(dscores, query, dkey), dvalue, dscores


@triton.jit
def last_keys_kernel(
  q, k, v, dy, log, delta, dk, dv, LENGTH: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
  SIZE: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
  STAGES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
  """dk and dv of `last`, float32 [B, SPLITS, (LENGTH - 1) div WINDOW, GROUPS, SIZE]: one for each share of the queries.

  There are few such keys, and all later queries attend to them: split, they keep the GPU busy.
  """
  batch, group, tile, split = place(GROUPS, SPLITS)
  row: tl.constexpr = HEADS * SIZE
  kv_row: tl.constexpr = GROUPS * SIZE
  shared: tl.constexpr = HEADS // GROUPS
  blocks: tl.constexpr = (LENGTH - 1) // WINDOW
  share: tl.constexpr = (LENGTH + SPLITS - 1) // SPLITS
  n = tile * COLUMNS + tl.arange(0, COLUMNS)
  j = n * WINDOW + WINDOW - 1
  keys = batch * LENGTH * kv_row + group * SIZE
  key = rows(k + keys, j, LENGTH, kv_row, SIZE)
  value = rows(v + keys, j, LENGTH, kv_row, SIZE)
  dkey = tl.zeros([COLUMNS, SIZE], tl.float32)
  dvalue = tl.zeros([COLUMNS, SIZE], tl.float32)
  begin, end = queries_of(j, j, tile * COLUMNS, LENGTH, 'last', WINDOW)
  begin = tl.maximum(begin, split * share)
  end = tl.minimum(end, (split + 1) * share)
  for h in tl.range(group * shared, (group + 1) * shared):
    start = batch * LENGTH * row + h * SIZE
    logs = (batch * HEADS + h) * LENGTH
    for i0 in tl.range(begin, end, ROWS, num_stages=STAGES):
      i = i0 + tl.arange(0, ROWS)
      # The next share begins where this one ends, perhaps within a tile.
      i = tl.where(i < end, i, LENGTH)
      query = rows(q + start, i, LENGTH, row, SIZE)
      cotangent = rows(dy + start, i, LENGTH, row, SIZE)
      dkey, dvalue, _ = _key_gradients(
        dkey, dvalue, key, value, query, cotangent, log + logs, delta + logs, i, j, 'last', LENGTH, WINDOW, SCALE
      )
  compact = (batch * SPLITS + split) * blocks * kv_row + group * SIZE
  store_rows(dk + compact, n, dkey * SCALE, blocks, kv_row, SIZE)
  store_rows(dv + compact, n, dvalue, blocks, kv_row, SIZE)
