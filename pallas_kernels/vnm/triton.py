"""V:N:M packers in Triton: one pass over the activations.

Four kernels read pairs of entries: A along its rows or along its columns (`_rows`, `_columns`), finding a pattern or
under a given one. What these leave, neurons spread along contiguous rows, a dense copy of columns and large or odd V,
goes through a general one (`_kernels`), a few times slower.

They agree with the reference bit for bit where sums of columns are exact or differ by more than rounding. bfloat16
squares below 2^-126 are the exception on a CPU, whose XLA makes them zero; the kernels round them like all others.
"""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import _triton
from pallas_kernels.sparse_matmul.operand import check_layout, metadata_shape, SparseOperand
from pallas_kernels.vnm import _columns, _dense, _kernels, _rows, _transpose
from pallas_kernels.vnm.format import check_groups, VNMOperand

_GROUPS = 16  # a program's, 64 compact columns
_PARTS = 2  # of a block's rows, both in a thread


def constants(
  r: int, c: int, v: int, m: int, *, transposed: bool, spread: bool, activation: str | None, gradient: bool,
  masked: bool = False,
) -> dict[str, Any]:
  """Compile-time constants of the general kernel for A [r, c], stored transposed or not."""
  return dict(
    R=r, C=c, ROW_STRIDE=1 if transposed else c, COLUMN_STRIDE=r if transposed else 1, V=v, M=m, SPREAD=spread,
    SQUARED_RELU=activation == 'squared_relu', GRADIENT=gradient, MASKED=masked,
  )


def row_constants(
  c: int, v: int, m: int, *, activation: str | None, masked: bool = False, **more: bool
) -> dict[str, Any]:
  """Compile-time constants of the kernels for A [r, c] whose rows are contiguous; `more` is one kernel's own."""
  return dict(C=c, V=v, M=m, SQUARED_RELU=activation == 'squared_relu', MASKED=masked, GROUPS=row_groups(v, m), **more)


def column_constants(r: int, c: int, v: int, m: int, *, activation: str | None, **more: bool) -> dict[str, Any]:
  """Compile-time constants of the kernels for A [r, c] whose columns are contiguous; `more` for finding a pattern."""
  return dict(R=r, C=c, V=v, M=m, PARTS=_PARTS, SQUARED_RELU=activation == 'squared_relu', **more)


def grid(r: int, c: int, v: int, m: int) -> tuple[int, int]:
  """Programs along groups and along blocks."""
  return c // (_GROUPS * m), r // v


def warps(m: int) -> int:
  """Of the general kernel: thirty-two entries a thread, of 64 rows at a time."""
  return m


def row_groups(v: int, m: int) -> int:
  """A program's where rows are contiguous; of wide ones few would share a multiprocessor and all wait at once."""
  return _GROUPS if v * m < 2048 else _GROUPS // 2


def row_warps(v: int, m: int) -> int:
  """128 entries a thread: fewer would repeat the ranking of columns, more would spill."""
  return max(2, v * m * row_groups(v, m) // (_GROUPS * 256))


def column_warps(v: int) -> int:
  return v // 32


def vnm_pack(
  x: Array, *, v: int, m: int, axis: int = -1, spread: bool = False, activation: str | None = None,
  gradient: Array | None = None, pattern: VNMOperand | None = None, masked: bool = False, used: Array | None = None,
  residuals: bool = False,
) -> tuple[VNMOperand, Array | None, Array | None, Array | None]:
  """See `api.vnm_pack`."""
  if pattern is not None:
    check_groups(pattern, spread, name='pattern')
  compact_x = pattern is not None and gradient is not None and x.shape != gradient.shape
  x, kept = (gradient, x) if compact_x and gradient is not None else (x, x)
  r, c = x.shape if axis == -1 else x.shape[::-1]
  if x.dtype not in (jnp.bfloat16, jnp.float16):
    raise NotImplementedError(f'the Triton packer takes bfloat16 and float16, found {x.dtype}')
  if v % 64 or m not in (4, 8, 16) or r % v or c % (_GROUPS * m):
    raise NotImplementedError(
      f'the Triton packer takes V in multiples of 64, M of 4, 8 or 16 and columns in multiples of 16 M; found'
      f' {v}:2:{m} of [{r}, {c}]'
    )
  if x.size >= 2**31:
    raise NotImplementedError(f'the Triton packer counts entries in 31 bits, found {x.shape}')
  compact = 4 * c // m
  shapes = dict(
    values=jax.ShapeDtypeStruct((r, compact // 2), x.dtype),
    metadata=jax.ShapeDtypeStruct(metadata_shape(r, compact), jnp.uint32),
    rows=jax.ShapeDtypeStruct((r // v, compact), jnp.int32),
    masked=jax.ShapeDtypeStruct(x.shape if masked else (1,), x.dtype),
    inputs=jax.ShapeDtypeStruct((r, compact // 2) if residuals else (1,), x.dtype),
    counts=jax.ShapeDtypeStruct((c,) if residuals else (1,), jnp.int32),
  )
  along, down = grid(r, c, v, m)
  fast = v in (64, 128, 256)

  def call(kernel: Any, inputs: Any, names: str, **options: Any) -> dict[str, Array]:
    names_of = names.split()
    made = _triton.call(kernel, *inputs, out_shape=[shapes[name] for name in names_of], **options)
    return dict(zip(names_of, made, strict=True))

  given = [] if pattern is None else [pattern.compact.metadata, pattern.rows]
  if fast and axis == -1 and not spread and used is None:
    options = row_constants(c, v, m, activation=activation, masked=masked)
    options |= dict(grid=(along * _GROUPS // row_groups(v, m), down), num_warps=row_warps(v, m))
    if gradient is None:
      zeroed = dict(zeroed_outputs=(5,)) if residuals else {}
      out = call(
        _rows.pack_rows, (x,), 'values metadata rows masked inputs counts', **options, **zeroed, RESIDUALS=residuals
      )
    else:
      out = call(_rows.pack_rows_as, (kept, gradient, *given), 'values masked', **options, COMPACT=compact_x)
  elif residuals or compact_x:
    raise NotImplementedError(f'with residuals V of 64, 128 or 256 along contiguous rows; found {v}, axis {axis}')
  elif fast and axis == -2 and not masked:
    options = column_constants(r, c, v, m, activation=activation) | dict(grid=(down, along), num_warps=column_warps(v))
    if gradient is None:
      bits = jnp.zeros((1,), jnp.uint32) if used is None else _bits(used)
      out = call(
        _columns.pack_columns, (x, bits), 'values metadata rows', **options, SPREAD=spread, SELECT=used is not None
      )
    else:
      out = call(_columns.pack_columns_as, (x, gradient, *given), 'values', **options)
  else:
    if used is not None:
      raise NotImplementedError('the general Triton packer uses all rows')
    options = constants(
      r, c, v, m, transposed=axis == -2, spread=spread, activation=activation, gradient=gradient is not None,
      masked=masked,
    )
    options |= dict(grid=(along, down), num_warps=warps(m))
    if gradient is None:
      nothing = (jnp.zeros((1,), x.dtype), jnp.zeros((1,), jnp.uint32), jnp.zeros((1,), jnp.int32))
      out = call(_kernels.pack_kernel, (x, *nothing), 'values metadata rows masked', **options)
    else:
      shapes |= dict(metadata=jax.ShapeDtypeStruct((1,), jnp.uint32), rows=jax.ShapeDtypeStruct((1,), jnp.int32))
      out = call(_kernels.pack_kernel, (x, gradient, *given), 'values metadata rows masked', **options)
  if pattern is not None:
    out |= dict(metadata=given[0], rows=given[1])
  a = VNMOperand(SparseOperand(out['values'], out['metadata']), out['rows'], m, spread)
  return (
    a, out['masked'] if masked else None, out['inputs'] if residuals else None, out['counts'] if residuals else None
  )


def _bits(used: Array) -> Array:
  """A uint32 a pair of rows, ones where a row is used."""
  pairs = used.reshape(-1, 2).astype(jnp.uint32) * jnp.uint32(0xFFFF)
  return pairs[:, 0] | pairs[:, 1] << 16


def transpose_warps(v: int, m: int) -> int:
  """Four words of the operand a thread, as one load, or two if M is 16: measured, see LOG.md."""
  return max(1, v // (8 * min(m, 8)))


def transpose_pack(a: VNMOperand, *, used: Array | None, pattern: VNMOperand | None) -> VNMOperand:
  """See `api.transpose_pack`."""
  check_groups(a, False)
  r, c, v, m = *a.shape, a.v, a.m
  if v not in (64, 128, 256) or m not in (4, 8, 16) or r % v or c % v or r % (_GROUPS * m) or c % (_GROUPS * m):
    raise NotImplementedError(
      f'V of 64, 128 or 256, M of 4, 8 or 16, and both axes in multiples of V and 16 M; found {v}:2:{m} of [{r}, {c}]'
    )
  _check_entries(a)
  options: dict[str, Any] = dict(R=r, C=c, V=v, M=m, grid=(c // v, r // (_GROUPS * m)), num_warps=transpose_warps(v, m))
  values = jax.ShapeDtypeStruct((c, 2 * r // m), a.dtype)
  tables = _tables(a, used, flags=used is not None)
  if pattern is not None:
    check_layout(pattern.compact, 'pattern')
    metadata, rows = pattern.compact.metadata, pattern.rows
    (made,) = _triton.call(
      _transpose.transpose_pack_as, a.compact.values, a.compact.metadata, tables, metadata, rows, out_shape=[values],
      **options,
    )
    return VNMOperand(SparseOperand(made, metadata), rows, m, spread=True)
  shapes = [
    values, jax.ShapeDtypeStruct(metadata_shape(c, 4 * r // m), jnp.uint32),
    jax.ShapeDtypeStruct((c // v, 4 * r // m), jnp.int32),
  ]  # fmt: skip
  made, metadata, rows = _triton.call(
    _transpose.transpose_pack, a.compact.values, a.compact.metadata, tables, out_shape=shapes, **options,
    SELECT=used is not None,
  )
  return VNMOperand(SparseOperand(made, metadata), rows, m, spread=True)


def transpose_24_warps(m: int) -> int:
  """A thread makes 128 dense entries and stores 64: measured for M of 8 and 16, see LOG.md."""
  return m // 4


def transpose_pack_24(a: VNMOperand, *, used: Array | None, pattern: SparseOperand | None) -> SparseOperand:
  """See `api.transpose_pack_24`."""
  check_groups(a, False)
  r, c, v, m = *a.shape, a.v, a.m
  if v % 64 or m not in (4, 8, 16) or r % v or c % (_GROUPS * m):
    raise NotImplementedError(
      f'V in multiples of 64, M of 4, 8 or 16 and columns in multiples of 16 M; found {v}:2:{m} of [{r}, {c}]'
    )
  _check_entries(a)
  grid = (c // (_GROUPS * m), r // (4 * _GROUPS))
  options: dict[str, Any] = dict(R=r, C=c, V=v, M=m, grid=grid, num_warps=transpose_24_warps(m))
  values = jax.ShapeDtypeStruct((c, r // 2), a.dtype)
  arrays = a.compact.values, a.compact.metadata, _tables(a, used, flags=False)
  if pattern is not None:
    check_layout(pattern, 'pattern')
    (made,) = _triton.call(_transpose.transpose_pack_24_as, *arrays, pattern.metadata, out_shape=[values], **options)
    return SparseOperand(made, pattern.metadata)
  shapes = [values, jax.ShapeDtypeStruct(metadata_shape(c, r), jnp.uint32)]
  return SparseOperand(*_triton.call(_transpose.transpose_pack_24, *arrays, out_shape=shapes, **options))


def _tables(a: VNMOperand, used: Array | None, *, flags: bool) -> Array:
  """What the kernels of `_transpose` read: uint32 [max(1, M / 8), R / V, K / M], one plane more with `flags`.

  Column by column, so that XLA makes one kernel of it; of sums over the four it makes three, a twelfth of the time.
  """
  rows = a.rows.reshape(a.rows.shape[0], -1, 4)
  columns = (rows % a.m).astype(jnp.uint32)
  here = [True] * 4 if used is None else [used[rows[..., i]] for i in range(4)]
  planes = []
  for word in range(max(1, a.m // 8)):
    plane = jnp.uint32(0x44444444)
    for i in range(4):
      column = columns[..., i]
      changed = jnp.uint32(i ^ 4) << 4 * (column % 8)
      plane = plane ^ jnp.where((column // 8 == word) & here[i], changed, jnp.uint32(0))
    planes.append(plane)
  if flags:
    bytes_ = [jnp.where(here[i], jnp.uint32(0xFF << 8 * i), jnp.uint32(0)) for i in range(4)]
    planes.append(bytes_[0] | bytes_[1] | bytes_[2] | bytes_[3])
  return jnp.stack(planes)


def _check_entries(a: VNMOperand) -> None:
  if a.dtype not in (jnp.bfloat16, jnp.float16) or a.shape[0] * a.shape[1] >= 2**31:
    raise NotImplementedError(f'16 bits and less than 2^31 entries only, found {a.dtype} of shape {a.shape}')


_ROWS, _WIDTH = 32, 128  # of a program that takes columns


def take_columns(a: VNMOperand, columns: Array) -> Array:
  """See `api.take_columns`."""
  check_groups(a, False)
  r, c = a.shape
  if a.v % _ROWS or r % 64 or c % (_GROUPS * a.m):
    raise NotImplementedError(f'V in multiples of {_ROWS}, whole tiles of words; found V={a.v} of [{r}, {c}]')
  _check_entries(a)
  count = columns.shape[0]
  if not count:
    return jnp.zeros((r, 0), a.dtype)
  # As XLA indexes: from the end if negative, else the nearest that there is.
  ids = jnp.pad(jnp.clip(jnp.where(columns < 0, columns + c, columns), 0, c - 1), (0, -count % _WIDTH))
  if r * ids.shape[0] >= 2**31:
    raise NotImplementedError(f'results of less than 2^31 entries only, found {count} columns of {r}')
  (out,) = _triton.call(
    _dense.take_columns, a.compact.values, a.compact.metadata, a.rows, ids,
    out_shape=[jax.ShapeDtypeStruct((r, count), a.dtype)], grid=(ids.shape[0] // _WIDTH, r // _ROWS),
    num_warps=4, C=c, V=a.v, M=a.m, COUNT=count, ROWS=_ROWS, WIDTH=_WIDTH,
  )
  return out


def expand(operand: SparseOperand | VNMOperand) -> Array:
  """See `api.expand`."""
  r, k = operand.shape
  check_layout(operand.compact if isinstance(operand, VNMOperand) else operand, 'operand')
  if isinstance(operand, VNMOperand):
    v, m = operand.v, operand.m
    if v % 64 or k % (_GROUPS * m):
      raise NotImplementedError(f'V in multiples of 64 and whole tiles of words only, found {v}:2:{m} of [{r}, {k}]')
    _check_entries(operand)
    (dense,) = _triton.call(
      _dense.scatter_rows, operand.compact.values, operand.compact.metadata, operand.rows,
      out_shape=[jax.ShapeDtypeStruct((r, k), operand.dtype)], zeroed_outputs=(0,), grid=(k // (_GROUPS * m), r // 64),
      num_warps=2, C=k, V=v, M=m, ROWS=64,
    )
    return dense
  if r % 64 or k % 64 or operand.dtype not in (jnp.bfloat16, jnp.float16) or r * k >= 2**31:
    raise NotImplementedError(f'whole tiles of 64 x 64 of 16 bits only, found {operand.dtype} of shape {operand.shape}')
  (dense,) = _triton.call(
    _dense.expand_rows, operand.values, operand.metadata, out_shape=[jax.ShapeDtypeStruct((r, k), operand.dtype)],
    grid=(k // 64, r // 64), num_warps=2, K=k, ROWS=64,
  )
  return dense
