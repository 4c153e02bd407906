"""This package's kernel of `sparse_matmul` against the dense matmul where a GPU has no record of it; see `_checks`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _checks, _device, _tuning
from pallas_kernels._own_kernel import OwnKernel
from pallas_kernels.sparse_matmul import _prepared, _settings, mosaic_gpu

# A smaller matmul takes microseconds, and there are many of them: as dense, it costs nobody much.
LEAST_MULTIPLICATIONS = 2**30


def outcome(device: _device.Device, key: Mapping[str, Any]) -> _checks.Entry | None:
  """The outcome for a problem; None if it is too small, no kernel takes its types, or the check failed."""
  p = _problem(**key)
  own = _settings.own_kernel(p, device)
  if p.m * p.n * p.k < LEAST_MULTIPLICATIONS or own is None or (p.a_dtype.itemsize == 1 and p.b_layout == 'kn'):
    return None
  settings = _settings.of_library(p, own)
  return _checks.outcome(device, own.op, key, settings, lambda: _entry(p, own, settings))


def _problem(m: int, n: int, k: int, dtype: str, out_dtype: str, b_layout: str, out_layout: str) -> mosaic_gpu.Problem:
  a, eight_bit = jnp.dtype(dtype), jnp.dtype(dtype).itemsize == 1
  b = jnp.dtype('float8_e4m3fn') if eight_bit else a
  return mosaic_gpu.Problem(m, n, k, a, b, jnp.dtype(out_dtype), b_layout, out_layout, scalars=2 * eight_bit)


def _entry(p: mosaic_gpu.Problem, own: OwnKernel, settings: list[Any]) -> _checks.Entry:
  compiled = _settings.compiled(p, own, settings)
  try:
    ready = _prepared.prepare(p, compiled, p.m + p.k, own)
    return _tuning.tune(
      p.key, ready.dense, ready.sparse, ready.expected, _prepared.timer(p), finalists=1,
      quick=dict(rounds=1, iterations=5, gap_s=_prepared.gap_s(p, 5)),
      final=dict(rounds=4, iterations=10, gap_s=_prepared.gap_s(p, 10)),
    )
  finally:
    _tuning.let_others_profile()
