"""V:N:M matmul for Hopper (sm_90a): the sparse matmul with the rows of B gathered by the columns that a block kept.

A tile has the rows of one block of A, so that one index serves it. Three warpgroups a CTA, as in `sparse_matmul`: one
produces, two consume. A's values and metadata come by TMA, B's rows by `cp.async` (`_gather`). The consumers share the
tile's columns or its rows.

Blocks differ in their rows of B, so B cannot be multicast. L2 is faster where SMs of one GPC ask for the same rows at
about the same time. So 32 or 64 tiles of rows by 4 or 2 of columns are multiplied side by side (a launch fills one GPC
after the other), and which tiles a CTA takes goes by where the launch began (`place_of`). `LOG.md` says what bounds it
and what was tried.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import _compat as compat
from pallas_kernels import _device, _records, operand
from pallas_kernels.arch import WGMMA_OF_BLOCKS
from pallas_kernels.mosaic import wgmma_sp
from pallas_kernels.mosaic.once import once
from pallas_kernels.mosaic.sizes import ceil, CONSUMERS
from pallas_kernels.vnm import _gather, _registers
from pallas_kernels.vnm._problem import (
  BK,
  check_config,
  Config,
  default_config,
  place_of,
  Problem,
  steps_of,
  UNROLL,
)
from pallas_kernels.vnm.api import key, OP
from pallas_kernels.vnm.format import CompressedVNM, to_vnm_operand, VNMOperand

Array = jax.Array


@functools.cache
def build(p: Problem, c: Config, *, num_sms: int = 132, interpret: bool = False) -> Callable[..., tuple[Array, ...]]:
  """The kernel for one problem: a function (values [m, k/2], metadata, rows int32 [m/v, k], b [depth, n]) -> (D,).

  Args:
    p: the problem; n and k are multiples of 64, two of them at least.
    c: settings.
    num_sms: of the GPU.
    interpret: run on the CPU with race detection.
  """
  check_config(p, c)
  stages, tile_m = c.stages, c.tile_m
  k_steps = steps_of(p.k)
  m_tiles, n_tiles = ceil(p.m, tile_m), ceil(p.n, c.tile_n)
  tiles = m_tiles * n_tiles
  ctas = max(1, min(c.ctas or num_sms, num_sms, tiles))
  # A launch of few CTAs may leave SM 0 out.
  by_gpc = c.places == 'gpc' and tiles >= (c.ctas or num_sms)
  metadata_tile = tile_m // 64
  a_swizzle, b_swizzle = BK // 2 * 2, 128
  # The last tile of columns is as narrow as its columns allow.
  left_over = p.n - (n_tiles - 1) * c.tile_n
  last_bn = ceil(left_over, c.parts * 64) * 64
  last_bn = c.bn if last_bn > 256 else last_bn
  in_registers = c.a_from == 'registers'

  def operations(bn, ragged):
    shape = wgmma_sp.Shape(c.rows, bn, BK, p.dtype, p.dtype, 'kn', a_swizzle, b_swizzle, c.delay)
    sizes = dict(parts=c.parts, bk=BK, width=c.bn, bn=bn, depth=p.depth, n=p.n, ragged=ragged, dtype=p.dtype)
    multiply = _registers if in_registers else wgmma_sp
    if interpret:
      return multiply.standins(shape), _gather.standins(**sizes)
    return multiply.blocks(shape), _gather.blocks(**sizes)

  # By columns of a consumer; both are needed unless the last tile is like the others, or the only one.
  widths = {c.bn, last_bn} if n_tiles > 1 else {last_bn}
  kinds = {bn: operations(bn, bn == last_bn and left_over % (c.parts * bn) != 0) for bn in widths}
  gather = kinds[last_bn][1]

  def by_width(ni, do):
    """Calls `do` with the width of tile `ni` of columns and the operations for it."""
    if len(kinds) == 1:
      return do(last_bn, *kinds[last_bn])
    pl.when(ni < n_tiles - 1)(lambda: do(c.bn, *kinds[c.bn]))
    pl.when(ni == n_tiles - 1)(lambda: do(last_bn, *kinds[last_bn]))

  out_block = (64, c.epilogue_n) if p.out_layout == 'mn' else (c.epilogue_n, 64)
  out_swizzle = min(128, out_block[1] * p.out_dtype.itemsize)
  # In the order in which it lies in shared memory: another one is another kernel.
  scratch: dict[str, Any] = dict(
    a_smem=plgpu.SMEM((stages, tile_m, BK // 2), p.dtype, transforms=wgmma_sp.transforms(a_swizzle, 2)),
    b_smem=plgpu.SMEM((stages, c.parts, BK, c.bn), p.dtype, transforms=wgmma_sp.transforms(b_swizzle, 2)),
    empty=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
    **({'first': plgpu.SMEM((1,), jnp.int32)} if by_gpc else {}),
    # A's values and metadata by TMA; B's rows arrive at barriers of their own.
    full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    landed=gather.barriers(stages),
    out_smem=plgpu.SMEM(
      (CONSUMERS, c.slots, *out_block), p.out_dtype, transforms=wgmma_sp.transforms(out_swizzle, p.out_dtype.itemsize)
    ),
    metadata_smem=plgpu.SMEM((stages, metadata_tile, 1, 128), jnp.uint32),
  )

  def kernel(values, metadata, rows, b, out):
    begun: Any = pl.get_global(plgpu.SemaphoreType.REGULAR((1,))) if by_gpc else None

    def scope(a_smem, b_smem, out_smem, metadata_smem, full, landed, empty, first=None):
      gather.start(landed)
      warpgroup, first_tile = lax.axis_index('warpgroup'), lax.axis_index('cta')
      if by_gpc:
        first_tile = place_of(first_tile, gather.find_first(begun.at[0], first), ctas)
      turns = lax.div(jnp.int32(tiles + ctas - 1) - first_tile, ctas)

      def tile_of(turn):
        return plgpu.planar_snake(first_tile + turn * ctas, (m_tiles, n_tiles), 0, c.band)

      @pl.when(warpgroup == CONSUMERS)
      def _produce():
        plgpu.set_max_registers(c.producer_registers, action='decrease')

        def block_of(turn):
          return lax.div(tile_of(turn)[0] * tile_m, jnp.int32(p.v))

        def fill(turn, carry):
          mi, ni = tile_of(turn)
          block, next_block = block_of(turn), block_of(jnp.minimum(turn + 1, turns - 1))

          def step(k, at, index):
            slot = lax.rem(at, stages)
            # The next step's indices travel while this step waits for its slot.
            last = k + 1 == k_steps
            following = gather.load_rows(rows, jnp.where(last, next_block, block), jnp.where(last, 0, k + 1))

            @pl.when(at >= stages)
            def _():
              plgpu.barrier_wait(empty.at[slot])

            plgpu.copy_gmem_to_smem(
              values.at[pl.ds(mi * tile_m, tile_m), pl.ds(k * (BK // 2), BK // 2)], a_smem.at[slot],
              barrier=full.at[slot],
            )
            plgpu.copy_gmem_to_smem(
              metadata.at[pl.ds(mi * metadata_tile, metadata_tile), pl.ds(k, 1)], metadata_smem.at[slot],
              barrier=full.at[slot],
            )
            by_width(ni, lambda bn, ops, gather: gather.copy(
              index, rows, block, k, b, ni * c.tile_n, b_smem.at[slot], landed.at[slot]
            ))
            return following

          def steps(i, carry):
            at, index = carry
            for u in range(UNROLL):
              index = step(i * UNROLL + u, at + u, index)
            return at + UNROLL, index

          return lax.fori_loop(0, k_steps // UNROLL, steps, carry)

        early = gather.load_rows(rows, block_of(0), jnp.int32(0))
        filled, _ = lax.fori_loop(0, turns, fill, (jnp.int32(0), early))
        # Copies belong to their threads, and nothing says that those of a thread that has exited land and arrive: stay
        # until the consumers have let go of every stage.
        wgmma_sp.drain(empty, filled, stages)

      @pl.when(warpgroup < CONSUMERS)
      def _consume():
        plgpu.set_max_registers(c.consumer_registers, action='increase')
        # Which rows of A, and which part of B, this consumer multiplies.
        down, part = (warpgroup, 0) if c.across == 'm' else (0, warpgroup)

        def multiply(turn, first):
          mi, ni = tile_of(turn)

          def tile(bn, ops, gather):
            result = matmul(bn, ops, gather, first)
            store(result, bn, mi * tile_m + down * c.rows, ni * c.tile_n + part * bn)

          by_width(ni, tile)
          return first + k_steps

        def matmul(bn, ops, gather, first):
          def b_of(slot, column=0, columns=bn):
            return b_smem.at[slot, part] if columns == c.bn else b_smem.at[slot, part, :, pl.ds(column, columns)]

          def steps(i, carry):
            accumulator, held = carry
            for u in range(UNROLL):
              at = first + i * UNROLL + u
              slot = lax.rem(at, stages)
              plgpu.barrier_wait(full.at[slot])
              gather.wait(landed.at[slot], lax.rem(lax.div(at, stages), 2))
              a = a_smem.at[slot, pl.ds(down * c.rows, c.rows)]
              a_metadata = metadata_smem.at[slot, pl.ds(down * (c.rows // 64), c.rows // 64)]
              if in_registers:
                columns = bn // _registers.panels_of(bn)
                panels = [b_of(slot, j, columns) for j in range(0, bn, columns)]
                accumulator, now = ops.step(accumulator, a_metadata, a, *panels), held
              else:
                now = ops.load_metadata(a_metadata)
                accumulator = ops.step(accumulator, now, held, a, b_of(slot))
              if c.delay:
                # The wait inside `step` completed the step before.
                @pl.when(at > first)
                def _(at=at):
                  plgpu.barrier_arrive(empty.at[lax.rem(at - 1, stages)])
              else:
                plgpu.barrier_arrive(empty.at[slot])
              held = now
            return accumulator, held

          carry = lax.fori_loop(0, k_steps // UNROLL, steps, (ops.zeros(), ops.no_metadata()))
          last = lax.rem(first + k_steps - 1, stages)
          result = ops.finish(*carry, b_of(last))
          if c.delay:
            plgpu.barrier_arrive(empty.at[last])
          return result

        def store(result, bn, first_row, first_column):
          across = bn // c.epilogue_n
          for i in range(c.rows // 64):
            for j in range(across):
              chunk = result[i * 64 : (i + 1) * 64, j * c.epilogue_n : (j + 1) * c.epilogue_n].astype(p.out_dtype)
              row, column = first_row + i * 64, first_column + j * c.epilogue_n
              piece = i * across + j
              buffer = out_smem.at[warpgroup, piece % c.slots]
              # Wait until TMA has read the buffer, whoever used it last.
              if piece == 0 or piece >= c.slots:
                plgpu.wait_smem_to_gmem(c.slots - 1 if piece else 0, wait_read_only=True)
              wgmma_sp.write_out(chunk, buffer, out, row, column, p.out_layout, interpret=interpret)

        lax.fori_loop(0, turns, multiply, jnp.int32(0))

    # By position: of named arguments Pallas would lay out shared memory in the order of their names.
    pl.run_scoped(
      lambda *refs: scope(**dict(zip(scratch, refs, strict=True))), *scratch.values(), collective_axes='warpgroup'
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  out_type = jax.ShapeDtypeStruct((p.m, p.n) if p.out_layout == 'mn' else (p.n, p.m), p.out_dtype)
  call = plgpu.kernel(
    kernel,
    out_type=(out_type,),
    grid=(ctas,), grid_names=('cta',),
    num_threads=CONSUMERS + 1, thread_name='warpgroup',
    compiler_params=plgpu.CompilerParams(
      approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    **({'interpret': compat.interpret_params()} if interpret else {}),
  )
  # Under vmap one launch after another: batching the grid would share the ring's barriers.
  return jax.custom_batching.sequential_vmap(call) if interpret else once(
    call, (out_type,), 'vnm_matmul', p, c, num_sms
  )


def vnm_matmul(
  a: CompressedVNM | VNMOperand,
  b: Array,
  *,
  out_dtype: Any,
  out_layout: str,
  config: Config | None = None,
  device: _device.Device | None = None,
  interpret: bool = False,
) -> Array:
  """The back end: `reference.vnm_matmul` by the kernel.

  Args:
    a: A, [R, K]; converted to the kernel's operand here unless it is one already.
    b: B, [K, N].
    out_dtype: ...
    out_layout: as in the reference.
    config: settings; None takes the tuned ones of the nearest measured problem.
    device: the GPU to build for; None is the current one.
    interpret: run on the CPU with race detection.

  Raises:
    NotImplementedError: no sm_90, or a type or size that the kernel does not take.
    ValueError: `config` cannot be built for this problem.
  """
  device = device or _device.current()
  if not (interpret or WGMMA_OF_BLOCKS in device.arch.kernels):
    raise NotImplementedError(f'sparse wgmma needs compute capability 9.0, {device.name} has {device.capability}')
  if a.dtype.name not in ('bfloat16', 'float16') or jnp.dtype(out_dtype) != a.dtype:
    raise NotImplementedError(f'the kernel multiplies and writes bfloat16 or float16, not {a.dtype} to {out_dtype}')
  if a.v % 64 or a.shape[0] < 128:
    raise NotImplementedError(
      f'the kernel takes blocks of 64 rows, 128 and their multiples, and two tiles of 64; found {a.v} of {a.shape[0]}'
    )
  a = to_vnm_operand(a) if isinstance(a, CompressedVNM) else a
  operand.check_layout(a.compact, layout=WGMMA_OF_BLOCKS.layout)
  config = config or _tuned_config(a, b.shape[1], out_layout, device) or default_config(a.v)
  m, n = a.shape[0], b.shape[1]
  k = a.rows.shape[-1]
  # Whole boxes of TMA, two at least, as in sparse_matmul; no copy for multiples of 64.
  wide, deep = max(ceil(n, 64), 2) * 64, max(ceil(k, BK), 2) * BK
  p = Problem(m, wide, deep, a.v, b.shape[0], a.dtype, jnp.dtype(out_dtype), out_layout)
  (d,) = build(p, config, num_sms=device.num_sms or 2, interpret=interpret)(
    operand.pad_to(a.compact.values, (m, deep // 2)),
    operand.pad_to(a.compact.metadata, operand.metadata_shape(m, deep)),
    # Beyond K values are zeros; any row of B will do.
    operand.pad_to(a.rows, (m // a.v, steps_of(deep) * BK)),
    operand.pad_to(b, (b.shape[0], wide)),
  )
  return d[:m, :n] if out_layout == 'mn' else d[:n, :m]


def settings(v: int) -> list[Config]:
  """Those that are worth timing for blocks of `v` rows."""
  best = default_config(v)
  change = dataclasses.replace
  if v % 128:
    # Places by launch are not among them: a program repeated alone may keep a good launch, a training step does not.
    return [best, change(best, stages=2, delay=0), change(best, band=16), change(best, band=64)]
  if v % 256 == 0:
    return [best, change(best, delay=0)]
  placed = [change(best, band=band, slots=slots) for band in (32, 64) for slots in (1, 2)]
  by_launch = [change(best, places='launch', band=32, slots=slots) for slots in (1, 2)]
  return [*placed, *by_launch, Config(slots=2), Config(places='gpc', slots=2)]


def _tuned_config(a: VNMOperand, n: int, out_layout: str, device: _device.Device) -> Config | None:
  choice = _records.lookup(device.slug, OP, key(a, n, a.dtype, out_layout), implementation='mosaic_gpu')
  return Config(**choice.config) if choice is not None and choice.config is not None else None
