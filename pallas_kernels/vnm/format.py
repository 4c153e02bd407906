"""The open V:N:M format, and the operand that the kernel reads.

An array [R, C] is cut into blocks of V rows by M columns. A block keeps four of its M columns, the same for its V
rows; side by side, the kept columns make a *compact* array [R, 4 C / M], which is 2:4 along its last axis. So the
format is the open 2:4 format of the compact array and, for each block, which columns it kept. Two of each M entries
remain, 2:M.
"""

import dataclasses
import functools

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from pallas_kernels._program import one_program, traced_once
from pallas_kernels.operand import check_layout, from_operand, SparseOperand, to_operand
from pallas_kernels.operand import check_operand as check_operand_24

KEPT = 4  # columns of each M; two entries of them are what sparse tensor cores take


@functools.partial(jax.tree_util.register_dataclass, data_fields=['values', 'metadata', 'columns'], meta_fields=['m'])
@dataclasses.dataclass(frozen=True)
class CompressedVNM:
  """A V:2:M array [..., R, C] as its kept values, their positions, and the columns that each block kept.

  Attributes:
    values: [..., R, 2 C / M], the two stored entries of each row of each block, by ascending column.
    metadata: uint8 [..., R, ceil(C / (2 M))], positions among the four kept columns, a nibble a row of a block, as in
      `Compressed24`.
    columns: uint8 [..., R / V, 4 C / M], the four kept columns of each block, ascending, below M.
    m: M.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.vnm.format import compress
  >>> x = jnp.zeros((2, 8)).at[:, 4:8].set(jnp.array([[1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 3.0, 4.0]]))
  >>> c = compress(x, x != 0, v=2, m=8)
  >>> c.values.tolist(), c.columns.tolist(), (c.v, c.m)
  ([[1.0, 2.0], [3.0, 4.0]], [[4, 5, 6, 7]], (2, 8))
  """

  values: Array
  metadata: Array
  columns: Array
  m: int

  @property
  def v(self) -> int:
    """V, rows of a block."""
    return self.values.shape[-2] // self.columns.shape[-2]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the dense array."""
    return (*self.values.shape[:-1], self.values.shape[-1] // 2 * self.m)

  @property
  def dtype(self) -> jnp.dtype:
    return self.values.dtype

  @property
  def nbytes(self) -> int:
    return self.values.nbytes + self.metadata.nbytes + self.columns.nbytes

  @property
  def compact(self) -> formats.Compressed24:
    """The kept columns side by side, [..., R, 4 C / M], 2:4 along the last axis."""
    return formats.Compressed24(self.values, self.metadata, -1)


@functools.partial(jax.tree_util.register_dataclass, data_fields=['compact', 'rows'], meta_fields=['m', 'spread'])
@dataclasses.dataclass(frozen=True)
class VNMOperand:
  """A V:2:M matrix [R, K] as A of the matmul: what `CompressedVNM` says, in the order that the kernel reads.

  Attributes:
    compact: the kept columns side by side, [..., R, 4 K / M], in the order of sparse tensor cores.
    rows: int32 [..., R / V, 4 K / M], the row of B, 0 to K - 1, that each compact column of a block multiplies.
    m: M.
    spread: whether the M columns of a group lie K / M apart, not side by side.
  """

  compact: SparseOperand
  rows: Array
  m: int
  spread: bool = False

  @property
  def v(self) -> int:
    """V, rows of A that share an index."""
    return self.compact.shape[-2] // self.rows.shape[-2]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the dense matrix."""
    return (*self.compact.shape[:-1], self.compact.shape[-1] // KEPT * self.m)

  @property
  def dtype(self) -> jnp.dtype:
    return self.compact.dtype


def check_groups(a: VNMOperand, spread: bool, *, name: str = 'a') -> None:
  """ValueError unless the groups of `a` lie as the caller takes them to, and its positions as all readers do."""
  check_layout(a.compact, name)
  if a.spread != spread:
    ways = {False: 'side by side', True: 'spread'}
    raise ValueError(f'{name} of shape {a.shape} has its groups {ways[a.spread]}; accepted are groups {ways[spread]}')


def check_blocks(x: Array, v: int, n: int, m: int, *, name: str = 'x') -> None:
  """ValueError unless `x` [..., R, C] consists of whole blocks that V:N:M can serve."""
  if n != 2:
    raise ValueError(f'n={n} must be 2: sparse tensor cores keep two of four columns')
  if not KEPT <= m <= 256:
    raise ValueError(f'm={m} must be from {KEPT} to 256')
  if v < 1:
    raise ValueError(f'v={v} must be 1 or more')
  if x.ndim < 2:
    raise ValueError(f'{name} must have at least two axes, found shape {x.shape}')
  for axis, divisor in ((-2, v), (-1, m)):
    if x.shape[axis] % divisor or not x.shape[axis]:
      raise ValueError(
        f'{name} of shape {x.shape} has length {x.shape[axis]} along axis {axis}; {v}:2:{m} needs a positive multiple'
        f' of {divisor}'
      )


@one_program('v', 'n', 'm')
def compress(x: Array, mask: Array, *, v: int, n: int = 2, m: int) -> CompressedVNM:
  """Stores the entries of `x` that `mask` keeps.

  Args:
    x: [..., R, C], whole blocks of `v` x `m`.
    mask: bool, shape of `x`; at most four columns of a block may hold a True, and two of these a row.
    v: rows of a block.
    n: 2.
    m: columns of a block.

  Raises:
    ValueError: shapes do not fit. A mask that keeps more than the format holds loses entries; `verify` tells.

  >>> x = jnp.arange(16.0).reshape(2, 8)
  >>> c = compress(x, (x % 8 == 1) | (x % 8 == 6), v=2, m=8)
  >>> c.values.tolist(), c.columns.tolist()
  ([[1.0, 6.0], [9.0, 14.0]], [[0, 1, 2, 6]])
  """
  check_blocks(x, v, n, m)
  if mask.shape != x.shape or mask.dtype != jnp.bool_:
    raise ValueError(f'mask must be bool of shape {x.shape}, found {mask.dtype} of shape {mask.shape}')
  *lead, rows, columns = x.shape
  used = mask.reshape(*lead, rows // v, v, columns // m, m).any(axis=-3).astype(jnp.int8)
  # Among equals top_k takes the lower index, so unused columns fill a block up from the left.
  return compress_columns(x, mask, jnp.sort(jax.lax.top_k(used, KEPT)[1], axis=-1), v=v, m=m)


def compress_columns(x: Array, mask: Array, ids: Array, *, v: int, m: int) -> CompressedVNM:
  """`compress` with the columns given, [..., R/V, C/M, 4], ascending."""
  kept = gather_columns(jnp.where(mask, x, jnp.zeros((), x.dtype)), ids, v)
  c = formats.compress(kept, gather_columns(mask, ids, v), axis=-1)
  return CompressedVNM(c.values, c.metadata, ids.reshape(*ids.shape[:-2], -1).astype(jnp.uint8), m)


def gather_columns(x: Array, ids: Array, v: int) -> Array:
  """The compact array [..., R, 4 C / M] from [..., R, C] and the columns kept, [..., R/V, C/M, 4]."""
  *lead, rows, columns = x.shape
  groups = ids.shape[-2]
  blocks = x.reshape(*lead, rows // v, v, groups, columns // groups)
  return jnp.take_along_axis(blocks, ids[..., None, :, :], axis=-1).reshape(*lead, rows, -1)


def decompress(c: CompressedVNM) -> Array:
  """The dense array that `c` stands for: shape `c.shape`, dtype `c.dtype`.

  Raises:
    ValueError: `c` is not the format, as `check_compressed` says.

  >>> x = jnp.arange(16.0).reshape(2, 8)
  >>> decompress(compress(x, (x % 8 == 1) | (x % 8 == 6), v=2, m=8))[0].tolist()
  [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 6.0, 0.0]
  """
  check_compressed(c)
  return expand(c)


@traced_once()
def expand(c: CompressedVNM) -> Array:
  """`decompress` of what was made here, which needs no check."""
  *lead, rows, columns = c.shape
  groups = columns // c.m
  kept = formats.expand(c.compact).reshape(*lead, rows // c.v, c.v, groups, KEPT)
  ids = c.columns.astype(jnp.int32).reshape(*lead, rows // c.v, 1, groups, KEPT)
  out = jnp.zeros((*lead, rows // c.v, c.v, groups, c.m), c.dtype)
  column = jax.lax.broadcasted_iota(jnp.int32, (*ids.shape[:-1], c.m), ids.ndim - 1)
  for i in range(KEPT):
    here = ids[..., i : i + 1] == column
    out = jnp.where(here, kept[..., i : i + 1], out)
  return out.reshape(c.shape)


def check(a: CompressedVNM | VNMOperand, name: str = 'a') -> None:
  """`check_compressed` or `check_operand`."""
  return check_operand(a, name) if isinstance(a, VNMOperand) else check_compressed(a, name)


def check_compressed(c: CompressedVNM, name: str = 'c') -> None:
  """Refuses what is no `CompressedVNM` but in name, as an array from elsewhere may be.

  Shapes and dtypes are checked always, positions and columns of concrete arrays by value, of traced ones under
  `checkify`.

  Raises:
    ValueError: naming the field, and where in it.
  """
  if not (isinstance(c.m, int) and KEPT <= c.m <= 256):
    raise ValueError(f'{name}.m={c.m!r} must be from {KEPT} to 256')
  if c.values.ndim < 2:
    raise ValueError(f'{name}.values must have at least two axes, found shape {c.values.shape}')
  formats.check_compressed(c.compact, name)
  *lead, r, half = c.values.shape
  *lead_of_columns, blocks, compact = (1, *c.columns.shape)[-c.values.ndim :]
  if (
    c.columns.ndim != c.values.ndim or lead_of_columns != lead or compact != 2 * half or not blocks or r % blocks
    or c.columns.dtype != jnp.uint8
  ):  # fmt: skip
    raise ValueError(
      f'{name}.columns must be uint8 of shape {(*lead, "R / V", 2 * half)} with whole blocks of the {r} rows, found'
      f' {c.columns.dtype} of shape {c.columns.shape}'
    )

  def legal(columns):
    four = columns.reshape(*columns.shape[:-1], -1, KEPT).astype(np.int32)
    return (four[..., :-1] < four[..., 1:]).all(-1) & (four[..., -1] < c.m)

  def message(columns, where):
    at = (*where[:-1], slice(KEPT * where[-1], KEPT * where[-1] + KEPT))
    return f'{name}.columns of block {where} are {columns[at].tolist()}; accepted are four below {c.m}, ascending'

  summary = f'{name}.columns are not four below {c.m}, ascending'
  formats.refuse_unless(legal, c.columns, message, summary, ('columns', c.m))


def check_operand(a: VNMOperand, name: str = 'a') -> None:
  """Refuses an index that does not fit the values, and a concrete one that names rows that B does not have, or twice.

  What is in a trace is left alone: only a packer makes it, and kernels take an index that is out of range for the
  last row.

  Raises:
    ValueError: naming the field and the block.
  """
  check_operand_24(a.compact, f'{name}.compact')
  *lead, r, k = a.shape
  *lead_of_rows, blocks, compact = (1, *a.rows.shape)[-a.compact.values.ndim :]
  if (
    a.rows.ndim != a.compact.values.ndim or lead_of_rows != lead or compact != a.compact.shape[-1] or not blocks
    or r % blocks or a.rows.dtype != jnp.int32
  ):  # fmt: skip
    raise ValueError(
      f'{name}.rows must be int32 of shape {(*lead, "R / V", a.compact.shape[-1])} with whole blocks of the {r} rows,'
      f' found {a.rows.dtype} of shape {a.rows.shape}'
    )
  if isinstance(a.rows, jax.core.Tracer):
    return

  def legal(rows):
    ordered = np.sort(rows, axis=-1)
    once = (ordered[..., :-1] != ordered[..., 1:]).all(-1)
    return once & (ordered[..., 0] >= 0) & (ordered[..., -1] < k)

  def message(rows, where):
    outside = rows[where][(rows[where] < 0) | (rows[where] >= k)]
    found = f'holds {outside[0]}' if len(outside) else 'names a row twice'
    return f'{name}.rows of block {where} {found}; accepted are rows of B, 0 to {k - 1}, each once'

  formats.refuse_unless(legal, a.rows, message, '', ('rows', k))


def verify(x: Array | CompressedVNM | VNMOperand, *, v: int | None = None, n: int = 2, m: int | None = None) -> None:
  """Checks on the host that `x` [..., R, C] is V:N:M: -0.0 counts as zero, NaN as a non-zero.

  Args:
    x: a concrete array, or one that is compressed, whose positions, columns and index are looked at.
    v: rows of a block; of what is compressed it may be left out, or must agree.
    n: 2.
    m: columns of a block, likewise.

  Raises:
    ValueError: naming the first block that uses more than four columns, or the first row of a block with more than two
      entries, or why `x` cannot be cut into blocks.

  >>> verify(jnp.array([[0.0, 5.0, -0.0, 7.0], [1.0, 0.0, 0.0, 7.0]]), v=2, m=4)
  """
  if isinstance(x, CompressedVNM | VNMOperand):
    check(x, 'x')
    if (v or x.v, n, m or x.m) != (x.v, 2, x.m):
      raise ValueError(f'x is {x.v}:2:{x.m}, found v={v}, n={n}, m={m}')
    return
  if v is None or m is None:
    raise ValueError(f'v and m must be given for an array that is not compressed, found v={v} and m={m}')
  check_blocks(x, v, n, m)
  *lead, rows, columns = x.shape
  nonzero = (np.asarray(x) != 0).reshape(*lead, rows // v, v, columns // m, m)
  wide = np.argwhere(nonzero.any(-3).sum(-1) > KEPT)
  if len(wide):
    raise ValueError(f'not {v}:{n}:{m}: block {tuple(wide[0].tolist())} uses more than {KEPT} columns')
  full = np.argwhere(nonzero.sum(-1) > n)
  if len(full):
    *block, row, group = full[0].tolist()
    raise ValueError(f'not {v}:{n}:{m}: row {row} of block {(*block, group)} holds more than {n} entries')


@traced_once()
def to_vnm_operand(c: CompressedVNM) -> VNMOperand:
  """The kernel's operand from the open format."""
  column = jax.lax.broadcasted_iota(jnp.int32, c.columns.shape, c.columns.ndim - 1)
  return VNMOperand(to_operand(c.compact), c.columns.astype(jnp.int32) + column // KEPT * c.m, c.m)


@traced_once()
def decompress_operand(a: VNMOperand) -> Array:
  """The dense matrix [R, K] of an operand, whatever rows of B its index names."""
  compact = formats.expand(from_operand(a.compact))
  r, k = a.shape
  blocks = compact.reshape(r // a.v, a.v, compact.shape[-1])
  place = jax.vmap(lambda block, rows: jnp.zeros((a.v, k), a.dtype).at[:, rows].set(block, unique_indices=True))
  return place(blocks, a.rows).reshape(r, k)
