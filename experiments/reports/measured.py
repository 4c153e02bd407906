"""Smaller tables of the documents, each of one file of records: matmuls, a step under a profiler, compiling, meshes."""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any

import numpy as np

from experiments.reports import provenance, race_table, speed, tables
from experiments.reports.reached import seconds_to
from experiments.runs.race.contenders import CONTENDERS

type Record = Mapping[str, Any]

# What the profiler's kinds of kernels are called, in the order of the table.
_KINDS = {
  'sparse matmuls': ('GEMM sparse',), 'dense matmuls': ('GEMM dense',), 'rounding, packing, MVUE': ('pack',),
  'attention': ('attention',), 'optimizer': ('optimizer',),
  'activation, norms, loss, copies, other': ('activation', 'normalisation', 'loss', 'copy', 'other'),
}  # fmt: skip
_ROLES = {'forward': 'forward', 'input_grad': 'input gradient', 'weight_grad': 'weight gradient', 'plain': ''}
_OVER_DENSE = ('over dense without zeros', 'sustained', 'with zeros', 'sustained')


def matmuls() -> str:
  """2:4 matmuls of layers: TFLOP/s, and how many times as fast as dense they are, in bursts and in loops of a second.

  Dense multiplies numbers without zeros, or the matmul's with its zeros. A matmul that is one layer's forward and
  another's input gradient stands once.
  """
  records = provenance.read('sparse_matmul.jsonl?headline=True')
  rows, seen = [], set()
  for many in speed.by_process(sorted(records, key=lambda r: r['device'])):
    r = many[0]
    fp8 = 'float8' in r['dtype']
    over = _over_dense(many, 'dense_fp8' if fp8 else 'dense')
    if not any(over) or (samples := tuple(r['samples_ms'])) in seen:
      continue
    seen.add(samples)
    sizes = speed.sizes(r, 'tokens', 'd_in', 'd_out')
    in_loops = [r['tflops'] * r['median_ms'] / r['sustained_ms'] for r in many if r.get('sustained_ms')]
    tflops = [f'{statistics.median(found):,.0f}' if found else '' for found in ([r['tflops'] for r in many], in_loops)]
    rows.append([
      _gpu(r), ', '.join(filter(None, (sizes, _ROLES[r['role']]))), 'FP8' if fp8 else r['dtype'],
      *tflops, *over, *_times(many, 'cusparselt'), len(many),
    ])  # fmt: skip
  head = ('GPU', 'tokens x in x out', 'dtype', 'TFLOP/s', 'sustained', *_OVER_DENSE, 'over cuSPARSELt', 'sustained')
  return tables.markdown((*head, 'processes'), rows)


def _gpu(record: Record) -> str:
  return record['device'].removeprefix('NVIDIA ').split()[0]


def _over_dense(many: Sequence[Record], dense: str) -> list[str]:
  """Of `_OVER_DENSE`: how many times as fast as dense, empty where it was not measured."""
  return [ratio for twin in (f'{dense}_without_zeros', dense) for ratio in _times(many, twin)]


def _times(many: Sequence[Record], twin: str) -> list[str]:
  """How many times as fast as a twin, in bursts and in loops; empty where it was not measured."""
  pairs = [(r['baselines'].get(twin, {}), r) for r in many]
  return [
    speed.spread(other[key] / own[key] for other, own in pairs if other.get(key) and own.get(key))
    for key in ('median_ms', 'sustained_ms')
  ]


def vnm_matmuls() -> str:
  """V:N:M matmuls: milliseconds, and how many times as fast as dense on numbers without zeros and with the matmul's."""
  rows = []
  for many in speed.by_process(provenance.read('vnm_matmul.jsonl')):
    r = many[0]
    sizes = speed.sizes(r, 'tokens', 'd_in', 'd_out')
    ms = statistics.median(r['median_ms'] for r in many)
    rows.append([_gpu(r), f'{r["pattern"]}, {sizes}', f'{ms:.3f}', *_over_dense(many, 'dense'), len(many)])
  return tables.markdown(('GPU', 'pattern, tokens x in x out', 'ms', *_OVER_DENSE, 'processes'), rows)


def attention() -> str:
  """Sparse attention by pattern beside full attention."""
  records = provenance.read('attention.jsonl')
  shapes = sorted({(r['shape']['length'], r['shape']['batch']) for r in records})
  patterns = ('local', 'fixed', 'combined', 'strided')
  rows = []
  for length, batch in shapes:
    here = [many for many in speed.by_process(records) if many[0]['shape']['length'] == length]
    of = {many[0]['pattern']: many for many in here}
    times = [statistics.median(speed.ratios(r)['full'] for r in of[name]) for name in patterns]
    own = [f'{statistics.median(r["median_ms"] for r in of[name]):.2f}' for name in patterns]
    full = np.mean([statistics.median(r['baselines']['full']['median_ms'] for r in many) for many in here])
    rows.append([
      f'{batch} x {length}', *own, f'{full:.2f}', f'{min(times):.1f} to {max(times):.1f}', min(map(len, here))
    ])  # fmt: skip
  head = ('batch x length', *(f'{name}, ms' for name in patterns), 'full, ms', 'times faster', 'processes')
  return tables.markdown(head, rows)


def profile() -> str:
  """Where the milliseconds of a step go, by kind of kernel."""
  records = provenance.read('best_steps_profile.jsonl')
  by_recipe = {r['recipe']: r for r in records}
  own = [by_recipe[name] for name in ('dense', 'fst', 'dense_fp8', 's_ste_fp8_all', 'fst_fp8_all')]
  rows = []
  for name, kinds in _KINDS.items():
    ms = [sum(r['profile']['by_kind_ms'][kind] for kind in kinds) for r in own]
    rows.append([name, *(f'{value:.1f}' if value else '' for value in ms)])
  rows.append(['in all', *(f'{r["profile"]["busy_ms"]:.1f}' for r in own)])
  return tables.markdown(('ms a step', *(r['label'] for r in own)), rows)


def compile_time() -> str:
  """Seconds of three processes, one after another, until the steps of a run are compiled on a GPU's machine."""
  records = {r['recipe']: r for r in provenance.read('compile_time.jsonl')}
  rows, dense = [], records['dense']['next']
  for name in (name for name in CONTENDERS if name in records):
    r, found = records[name], records[name]['next']
    parts = ', '.join(f'{found[part]:.1f}' for part in ('trace_s', 'lower_s', 'compile_s'))
    over = '' if name == 'dense' else f'{found["total_s"] / found["programs"] / dense["total_s"]:.2f}'
    rows.append([
      CONTENDERS[name].label, str(found['programs']), f'{r["first"]["total_s"]:.1f}',
      f'{found["total_s"]:.1f}: {parts}', over, f'{r["again"]["total_s"]:.1f}',
    ])  # fmt: skip
  head = (
    'method', 'programs', 'first process, s', 'next process: traced, lowered, compiled, s',
    'a program of it over dense', 'third process, s',
  )  # fmt: skip
  return tables.markdown(head, rows)


def compile_seconds() -> str:
  """CPU seconds of compiling a step, in a first process and in the next."""
  records = provenance.read('compile_seconds.jsonl')
  rows = []
  for r in records:
    first, again, over = r['first'], r['again'], r['over_dense']
    parts = ', '.join(f'{again[part]:.1f}' for part in ('trace_s', 'lower_s', 'compile_s'))
    factors = ['' if r['recipe'] == 'dense' else f'{over[process]:.2f}' for process in ('first', 'again')]
    rows.append([
      r['layouts'], CONTENDERS[r['recipe']].label, f'{first["total_s"]:.1f}', factors[0],
      f'{again["total_s"]:.1f}: {parts}', factors[1], f'{again["fusions"]}, {again["distinct_fusions"]}',
    ])  # fmt: skip
  head = (
    'layers', 'method', 'first process, s', 'over dense', 'next process: traced, lowered, compiled, s', 'over dense',
    'fusions, distinct',
  )  # fmt: skip
  return tables.markdown(head, rows)


def meshes() -> str:
  """Blocks and steps on two GPUs."""
  rows = []
  for many in speed.by_process(r for r in provenance.read('mesh.jsonl?bench=mesh') if not r['xla_flags']):
    r = many[0]
    shape, whole = r['shape'], r['sharding'] == 'whole'
    if r['op'] == 'ffn':
      what = f'{r["activation"]} block, {speed.sizes(r, "tokens", "d", "hidden")}'
    else:
      what = f'step of {r["model"]}, {shape["batch"]} x {shape["length"]}'
    twins = [r['baselines']['dense'] for r in many]
    rows.append([
      what, 'tokens' if whole else 'tokens, weights, moments, masks',
      *(f'{statistics.median(each["median_ms"] for each in twin):.1f}' for twin in (many, twins)),
      speed.spread(speed.ratios(r)['dense'] for r in many),
      *(f'{each["memory_gb"]["total"]:.1f}' for each in (r, twins[0])), len(many),
    ])  # fmt: skip
  head = ('what', 'divided', 'sparse, ms', 'dense, ms', 'times faster', 'GB a device, sparse', 'dense', 'processes')
  return tables.markdown(head, rows)


def race_by_the_clock(name: str, ours: str, rival: str) -> str:
  """A race in which two contenders took other seconds than they were to take, by the seconds of the runs themselves.

  Each is at its best, and seeds are those of both.
  """
  records = [r for r in provenance.read(f'{name}?share=1.0') if r['bench'] == 'race']
  found = race_table.by_seed(records)
  best = {who: (own.rate, own.decay) for who, own in found.items()}
  runs = {(r['contender'], r['seed']): r for r in records if (r['rate'], r['decay']) == best[r['contender']]}
  rows = []
  for seed in sorted(found[ours].losses.keys() & found[rival].losses.keys()):
    own, other = runs[ours, seed], runs[rival, seed]
    steps, _, losses = np.array(other['validation']).T
    seconds = steps * other['wall_s'] / other['steps']
    after = np.interp(own['wall_s'], seconds, losses)
    reached = seconds_to(list(zip(seconds, losses, strict=True)), own['loss'])
    times = [f'{1e3 * r["wall_s"] / r["steps"]:.1f}, {r["wall_s"]:.1f}' for r in (own, other)]
    rows.append([
      seed, times[0], f'{own["loss"]:.3f}', times[1], f'{other["loss"]:.3f}', f'{after:.3f}',
      'never' if reached is None else f'{reached:.1f}, {reached / own["wall_s"]:.3f}',
    ])  # fmt: skip
  first, second = (found[who].title for who in (ours, rival))
  head = (
    'seed', f'{first}: ms a step, seconds', 'loss', f'{second}: ms a step, seconds', 'loss',
    "loss after the first's seconds", "at the first's final loss after so many, share",
  )  # fmt: skip
  return tables.markdown(head, rows)


def race_by_the_minute(name: str, ours: str, rival: str, every: int) -> str:
  """Bytes read, training and validation loss of one run of each, at every so many evaluations, and the lowest of all.

  A training loss is the mean of what was logged since the evaluation before.
  """
  (mine,), (others,) = (
    [r for r in provenance.read(name) if r['bench'] == 'race' and r['contender'] == who] for who in (ours, rival)
  )
  cells, head, lowest, losses = [], ['seconds'], ['lowest of all'], []
  for r in (mine, others):
    steps, seconds, found = np.array(r['validation']).T
    logged, train = np.array(r['train'])[:, :2].T
    before = np.concatenate([[0], steps[:-1]])
    means = [train[(a < logged) & (logged <= b)].mean() for a, b in zip(before, steps, strict=True)]
    read = steps * r['batch'] * r['length'] / 1e6
    cells.append([(f'{a:.0f}', f'{b:.3f}', f'{c:.4f}') for a, b, c in zip(read, means, found, strict=True)])
    head += [f'{r["title"]}: million bytes read', 'training loss', 'validation loss']
    least = found.argmin()
    lowest += [f'{read[least]:.0f}', f'{means[least]:.3f}', f'{found[least]:.4f} after {seconds[least]:.0f} s']
    losses.append(found)
  rows = [
    [f'{mine["validation"][i][1]:.0f}', *cells[0][i], *cells[1][i], f'{losses[0][i] - losses[1][i]:+.4f}']
    for i in range(every - 1, len(mine['validation']), every)
  ]
  lowest.append(f'{losses[0].min() - losses[1].min():+.4f}')
  return tables.markdown([*head, 'the first minus the second'], [*rows, lowest])
