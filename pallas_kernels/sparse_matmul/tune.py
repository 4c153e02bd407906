"""Times settings of `sparse_matmul` on the GPU at hand and keeps what was measured: `python -m pallas_kernels tune`.

Every comparison is made in one process, on the same random data, with the same output layout (`_prepared`).
"""

import argparse
from collections.abc import Sequence
import contextlib
import functools
import logging
import math
import pathlib
import statistics
import time
from typing import Any

import jax

from pallas_kernels import _device, _processes, _records, _tuning
from pallas_kernels.sparse_matmul import _prepared, _settings, arg_specs, cusparselt_search, mosaic_gpu
from pallas_kernels.sparse_matmul.api import OP
from pallas_kernels.sparse_matmul.arg_specs import SELECTIONS


def arguments(parser: argparse.ArgumentParser) -> None:
  """What `tune sparse_matmul` takes."""
  arg_specs.arguments(parser)
  parser.add_argument('--backends', nargs='+', default=['sparse', 'cusparselt'], help='whose settings are searched')
  parser.add_argument('--processes', type=int, default=4, help='that compile (default: %(default)s)')
  parser.add_argument('--seconds', type=float, default=3600.0, help='after which no problem is begun')
  parser.add_argument('--sustained', action='store_true',
                      help='judge the six fastest of each by loops of a second, hot, and not two by bursts with idle'
                      ' gaps; short calls by bursts all the same')
  parser.add_argument('--missing', action='store_true', help='only what this GPU has no record of')


def run(args: argparse.Namespace) -> int:
  """Exit status 1 if a problem failed."""
  given = args.select, args.tuned, args.backends, args.processes, args.seconds, args.missing, args.sustained
  return min(tune_in_processes(*given), 1)


def tune(
  selection: str | Sequence[arg_specs.Spec],
  folder: pathlib.Path = _records.TUNED,
  backends: Sequence[str] = ('sparse', 'cusparselt'),
  alone: contextlib.AbstractContextManager[Any] | None = None,
  sustained: bool = False,
) -> None:
  """Writes `tuned/<device>/sparse_matmul.json` for a selection of specs, each as soon as it is known.

  Args:
    selection: a key of `SELECTIONS`, or specs.
    folder: of the records.
    backends: whose settings are searched: 'sparse', this package's kernel for the GPU, which may be named as well, and
      'cusparselt'. If the kernel is left out, its best known setting takes part all the same. Older rows of settings
      that are not timed now stay in the record.
    alone: entered while the GPU or the record is used, not while the kernels are compiled, which takes a core longer:
      a lock that processes which tune different problems share.
    sustained: whether loops of a second decide, as a GPU runs in training, and not bursts with idle gaps.
  """
  device = _device.current()
  path = folder / device.slug / f'{OP}.json'
  for p, _ in _prepared.unique(SELECTIONS[selection] if isinstance(selection, str) else selection):
    own = _settings.own_kernel(p, device)
    search = own is not None and not {'sparse', own.name}.isdisjoint(backends)
    laps = [time.monotonic()]
    compiled = _settings.compiled(p, own, _settings.to_time(p, own, folder, search))
    laps.append(time.monotonic())
    with alone or contextlib.nullcontext():
      laps.append(time.monotonic())
      ready = _prepared.prepare(p, compiled, p.m + p.k, own)
      # Its candidates multiply with one weight.
      searches = 'cusparselt' in backends and _prepared.weights(p) == 1
      found = _cusparselt_search(p, ready.x) if searches else cusparselt_search.Found([], [], [])
      candidates = ready.sparse + found.candidates
      laps.append(time.monotonic())
      # Who may take 8 bits may leave them, too.
      others = {}
      if p.a_dtype.itemsize == 1:
        others['dense_bf16'] = _prepared.in_16_bits(p, ready.x.a_dense, jax.random.key(p.n))
      entry = _tuning.tune(
        p.key, ready.dense, candidates, ready.expected, _prepared.timer(p), finalists=6 if sustained else 2,
        others=others, loops_of=_prepared.weights(p) if sustained else None,
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
  missing: bool = False, sustained: bool = False,
) -> int:  # fmt: skip
  """`tune` in several processes; returns how many problems failed. In the order of the selections, while time lasts.

  Problems that no time was left for are no failures; how many there are is printed. With `missing` only problems of
  which this GPU has no record.
  """
  specs = [specs[0] for _, specs in _selected(selections)]
  if missing:
    path = folder / _device.current().slug / f'{OP}.json'
    specs = [spec for spec in specs if _records.entry_of(path, _prepared.problem(spec).key) is None]
  job = functools.partial(_tune_one, tuple(specs), folder, tuple(backends), sustained)
  ended = _processes.run(job, len(specs), processes, seconds)
  if ended.left:
    print(f'{ended.left} problems not tuned: time ran out', flush=True)
  return ended.failed


def _selected(selections: Sequence[str]) -> list[tuple[mosaic_gpu.Problem, list[arg_specs.Spec]]]:
  return list(_prepared.unique(spec for name in selections for spec in SELECTIONS[name]))


def _tune_one(
  specs: Sequence[arg_specs.Spec], folder: pathlib.Path, backends: Sequence[str], sustained: bool, i: int,
  turn: _processes.Turn,
) -> None:  # fmt: skip
  tune(specs[i : i + 1], folder, backends, turn, sustained)


def _print_tuned(p: mosaic_gpu.Problem, entry: dict[str, Any], timed: int, laps: Sequence[float]) -> None:
  """The four fastest of the first `timed` candidates, and where the time went."""
  dense_ms, looped = statistics.median(entry['baseline']['samples_ms']), entry['baseline'].get('sustained_ms')
  rows = entry['candidates'][:timed]
  rejected = [r['rejected'] for r in rows if r['rejected']]
  spent = ', '.join(
    f'{name} {end - start:.1f} s'
    for name, start, end in zip(('compile', 'wait', 'prepare', 'time'), laps, laps[1:], strict=False)
  )
  in_loops = '' if looped is None else f', {looped:.4f} ms in loops'
  lines = [f'{p.key} dense {dense_ms:.4f} ms{in_loops}, {timed} candidates, rejected {rejected}; {spent}']

  def order(row: dict[str, Any]) -> tuple[float, float]:
    return row.get('sustained_ms', math.inf), statistics.median(row.get('samples_ms', [math.inf]))

  for row in sorted(rows, key=order)[:4]:
    ms = statistics.median(row.get('final_samples_ms', row.get('samples_ms', [float('nan')])))
    setup = f' and {row["setup_ms"]:.4f} ms set-up' if 'setup_ms' in row else ''
    settings = _prepared.difference(row['config'])
    gain = f'x{dense_ms / ms:.3f}'
    if looped is not None and 'sustained_ms' in row:
      gain += f', {row["sustained_ms"]:.4f} ms in loops x{looped / row["sustained_ms"]:.3f}'
    lines += [f'   {ms:.4f} ms{setup} {gain} {row["implementation"]} {settings}']
  # At once: processes that share a terminal do not mix their lines then.
  print('\n'.join(lines), flush=True)


def _cusparselt_search(p: mosaic_gpu.Problem, x: _prepared.Inputs) -> cusparselt_search.Found:
  try:
    return cusparselt_search.search(p, x.a_dense, x.b, sparse=x.a)
  except NotImplementedError as e:
    logging.warning('not tuned with cuSPARSELt: %s', e)
    return cusparselt_search.Found([], [], [])
