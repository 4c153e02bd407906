"""Tunes, benchmarks and verifies `sparse_matmul` on the card at hand; `python -m pallas_kernels` is the way in.

Every comparison is made in one process, on the same random data, with the same output layout (`_prepared`).
"""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _device, _processes, _records, _tuning
from pallas_kernels.sparse_matmul import (
  _own_kernel,
  _prepared,
  arg_specs,
  cusparselt,
  cusparselt_search,
  mosaic_gpu,
)
from pallas_kernels.sparse_matmul.verify import verify

__all__ = ['bench', 'table_of_records', 'tune', 'verify']

Array = jax.Array
OP = 'sparse_matmul'
SELECTIONS = {
  'square': arg_specs.SQUARE, 'headline': arg_specs.HEADLINE, 'small': arg_specs.SMALL,
  'gpt2_124m': arg_specs.GPT2_124M, 'gpt2_774m': arg_specs.GPT2_774M, 'gpt2_1558m': arg_specs.GPT2_1558M,
  'llama_3b': arg_specs.LLAMA_3B, 'block': arg_specs.BLOCK, 'models': arg_specs.MODELS, 'fp8': arg_specs.FP8,
  'all': arg_specs.ALL,
}


def _unique(specs: Iterable[arg_specs.Spec]) -> Iterator[tuple[mosaic_gpu.Problem, list[arg_specs.Spec]]]:
  """Problems with the specs that come down to them (one layer's forward is its neighbour's input gradient)."""
  groups: dict[mosaic_gpu.Problem, list[arg_specs.Spec]] = {}
  for spec in specs:
    groups.setdefault(_prepared.problem(spec), []).append(spec)
  yield from groups.items()


def _cusparselt_search(p: mosaic_gpu.Problem, x: _prepared.Inputs) -> cusparselt_search.Found:
  try:
    return cusparselt_search.search(p, x.a_dense, x.b, sparse=x.a)
  except NotImplementedError as e:
    logging.warning('not tuned with cuSPARSELt: %s', e)
    return cusparselt_search.Found([], [], [])


def tune(
  selection: str | Sequence[arg_specs.Spec],
  folder: pathlib.Path = _records.TUNED,
  backends: Sequence[str] = ('mosaic_gpu', 'cusparselt'),
  alone: contextlib.AbstractContextManager[Any] | None = None,
) -> None:
  """Writes `tuned/<device>/sparse_matmul.json` for a selection of specs, each as soon as it is known.

  Args:
    selection: a key of `SELECTIONS`, or specs.
    folder: of the records.
    backends: whose settings are searched. Of 'mosaic_gpu', if it is left out, the best known setting takes part all
      the same, and so does 'mosaic_gpu_sm80', which has one, where that kernel does not run; older rows of settings
      that are not timed now stay in the record as they are.
    alone: entered while the card or the record is used, not while the kernels are compiled, which takes a core longer:
      a lock that processes which tune different problems share.
  """
  device = _device.current()
  path = folder / device.slug / f'{OP}.json'
  for p, _ in _unique(SELECTIONS[selection] if isinstance(selection, str) else selection):
    laps = [time.monotonic()]
    compiled = _own_kernel.compiled(p, device, _own_kernel.settings(p, device, folder, 'mosaic_gpu' in backends))
    laps.append(time.monotonic())
    with alone or contextlib.nullcontext():
      laps.append(time.monotonic())
      ready = _prepared.prepare(p, compiled, p.m + p.k, _own_kernel.name(device))
      searches = 'cusparselt' in backends
      found = _cusparselt_search(p, ready.x) if searches else cusparselt_search.Found([], [], [])
      candidates = ready.sparse + found.candidates
      laps.append(time.monotonic())
      # Who may take 8 bits may leave them, too.
      others = {}
      if p.a_dtype.itemsize == 1:
        others['dense_bf16'] = _prepared.in_16_bits(p, ready.x.a_dense, jax.random.key(p.n))
      entry = _tuning.tune(
        p.key, ready.dense, candidates, ready.expected, _prepared.times_ms, finalists=2,
        others=others,
        quick=dict(rounds=2, iterations=10, gap_s=_prepared.gap_s(p, 10)),
        final=dict(rounds=4, iterations=20, gap_s=_prepared.gap_s(p, 20)),
      )
      entry['candidates'] = _records.merged(entry['candidates'] + found.others, _records.entry_of(path, p.key))
      _records.save(path, _device.environment() | {'op': OP}, [entry])
      laps.append(time.monotonic())
    _print_tuned(p, entry, len(candidates), laps)
    del ready, candidates, found, compiled


def tune_in_processes(
  selections: Sequence[str], folder: pathlib.Path, backends: Sequence[str], processes: int, seconds: float,
  missing: bool = False,
) -> int:  # fmt: skip
  """`tune` in several processes; returns how many problems failed. In the order of the selections, while time lasts.

  Problems that no time was left for are no failures; how many there are is printed. With `missing` only problems of
  which this card has no record.
  """
  specs = [specs[0] for _, specs in _selected(selections)]
  if missing:
    path = folder / _device.current().slug / f'{OP}.json'
    specs = [spec for spec in specs if _records.entry_of(path, _prepared.problem(spec).key) is None]
  job = functools.partial(_tune_one, tuple(specs), folder, tuple(backends))
  ended = _processes.run(job, len(specs), processes, seconds)
  if ended.left:
    print(f'{ended.left} problems not tuned: time ran out', flush=True)
  return ended.failed


def _selected(selections: Sequence[str]) -> list[tuple[mosaic_gpu.Problem, list[arg_specs.Spec]]]:
  return list(_unique(spec for name in selections for spec in SELECTIONS[name]))


def _tune_one(
  specs: Sequence[arg_specs.Spec], folder: pathlib.Path, backends: Sequence[str], i: int, turn: _processes.Turn
) -> None:
  tune(specs[i : i + 1], folder, backends, turn)


def _print_tuned(p: mosaic_gpu.Problem, entry: dict[str, Any], timed: int, laps: Sequence[float]) -> None:
  """The four fastest of the first `timed` candidates, and where the time went."""
  dense_ms = statistics.median(entry['baseline']['samples_ms'])
  rows = entry['candidates'][:timed]
  rejected = [r['rejected'] for r in rows if r['rejected']]
  spent = ', '.join(
    f'{name} {end - start:.1f} s'
    for name, start, end in zip(('compile', 'wait', 'prepare', 'time'), laps, laps[1:], strict=False)
  )
  lines = [f'{p.key} dense {dense_ms:.4f} ms, {timed} candidates, rejected {rejected}; {spent}']
  for row in sorted(rows, key=lambda r: statistics.median(r.get('samples_ms', [1e9])))[:4]:
    ms = statistics.median(row.get('final_samples_ms', row.get('samples_ms', [float('nan')])))
    setup = f' and {row["setup_ms"]:.4f} ms set-up' if 'setup_ms' in row else ''
    lines += [f'   {ms:.4f} ms{setup} x{dense_ms / ms:.3f} {row["implementation"]} {_difference(row["config"])}']
  # At once: processes that share a terminal do not mix their lines then.
  print('\n'.join(lines), flush=True)


def _difference(config: dict[str, Any]) -> dict[str, Any]:
  default = _prepared.plain(mosaic_gpu.Config())
  return {k: v for k, v in config.items() if v != default.get(k)}


def _cusparselt_baseline(
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
  for p, specs in _unique(SELECTIONS[selection]):
    settings = _own_kernel.library_settings(p, device, folder)
    compiled = _own_kernel.compiled(p, device, settings)
    if settings and not compiled:
      raise ValueError(f'{p.key}: {settings[0]} does not compile')
    if not compiled:
      print(f'{p.key}: not measured, no kernel of this package takes it on {device.name}', flush=True)
      continue
    ready = _prepared.prepare(p, compiled, p.m + p.n + 1, _own_kernel.name(device))
    x, runs = ready.x, [*ready.sparse, ready.dense]
    dense = 'dense' if p.a_dtype.itemsize == 2 else 'dense_fp8'
    # Half of the entries of `ready.dense` are zeros, which take less power; those of a dense weight are not.
    full = _prepared.full(p, jax.random.key(p.m + p.n + 2))
    runs.append(dataclasses.replace(ready.dense, args=(full, x.b)))
    names = [dense, f'{dense}_without_zeros']
    if p.a_dtype.itemsize == 1:
      wide = dataclasses.replace(p, a_dtype=jnp.dtype('bfloat16'), b_dtype=jnp.dtype('bfloat16'))
      runs.append(_prepared.dense_candidate(wide, _prepared.inputs(wide, jax.random.key(p.m + p.n + 1))))
      names.append('dense')
    error, reason = _tuning.verify(runs[0], ready.expected)
    if reason:
      raise ValueError(f'{p.key}: {reason}')
    vendor = _cusparselt_baseline(p, x, ready.expected, device, folder)
    if vendor is not None:
      runs.append(vendor[0])
      names.append('cusparselt')
    samples = _tuning.interleave(runs, _prepared.times_ms, rounds=6, iterations=20)
    sustained = _tuning.sustained([(run.f, run.args) for run in runs])
    for spec in specs:
      record = _record(spec, p, environment, runs, names, samples, sustained, error)
      if vendor is not None:
        # Apart from the product: who keeps A over many products pays it once.
        record['baselines']['cusparselt']['compress_samples_ms'] = vendor[1]
      with out.open('a') as f:
        f.write(json.dumps(record) + '\n')
      ratio = record['baselines'][names[0]]['median_ms'] / record['median_ms']
      hot = record['baselines'][names[0]]['sustained_ms'] / record['sustained_ms']
      full_ratios = [record['baselines'][names[1]][time] / record[time] for time in ('median_ms', 'sustained_ms')]
      print(
        f'{spec.tokens}x{spec.d_in}x{spec.d_out} {spec.role} {spec.dtype.name}: {record["tflops"]:.0f} TFLOP/s,'
        f' x{ratio:.3f}{_over_cusparselt(record)}; sustained {spec.flops / record["sustained_ms"] / 1e9:.0f},'
        f' x{hot:.3f}; over dense without zeros x{full_ratios[0]:.3f}, x{full_ratios[1]:.3f};'
        f' {error:.1e} {runs[0].implementation} {_difference(runs[0].config)}', flush=True,
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
      key, dense_ms = entry['key'], statistics.median(entry['baseline']['samples_ms'])
      ms = min(_records.sparse_ms(entry).values(), default=None)
      if ms is None:
        continue
      yield (
        f'{key["m"]:6} {key["n"]:6} {key["k"]:6}  {key["dtype"]:14} {key["b_layout"]:2} {key["out_layout"]:2}'
        f'  {dense_ms:9.4f} {ms:9.4f}  {dense_ms / ms:5.2f}  {entry["choice"]["implementation"]}'
      )
