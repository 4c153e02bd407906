"""Times settings of `vnm_matmul` on the GPU at hand and keeps what was measured.

`python -m pallas_kernels tune vnm_matmul` is the way in.
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _device, _own_kernel, _records, _tuning
from pallas_kernels.vnm import api
from pallas_kernels.vnm.arg_specs import dense_ways, matrices, Spec, SPECS


def arguments(parser: argparse.ArgumentParser) -> None:
  """What `tune vnm_matmul` takes."""
  parser.add_argument('--select', nargs='+', default=list(SPECS), choices=SPECS, metavar='NAME', help=', '.join(SPECS))


def run(args: argparse.Namespace) -> int:
  """Exit status 1 if no setting of a problem is right."""
  return max(tune(SPECS[name], args.tuned) for name in args.select)


def tune(spec: Spec, folder: pathlib.Path = _records.TUNED) -> int:
  """Writes `<folder>/<device>/vnm_matmul.json` for a problem; 1 if no setting is right."""
  device, kernel = _device.current(), _own_kernel.here(api.OP, api.MATMULS)
  make, key = functools.partial(matrices, spec), jax.random.key(spec.shape[0] + spec.group)
  a, b, dense = jax.eval_shape(make, key)
  problem, ways = api.key(a, b.shape[1], a.dtype, 'mn'), dense_ways(a.dtype)
  known = kernel.known(problem, folder) or kernel.module.default_config(spec.v)
  settings = list(dict.fromkeys([known, *kernel.module.settings(spec.v)]))
  right = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
  jobs: list[tuple[Any, ...]] = [(make, (key,)), (right, (dense, b)), *((f, (dense, b)) for f in ways.values())]
  multiply = functools.partial(kernel.module.vnm_matmul, out_dtype=a.dtype, out_layout='mn')
  jobs += [(functools.partial(multiply, config=c), (a, b)) for c in settings]
  made, right, *compiled = _tuning.compile_all(jobs)
  for f in (made, right, *compiled[: len(ways)]):
    if isinstance(f, Exception):
      raise f
  a, b, dense = made(key)
  expected = right(dense, b)
  heat = {
    name: statistics.median(_tuning.times_ms(f, (dense, b), 10)) for name, f in zip(ways, compiled, strict=False)
  }
  best = min(heat, key=heat.__getitem__)
  candidates = []
  for config, f in zip(settings, compiled[len(ways) :], strict=True):
    if isinstance(f, Exception):
      print(f'{spec.name}: {config} does not compile: {f}', flush=True)
    else:
      candidates.append(_tuning.Candidate(kernel.name, dataclasses.asdict(config), f, (a, b)))
  baseline = _tuning.Candidate('dense', {'way': best}, dict(zip(ways, compiled, strict=False))[best], (dense, b))
  entry = _tuning.tune(
    problem, baseline, candidates, expected, _tuning.times_ms, finalists=2,
    quick=dict(rounds=2, iterations=10, gap_s=0.05), final=dict(rounds=6, iterations=20, gap_s=0.1),
  )
  _records.save(folder / device.slug / f'{api.OP}.json', _device.environment() | {'op': api.OP}, [entry])
  row, dense_ms = _records.best_of(entry, kernel.name), statistics.median(entry['baseline']['samples_ms'])
  if row is None:
    print(f'{spec.name}: no setting is right: {[c["rejected"] for c in entry["candidates"]]}', flush=True)
    return 1
  ms = statistics.median(row['final_samples_ms'])
  print(f'{spec.name}: {ms:.4f} ms, dense {dense_ms:.4f}, x{dense_ms / ms:.3f}, {row["config"]}', flush=True)
  return 0
