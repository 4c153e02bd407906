"""The Hopper kernel for one problem and one setting: its ring, its warpgroups, its epilogue.

Three warpgroups a CTA. One *produces*: it copies the kept values and positions of A and the dense B to a ring of
shared-memory stages by TMA; in a cluster each CTA copies its part of the operand that all share and multicasts it. Two
*consume*: each owns half of the tile's rows, multiplies stage after stage, then scales, adds the bias, applies the
activation and stores by TMA. The ring runs on over the tiles, so the next tile's first stages arrive while the last
tile is stored. By `halves='k'` each owns every other stage of all rows, and the first adds the sums of the second.
"""

from collections.abc import Callable
import dataclasses
import functools
import operator
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import _compat as compat
from pallas_kernels.mosaic import wgmma_sp
from pallas_kernels.mosaic.once import once
from pallas_kernels.mosaic.sizes import ceil, CONSUMERS
from pallas_kernels.sparse_matmul import reference
from pallas_kernels.sparse_matmul._problem import box_bytes, check_config, Config, Problem, schedule

Array = jax.Array


@functools.cache
def build(p: Problem, c: Config, *, num_sms: int = 132, interpret: bool = False) -> Callable[..., tuple[Array, ...]]:
  """The kernel for one problem.

  Args:
    p: the problem; row lengths in bytes must be multiples of 16, along K of 32 (`sparse_matmul` pads).
    c: settings.
    num_sms: of the GPU; clusters are launched once and must all be resident.
    interpret: run on the CPU with race detection.

  Returns:
    A function (values [M, K/2], metadata, b, *factors) -> (D,), or (D, Z) with `keep_preactivation`; with `amax` last
    float32 numbers, of which the largest is the largest magnitude of D before it is rounded. Factors are in float32
    scales of shape [1], the inverse of the row scale and the bias, padded to whole tiles of M, and the inverse of the
    column scale, padded to whole tiles of N, in this order and as far as `p` has them.
  """
  check_config(p, c)
  stages, unroll, tile_m = c.stages, c.unroll, c.tile_m
  metadata_tile = (tile_m // 64, c.bk // 64)
  m_tiles, n_tiles = (ceil(size, tile) for size, tile in zip((p.m, p.n), c.cluster_tile, strict=True))
  work = schedule(p, c, num_sms)
  splits = bool(work.remainder)
  by_steps = c.halves == 'k'
  stride = CONSUMERS if by_steps else 1  # of the steps of a consumer
  consumers = work.clusters * c.cluster * CONSUMERS
  num_outs = 1 + p.keep_preactivation

  a_swizzle = box_bytes(c.bk // 2 * p.a_dtype.itemsize, p.k // 2 * p.a_dtype.itemsize)
  along_b = (c.bk, p.k) if p.b_layout == 'nk' else (c.bn, c.bn)  # what a tile has of a row, and what divides the row
  b_swizzle = box_bytes(*(size * p.b_dtype.itemsize for size in along_b))
  shape = wgmma_sp.Shape(c.rows, c.bn, c.bk, p.a_dtype, p.b_dtype, p.b_layout, a_swizzle, b_swizzle, c.delay)
  ops = (wgmma_sp.standins if interpret else wgmma_sp.blocks)(shape)
  b_block = (c.bn, c.bk) if p.b_layout == 'nk' else (c.bk, c.bn)
  out_block = (64, c.epilogue_n) if p.out_layout == 'mn' else (c.epilogue_n, 64)
  out_swizzle = min(128, out_block[1] * p.out_dtype.itemsize)
  # Each CTA copies its part of the shared operand to all.
  shared_a, shared_b = (('rank',) if c.cluster > 1 and c.along == along else None for along in 'nm')

  # A stage is full when its three copies have landed, and empty when all consumers, of every CTA that received its part
  # of the shared operand, have let it go.
  readers = CONSUMERS // stride
  empty = (
    plgpu.ClusterBarrier(collective_axes=('rank',), num_arrivals=readers, num_barriers=stages)
    if c.cluster > 1 else plgpu.Barrier(num_arrivals=readers, num_barriers=stages)
  )
  # In the order in which it lies in shared memory: another one is another kernel.
  scratch = dict(
    a_smem=plgpu.SMEM((stages, tile_m, c.bk // 2), p.a_dtype, transforms=wgmma_sp.transforms(a_swizzle, shape.width)),
    b_smem=plgpu.SMEM(
      (stages, *b_block), p.b_dtype, transforms=wgmma_sp.transforms(b_swizzle, p.b_dtype.itemsize)
    ),
    empty=empty,
    full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
    out_smem=plgpu.SMEM(
      (CONSUMERS, c.slots, *out_block), p.out_dtype, transforms=wgmma_sp.transforms(out_swizzle, p.out_dtype.itemsize)
    ),
    **(dict(
      sums_smem=plgpu.SMEM((c.rows * c.bn,), jnp.float32), sums_taken=plgpu.Barrier(num_arrivals=1),
      sums_there=plgpu.Barrier(num_arrivals=1),
    ) if by_steps else {}),
    metadata_smem=plgpu.SMEM((stages, *metadata_tile, 128), jnp.uint32),
  )  # fmt: skip
  # setmaxnreg, in steps of 8: three warpgroups start with 168 registers a thread, and whoever asks for more than the
  # others gave back waits for ever. The producer issues copies and little else; with 56 for it the consumers spill one
  # register when the last wave is split, and eight registers of metadata, those of two steps of a wide tile in 8 bits,
  # fit beside the accumulators with 24 only.
  producer_registers = 24 if shape.tiles * shape.metadata_words * (1 + c.delay) > 4 else 40
  consumer_registers = min(240, (3 * 168 - producer_registers) // CONSUMERS // 8 * 8)

  def kernel(values, metadata, b, *rest):
    scalars, rest = rest[: p.scalars], rest[p.scalars :]
    vectors = list(rest[: p.row_scale + p.bias + p.column_scale])
    # D, then Z if it is kept.
    outs, partial = rest[len(vectors) :][:num_outs], rest[len(vectors) + num_outs :]
    largest, partial = (partial[0], partial[1:]) if p.amax else (None, partial)
    row_scale = vectors.pop(0) if p.row_scale else None
    bias = vectors.pop(0) if p.bias else None
    column_scale = vectors.pop(0) if p.column_scale else None
    flags: Any = pl.get_global(plgpu.SemaphoreType.REGULAR((consumers,))) if splits else None

    def scope(a_smem, b_smem, out_smem, metadata_smem, full, empty, sums_smem=None, sums_there=None, sums_taken=None):
      warpgroup, rank, cluster = lax.axis_index('warpgroup'), lax.axis_index('rank'), lax.axis_index('cluster')
      # Every whole tile has work; pieces may be empty.
      turns = work.turns if splits else lax.div(jnp.int32(work.tiles + work.clusters - 1) - cluster, work.clusters)

      def item_of(turn):
        item = work.item(cluster, turn)
        if not splits:
          item = dataclasses.replace(item, steps=work.k_steps)
        mi, ni = plgpu.planar_snake(jnp.minimum(item.tile, work.tiles - 1), (m_tiles, n_tiles), 0, c.band)
        if c.along == 'm':
          return item, mi * c.cluster + rank, ni
        return item, mi, ni * c.cluster + rank

      def consumer_of(cluster):
        return (cluster * c.cluster + rank) * CONSUMERS + warpgroup

      @pl.when(warpgroup == CONSUMERS)
      def _produce():
        plgpu.set_max_registers(producer_registers, action='decrease')

        def fill(turn, first):
          item, mi, ni = item_of(turn)

          def step(i, at):
            slot = lax.rem(at, stages)

            @pl.when(at >= stages)
            def _():
              plgpu.barrier_wait(empty.at[slot])

            k = item.start + i
            row_tiles = pl.ds(mi * metadata_tile[0], metadata_tile[0])
            copy = functools.partial(plgpu.copy_gmem_to_smem, barrier=full.at[slot])
            copy_a = functools.partial(copy, collective_axes=shared_a)
            copy_a(values.at[pl.ds(mi * tile_m, tile_m), pl.ds(k * (c.bk // 2), c.bk // 2)], a_smem.at[slot])
            copy_a(metadata.at[row_tiles, pl.ds(k * metadata_tile[1], metadata_tile[1])], metadata_smem.at[slot])
            columns, ks = pl.ds(ni * c.bn, c.bn), pl.ds(k * c.bk, c.bk)
            copy(
              b.at[columns, ks] if p.b_layout == 'nk' else b.at[ks, columns], b_smem.at[slot],
              collective_axes=shared_b,
            )
            return at + 1

          return lax.fori_loop(0, item.steps, step, first)

        filled = lax.fori_loop(0, turns, fill, jnp.int32(0))
        wgmma_sp.drain(empty, filled, stages)

      @pl.when(warpgroup < CONSUMERS)
      def _consume():
        plgpu.set_max_registers(consumer_registers, action='increase')
        if largest is not None:
          ops.clear_largest(largest.at[consumer_of(cluster)])

        def multiply(turn, first):
          item, mi, ni = item_of(turn)
          own = item.steps // stride if not splits else item.steps
          # Stages are even in number, so that each is always the same consumer's.
          begin = first + warpgroup if by_steps else first
          part = 0 if by_steps else warpgroup

          def step(at, carry):
            accumulator, held = carry
            slot = lax.rem(at, stages)
            plgpu.barrier_wait(full.at[slot])
            now = ops.load_metadata(metadata_smem.at[slot, pl.ds(part * (c.rows // 64), c.rows // 64)])
            accumulator = ops.step(
              accumulator, now, held, a_smem.at[slot, pl.ds(part * c.rows, c.rows)], b_smem.at[slot]
            )
            if c.delay:
              # The wait inside `step` completed the step before.
              @pl.when(at > begin)
              def _():
                plgpu.barrier_arrive(empty.at[lax.rem(at - stride, stages)])
            else:
              plgpu.barrier_arrive(empty.at[slot])
            return accumulator, now

          def steps(i, carry):
            for u in range(unroll):
              carry = step(begin + (i * unroll + u) * stride, carry)
            return carry

          carry = lax.fori_loop(0, lax.div(own, unroll) if splits else own // unroll, steps,
                                (ops.zeros(), ops.no_metadata()))
          if not splits:
            for u in range(own % unroll):
              carry = step(begin + (own - 1 + u) * stride, carry)
          last = lax.rem(jnp.maximum(begin + (own - 1) * stride, 0), stages)
          result = ops.finish(*carry, b_smem.at[last])
          if c.delay:
            _when(item.steps > 0 if splits else True, lambda: plgpu.barrier_arrive(empty.at[last]))
          if splits:
            mine = consumer_of(cluster)

            @pl.when(jnp.logical_and(item.helps, item.steps > 0))
            def _help():
              ops.store_partial(result, partial[0].at[mine])
              plgpu.semaphore_signal(flags.at[mine], memory_scope='gpu')

            @pl.when(jnp.logical_and(jnp.logical_not(item.helps), item.steps > 0))
            def _finish():
              def add(helper, total):
                # The same warpgroup of the same CTA of the helping cluster holds the same elements.
                theirs = mine + (helper - cluster) * (c.cluster * CONSUMERS)
                plgpu.semaphore_wait(flags.at[theirs], decrement=False, memory_scope='gpu')
                return ops.add_partial(total, partial[0].at[theirs])

              store(lax.fori_loop(item.first_helper, cluster, add, result), mi, ni)
          elif by_steps:
            @pl.when(warpgroup == 1)
            def _hand_over():
              ops.store_partial(result, sums_smem)
              plgpu.barrier_arrive(sums_there)
              plgpu.barrier_wait(sums_taken)

            @pl.when(warpgroup == 0)
            def _add():
              plgpu.barrier_wait(sums_there)
              total = ops.add_partial(result, sums_smem)
              plgpu.barrier_arrive(sums_taken)
              store(total, mi, ni)
          else:
            store(result, mi, ni)
          return first + item.steps

        def store(result, mi, ni):
          # Inverted here: made before, each would be one more kernel to launch.
          factor = functools.reduce(operator.mul, [1 / scalar[0] for scalar in scalars], p.alpha)
          for i in range(c.rows // 64):
            row = mi * tile_m + (0 if by_steps else warpgroup * c.rows) + i * 64
            for j in range(c.bn // c.epilogue_n):
              column = ni * c.bn + j * c.epilogue_n
              chunk = result[i * 64 : (i + 1) * 64, j * c.epilogue_n : (j + 1) * c.epilogue_n]
              if scalars or p.alpha != 1:
                chunk = chunk * factor
              if row_scale is not None:
                chunk = chunk * _along(row_scale, row, chunk.shape, 0)
              if column_scale is not None:
                chunk = chunk * _along(column_scale, column, chunk.shape, 1)
              if bias is not None:
                chunk = chunk + _along(bias, row, chunk.shape, 0)
              # Z first: TMA reads it out of its buffer while the activation is computed.
              piece = (i * (c.bn // c.epilogue_n) + j) * num_outs
              if p.keep_preactivation:
                store_piece(chunk, outs[1], row, column, piece)
              d = reference.activate(chunk, p.activation)
              if largest is not None:
                ops.note_largest(d, largest.at[consumer_of(cluster)])
              store_piece(d, outs[0], row, column, piece + num_outs - 1)

        def store_piece(values, out, row, column, piece):
          # Wait until TMA has read the oldest piece out of the buffer that comes next.
          buffer = out_smem.at[warpgroup, piece % c.slots]
          plgpu.wait_smem_to_gmem(c.slots - 1, wait_read_only=True)
          values = values.astype(p.out_dtype)
          wgmma_sp.write_out(values, buffer, out, row, column, p.out_layout, interpret=interpret)

        lax.fori_loop(0, turns, multiply, jnp.int32(0))

    # By position: of named arguments Pallas would lay out shared memory in the order of their names.
    pl.run_scoped(
      lambda *refs: scope(**dict(zip(scratch, refs, strict=True))), *scratch.values(), collective_axes='warpgroup'
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  out_type = jax.ShapeDtypeStruct((p.m, p.n) if p.out_layout == 'mn' else (p.n, p.m), p.out_dtype)
  out_types = (out_type,) * num_outs
  if p.amax:
    out_types += (jax.ShapeDtypeStruct((consumers, 4), jnp.float32),)  # of each warp
  partial_type = jax.ShapeDtypeStruct((consumers, c.rows * c.bn), jnp.float32)
  call = plgpu.kernel(
    kernel,
    out_type=out_types + ((partial_type,) if splits else ()),
    grid=(work.clusters,), grid_names=('cluster',),
    cluster=(c.cluster,), cluster_names=('rank',),
    num_threads=CONSUMERS + 1, thread_name='warpgroup',
    compiler_params=plgpu.CompilerParams(
      approx_math=p.out_dtype.itemsize == 2, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    **({'interpret': compat.interpret_params()} if interpret else {}),
  )

  def run(*args: Array) -> tuple[Array, ...]:
    return tuple(call(*args)[: len(out_types)])

  # Under vmap one launch after another: batching the grid would share the ring's barriers and the flags.
  return jax.custom_batching.sequential_vmap(run) if interpret else once(
    run, out_types, 'sparse_matmul', p, c, num_sms
  )


def _when(condition: Any, body: Callable[[], None]) -> None:
  body() if condition is True else pl.when(condition)(body)


def _along(vector: Any, start: Any, shape: tuple[int, int], axis: int) -> Array:
  """Entries of a float32 vector in memory from `start`, repeated over the other axis of a chunk."""
  piece = vector.at[pl.ds(start, shape[axis])]
  layout = plgpu.Layout.WGMMA.reduce(1 - axis)
  return lax.broadcast_in_dim(plgpu.load(piece, layout=layout, optimized=False), shape, (axis,))
