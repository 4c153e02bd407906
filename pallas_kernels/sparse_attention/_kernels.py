"""Flash attention (Dao, arXiv 2307.08691) over parts of a causal pattern, as Triton kernels.

A part is a set of keys for each query; the parts of a pattern are disjoint. Positions of a part are visited through a
view, position = stride * n + offset, so that what is far apart in memory is a dense tile:

    full    every earlier key
    near    the last c positions
    own     those of the query's own block of c
    last    the last position of every block before; keys with stride c
    column  positions of the query's residue mod c; queries and keys with stride c
    far     those of them before the query itself

Forward, a running maximum and sum are kept over all parts; a second launch goes on from the output and logarithm that
the first has left. Backward, weights come from the logarithm of all parts, so gradients of parts add up. Every result
has one writer: nothing is atomic, and results repeat bit for bit. Logarithms are to base 2 and of sums with `SCALE`
in them.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# The maximum of a query without keys so far; finite, since infinity minus infinity is not a number.
NOTHING: tl.constexpr = tl.constexpr(-1e30)


@triton.jit
def attended(i, j, PART: tl.constexpr, WINDOW: tl.constexpr):
  """Whether query position i attends to key position j; within a column both have one residue."""
  if PART == 'near':
    return (j <= i) & (i - j < WINDOW)
  elif PART == 'own':
    return (j <= i) & (i // WINDOW == j // WINDOW)
  elif PART == 'last':
    return j // WINDOW < i // WINDOW
  elif PART == 'far':
    return j < i
  else:
    return j <= i


@triton.jit
def place(HEADS: tl.constexpr, STRIDE: tl.constexpr):
  """(batch entry, head, tile, residue) of a program; neighbours share lines of memory."""
  across = tl.program_id(0) // HEADS
  return tl.program_id(1).to(tl.int64), tl.program_id(0) % HEADS, across // STRIDE, across % STRIDE


@triton.jit
def rows(x, at, LENGTH: tl.constexpr, ROW: tl.constexpr, SIZE: tl.constexpr):
  """Rows of [positions, heads, SIZE] at positions `at`, zeros past the end."""
  return tl.load(x + at[:, None] * ROW + tl.arange(0, SIZE)[None, :], mask=at[:, None] < LENGTH, other=0)


@triton.jit
def store_rows(x, at, values, LENGTH: tl.constexpr, ROW: tl.constexpr, SIZE: tl.constexpr):
  pointers = x + at[:, None] * ROW + tl.arange(0, SIZE)[None, :]
  tl.store(pointers, values.to(x.dtype.element_ty), mask=at[:, None] < LENGTH)


@triton.jit
def keys_of(i0, i1, n1, PART: tl.constexpr, WINDOW: tl.constexpr):
  """Keys [begin, end) of a part, in its view, for queries of positions i0 to i1, the last being n1 in theirs."""
  if PART == 'near':
    return tl.maximum(i0 - WINDOW + 1, 0), i1 + 1
  elif PART == 'own':
    return i0 // WINDOW * WINDOW, i1 + 1
  elif PART == 'last':
    return i0 * 0, i1 // WINDOW
  elif PART == 'far':
    return i0 * 0, n1
  else:
    return i0 * 0, n1 + 1


@triton.jit
def _attend(
  y, top, total, query, k, v, i, begin, end, offset, STRIDE: tl.constexpr, PART: tl.constexpr,
  LENGTH: tl.constexpr, ROW: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
  COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
  """Takes a part's keys into the running output, maximum and sum of a tile of queries."""
  for n in tl.range(begin, end, COLUMNS, num_stages=STAGES):
    j = (n + tl.arange(0, COLUMNS)) * STRIDE + offset
    key = rows(k, j, LENGTH, ROW, SIZE)
    scores = tl.dot(query, tl.trans(key)) * (SCALE * LOG2E)
    scores = tl.where(attended(i[:, None], j[None, :], PART, WINDOW), scores, float('-inf'))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weights, 1)
    value = rows(v, j, LENGTH, ROW, SIZE)
    y = tl.dot(weights.to(value.dtype), value, y * shrink[:, None])
    top = higher
  return y, top, total


@triton.jit
def forward_kernel(
  q, k, v, y_before, log_before, y, log, PART: tl.constexpr, JOINED: tl.constexpr, LAST: tl.constexpr,
  LENGTH: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr,
  STRIDE: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
  """y [B, LENGTH, HEADS, SIZE] and log [B, HEADS, LENGTH] of one part, and of `last` with it if LAST.

  If JOINED it goes on from `y_before` and `log_before`, which are not read otherwise.
  """
  batch, head, tile, residue = place(HEADS, STRIDE)
  row: tl.constexpr = HEADS * SIZE
  kv_row: tl.constexpr = GROUPS * SIZE
  n0 = tile * ROWS
  i0 = n0 * STRIDE + residue
  i = i0 + tl.arange(0, ROWS) * STRIDE
  i1 = tl.minimum(i0 + (ROWS - 1) * STRIDE, LENGTH - 1)
  start = batch * LENGTH * row + head * SIZE
  keys = batch * LENGTH * kv_row + head // (HEADS // GROUPS) * SIZE
  logs = (batch * HEADS + head) * LENGTH + i
  query = rows(q + start, i, LENGTH, row, SIZE)
  if JOINED:
    result = rows(y_before + start, i, LENGTH, row, SIZE).to(tl.float32)
    top = tl.load(log_before + logs, mask=i < LENGTH, other=0)
    total = tl.full([ROWS], 1, tl.float32)
  else:
    result = tl.zeros([ROWS, SIZE], tl.float32)
    top = tl.full([ROWS], NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
  if LAST:
    begin, end = keys_of(i0, i1, i1, 'last', WINDOW)
    result, top, total = _attend(
      result, top, total, query, k + keys, v + keys, i, begin, end, WINDOW - 1, WINDOW, 'last',
      LENGTH, kv_row, SIZE, WINDOW, SCALE, COLUMNS, STAGES,
    )  # fmt: skip
  begin, end = keys_of(i0, i1, (i1 - residue) // STRIDE, PART, WINDOW)
  result, top, total = _attend(
    result, top, total, query, k + keys, v + keys, i, begin, end, residue, STRIDE, PART,
    LENGTH, kv_row, SIZE, WINDOW, SCALE, COLUMNS, STAGES,
  )  # fmt: skip
  total = tl.where(total > 0, total, 1.0)
  store_rows(y + start, i, result / total[:, None], LENGTH, row, SIZE)
  tl.store(log + logs, top + tl.log2(total), mask=i < LENGTH)
