"""Sparse matmul by warp-level `mma.sp`, which every NVIDIA GPU from compute capability 8.0 on has.

One warpgroup a CTA computes 128 x 64 entries; Pallas' pipeline brings the tiles to shared memory, by cp.async on 8.x
and by TMA on 9.0. The instruction (m16n8k32) takes the compressed A as a dense m16n8k16 takes its A, B as those of two
such matmuls, and the metadata in the order of `operand.py`: a warp's rows are the wgmma's. So one operand serves
both kernels.

Kept simple: sizes are padded to whole tiles and N-major B is transposed beforehand, both with a copy; scales, bias,
activation and the transposed layout are left to XLA after a float32 result. No speed is claimed for any GPU.
"""

from collections.abc import Callable
import dataclasses
import functools
import itertools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import _compat as compat
from pallas_kernels import _device, formats, operand
from pallas_kernels.arch import MMA_SP
from pallas_kernels.mosaic import asm as ptx
from pallas_kernels.mosaic import wgmma_sp
from pallas_kernels.mosaic.sizes import ceil
from pallas_kernels.sparse_matmul import reference
from pallas_kernels.sparse_matmul.call import Call, Vectors

Array = jax.Array
_PTX_TYPE = {'bfloat16': 'bf16', 'float16': 'f16'}


@dataclasses.dataclass(frozen=True)
class Config:
  """Settings of the kernel.

  Attributes:
    bm: rows of a tile, a multiple of 64. 128 x 64 float32 sums are 64 registers a thread; 128 x 128 spill.
    bn: columns of a tile, a multiple of 8.
    stages: K steps of 64 in flight.
  """

  bm: int = 128
  bn: int = 64
  stages: int = 3


_BK = 64  # one metadata word a thread and 64 rows


@functools.cache
def build(m: int, n: int, k: int, dtype: jnp.dtype, out_dtype: jnp.dtype, c: Config) -> Callable[..., Array]:
  """(values [M, K/2], metadata, b [N, K]) -> D [M, N] for sizes of whole tiles."""
  if m % c.bm or n % c.bn or k % _BK:
    raise ValueError(f'm={m}, n={n}, k={k} must be multiples of the tile {(c.bm, c.bn, _BK)}')
  lhs, rhs, sums = (f(dtype) for f in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC))
  result = plgpu.ShapeDtypeStruct((c.bm, c.bn), jnp.float32, sums)

  inline: Any = plgpu.inline_mgpu

  @inline(arg_types=(sums, lhs, plgpu.RefType(), rhs), return_type=result)
  def multiply(ctx, accumulator, a, metadata, b):
    return _multiply(c, dtype, accumulator, a, metadata, b)

  @inline(arg_types=(sums, plgpu.RefType()), return_type=None)
  def store(ctx, accumulator, out):
    element = compat.utils.dtype_to_ir_type(out_dtype)
    accumulator.astype(element).store_untiled(out, optimized=False)

  def kernel(values, metadata, b, out):
    row, column = lax.axis_index('row'), lax.axis_index('column')

    def body(_, a_smem, metadata_smem, b_smem, accumulator):
      a = plgpu.load(a_smem, layout=lhs)
      return multiply(accumulator, a, metadata_smem, plgpu.load(b_smem.T, layout=rhs))

    def spec(shape, index, transforms=()):
      return plgpu.BlockSpec(
        shape, index, transforms=transforms, oob_fill_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
      )

    total = plgpu.emit_pipeline(
      body, grid=(k // _BK,), max_concurrent_steps=c.stages,
      init_carry=plgpu.layout_cast(jnp.zeros((c.bm, c.bn), jnp.float32), sums),
      in_specs=[
        spec((c.bm, _BK // 2), lambda i: (row, i), wgmma_sp.transforms(64, 2)),
        spec((c.bm // 64, 1, 128), lambda i: (row, i, 0)),
        spec((c.bn, _BK), lambda i: (column, i), wgmma_sp.transforms(128, 2)),
      ],
    )(values, metadata, b)
    store(total, out.at[pl.ds(row * c.bm, c.bm), pl.ds(column * c.bn, c.bn)])

  return jax.jit(plgpu.kernel(
    kernel, out_type=jax.ShapeDtypeStruct((m, n), out_dtype), grid=(m // c.bm, n // c.bn), grid_names=('row', 'column')
  ))


def _multiply(c: Config, dtype: jnp.dtype, accumulator: Any, a: Any, metadata: Any, b: Any) -> Any:
  """One K step: two mma.sp an m16n8 tile, selectors 0 and 1 of the same metadata word."""
  thread = compat.arith.remui(compat.utils.thread_idx(), compat.utils.c(128, _i32()))
  at = compat.arith.index_cast(compat.ir.IndexType.get(), thread)
  words = [
    ptx.extract(compat.vector.load(compat.ir.VectorType.get((1,), _i32()), metadata, [_index(i), _index(0), at]))
    for i in range(c.bm // 64)
  ]
  accumulator = accumulator.copy()
  for i, j in itertools.product(range(c.bm // 64), range(c.bn // 8)):
    rows, columns = slice(i * 64, (i + 1) * 64), slice(j * 8, (j + 1) * 8)
    tile = accumulator[rows, columns]
    total = [ptx.extract(r, p) for r in tile.registers.flat for p in range(2)]
    for step in range(2):
      left = [compat.utils.bitcast(r, _i32()) for r in a[rows, step * 16 : (step + 1) * 16].registers.flat]
      right = [
        compat.utils.bitcast(r, _i32())
        for half in range(2)
        for r in b[step * 32 + half * 16 : step * 32 + (half + 1) * 16, columns].registers.flat
      ]
      total = _mma(_PTX_TYPE[dtype.name], left, right, total, words[i], step)
    accumulator[rows, columns] = ptx.from_floats(total, tile)
  return accumulator


def _mma(kind: str, a: list[Any], b: list[Any], total: list[Any], word: Any, selector: int) -> list[Any]:
  """`ordered_metadata` promises positions in rising order, which the format has, and is the fast form on new GPUs."""
  f32 = compat.ir.F32Type.get()
  text = (
    f'mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{kind}.{kind}.f32 '
    f'{{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9,$10,$11}}, {{$12,$13,$14,$15}}, $16, {selector};'
  )
  constraints = ','.join(['=f'] * 4 + ['r'] * 8 + ['f'] * 4 + ['r'])
  four = compat.llvm.StructType.get_literal([f32] * 4)
  result = compat.llvm.inline_asm(four, [*a, *b, *total, word], text, constraints, has_side_effects=False)
  return [compat.llvm.extractvalue(f32, result, [i]) for i in range(4)]


def _i32() -> Any:
  return compat.ir.IntegerType.get_signless(32)


def _index(i: int) -> Any:
  return compat.arith.constant(compat.ir.IndexType.get(), i)


def sparse_matmul(
  a: formats.Compressed24 | operand.SparseOperand,
  b: Array,
  vectors: Vectors,
  call: Call,
  *,
  config: Config | None = None,
  device: _device.Device | None = None,
) -> Any:
  """The back end: `reference.sparse_matmul` by the kernel; `config` and `device` as in `mosaic_gpu`.

  Raises:
    NotImplementedError: no GPU of compute capability 8.0 to 9.0, or types other than bfloat16 and float16.
  """
  device, config = device or _device.current(), config or Config()
  if MMA_SP not in device.arch.kernels:
    raise NotImplementedError(f'tried on compute capability 8.0 to 9.0 only, {device.name} has {device.capability}')
  if a.dtype.name not in _PTX_TYPE or a.dtype != b.dtype:
    raise NotImplementedError(f'mma.sp here multiplies pairs of bfloat16 or float16, not {a.dtype} x {b.dtype}')
  a = operand.to_operand(a) if isinstance(a, formats.Compressed24) else a
  operand.check_layout(a, layout=MMA_SP.layout)
  m, n, k = call.sizes(a, b)
  b = b if call.b_layout == 'nk' else b.T
  whole_m, whole_n, whole_k = (ceil(size, tile) * tile for size, tile in ((m, config.bm), (n, config.bn), (k, _BK)))
  inner = call.out_dtype if call.is_plain(vectors) else jnp.dtype('float32')
  run = build(whole_m, whole_n, whole_k, a.dtype, inner, config)
  d = run(
    operand.pad_to(a.values, (whole_m, whole_k // 2)),
    operand.pad_to(a.metadata, operand.metadata_shape(whole_m, whole_k)),
    operand.pad_to(b, (whole_n, whole_k)),
  )[:m, :n]
  return reference.results(d, vectors, call)
