"""The packing kernels: checked against the reference, and timed; `python -m pallas_kernels bench pack`."""

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


def check16() -> list[dict[str, Any]]:
  """Every kernel that packs 16 bits against the reference, on ragged shapes with ties, infinities and NaN."""
  jobs = []
  ragged, square = (2, 1028, 260), (512, 512)
  for shape, dtype, special in (
    (ragged, BF16, 0.003), (square, jnp.float16, 0.003), (square, jnp.float32, 0.003),
    (ragged, BF16, 0.0), (square, jnp.float16, 0.0), (square, jnp.float32, 0.0),
  ):  # fmt: skip
    out = jnp.float16 if dtype == jnp.float16 else BF16
    rng = np.random.default_rng(0)
    w = rng.standard_normal(shape).astype(np.float32)
    w = np.where(rng.random(shape) < 0.2, np.round(2 * w), w)
    for value in (-0.0, np.inf, -np.inf, np.nan):
      w = np.where(rng.random(shape) < (special if value else 0.003), np.float32(value), w)
    w = jnp.asarray(w).astype(dtype)
    codes = reference.mask_codes(reference.transposable.transposable_mask(-w[..., ::-1]))
    scale, key = jnp.full(shape[:-2], 1.48, jnp.float32), jax.random.key(5)
    calls = {
      'transposable_pack': (lambda m, w, o=out: m.transposable_pack(w, dtype=o), (w,)),
      'masked_pack': (lambda m, w, p, o=out: m.masked_pack(w, p, dtype=o), (w, codes)),
    }
    # Special values matter to the first alone.
    for axis in (-1, -2) if special else ():
      calls[f'soft_threshold_pack{axis}'] = (
        lambda m, w, s, a=axis, o=out: m.soft_threshold_pack(w, s, axis=a, dtype=o), (w, scale),
      )  # fmt: skip
      calls[f'mvue_pack{axis}'] = (
        lambda m, w, k, a=axis, o=out: m.mvue_pack(w, k, axis=a, origin=(1, 2, 4), dtype=o), (w, key),
      )  # fmt: skip
    jobs += [(name, shape, dtype, *call) for name, call in calls.items()]

  def compare(job: Any) -> dict[str, Any]:
    name, shape, dtype, call, arrays = job
    found = jax.jit(functools.partial(call, pack))(*arrays)
    counts = differing(found, jax.jit(functools.partial(call, reference))(*arrays))
    return dict(op=name, shape=shape, dtype=jnp.dtype(dtype).name, differing=counts)

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    return list(pool.map(compare, jobs))


def check8() -> list[dict[str, Any]]:
  """Every kernel that packs float8 against the reference."""
  jobs = []
  for shape, source, dtype, top, x in float8_inputs():
    scale = jnp.full(shape[:-2], float(jnp.finfo(dtype).max) / top, F32)
    for axis in (-1, -2):
      more = dict(axis=axis)
      jobs.append((source, dtype, top, 'soft_threshold_pack8', (x, scale), more))
      jobs.append((source, dtype, top, 'mvue_pack8', (x, jax.random.key(5), scale), more | dict(origin=(1, 2, 4))))

  def compare(job: Any) -> dict[str, Any]:
    source, dtype, top, name, arrays, options = job
    made = [jax.jit(functools.partial(getattr(m, name), dtype=dtype, **options))(*arrays) for m in (pack, reference)]
    found = dict(op=f'{name}{options["axis"]}', source=jnp.dtype(source).name, dtype=dtype.name, top=top)
    return found | dict(differing=differing(*made))

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    return list(pool.map(compare, jobs))


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


OP = _passes.Op('pack', cases, lambda: [*check16(), *check8()])
arguments = _passes.bench_arguments
run = functools.partial(_passes.bench, OP)
