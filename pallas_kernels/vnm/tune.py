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
from jax import Array
import jax.numpy as jnp

from pallas_kernels import _device, _records, _tuning
from pallas_kernels.vnm import api, mosaic_gpu
from pallas_kernels.vnm.arg_specs import dense_ways, operand, Spec, SPECS
from pallas_kernels.vnm.format import decompress_operand, VNMOperand

_BF16 = jnp.dtype('bfloat16')


def arguments(parser: argparse.ArgumentParser) -> None:
  """What `tune vnm_matmul` takes."""
  parser.add_argument('--select', nargs='+', default=list(SPECS), choices=SPECS, metavar='NAME', help=', '.join(SPECS))
  parser.add_argument('--tuned', type=pathlib.Path, default=_records.TUNED, help='folder of tuned records')


def run(args: argparse.Namespace) -> int:
  """Exit status 1 if no setting of a problem is right."""
  return max(tune(SPECS[name], args.tuned) for name in args.select)


def configs(v: int) -> list[mosaic_gpu.Config]:
  """The settings that are worth timing."""
  best = mosaic_gpu.default_config(v)
  change = dataclasses.replace
  if v % 128:
    # Places by launch are not among them: a program repeated alone may keep a good launch, a training step does not.
    return [best, change(best, stages=2, delay=0), change(best, band=16), change(best, band=64)]
  if v % 256 == 0:
    return [best, change(best, delay=0)]
  placed = [change(best, band=band, slots=slots) for band in (32, 64) for slots in (1, 2)]
  by_launch = [change(best, places='launch', band=32, slots=slots) for slots in (1, 2)]
  return [*placed, *by_launch, mosaic_gpu.Config(slots=2), mosaic_gpu.Config(places='gpc', slots=2)]


def tune(spec: Spec, folder: pathlib.Path = _records.TUNED) -> int:
  """Writes `<folder>/<device>/vnm_matmul.json` for a problem; 1 if no setting is right."""
  m, k, n = spec.shape
  device = _device.current()

  def make(key: Array) -> tuple[VNMOperand, Array, Array]:
    a = operand(m, k, spec.v, spec.group, key)
    b = jax.random.normal(jax.random.fold_in(key, 1), (k, n), jnp.float32).astype(a.dtype)
    return a, b, decompress_operand(a)

  key = jax.random.key(m + spec.group)
  a, b, dense = jax.eval_shape(make, key)
  problem, ways = api.key(a, n, a.dtype, 'mn'), dense_ways(a.dtype)
  choice = _records.lookup(device.slug, api.OP, problem, implementation='mosaic_gpu', folder=folder)
  known = mosaic_gpu.Config(**choice.config) if choice and choice.config else mosaic_gpu.default_config(spec.v)
  settings = list(dict.fromkeys([known, *configs(spec.v)]))
  right = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
  jobs: list[tuple[Any, ...]] = [(make, (key,)), (right, (dense, b)), *((f, (dense, b)) for f in ways.values())]
  made, right, *compiled = _tuning.compile_all(jobs + [(_multiply(c), (a, b)) for c in settings])
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
      candidates.append(_tuning.Candidate('mosaic_gpu', dataclasses.asdict(config), f, (a, b)))
  baseline = _tuning.Candidate('dense', {'way': best}, dict(zip(ways, compiled, strict=False))[best], (dense, b))
  entry = _tuning.tune(
    problem, baseline, candidates, expected, _tuning.times_ms, finalists=2,
    quick=dict(rounds=2, iterations=10, gap_s=0.05), final=dict(rounds=6, iterations=20, gap_s=0.1),
  )
  _records.save(folder / device.slug / f'{api.OP}.json', _device.environment() | {'op': api.OP}, [entry])
  row, dense_ms = _records.best_of(entry, 'mosaic_gpu'), statistics.median(entry['baseline']['samples_ms'])
  if row is None:
    print(f'{spec.name}: no setting is right: {[c["rejected"] for c in entry["candidates"]]}', flush=True)
    return 1
  ms = statistics.median(row['final_samples_ms'])
  print(f'{spec.name}: {ms:.4f} ms, dense {dense_ms:.4f}, x{dense_ms / ms:.3f}, {row["config"]}', flush=True)
  return 0


def _multiply(config: mosaic_gpu.Config) -> Any:
  return functools.partial(mosaic_gpu.vnm_matmul, out_dtype=_BF16, out_layout='mn', config=config)
