"""Rows of B, gathered to shared memory by index: what TMA cannot do on Hopper.

TMA copies boxes. Boxes of one row of 128 bytes would have to come at one every four cycles (384 for a 64 x 384 stage);
gather boxes came with the next generation. So the producer's 128 threads copy 16 bytes each with `cp.async`, straight
to the place in the 128-byte-swizzled tile where wgmma looks for them. Eight neighbours take 128 contiguous bytes.

wgmma reads shared memory through the asynchronous proxy, so a thread waits for its copies, fences, and only then
arrives at the stage's barrier. It does so one step late (`lag`), with the next step's copies under way.
"""

import dataclasses
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import _compat as compat
from pallas_kernels.sparse_matmul import _wgmma_sp as wgmma

_THREADS = 128
ROWS_AT_ONCE = _THREADS // 8  # rows that the threads cover with 128 bytes each


@dataclasses.dataclass(frozen=True)
class Gather:
  """The operations of the producer warpgroup.

  Attributes:
    load_rows: (index ref, block, step) -> the indices that the thread needs in this step.
    copy: (indices, index ref, block, step, b ref, first column, stage ref [parts, bk, bn]) -> None; issues the copies.
    wait: () -> None; all but the youngest `lag` groups of copies are complete and visible to wgmma.
    wait_all: () -> None.
  """

  load_rows: Any
  copy: Any
  wait: Any
  wait_all: Any


def blocks(*, parts: int, bk: int, bn: int, n: int, ragged: bool, lag: int, dtype: Any) -> Gather:
  """The operations as PTX.

  Args:
    parts: tiles of `bn` columns side by side in a stage.
    bk: rows of a stage.
    bn: columns of a part, a multiple of 64.
    n: columns of B.
    ragged: whether the last tile of columns hangs over.
    lag: steps whose copies stay under way.
    dtype: of B, 16 bits.
  """
  each = bk // ROWS_AT_ONCE
  layout = plgpu.Layout.WG_STRIDED((each * _THREADS,), 1)
  rows_type = plgpu.ShapeDtypeStruct((each * _THREADS,), jnp.int32, layout)
  stage_ref = plgpu.RefType(wgmma.transforms(128, jnp.dtype(dtype).itemsize))
  chunks, pitch = bn // 64, 2 * n

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=rows_type)
  def load(ctx, ref):
    at = _add64(wgmma._address(ref), _wide(_mul(_thread_row(), 4)))
    return wgmma._array_of_words([
      compat.llvm.inline_asm(_i32(), [at], f'ld.global.nc.b32 $0, [$1+{4 * ROWS_AT_ONCE * i}];', '=r,l',
                             has_side_effects=True)
      for i in range(each)
    ], layout)

  @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(), plgpu.RefType(), stage_ref), return_type=())
  def issue(ctx, rows, b, corner, stage):
    row, chunk = _thread_row(), _rem(_thread(), 8)
    row8 = _rem(row, 8)
    # The swizzle of 128 bytes: 16-byte chunk c of row r of an 8-row atom lies at chunk c xor r.
    place = _add32(_mul(row8, 128), _mul(compat.arith.xori(chunk, row8), 16))
    place = _add32(place, _mul(_div(row, 8), 1024 * chunks))
    target = _add64(wgmma._address(stage), _wide(place))
    base = _add64(wgmma._address(corner), _wide(_mul(chunk, 16)))
    sizes = {}
    if ragged:
      # Bytes from the start of B's first row to this thread's first column: scalars reach a block as addresses only.
      along = compat.arith.subi(base, wgmma._address(b))
      for at in range(0, parts * bn, 64):
        end = compat.utils.c(pitch - 2 * at, _i64())
        inside = compat.arith.cmpi(compat.arith.CmpIPredicate.slt, along, end)
        sizes[at] = compat.arith.select(inside, _c32(16), _c32(0))
    for i in range(each):
      index = wgmma.extract(rows.registers.flat[i])
      source = _add64(base, compat.arith.muli(_wide(index), compat.utils.c(pitch, _i64())))
      for part in range(parts):
        for j in range(chunks):
          to = 2 * (part * bk * bn) + (ROWS_AT_ONCE // 8 * i * chunks + j) * 1024
          at = part * bn + 64 * j
          copy = f'cp.async.cg.shared.global.L2::128B [$0+{to}], [$1+{2 * at}], 16'
          if ragged:
            wgmma._asm(f'{copy}, $2;', [target, source, sizes[at]], 'l,l,r')
          else:
            wgmma._asm(f'{copy};', [target, source], 'l,l')
    wgmma._asm('cp.async.commit_group;')

  # The decorator supplies `ctx`, which type checkers do not see.
  start: Any = issue
  load_from: Any = load

  def waiting(left: int) -> Any:
    @plgpu.inline_mgpu(arg_types=(), return_type=())
    def wait(ctx):
      wgmma._asm(f'cp.async.wait_group {left};')
      wgmma._asm('fence.proxy.async.shared::cta;')

    return wait

  def copy(rows, index_ref, block, step, b_ref, column, stage):
    del index_ref, block, step
    start(rows, b_ref, b_ref.at[pl.ds(0, 8), pl.ds(column, 64)], stage)

  return Gather(
    load_rows=lambda index_ref, block, step: load_from(index_ref.at[block, pl.ds(step * bk, bk)]),
    copy=copy, wait=waiting(lag), wait_all=waiting(0),
  )


def standins(*, parts: int, bk: int, bn: int, n: int, **_: Any) -> Gather:
  """The operations in jnp, for interpret mode."""

  def copy(rows, index_ref, block, step, b_ref, column, stage):
    del rows
    index = index_ref[block, pl.ds(step * bk, bk)]
    for part in range(parts):
      for j in range(0, bn, 64):
        # What hangs over is never stored; any columns will do.
        at = jnp.minimum(column + part * bn + j, n - 64)
        stage[part, :, pl.ds(j, 64)] = jnp.take(b_ref[:, pl.ds(at, 64)], index, axis=0)

  return Gather(lambda *_: jnp.int32(0), copy, lambda: None, lambda: None)


def _thread() -> Any:
  return compat.arith.remui(compat.utils.thread_idx(), _c32(_THREADS))


def _thread_row() -> Any:
  return _div(_thread(), 8)


def _i32() -> Any:
  return compat.ir.IntegerType.get_signless(32)


def _i64() -> Any:
  return compat.ir.IntegerType.get_signless(64)


def _c32(x: int) -> Any:
  return compat.utils.c(x, _i32())


def _add32(x: Any, y: Any) -> Any:
  return compat.arith.addi(x, y)


_add64 = _add32


def _mul(x: Any, y: int) -> Any:
  return compat.arith.muli(x, _c32(y))


def _div(x: Any, y: int) -> Any:
  return compat.arith.divui(x, _c32(y))


def _rem(x: Any, y: int) -> Any:
  return compat.arith.remui(x, _c32(y))


def _wide(x: Any) -> Any:
  return compat.arith.extui(_i64(), x)
