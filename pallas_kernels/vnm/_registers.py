"""A step of the V:N:M matmul with A from registers, where one read of A's values serves up to 384 columns of B.

With A in shared memory every instruction reads its 64 rows of A again, and shared memory is what bounds the kernel at V
= 128: of 896 cycles a step 128 are A's. Two instructions side by side that share registers read half of it. A step is
complete before the next one begins: what would stay in flight needs more registers than there are.
"""

import dataclasses
import functools
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import _compat as compat
from pallas_kernels.mosaic import asm as ptx
from pallas_kernels.mosaic import wgmma_sp as wgmma

_FRAGMENT = 4  # 32-bit registers of A's values of an instruction


def panels_of(bn: int) -> int:
  """Instructions side by side for `bn` columns, each of a multiple of 64 up to 256."""
  return 1 if bn <= 256 else 2


def blocks(s: wgmma.Shape) -> wgmma.Blocks:
  """Like `wgmma_sp.blocks` for 64 rows, but `step` takes (accumulator, metadata ref, A ref, a ref of B a panel)."""
  panels = panels_of(s.bn)
  columns, per_panel = s.bn // panels, s.bn // panels // 2
  a_ref = plgpu.RefType(wgmma.transforms(s.a_swizzle, s.width))
  b_ref = plgpu.RefType(wgmma.transforms(s.b_swizzle, s.b_dtype.itemsize))
  accumulator_type = plgpu.ShapeDtypeStruct((s.rows, s.bn), jnp.float32, compat.ACCUMULATOR)

  @plgpu.inline_mgpu(
    arg_types=(compat.ACCUMULATOR, plgpu.RefType(), a_ref, *[b_ref] * panels), return_type=accumulator_type
  )
  def step(ctx, accumulator, metadata, a, *b):
    registers = [ptx.extract(r) for r in accumulator.registers.flat]
    at = ptx.add(ptx.address(metadata), ptx.scaled_thread(4))
    loaded = compat.llvm.inline_asm(ptx.i32(), [at], 'ld.shared.b32 $0, [$1];', '=r,l', has_side_effects=True)
    lane = _lane_offset(s.a_swizzle)
    values = [_load_fragment(ptx.address(a), lane, 32 * i) for i in range(s.instructions)]
    issue = [_issuer(s, columns, panel) for panel in b]
    compat.nvvm.wgmma_fence_aligned()
    for i in range(s.instructions):
      for j in range(panels):
        part = slice(j * per_panel, (j + 1) * per_panel)
        registers[part] = issue[j](i, registers[part], values[i], loaded)
    ptx.asm('wgmma.commit_group.sync.aligned;')
    # Nothing in flight may read a register that ptxas takes for free.
    ptx.asm('wgmma.wait_group.sync.aligned 0;')
    return ptx.accumulator_of(registers, accumulator)

  return dataclasses.replace(wgmma.blocks(s), step=step)


def _issuer(s: wgmma.Shape, columns: int, b: Any) -> Any:
  """(i, accumulators, A's values, metadata) -> accumulators: issues the i-th instruction along K on a panel of B."""
  (descriptor, (tiling, strides)), _, fastest = compat.mma_utils.create_descriptor(
    b, swizzle=s.b_swizzle, group_size=(s.bk, columns), logical_k_major=True, mma_bytewidth_k=64
  )
  transpose_b = int(fastest != compat.mma_utils.Dim.K)
  count = columns // 2
  # Outputs $0.., the same registers again as inputs, then A's values, B's descriptor and the metadata.
  o = 2 * count
  places = '{' + ','.join(f'${i}' for i in range(count)) + '}'
  a_places = '{' + ','.join(f'${o + i}' for i in range(_FRAGMENT)) + '}'
  types = f'{wgmma.PTX_TYPE[s.a_dtype.name]}.{wgmma.PTX_TYPE[s.b_dtype.name]}'
  constraints = ','.join(['=f'] * count + [str(i) for i in range(count)] + ['r'] * _FRAGMENT + ['l', 'r'])
  f32 = ptx.f32()

  def issue(i, accumulators, values, metadata):
    # One register of metadata serves two instructions, by selector.
    text = (
      f'wgmma.mma_async.sp.sync.aligned.m64n{columns}k{s.instruction_k}.f32.{types} {places}, {a_places}, '
      f'${o + _FRAGMENT}, ${o + _FRAGMENT + 1}, {i % 2}, 1, 1, 1, {transpose_b};'
    )
    result = compat.llvm.inline_asm(
      compat.llvm.StructType.get_literal([f32] * count),
      [*accumulators, *values, wgmma.advance(descriptor, wgmma.offset_of(i, tiling, strides)), metadata],
      text, constraints, asm_dialect=0, has_side_effects=True,
    )
    return [compat.llvm.extractvalue(f32, result, [j]) for j in range(count)]

  return issue


def _lane_offset(swizzle: int) -> Any:
  """Byte of the row that this thread names to `ldmatrix`, in a tile of rows of `swizzle` bytes, i32.

  Threads 0 to 15 name the first 16 bytes of a warp's 16 rows, threads 16 to 31 the next. The swizzle exchanges units of
  16 bytes by bits 7 and up of the address.
  """
  c32 = functools.partial(compat.utils.c, ty=ptx.i32())
  arith = compat.arith
  thread = arith.remui(compat.utils.thread_idx(), c32(128))
  row = arith.ori(arith.shli(arith.shrui(thread, c32(5)), c32(4)), arith.andi(thread, c32(15)))
  byte = arith.muli(row, c32(swizzle))
  unit = arith.andi(arith.shrui(thread, c32(4)), c32(1))
  exchange = arith.andi(arith.shrui(byte, c32(7)), c32(swizzle // 16 - 1))
  return arith.addi(byte, arith.shli(arith.xori(unit, exchange), c32(4)))


def _load_fragment(address: Any, lane: Any, step: int) -> list[Any]:
  """A's 16 rows of this warp by 32 bytes as an instruction takes them, from `step` bytes on."""
  i32 = ptx.i32()
  offset = compat.arith.extui(ptx.i64(), compat.arith.xori(lane, compat.utils.c(step, i32)) if step else lane)
  loaded = compat.llvm.inline_asm(
    compat.llvm.StructType.get_literal([i32] * _FRAGMENT), [ptx.add(address, offset)],
    'ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];', '=r,=r,=r,=r,l', has_side_effects=True,
  )
  return [compat.llvm.extractvalue(i32, loaded, [j]) for j in range(_FRAGMENT)]


def standins(s: wgmma.Shape) -> wgmma.Blocks:
  """The blocks in jnp, for interpret mode."""
  panels = panels_of(s.bn)
  panel = wgmma.standins(dataclasses.replace(s, bn=s.bn // panels))

  def step(accumulator, metadata, a, *b):
    parts = jnp.split(accumulator, panels, axis=1)
    return jnp.concatenate([panel.step(x, metadata[...], None, a, y) for x, y in zip(parts, b, strict=True)], axis=1)

  return dataclasses.replace(wgmma.standins(s), step=step)
