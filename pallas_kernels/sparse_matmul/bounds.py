"""What bounds the matmul: loops with clock and power, and the counters of single launches: `... pallas_kernels bounds`.

Dense, this package's kernel and cuSPARSELt run in one process on the same data. A second process, under NVIDIA's `ncu`
with clocks left alone, launches each once more. XLA's choice of a dense kernel differs from process to process, so the
second takes the first one's programs from a cache.
"""

import argparse
from collections.abc import Collection, Mapping, Sequence
import csv
import ctypes
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _bench, _device, _power, _records, _tuning
from pallas_kernels.sparse_matmul import _prepared, _settings, arg_specs, bench, cusparselt
from pallas_kernels.sparse_matmul.api import OP

CASES = {
  'square': arg_specs.SQUARE,
  'forward': [next(s for s in specs if s.role == 'forward') for specs in (arg_specs.HEADLINE, arg_specs.FP8)],
}
# Field -> (factor of its unit, metric). The tensor cores of an SM are four, whose cycles ncu adds up.
COLUMNS: Mapping[str, tuple[float, str]] = {
  'ms': (1e-6, 'gpu__time_duration.sum'),
  'mcycles_elapsed': (1e-6, 'sm__cycles_elapsed.max'),
  'mcycles_active': (1e-6, 'sm__cycles_active.avg'),
  'mcycles_tensor': (0.25e-6, 'sm__pipe_tensor_cycles_active.avg'),
  'port_mwavefronts': (1e-6, 'l1tex__data_pipe_lsu_wavefronts.avg'),
  'l2_gigabytes': (1e-9, 'lts__t_bytes.sum'),
  'l2_percent': (1.0, 'lts__t_sectors.avg.pct_of_peak_sustained_elapsed'),
  'dram_percent': (1.0, 'dram__throughput.avg.pct_of_peak_sustained_elapsed'),
}
_WARM_UP_S, _LOOP_S, _ZEROS_S = 0.35, 1.3, 0.5
_CHILD = 'pallas_kernels.sparse_matmul.bounds'
_PATIENCE_S = 400


def run(args: argparse.Namespace) -> int:
  """Appends a record of each matmul and implementation; exit status 1 if a case failed or had no counters."""
  ncu = args.ncu or shutil.which('ncu') or '/usr/local/cuda/bin/ncu'
  specs = [spec for name in args.select for spec in CASES[name]]
  environment, missed = _device.environment(), 0
  cache = dict(jax_persistent_cache_min_compile_time_secs=0.0, jax_persistent_cache_min_entry_size_bytes=-1)
  with tempfile.TemporaryDirectory() as folder:
    for name, value in (cache := cache | dict(jax_compilation_cache_dir=folder)).items():
      jax.config.update(name, value)
    variables = {name.upper(): str(value) for name, value in cache.items()}
    for spec in specs:
      loops = _loops(spec)
      try:
        launches, reason = _profiled(spec, {name: row['config'] for name, row in loops.items()}, ncu, variables), None
      except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        launches, reason = {}, repr(error)
        print(f'{spec}: NO COUNTERS: {reason}', flush=True)
        missed = 1
      p = _prepared.problem(spec)
      for name, row in loops.items():
        found = launches.get(name, {'kernel': None, 'profiled': None, 'counters': None, 'unprofiled': reason})
        shape = dict(tokens=spec.tokens, d_in=spec.d_in, d_out=spec.d_out, m=p.m, n=p.n, k=p.k)
        record = dict(bench='matmul_bounds', **environment, op=OP, role=spec.role, shape=shape, dtype=spec.dtype.name)
        _bench.append(args.out, record | dict(implementation=name) | row | found | dict(
          note='sustained: 1.3 s after 0.35 s, medians; B zero: 0.5 s; profiled: one launch, clocks left alone',
        ))  # fmt: skip
        print(f'{p.key} {name}: {row["sustained"]} {found["kernel"]} {found["profiled"]}', flush=True)
  return missed


def _loops(spec: arg_specs.Spec) -> dict[str, dict[str, Any]]:
  """Settings, and figures of the loops, by implementation."""
  p, device = _prepared.problem(spec), _device.current()
  own = _settings.own_kernel(p, device)
  compiled = _settings.compiled(p, own, _settings.of_library(p, own))
  ready = _prepared.prepare(p, compiled, p.m + p.n + 1, own)
  runs = [ready.dense, *ready.sparse[:1]]
  vendor = bench.cusparselt_baseline(p, ready.x, ready.expected, device, _records.TUNED)
  if vendor is not None:
    runs.append(vendor[0])
  rows = {}
  for run in runs:
    zeros = (*run.args[:-1], jnp.zeros_like(run.args[-1]))
    rows[run.implementation] = dict(
      config=run.config, sustained=_loop(run.f, run.args, _LOOP_S), sustained_b_zero=_loop(run.f, zeros, _ZEROS_S)
    )
  return rows


def _loop(f: Any, args: Sequence[Any], seconds: float) -> dict[str, Any]:
  _tuning.sustained_ms(f, args, seconds=_WARM_UP_S)
  with _power.recorded() as reading:
    ms = _tuning.sustained_ms(f, args, seconds=seconds)
  fields = reading().fields(ms)
  clock = fields['clock_mhz']
  return dict(ms=ms) | fields | dict(mcycles=None if clock is None else ms * clock / 1e3)


def launches_of(text: str) -> list[dict[str, Any]]:
  """Kernels in `ncu --csv --page raw --print-units base`, as launched: name, columns, and the counters behind them."""
  lines = [line for line in text.splitlines() if line.startswith('"')]
  rows = []
  for row in csv.DictReader(lines):
    if not row['ID']:  # the second line: units
      continue
    counters = {name: float(row[name].replace(',', '')) for _, name in COLUMNS.values()}
    profiled = {field: round(counters[name] * factor, 4) for field, (factor, name) in COLUMNS.items()}
    rows.append(dict(kernel=row['Kernel Name'], profiled=profiled, counters=counters))
  return rows


def matmuls_of(launches: Sequence[dict[str, Any]], names: Collection[str]) -> dict[str, dict[str, Any]]:
  """The longest launches, as many as names, which are in the order of launch; what prepares operands is shorter.

  Raises:
    ValueError: there are not that many, or that of this package is not where it should be.
  """
  longest = sorted(range(len(launches)), key=lambda i: launches[i]['profiled']['ms'])[-len(names) :]
  found = dict(zip(names, (launches[i] for i in sorted(longest)), strict=False))
  own = [name for name, row in found.items() if 'mosaic' in row['kernel']]
  if len(found) < len(names) or own != [name for name in names if name == 'mosaic_gpu']:
    raise ValueError(f'ncu saw {[row["kernel"] for row in launches]} of {list(names)}')
  return found


def _profiled(
  spec: arg_specs.Spec, configs: Mapping[str, Any], ncu: str, variables: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
  """Launches by implementation; OSError, ValueError, KeyError or TimeoutExpired says why there are none."""
  case = next([name, i] for name, specs in CASES.items() for i, s in enumerate(specs) if s == spec)
  with tempfile.TemporaryDirectory() as folder:
    log = pathlib.Path(folder, 'ncu.csv')
    options = [
      '--profile-from-start', 'off', '--clock-control', 'none', '--metrics',
      ','.join(name for _, name in COLUMNS.values()), '--csv', '--page', 'raw', '--print-units', 'base', '--log-file',
      str(log),
    ]  # fmt: skip
    # Between passes ncu restores all memory of an allocation, which JAX's reserve is one of.
    found = subprocess.run(
      [ncu, *options, sys.executable, '-m', _CHILD, json.dumps([case, configs])], capture_output=True, text=True,
      check=False, env=os.environ | variables | {'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.1'}, timeout=_PATIENCE_S,
    )  # fmt: skip
    text = log.read_text() if log.exists() else ''
  said = '\n'.join((text, found.stdout, found.stderr))
  if 'ERR_NVGPUCTRPERM' in said:
    raise ValueError('this user may not read counters (ERR_NVGPUCTRPERM): be root, or set the driver to allow it')
  launches = launches_of(text)
  if found.returncode or not launches:
    raise ValueError(f'ncu ended with {found.returncode}: {text[-800:]} {found.stdout[-800:]} {found.stderr[-1500:]}')
  return matmuls_of(launches, configs)


def launch(case: Sequence[Any], configs: Mapping[str, Any]) -> None:
  """Launches each implementation once between calls that start and stop a profiler; CUPTI must not run beside it."""
  p, device = _prepared.problem(CASES[case[0]][case[1]]), _device.current()
  x = _prepared.inputs(p, jax.random.key(p.m + p.n + 1))
  # The driver's calls are for the context that is current in this thread; XLA uses the primary one.
  cuda, context = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p()
  _check(cuda.cuInit(0))
  _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
  _check(cuda.cuCtxSetCurrent(context))
  for name, config in configs.items():
    if name == 'dense':
      args = (x.a_dense, x.b)
      f = _prepared.dense_way(p, config['way'], args)
    elif name == 'cusparselt':
      setting = cusparselt.Config(**{key: value for key, value in config.items() if key != 'version'})
      args = (jax.jit(cusparselt.prepare)(x.a_dense), x.b)
      f = jax.jit(lambda a, b, setting=setting: cusparselt.matmul(
        a, b, out_dtype=p.out_dtype, b_layout=p.b_layout, out_layout=p.out_layout, config=setting))  # fmt: skip
    else:
      own = _settings.own_kernel(p, device)
      args, f = (x.a, x.b), _settings.compiled(p, own, _settings.of_library(p, own))[0][1]
    for _ in range(3):
      jax.block_until_ready(f(*args))
    _check(cuda.cuProfilerStart())
    jax.block_until_ready(f(*args))
    _check(cuda.cuProfilerStop())


def _check(status: int) -> None:
  if status:
    raise RuntimeError(f'the profiler does not start or stop: error {status} of the CUDA driver')


if __name__ == '__main__':
  launch(*json.loads(sys.argv[1]))
