"""Times `sparse_matmul` as the library runs it against dense and cuSPARSELt: `python -m pallas_kernels bench`.

Every comparison is made in one process, on the same random data, with the same output layout (`_prepared`).
"""

import argparse
from collections.abc import Iterator, Sequence
import dataclasses
import json
import logging
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _bench, _device, _records, _tuning
from pallas_kernels.sparse_matmul import (
  _prepared,
  _settings,
  arg_specs,
  cusparselt,
  cusparselt_search,
  mosaic_gpu,
)
from pallas_kernels.sparse_matmul.api import OP

Array = jax.Array


def arguments(parser: argparse.ArgumentParser) -> None:
  """What `bench sparse_matmul` takes."""
  arg_specs.arguments(parser)
  parser.add_argument('--tuned', type=pathlib.Path, default=_records.TUNED, help='folder of tuned records')


def run(args: argparse.Namespace) -> int:
  """Exit status 0; a wrong result is an error."""
  for name in args.select:
    bench(name, args.out, args.tuned)
  return 0


def cusparselt_baseline(
  p: mosaic_gpu.Problem, x: _prepared.Inputs, expected: Array, device: _device.Device, folder: pathlib.Path
) -> tuple[_tuning.Candidate, list[float]] | None:
  """cuSPARSELt's fastest right algorithm, its blob given, and times of making that; None where there is none."""
  try:
    known = cusparselt.tuned_config(
      p.m, p.n, p.k, p.a_dtype, p.out_dtype, p.b_layout, p.out_layout, device, folder=folder
    )
    return cusparselt_search.fastest(p, x.a_dense, x.b, expected, known=known)
  except NotImplementedError as e:
    logging.warning('no cuSPARSELt baseline: %s', e)
    return None


def bench(selection: str, out: pathlib.Path, folder: pathlib.Path = _records.TUNED) -> None:
  """Appends one record a spec to `out`: tuned sparse against dense, interleaved and sustained."""
  device, environment = _device.current(), _device.environment()
  for p, specs in _prepared.unique(arg_specs.SELECTIONS[selection]):
    own = _settings.own_kernel(p, device)
    settings = _settings.of_library(p, own, folder)
    compiled = _settings.compiled(p, own, settings)
    if settings and not compiled:
      raise ValueError(f'{p.key}: {settings[0]} does not compile')
    if not compiled:
      print(f'{p.key}: not measured, no kernel of this package takes it on {device.name}', flush=True)
      continue
    ready = _prepared.prepare(p, compiled, p.m + p.n + 1, own)
    x, runs = ready.x, [*ready.sparse, ready.dense]
    dense = 'dense' if p.a_dtype.itemsize == 2 else 'dense_fp8'
    # Half of the entries of `ready.dense` are zeros, which take less power; those of a dense weight are not.
    full = _prepared.full(p, jax.random.key(p.m + p.n + 2))
    runs.append(dataclasses.replace(ready.dense, args=(_prepared.many(p, full), x.b)))
    names = [dense, f'{dense}_without_zeros']
    if p.a_dtype.itemsize == 1:
      wide = dataclasses.replace(p, a_dtype=jnp.dtype('bfloat16'), b_dtype=jnp.dtype('bfloat16'))
      runs.append(_prepared.dense_candidate(wide, _prepared.inputs(wide, jax.random.key(p.m + p.n + 1))))
      names.append('dense')
    error, reason = _tuning.verify(runs[0], ready.expected)
    if reason:
      raise ValueError(f'{p.key}: {reason}')
    count = _prepared.weights(p)
    vendor = cusparselt_baseline(p, x, ready.expected, device, folder) if count == 1 else None
    if vendor is not None:
      runs.append(vendor[0])
      names.append('cusparselt')
    samples = _tuning.interleave(runs, _prepared.timer(p), rounds=6, iterations=20)
    sustained = _tuning.sustained([(run.f, run.args) for run in runs], matmuls=count)
    for spec in specs:
      record = _record(spec, p, environment, runs, names, samples, sustained, error)
      if vendor is not None:
        # Apart from the matmul: who keeps A over many matmuls pays it once.
        record['baselines']['cusparselt']['compress_samples_ms'] = vendor[1]
      _bench.append(out, record)
      ratio = record['baselines'][names[0]]['median_ms'] / record['median_ms']
      hot = record['baselines'][names[0]]['sustained_ms'] / record['sustained_ms']
      full_ratios = [record['baselines'][names[1]][time] / record[time] for time in ('median_ms', 'sustained_ms')]
      print(
        f'{spec.tokens}x{spec.d_in}x{spec.d_out} {spec.role} {spec.dtype.name}: {record["tflops"]:.0f} TFLOP/s,'
        f' x{ratio:.3f}{_over_cusparselt(record)}; sustained {spec.flops / record["sustained_ms"] / 1e9:.0f},'
        f' x{hot:.3f}; over dense without zeros x{full_ratios[0]:.3f}, x{full_ratios[1]:.3f};'
        f' {error:.1e} {runs[0].implementation} {_prepared.difference(runs[0].config)}', flush=True,
      )


def _over_cusparselt(record: dict[str, Any]) -> str:
  baseline = record['baselines'].get('cusparselt')
  return f' (x{baseline["median_ms"] / record["median_ms"]:.3f} cuSPARSELt)' if baseline else ''


def _record(
  spec: arg_specs.Spec, p: mosaic_gpu.Problem, environment: dict[str, Any], runs: Sequence[_tuning.Candidate],
  names: Sequence[str], samples: list[list[float]], sustained: Sequence[dict[str, Any]],
  error: float,
) -> dict[str, Any]:

  def timed(i: int) -> dict[str, Any]:
    return dict(samples_ms=samples[i], median_ms=statistics.median(samples[i])) | sustained[i]

  mine = timed(0)
  return dict(
    bench=OP, **environment, op=OP, role=spec.role, dtype=spec.dtype.name,
    shape=dict(tokens=spec.tokens, d_in=spec.d_in, d_out=spec.d_out, m=p.m, n=p.n, k=p.k),
    layouts=dict(b=p.b_layout, out=p.out_layout), mode='forward',
    implementation=runs[0].implementation, config=runs[0].config,
    **mine,
    baselines={name: timed(i + 1) | {'config': runs[i + 1].config} for i, name in enumerate(names)},
    tflops=spec.flops / mine['median_ms'] / 1e9, sustained_tflops=spec.flops / mine['sustained_ms'] / 1e9,
    error=error, headline=spec.headline,
  )


def table_of_records(folder: pathlib.Path = _records.TUNED) -> Iterator[str]:
  """Lines of a table: measured problems, dense time, that of the fastest sparse back end with its set-up, choice."""
  yield f'{"m":>6} {"n":>6} {"k":>6}  {"dtype":14} {"B":2} {"D":2}  {"dense ms":>9} {"sparse ms":>9}  ratio  choice'
  path = folder / _device.current().slug / f'{OP}.json'
  paths = [path] if path.exists() else sorted(folder.glob(f'*/{OP}.json'))
  for found in paths:
    yield f'# {found.parent.name}'
    for entry in json.loads(found.read_text())['entries']:
      key, dense_ms = entry['key'], _records.times_ms(entry)['dense']
      ms = min(_records.sparse_ms(entry).values(), default=None)
      if ms is None:
        continue
      yield (
        f'{key["m"]:6} {key["n"]:6} {key["k"]:6}  {key["dtype"]:14} {key["b_layout"]:2} {key["out_layout"]:2}'
        f'  {dense_ms:9.4f} {ms:9.4f}  {dense_ms / ms:5.2f}  {entry["choice"]["implementation"]}'
      )
