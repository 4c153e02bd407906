"""The parts of the Hopper kernel that Pallas has no words for: sparse wgmma, its metadata registers, partial sums.

Mosaic GPU emits dense wgmma only, so these blocks write the PTX themselves. Each block is a function of Pallas values
and references; `standins` are the same functions in jnp, for interpret mode on a CPU.

The hazard that shapes this file: a sparse wgmma reads its metadata register while it runs, asynchronously, and ptxas
does not know. After the issue the register looks dead, so ptxas loads the next step's metadata into it while the tensor
core still reads, which then multiplies by the next step's positions. Either the group is drained before the next load
(`delay=0`), or the metadata is carried to the wait that completes their group and used there by an instruction that can
neither be dropped nor branch (`delay=1`); see `_keep_alive`.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import _compat as compat
from pallas_kernels import operand
from pallas_kernels.mosaic import asm as ptx

# Of a warp, whose lane is $0.
_FIRST_LANE = '.reg .pred first; setp.eq.u32 first, $0, 0;'
PTX_TYPE = {'bfloat16': 'bf16', 'float16': 'f16', 'float8_e4m3fn': 'e4m3', 'float8_e5m2': 'e5m2'}


@dataclasses.dataclass(frozen=True)
class Blocks:
  """The operations of one consumer warpgroup on its rows of a CTA tile.

  Attributes:
    zeros: () -> accumulator.
    no_metadata: () -> metadata that belongs to no wgmma.
    load_metadata: (metadata_ref [rows/64, bk/64, 128]) -> metadata of one K step.
    step: (accumulator, metadata, held, a_ref, b_ref) -> accumulator; `held` is that of the step before.
    finish: (accumulator, held, b_ref) -> float32 [rows, bn] after the last wgmma.
    store_partial: (float32 [rows, bn], global or shared memory ref [rows * bn]) -> None.
    add_partial: (float32 [rows, bn], memory ref) -> their sum.
    clear_largest: (global memory ref [4], one of each warp) -> None.
    note_largest: (float32 chunk of rows and columns, that ref) -> None; it then holds no less than their magnitudes.
  """

  zeros: Any
  no_metadata: Any
  load_metadata: Any
  step: Any
  finish: Any
  store_partial: Any
  add_partial: Any
  clear_largest: Any
  note_largest: Any


@dataclasses.dataclass(frozen=True)
class Shape:
  """What a step multiplies: `rows` x `bk` (compressed) by `bk` x `bn`.

  Attributes:
    rows: rows of A of one warpgroup, a multiple of 64.
    bn: columns.
    bk: logical K of a step.
    a_dtype: dtype of A.
    b_dtype: dtype of B.
    b_layout: 'nk' or 'kn'.
    a_swizzle: bytes.
    b_swizzle: bytes.
    delay: steps that stay in flight, 0 or 1.
  """

  rows: int
  bn: int
  bk: int
  a_dtype: jnp.dtype
  b_dtype: jnp.dtype
  b_layout: str
  a_swizzle: int
  b_swizzle: int
  delay: int

  @property
  def tiles(self) -> int:
    return self.rows // 64

  @property
  def metadata_words(self) -> int:
    """Metadata words of a thread and 64 rows."""
    return self.bk // 64

  @property
  def width(self) -> int:
    return self.a_dtype.itemsize

  @property
  def instruction_k(self) -> int:
    return 64 // self.width

  @property
  def instructions(self) -> int:
    return self.bk // self.instruction_k


def transforms(swizzle: int, itemsize: int) -> tuple[Any, ...]:
  """Layout of a shared-memory tile that wgmma and TMA agree on."""
  tiling: Any = plgpu.TilingTransform
  swizzling: Any = plgpu.SwizzleTransform
  return tiling((8, swizzle // itemsize)), swizzling(swizzle)


def drain(empty: Any, filled: Any, stages: int) -> None:
  """Waits for the release of every stage of the ring: the other CTAs of a cluster signal these barriers, too."""
  used = jnp.minimum(filled, stages)

  def wait(i: Any, _: Any) -> Any:
    plgpu.barrier_wait(empty.at[jax.lax.rem(filled - used + i, stages)])
    return _

  jax.lax.fori_loop(0, used, wait, jnp.int32(0))


def write_out(x: Any, buffer: Any, out: Any, row: Any, column: Any, layout: str, *, interpret: bool) -> None:
  """Writes a piece of a result [M, N] at its row and column, through shared memory; with layout 'nm' it is [N, M]."""
  rows, columns = (pl.ds(start, size) for start, size in zip((row, column), x.shape, strict=True))
  if layout == 'mn':
    buffer[...] = x
  elif interpret:
    buffer[...] = x.T
  else:
    buffer.transpose((1, 0))[...] = x
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(buffer, out.at[rows, columns] if layout == 'mn' else out.at[columns, rows])


def blocks(s: Shape) -> Blocks:
  """The blocks as PTX."""
  metadata_layout = plgpu.Layout.WG_STRIDED((s.tiles * s.metadata_words * ptx.THREADS,), 1)
  metadata_type = plgpu.ShapeDtypeStruct((s.tiles * s.metadata_words * ptx.THREADS,), jnp.int32, metadata_layout)
  accumulator_type = plgpu.ShapeDtypeStruct((s.rows, s.bn), jnp.float32, compat.ACCUMULATOR)
  result_type = plgpu.ShapeDtypeStruct((s.rows, s.bn), jnp.float32, plgpu.Layout.WGMMA)
  a_ref = plgpu.RefType(transforms(s.a_swizzle, s.width))
  b_ref = plgpu.RefType(transforms(s.b_swizzle, s.b_dtype.itemsize))
  as_metadata = functools.partial(ptx.array_of_words, layout=metadata_layout)

  @plgpu.inline_mgpu(arg_types=(), return_type=accumulator_type)
  def zeros(ctx):
    zero = compat.arith.constant(ptx.f32(), 0.0)
    return compat.fragmented_array.FragmentedArray.splat(zero, (s.rows, s.bn), compat.FRAGMENTED_ACCUMULATOR)

  @plgpu.inline_mgpu(arg_types=(), return_type=metadata_type)
  def no_metadata(ctx):
    return as_metadata([compat.utils.c(0, ptx.i32())] * (s.tiles * s.metadata_words))

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=metadata_type)
  def load_metadata(ctx, ref):
    # A volatile load into a fresh value: ptxas may not reuse a register that a carried value still occupies.
    address = ptx.add(ptx.address(ref), ptx.scaled_thread(4))
    return as_metadata([
      compat.llvm.inline_asm(ptx.i32(), [address], f'ld.shared.b32 $0, [$1+{4 * ptx.THREADS * i}];', '=r,l',
                             has_side_effects=True)
      for i in range(s.tiles * s.metadata_words)
    ])

  @plgpu.inline_mgpu(
    arg_types=(compat.ACCUMULATOR, metadata_layout, metadata_layout, a_ref, b_ref), return_type=accumulator_type
  )
  def step(ctx, accumulator, metadata, held, a, b):
    registers = _multiply(s, [ptx.extract(r) for r in accumulator.registers.flat], _extract(metadata), a, b)
    ptx.asm('wgmma.commit_group.sync.aligned;')
    ptx.asm(f'wgmma.wait_group.sync.aligned {s.delay};')
    if s.delay:
      _keep_alive(_extract(held), b)
    return ptx.accumulator_of(registers, accumulator)

  @plgpu.inline_mgpu(arg_types=(compat.ACCUMULATOR, metadata_layout, b_ref), return_type=result_type)
  def finish(ctx, accumulator, held, b):
    if s.delay:
      ptx.asm('wgmma.wait_group.sync.aligned 0;')
      _keep_alive(_extract(held), b)
    # To LLVM the accumulators are defined where the wgmma was issued; the barrier keeps their uses below the wait.
    return compat.fragmented_array.optimization_barrier(accumulator).to_layout(compat.FRAGMENTED_WGMMA)

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=())
  def store_partial(ctx, accumulator, memory):
    # Whoever reads these sums holds the same elements in the same thread, so they go out in register order: 16 bytes
    # a thread, 512 consecutive bytes a warp.
    address = ptx.add(ptx.address(memory), ptx.scaled_thread(16))
    values, space = ptx.floats(accumulator), 'shared' if compat.utils.is_smem_ref(memory) else 'global'
    for i in range(0, len(values), 4):
      text = f'st.{space}.v4.f32 [$4+{4 * i * ptx.THREADS}], {{$0, $1, $2, $3}};'
      ptx.asm(text, [*values[i : i + 4], address], 'f,f,f,f,l')

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=result_type)
  def add_partial(ctx, accumulator, memory):
    address = ptx.add(ptx.address(memory), ptx.scaled_thread(16))
    four = compat.llvm.StructType.get_literal([ptx.f32()] * 4)
    # .cg reads through to L2: sums in memory were written by another SM during this kernel.
    values, space = ptx.floats(accumulator), 'shared' if compat.utils.is_smem_ref(memory) else 'global.cg'
    for i in range(0, len(values), 4):
      loaded = compat.llvm.inline_asm(
        four, [address], f'ld.{space}.v4.f32 {{$0, $1, $2, $3}}, [$4+{4 * i * ptx.THREADS}];', '=f,=f,=f,=f,l',
        has_side_effects=True,
      )
      for j in range(4):
        values[i + j] = compat.arith.addf(values[i + j], compat.llvm.extractvalue(ptx.f32(), loaded, [j]))
    return ptx.from_floats(values, accumulator)

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=())
  def clear_largest(ctx, memory):
    ptx.asm(f'{{ {_FIRST_LANE} @first st.global.u32 [$1], 0; }}', ptx.lane_and_warp(memory), 'r,l')

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=())
  def note_largest(ctx, chunk, memory):
    largest = compat.arith.constant(ptx.f32(), 0.0)
    for value in ptx.floats(chunk):
      largest = ptx.larger_magnitude(largest, value)
    # Magnitudes are in the order of their bits, with NaN above all. No one waits for the maximum in memory.
    note = 'redux.sync.max.u32 bits, $2, 0xFFFFFFFF; @first red.relaxed.gpu.global.max.u32 [$1], bits;'
    bits = compat.arith.bitcast(ptx.i32(), largest)
    ptx.asm(f'{{ .reg .b32 bits; {_FIRST_LANE} {note} }}', [*ptx.lane_and_warp(memory), bits], 'r,l,r')

  return Blocks(
    zeros, no_metadata, load_metadata, step, finish, store_partial, add_partial, clear_largest, note_largest
  )


def _multiply(s: Shape, registers: list[Any], words: list[Any], a: Any, b: Any) -> list[Any]:
  """Issues the wgmmas of one K step; returns the accumulators."""
  (a_descriptor, (a_tiling, a_strides)), (a_tile_stride, _), a_fastest = compat.mma_utils.create_descriptor(
    a, swizzle=s.a_swizzle, group_size=(64, s.bk // 2), logical_k_major=False
  )
  b_logical = compat.memref_transpose(b, (1, 0, 3, 2)) if s.b_layout == 'nk' else b
  # A sparse instruction spans twice the K of a dense one, 64 bytes of B.
  (b_descriptor, (b_tiling, b_strides)), _, b_fastest = compat.mma_utils.create_descriptor(
    b_logical, swizzle=s.b_swizzle, group_size=(s.bk, s.bn), logical_k_major=True, mma_bytewidth_k=64
  )
  assert a_fastest == compat.mma_utils.Dim.K
  transpose_b = b_fastest != compat.mma_utils.Dim.K
  per_tile = s.bn // 2
  compat.nvvm.wgmma_fence_aligned()
  for i in range(s.instructions):
    # 16-bit: one word serves two instructions, by selector. 8-bit: one word an instruction.
    word, selector = divmod(i, 2) if s.width == 2 else (i, 0)
    for tile in range(s.tiles):
      part = slice(tile * per_tile, (tile + 1) * per_tile)
      registers[part] = _wgmma(
        s, registers[part],
        advance(a_descriptor, tile * a_tile_stride + offset_of(i, a_tiling, a_strides)),
        advance(b_descriptor, offset_of(i, b_tiling, b_strides)),
        words[tile * s.metadata_words + word], selector, transpose_b,
      )
  return registers


def _wgmma(s: Shape, registers: list[Any], a: Any, b: Any, word: Any, selector: int, transpose_b: bool) -> list[Any]:
  """One `wgmma.mma_async.sp`, accumulating in place."""
  count = s.bn // 2
  places = '{' + ','.join(f'${i}' for i in range(count)) + '}'
  # Outputs $0.., the same registers again as inputs, then the two descriptors and the metadata word.
  o = 2 * count
  immediates = '1, 1' + (f', 0, {int(transpose_b)}' if s.width == 2 else '')
  types = f'{PTX_TYPE[s.a_dtype.name]}.{PTX_TYPE[s.b_dtype.name]}'
  text = (
    f'wgmma.mma_async.sp.sync.aligned.m64n{s.bn}k{s.instruction_k}.f32.{types} '
    f'{places}, ${o}, ${o + 1}, ${o + 2}, {selector}, 1, {immediates};'
  )
  constraints = ','.join(['=f'] * count + [str(i) for i in range(count)] + ['l', 'l', 'r'])
  result = compat.llvm.inline_asm(
    compat.llvm.StructType.get_literal([ptx.f32()] * count), [*registers, a, b, word], text, constraints,
    asm_dialect=0, has_side_effects=True,
  )
  return [compat.llvm.extractvalue(ptx.f32(), result, [i]) for i in range(count)]


def _keep_alive(words: list[Any], memory: Any) -> None:
  """A use of the words that cannot be dropped and does not branch: a store that never happens.

  Predicated on a word of all ones, which is no legal metadata. With a branch (`@p trap`) ptxas serialises every wgmma.
  """
  n = len(words)
  stores = ' '.join(f'@p st.shared.b32 [${n}], ${i};' for i in range(n))
  text = f'{{ .reg .pred p; setp.eq.u32 p, ${n - 1}, 0xFFFFFFFF; {stores} }}'
  ptx.asm(text, [*words, ptx.address(memory)], ','.join(['r'] * n + ['l']))


def offset_of(i: int, tiling: tuple[int, ...], strides: tuple[int, ...]) -> int:
  """Byte offset of the i-th instruction along K, from the tiling that `create_descriptor` reports."""
  index = []
  for t in reversed(tiling):
    i, r = divmod(i, t)
    index.append(r)
  index.append(i)
  return sum(x * y for x, y in zip(reversed(index), strides, strict=True))


def advance(descriptor: Any, offset: int) -> Any:
  """Descriptors count addresses in 16 bytes."""
  return ptx.add(descriptor, compat.utils.c(offset >> 4, ptx.i64())) if offset else descriptor


def _extract(metadata: Any) -> list[Any]:
  return [ptx.extract(r) for r in metadata.registers.flat]


def standins(s: Shape) -> Blocks:
  """The blocks in jnp, for interpret mode: same operands in the same memory, so that copies and barriers are tested."""

  def step(accumulator, metadata, held, a_ref, b_ref):
    del held
    a, b = a_ref[...].astype(jnp.float32), b_ref[...].astype(jnp.float32)
    nibbles = operand.unpack_metadata(metadata.reshape(-1, ptx.THREADS), s.width)  # [tiles * words, 64, 16]
    nibbles = nibbles.reshape(s.tiles, s.metadata_words, 64, 16).transpose(0, 2, 1, 3).reshape(s.rows, s.bk // 4)
    low, high = a[:, 0::2], a[:, 1::2]
    places = [jnp.where((nibbles & 3) == i, low, 0.0) + jnp.where((nibbles >> 2) == i, high, 0.0) for i in range(4)]
    dense = jnp.stack(places, -1).reshape(s.rows, s.bk)
    # The stand-in reads A and B by ordinary loads; before TMA refills them the race detector wants a fence.
    plgpu.commit_smem()
    return accumulator + jax.lax.dot_general(dense, b, (((1,), (1 if s.b_layout == 'nk' else 0,)), ((), ())))

  def store_partial(accumulator, memory):
    memory[...] = accumulator.reshape(-1)

  def clear_largest(memory):
    memory[...] = jnp.zeros(memory.shape, jnp.float32)

  def note_largest(chunk, memory):
    memory[...] = jnp.maximum(memory[...], jnp.max(jnp.abs(chunk)))

  return Blocks(
    zeros=lambda: jnp.zeros((s.rows, s.bn), jnp.float32),
    no_metadata=lambda: jnp.zeros((s.tiles, s.metadata_words, ptx.THREADS), jnp.uint32),
    load_metadata=lambda ref: ref[...],
    step=step,
    finish=lambda accumulator, held, b_ref: accumulator,
    store_partial=store_partial,
    add_partial=lambda accumulator, memory: accumulator + memory[...].reshape(accumulator.shape),
    clear_largest=clear_largest,
    note_largest=note_largest,
  )
