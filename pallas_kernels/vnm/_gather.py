"""Rows of B, gathered to shared memory by index: what TMA cannot do on Hopper.

TMA copies boxes. Boxes of one row of 128 bytes would have to come at one every four cycles (384 for a 64 x 384 stage);
gather boxes came with the next generation. So the producer's 128 threads copy 16 bytes each with `cp.async`, straight
to the place in the 128-byte-swizzled tile where wgmma looks for them. Eight neighbours take 128 contiguous bytes.

A producer that waits for its copies and then fences stands still: the fence waits for everything under way, so that
each step's copies land before the next are issued. Here nobody waits: copies arrive at the barrier of their stage when
they have landed, and the consumers, for whom wgmma reads through the asynchronous proxy, fence after they have seen all
128 arrivals: a proxy fence counts anywhere on the way from the write to the read, and this one stands behind the
barrier, which orders the writes before it.
"""

import dataclasses
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import _compat as compat
from pallas_kernels.mosaic import asm as ptx
from pallas_kernels.mosaic import wgmma_sp as wgmma

_THREADS = 128
_ROWS = 4  # of a stage and thread: one 16-byte load has their indices
_PATIENCE = 20  # looks for a word of SM 0, about 15 us
_TICKS = 10_000_000  # a wait sleeps so long at most before it looks again


@dataclasses.dataclass(frozen=True)
class Gather:
  """The operations on a stage's rows of B, of the warpgroup that copies them unless said otherwise.

  Attributes:
    barriers: (stages) -> scratch: a barrier a stage, at which its rows arrive.
    start: (barriers) -> None; all threads of the CTA call it once, first.
    find_first: (semaphore, scratch [1]) -> index of the CTA on SM 0, or 0 if none said so in time: one answer for all
      CTAs of the launch. All threads call it once.
    load_rows: (index ref, block, step) -> the indices that the thread needs in this step.
    copy: (indices, index ref, block, step, b ref, first column, stage ref [parts, bk, bn], barrier) -> None; issues the
      copies, which arrive at the barrier when they land.
    wait: (barrier, phase 0 or 1) -> None; by consumers: the rows have landed and wgmma sees them.
  """

  barriers: Any
  start: Any
  find_first: Any
  load_rows: Any
  copy: Any
  wait: Any


def blocks(*, parts: int, bk: int, width: int, bn: int, depth: int, n: int, ragged: bool, dtype: Any) -> Gather:
  """The operations as PTX.

  Args:
    parts: tiles of `bn` columns side by side in a stage.
    bk: rows of a stage, 64.
    width: columns of a part in memory, a multiple of 64.
    bn: of which so many are copied, a multiple of 64.
    depth: rows of B; an index that names another is taken for the last, so that nothing beside B is read.
    n: columns of B.
    ragged: whether the last tile of columns hangs over.
    dtype: of B, 16 bits.
  """
  assert bk == _ROWS * _THREADS // 8
  layout = plgpu.Layout.WG_STRIDED((_ROWS * _THREADS,), 1)
  rows_type = plgpu.ShapeDtypeStruct((_ROWS * _THREADS,), jnp.int32, layout)
  stage_ref = plgpu.RefType(wgmma.transforms(128, jnp.dtype(dtype).itemsize))
  pitch = 2 * n

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=())
  def start(ctx, barriers):
    first = compat.arith.cmpi(compat.arith.CmpIPredicate.eq, compat.utils.thread_idx(), _c32(0))
    stages = compat.ir.MemRefType(barriers.type).shape[0]
    inits = ' '.join(f'@p mbarrier.init.shared::cta.b64 [$0+{8 * i}], {_THREADS};' for i in range(stages))
    ptx.asm(
      f'{{ .reg .pred p; setp.ne.u32 p, $1, 0; {inits} fence.mbarrier_init.release.cluster; bar.sync 0; }}',
      [ptx.address(barriers), compat.arith.extui(ptx.i32(), first)], 'l,r',
    )

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=())
  def agree(ctx, word, found):
    # The first to say something decides for all: SM 0's CTA says its index, who has looked long enough says 0, plus 1.
    text = (
      '{ .reg .pred p; .reg .u32 seen, mine, n; setp.ne.u32 p, $2, 0; @p bra DONE;'
      ' mov.u32 mine, %ctaid.x; add.u32 mine, mine, 1; mov.u32 n, %smid; setp.eq.u32 p, n, 0; @p bra SAY;'
      ' mov.u32 mine, 1; mov.u32 n, 0;'
      ' AGAIN: ld.relaxed.gpu.global.u32 seen, [$0]; setp.ne.u32 p, seen, 0; @p bra TELL;'
      f' add.u32 n, n, 1; setp.lt.u32 p, n, {_PATIENCE}; @p bra AGAIN;'
      ' SAY: atom.relaxed.gpu.global.cas.b32 seen, [$0], 0, mine; setp.eq.u32 p, seen, 0; @p mov.u32 seen, mine;'
      ' TELL: sub.u32 seen, seen, 1; st.shared.u32 [$1], seen; DONE: bar.sync 0; }'
    )
    ptx.asm(text, [ptx.address(word), ptx.address(found), compat.utils.thread_idx()], 'l,l,r')

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=())
  def wait(ctx, barrier, phase):
    compat.nvvm.mbarrier_try_wait_parity(compat.utils.memref_ptr(barrier), phase.registers.item(), _c32(_TICKS))
    ptx.asm('fence.proxy.async.shared::cta;')

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=rows_type)
  def load(ctx, ref):
    at = _add(ptx.address(ref), _wide(_mul(_thread_row(), 4 * _ROWS)))
    four = compat.llvm.StructType.get_literal([ptx.i32()] * _ROWS)
    loaded = compat.llvm.inline_asm(
      four, [at], 'ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];', '=r,=r,=r,=r,l', has_side_effects=True
    )
    return ptx.array_of_words([compat.llvm.extractvalue(ptx.i32(), loaded, [i]) for i in range(_ROWS)], layout)

  @plgpu.inline_mgpu(
    arg_types=(layout, plgpu.RefType(), plgpu.RefType(), stage_ref, plgpu.RefType()), return_type=()
  )
  def issue(ctx, rows, b, corner, stage, barrier):
    chunk, first = _rem(_thread(), 8), _mul(_rem(_thread_row(), 8 // _ROWS), _ROWS)
    atom = _mul(_div(_thread_row(), 8 // _ROWS), 1024 * (width // 64))
    target = _add(ptx.address(stage), _wide(atom))
    base = _add(ptx.address(corner), _wide(_mul(chunk, 16)))
    sizes = {}
    if ragged:
      # Bytes from the start of B's first row to this thread's first column.
      along = compat.arith.subi(base, ptx.address(b))
      for at in range(0, parts * bn, 64):
        end = compat.utils.c(pitch - 2 * at, ptx.i64())
        inside = compat.arith.cmpi(compat.arith.CmpIPredicate.slt, along, end)
        sizes[at] = compat.arith.select(inside, _c32(16), _c32(0))
    for i in range(_ROWS):
      index = compat.arith.minui(ptx.extract(rows.registers.flat[i]), _c32(depth - 1))
      source = _add(base, compat.arith.muli(_wide(index), compat.utils.c(pitch, ptx.i64())))
      # The swizzle of 128 bytes: 16-byte chunk c of row r of an 8-row atom lies at chunk c xor r.
      row = _add(first, _c32(i))
      place = _add(target, _wide(_add(_mul(row, 128), _mul(compat.arith.xori(chunk, row), 16))))
      for part in range(parts):
        for j in range(bn // 64):
          to, at = 2 * part * bk * width + 1024 * j, part * bn + 64 * j
          copy = f'cp.async.cg.shared.global.L2::128B [$0+{to}], [$1+{2 * at}], 16'
          if ragged:
            ptx.asm(f'{copy}, $2;', [place, source, sizes[at]], 'l,l,r')
          else:
            ptx.asm(f'{copy};', [place, source], 'l,l')
    ptx.asm('cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];', [ptx.address(barrier)], 'l')

  # The decorator supplies `ctx`, which type checkers do not see.
  issue_all: Any = issue
  load_from: Any = load
  agree_on: Any = agree

  def find_first(word, found):
    agree_on(word, found)
    return found[0]

  def copy(rows, index_ref, block, step, b_ref, column, stage, barrier):
    del index_ref, block, step
    issue_all(rows, b_ref, b_ref.at[pl.ds(0, 8), pl.ds(column, 64)], stage, barrier)

  return Gather(
    # A barrier is 64 bits, a type that JAX has by a flag only.
    barriers=lambda stages: plgpu.SMEM((stages, 2), jnp.int32), start=start, find_first=find_first,
    load_rows=lambda index_ref, block, step: load_from(index_ref.at[block, pl.ds(step * bk, bk)]),
    copy=copy, wait=wait,
  )


def standins(*, parts: int, bk: int, width: int, bn: int, depth: int, n: int, **_: Any) -> Gather:
  """The operations in jnp, for interpret mode."""
  del width

  def copy(rows, index_ref, block, step, b_ref, column, stage, barrier):
    del rows
    index = jnp.minimum(index_ref[block, pl.ds(step * bk, bk)].astype(jnp.uint32), depth - 1).astype(jnp.int32)
    for part in range(parts):
      for j in range(0, bn, 64):
        # What hangs over is never stored; any columns will do.
        at = jnp.minimum(column + part * bn + j, n - 64)
        stage[part, :, pl.ds(j, 64)] = jnp.take(b_ref[:, pl.ds(at, 64)], index, axis=0)
    plgpu.barrier_arrive(barrier)

  return Gather(
    barriers=lambda stages: plgpu.Barrier(num_arrivals=1, num_barriers=stages), start=lambda barriers: None,
    find_first=lambda word, found: jnp.int32(10), load_rows=lambda *_: jnp.int32(0), copy=copy,
    wait=lambda barrier, phase: plgpu.barrier_wait(barrier),
  )


def _thread() -> Any:
  return compat.arith.remui(compat.utils.thread_idx(), _c32(_THREADS))


def _thread_row() -> Any:
  """Eight threads copy a row's 128 bytes."""
  return _div(_thread(), 8)


def _c32(x: int) -> Any:
  return compat.utils.c(x, ptx.i32())


def _add(x: Any, y: Any) -> Any:
  return compat.arith.addi(x, y)


def _mul(x: Any, y: int) -> Any:
  return compat.arith.muli(x, _c32(y))


def _div(x: Any, y: int) -> Any:
  return compat.arith.divui(x, _c32(y))


def _rem(x: Any, y: int) -> Any:
  return compat.arith.remui(x, _c32(y))


def _wide(x: Any) -> Any:
  return compat.arith.extui(ptx.i64(), x)
