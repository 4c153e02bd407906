"""The packing kernels: checked against the reference, and timed; `python -m pallas_kernels bench pack`."""

from collections.abc import Iterator
import concurrent.futures
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _passes, _triton
from pallas_kernels._passes import differing, float8_inputs
from pallas_kernels.pack import arg_specs, reference

pack = _triton.kernels('pallas_kernels.pack.triton')
BF16, F32 = jnp.bfloat16, jnp.float32
# Name of an op, shape and dtype of its matrix, options, arrays.
_Job = tuple[str, tuple[int, ...], Any, dict[str, Any], tuple[jax.Array, ...]]


def check() -> list[dict[str, Any]]:
  """Every kernel against the reference, on ragged shapes with ties, infinities and NaN."""

  def compare(job: Any) -> dict[str, Any]:
    name, shape, source, options, arrays = job
    made = [jax.jit(functools.partial(getattr(m, name), **options))(*arrays) for m in (pack, reference)]
    return dict(op=name, shape=shape, source=jnp.dtype(source).name, **options, differing=differing(*made))

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    return list(pool.map(compare, [*_in_16_bits(), *_in_float8()]))


def _in_16_bits() -> Iterator[_Job]:
  ragged, square = (2, 1028, 260), (512, 512)
  for shape, source, special in (
    (ragged, BF16, 0.003), (square, jnp.float16, 0.003), (square, F32, 0.003),
    (ragged, BF16, 0.0), (square, jnp.float16, 0.0), (square, F32, 0.0),
  ):  # fmt: skip
    rng = np.random.default_rng(0)
    w = rng.standard_normal(shape).astype(np.float32)
    w = np.where(rng.random(shape) < 0.2, np.round(2 * w), w)
    for value in (-0.0, np.inf, -np.inf, np.nan):
      w = np.where(rng.random(shape) < (special if value else 0.003), np.float32(value), w)
    w = jnp.asarray(w).astype(source)
    codes = reference.mask_codes(reference.transposable.transposable_mask(-w[..., ::-1]))
    out = dict(dtype=jnp.dtype(jnp.float16 if source == jnp.float16 else BF16))
    yield 'transposable_pack', shape, source, out, (w,)
    yield 'masked_pack', shape, source, out, (w, codes)
    if special:  # such values matter to the first alone
      yield from _of_one_operand(w, jnp.full(shape[:-2], 1.48, F32), out, ())


def _in_float8() -> Iterator[_Job]:
  for shape, _, dtype, top, x in float8_inputs():
    scale = jnp.full(shape[:-2], float(jnp.finfo(dtype).max) / top, F32)
    codes = reference.mask_codes(reference.transposable.transposable_mask(-x[..., ::-1]))
    yield 'masked_pack', shape, x.dtype, dict(dtype=dtype), (x, codes, scale)
    yield from _of_one_operand(x, scale, dict(dtype=dtype), (scale,))


def _of_one_operand(
  x: jax.Array, scale: jax.Array, out: dict[str, Any], of_sample: tuple[jax.Array, ...]
) -> Iterator[_Job]:
  for axis in (-1, -2):
    yield 'soft_threshold_pack', x.shape, x.dtype, out | dict(axis=axis), (x, scale)
  yield 'mvue_pack', x.shape, x.dtype, out | dict(origin=(1, 2, 4)), (x, jax.random.key(5), *of_sample)


def cases() -> list[_passes.Case]:
  """All rows; the first one beside PyTorch."""
  first, *others = arg_specs.cases()
  return [dataclasses.replace(first, baselines={'pytorch': torch_ms}), *others]


def torch_ms() -> list[float]:
  """PyTorch's own prune + pack both ways, by CUDA events; empty if PyTorch lacks it."""
  try:
    import torch

    w = torch.randn(arg_specs.WEIGHT, device='cuda', dtype=torch.bfloat16)
    for _ in range(5):
      torch._sparse_semi_structured_tile(w, '')
    times = []
    for _ in range(30):
      start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
      start.record()
      torch._sparse_semi_structured_tile(w, '')
      end.record()
      torch.cuda.synchronize()
      times.append(start.elapsed_time(end))
    return times
  except Exception as e:
    print('no PyTorch baseline:', e)
    return []


OP = _passes.Op('pack', cases, check)
arguments = _passes.bench_arguments
run = functools.partial(_passes.bench, OP)
