"""V:N:M packers in Triton: one pass over the activations.

Entries are read in pairs along the rows of A (`_rows`), to find a pattern or under a given one. All else is made from
what was packed: the operand of the transpose (`_transpose`), some columns and the dense matrix (`_dense`).

They agree with the reference bit for bit where sums of columns are exact or differ by more than rounding. bfloat16
squares below 2^-126 are the exception on a CPU, whose XLA makes them zero; the kernels round them like all others.
"""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import _triton
from pallas_kernels.operand import check_layout, metadata_shape, SparseOperand
from pallas_kernels.vnm import _dense, _rows, _transpose
from pallas_kernels.vnm.format import check_groups, VNMOperand

_GROUPS = 16  # a program's, 64 compact columns


def row_constants(c: int, v: int, m: int, *, activation: str | None, **more: bool) -> dict[str, Any]:
  """Compile-time constants of the kernels that read along rows; `more` is one kernel's own."""
  return dict(C=c, V=v, M=m, SQUARED_RELU=activation == 'squared_relu', GROUPS=row_groups(v, m), **more)


def row_groups(v: int, m: int) -> int:
  """A program's where rows are contiguous; of wide ones few would share a multiprocessor and all wait at once."""
  return _GROUPS if v * m < 2048 else _GROUPS // 2


def row_warps(v: int, m: int) -> int:
  """128 entries a thread: fewer would repeat the ranking of columns, more would spill."""
  return max(2, v * m * row_groups(v, m) // (_GROUPS * 256))


def vnm_pack(
  x: Array, *, v: int, m: int, activation: str | None = None, gradient: Array | None = None,
  pattern: VNMOperand | None = None, masked: bool = False, residuals: bool = False,
) -> tuple[VNMOperand, Array | None, Array | None, Array | None]:
  """See `api.vnm_pack`."""
  if pattern is not None:
    check_groups(pattern, False, name='pattern')
  whole = x if gradient is None else gradient
  r, c = whole.shape
  if x.dtype not in (jnp.bfloat16, jnp.float16):
    raise NotImplementedError(f'the Triton packer takes bfloat16 and float16, found {x.dtype}')
  if v not in (64, 128, 256) or m not in (4, 8, 16) or r % v or c % (_GROUPS * m):
    raise NotImplementedError(
      f'the Triton packer takes V of 64, 128 or 256, M of 4, 8 or 16 and columns in multiples of 16 M; found {v}:2:{m}'
      f' of [{r}, {c}]'
    )
  if whole.size >= 2**31:
    raise NotImplementedError(f'the Triton packer counts entries in 31 bits, found {whole.shape}')
  values = jax.ShapeDtypeStruct((r, 2 * c // m), x.dtype)
  options: dict[str, Any] = dict(grid=(c // (row_groups(v, m) * m), r // v), num_warps=row_warps(v, m))
  options |= row_constants(c, v, m, activation=activation)
  if gradient is not None and pattern is not None:
    metadata, rows = pattern.compact.metadata, pattern.rows
    dense = jax.ShapeDtypeStruct(whole.shape if masked else (1,), x.dtype)
    made, dense = _triton.call(
      _rows.pack_rows_as, x, gradient, metadata, rows, out_shape=[values, dense], **options, MASKED=masked
    )
    return VNMOperand(SparseOperand(made, metadata), rows, m), dense if masked else None, None, None
  shapes = [
    values,
    jax.ShapeDtypeStruct(metadata_shape(r, 4 * c // m), jnp.uint32),
    jax.ShapeDtypeStruct((r // v, 4 * c // m), jnp.int32),
    jax.ShapeDtypeStruct(values.shape if residuals else (1,), x.dtype),
    jax.ShapeDtypeStruct((c,) if residuals else (1,), jnp.int32),
  ]
  zeroed = dict(zeroed_outputs=(4,)) if residuals else {}
  made, metadata, rows, inputs, counts = _triton.call(
    _rows.pack_rows, x, out_shape=shapes, **options, **zeroed, RESIDUALS=residuals
  )
  a = VNMOperand(SparseOperand(made, metadata), rows, m)
  return a, None, inputs if residuals else None, counts if residuals else None


def transpose_warps(v: int, m: int) -> int:
  """Four pairs of the operand a thread, as one load, or two if M is 16: measured, see LOG.md."""
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
  for part in range(max(1, a.m // 8)):
    plane = jnp.uint32(0x44444444)
    for i in range(4):
      column = columns[..., i]
      changed = jnp.uint32(i ^ 4) << 4 * (column % 8)
      plane = plane ^ jnp.where((column // 8 == part) & here[i], changed, jnp.uint32(0))
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
    raise NotImplementedError(f'V in multiples of {_ROWS}, whole tiles of metadata; found V={a.v} of [{r}, {c}]')
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
      raise NotImplementedError(f'V in multiples of 64 and whole tiles of metadata only, found {v}:2:{m} of [{r}, {k}]')
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
