"""Sparse matmul for Hopper (sm_90a): a persistent, warp-specialised kernel around `wgmma.mma_async.sp` (`_kernel`).

This is its back end: which calls it takes, how operands are padded for it, which settings it runs with. Tiles of
256 x 192 read fewer bytes a multiplication than those of 128 x 256. The last wave may be split (`_schedule`). Settings
are chosen by measurement (`Config`, `pallas_kernels/tuned`) or, where nothing was measured, by prediction (`_predict`).
`pallas_kernels/README.md` says what bounds the kernel, and has the log.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _device, _records, formats, operand
from pallas_kernels.arch import WGMMA
from pallas_kernels.mosaic.sizes import ceil
from pallas_kernels.sparse_matmul import reference
from pallas_kernels.sparse_matmul._kernel import build
from pallas_kernels.sparse_matmul._predict import candidates as settings
from pallas_kernels.sparse_matmul._predict import default_config, H100_SMS, of_neighbour
from pallas_kernels.sparse_matmul._problem import Config, ends_half_way, fits, for_outputs, Problem
from pallas_kernels.sparse_matmul.call import Call, Vectors

__all__ = ['Config', 'Problem', 'build', 'default_config', 'fits', 'for_outputs', 'settings', 'sparse_matmul']

Array = jax.Array
OP = WGMMA.op


def sparse_matmul(
  a: formats.Compressed24 | operand.SparseOperand,
  b: Array,
  vectors: Vectors,
  call: Call,
  *,
  config: Config | None = None,
  device: _device.Device | None = None,
  interpret: bool = False,
) -> Any:
  """The back end: `reference.sparse_matmul` by the kernel.

  Args:
    a: A, [M, K]; converted to the kernel's operand here unless it is one already.
    b: as in the reference, as are
    vectors: and
    call: here.
    config: settings; None takes the tuned ones of the nearest measured problem.
    device: the GPU to build for; None is the current one.
    interpret: run on the CPU with race detection.

  Raises:
    NotImplementedError: no sm_90, or dtypes or layouts that sparse wgmma does not take.
    ValueError: `config` cannot be built for this problem.
  """
  device = device or _device.current()
  if not (interpret or WGMMA in device.arch.kernels):
    other = device.arch.kernel(OP)
    instead = f'; implementation={other.backend!r} takes bfloat16 and float16 there' if other else ''
    raise NotImplementedError(
      f'sparse wgmma needs compute capability 9.0, {device.name} has {device.capability}{instead}'
    )
  _check_types(a.dtype, b.dtype, call.out_dtype, call.b_layout)
  same = dict(config=config, device=device, interpret=interpret)
  if call.out_dtype.itemsize == 4 and call.out_layout == 'nm':
    # A shared-memory store transposes 16-bit elements only; XLA transposes afterwards.
    rows_first = dataclasses.replace(call, out_layout='mn')
    return jax.tree.map(jnp.transpose, sparse_matmul(a, b, vectors, rows_first, **same))
  a = operand.to_operand(a) if isinstance(a, formats.Compressed24) else a
  operand.check_layout(a, layout=WGMMA.layout)
  m, n, k = call.sizes(a, b)
  p = Problem(
    m, n, k, a.dtype, b.dtype, call.out_dtype, call.b_layout, call.out_layout, call.activation,
    bias=vectors.bias is not None,
    scalars=len(vectors.scalars),
    row_scale=_is_vector(vectors.a_scale),
    column_scale=_is_vector(vectors.b_scale),
    keep_preactivation=call.keep_preactivation,
    alpha=call.alpha,
    amax=call.amax,
  )
  config = config or for_outputs(p, chosen_config(p, device))
  if p.amax and p.bias and n % config.cluster_tile[1]:
    # Columns of the last tile that are none hold what the bias makes of zero.
    d = sparse_matmul(a, b, vectors, dataclasses.replace(call, amax=False), **same)
    d, *z = d if p.keep_preactivation else (d,)
    return (d, *z, reference.largest(d))
  padded = _padded(p, config)
  values = operand.pad_to(a.values, (padded.m, padded.k // 2))
  metadata = operand.pad_to(a.metadata, operand.metadata_shape(padded.m, padded.k))
  b = operand.pad_to(b, (padded.n, padded.k) if p.b_layout == 'nk' else (padded.k, padded.n))
  factors = _factors(padded, config, vectors)
  run = build(padded, config, num_sms=device.num_sms or 2, interpret=interpret)
  outs, noted = run(values, metadata, b, *factors), ()
  if p.amax:
    *outs, largest = outs
    # Of the float32 values: rounding keeps their order.
    noted = (_rounded(jnp.max(largest), p.out_dtype),)
  d, *others = *(x[:m, :n] if p.out_layout == 'mn' else x[:n, :m] for x in outs), *noted
  return (d, *others) if others else d


def _rounded(x: Array, dtype: Any) -> Array:
  """x >= 0 in float32 as a cast to `dtype` and back leaves it, which on GPUs XLA takes for a no-op."""
  to = jnp.finfo(dtype)
  rounded = jax.lax.reduce_precision(x, to.nexp, to.nmant)
  if to.nexp == jnp.finfo(jnp.float32).nexp:
    return rounded
  # Subnormal numbers, which that makes zero.
  step = float(to.smallest_subnormal)
  return jnp.where(x < float(to.smallest_normal), jnp.round(x / step) * step, rounded)


def _check_types(a: jnp.dtype, b: jnp.dtype, out: jnp.dtype, b_layout: str) -> None:
  """NotImplementedError unless sparse wgmma multiplies these types."""
  wide, narrow = ('bfloat16', 'float16'), ('float8_e4m3fn', 'float8_e5m2')
  if not ((a.name in wide and a == b) or (a.name in narrow and b.name in narrow)):
    raise NotImplementedError(f'sparse wgmma multiplies pairs of bfloat16, float16 or float8, not {a} x {b}')
  if a.name in narrow and b_layout != 'nk':
    raise NotImplementedError("8-bit wgmma reads K-major operands only: B must be [N, K], b_layout='nk'")
  if out.name not in (*wide, 'float32'):
    raise NotImplementedError(f'the kernel writes bfloat16, float16 or float32, not {out}')


def _padded(p: Problem, c: Config) -> Problem:
  """The problem with sizes that TMA can address: whole boxes of 8 rows by one swizzle width of each matrix.

  Rounding is explicit and copies the operand; sizes that are multiples of 64 (of a step along K) are left alone.
  A dimension that a copy steps through box by box holds two boxes at least: Mosaic drops a dimension of one box from
  the copy, index included, and what should fall outside lands in that box.
  """
  along_out, along_b = 128 // p.out_dtype.itemsize, 128 // p.b_dtype.itemsize
  m = _boxes(p.m, along_out, 2) if p.out_layout == 'nm' else _boxes(p.m, 8)
  # Where N is the outer dimension of B and D, as in a forward pass, a copy of less than one box stops at its end: a few
  # tokens cost no pass of padding and none of cutting. Mosaic refuses sizes above a box that are not whole boxes.
  n = p.n if p.n < 8 and (p.b_layout, p.out_layout) == ('nk', 'nm') else _boxes(p.n, 8)
  if p.out_layout == 'mn':
    n = _boxes(n, along_out, 2)
  if p.b_layout == 'kn':
    n = _boxes(n, along_b, 2)
  k = p.k
  if not ends_half_way(p):
    # A step of 128 16-bit entries reads boxes of 64 kept values, which make 128 of K.
    k = _boxes(_boxes(k, 128 // p.a_dtype.itemsize, 2), c.bk)
  return dataclasses.replace(p, m=m, n=n, k=k)


def _boxes(size: int, box: int, least: int = 1) -> int:
  return max(ceil(size, box), least) * box


def _factors(p: Problem, c: Config, vectors: Vectors) -> list[Array]:
  """Scalar scales, row scale inverted, bias and column scale inverted, as far as there are any, in whole tiles."""
  rows, columns = (ceil(size, tile) * tile for size, tile in zip((p.m, p.n), c.cluster_tile, strict=True))
  row, column = (1 / scale if _is_vector(scale) else None for scale in vectors[1:])
  found = [
    operand.pad_to(vector, (size,))
    for vector, size in ((row, rows), (vectors.bias, rows), (column, columns)) if vector is not None
  ]  # fmt: skip
  return [scalar.reshape(1) for scalar in vectors.scalars] + found


def _is_vector(scale: Array | None) -> bool:
  return scale is not None and scale.ndim == 1


def chosen_config(p: Problem, device: _device.Device) -> Config:
  """What was measured for this very problem, else for its neighbour if that suits, else what should be fastest."""
  num_sms = device.num_sms or H100_SMS
  choice = _records.lookup(device.slug, OP, p.key, implementation='mosaic_gpu')
  if choice is None or choice.config is None:
    return default_config(p, num_sms)
  measured = Config(**choice.config)
  # It may be too large for the outputs of this call.
  return measured if choice.distance == 0 and fits(p, measured) else of_neighbour(p, measured, num_sms)
