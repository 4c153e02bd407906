"""What the benchmark records say: a page, the tables of `docs/speed.md`, the picture of the README.

Every figure comes from a record; the latest of equal records counts. Records of small shapes made to test a benchmark
(`--tiny`) are left out.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
import json
from pathlib import Path
from typing import Any

from experiments.reports import charts, provenance
from experiments.reports import page as page_lib
from experiments.reports.speed_records import (
  dense_features,
  lower,
  milliseconds,
  pattern,
  ratios,
  Record,
  title,
  traced,
)
from experiments.reports.speed_sections import section

RESULTS = Path(__file__).parents[1] / 'results'
BENCHES = (
  'ffn', 'ffn_check', 'tracking', 'ffn_pytorch', 'block', 'train_step', 'mesh', 'mesh_check', 'sparse_matmul',
  'float8_products', 'cusparselt', 'epilogue', 'vnm_matmul', 'attention', 'memory_bound',
)  # fmt: skip


def load(paths: Iterable[Path]) -> list[dict[str, Any]]:
  """Records of the known benchmarks, the last of equal ones, without those of tiny shapes.

  Raises:
    ValueError: a line that is not a JSON object; names file and line.
  """
  found: dict[str, dict[str, Any]] = {}
  for path in sorted(paths):
    for number, line in enumerate(path.read_text().splitlines(), 1):
      try:
        record = json.loads(line)
      except json.JSONDecodeError as error:
        raise ValueError(f'{path}, line {number}: not JSON: {error}') from error
      if not isinstance(record, dict):
        raise ValueError(f'{path}, line {number}: not a JSON object')
      if record.get('bench') in BENCHES and '--tiny' not in str(record.get('command', '')):
        found[json.dumps(identity(record), sort_keys=True)] = record
  return list(found.values())


def identity(record: Record) -> list[Any]:
  """What was measured; of two records that agree in it the later counts."""
  keys = 'bench device op role model recipe activation pattern dtype weights shape layouts mode remat mesh'
  keys += ' layout process'  # of `best_steps`
  # Of meshes, older records do not say what was not asked for.
  mesh = record.get('sharding', 'whole'), record.get('xla_flags') or ''
  return [*(record.get(key) for key in keys.split()), *mesh, dense_features(record), record.get('token_pattern')]


_METHODS = {
  'transposable_srste': 'FST, bfloat16', 's_ste': 'S-STE, bfloat16', 's_ste_fp8': 'S-STE, FP8',
  'mixed_sparsity_24': 'MST within 2:4, bfloat16', 'neuron_level': 'neuron level, bfloat16',
  'mixed_sparsity_transposable': 'MST, transposable 2:4 and MVUE, bfloat16',
}  # fmt: skip
_PROGRAMS = {'ffn': 'feed-forward block', 'block': 'transformer block', 'train_step': 'training step'}


def markdown(records: Sequence[Record]) -> str:
  """Blocks and steps, a table for each device, that with most of them first: those of `docs/speed.md`.

  The lower figure of bursts and a trace; a dagger where the record does not stand by itself.

  >>> row = {'median_ms': 2.0, 'baselines': {'dense': {'median_ms': 3.0}}, 'commit': None}
  >>> step = {'bench': 'train_step', 'recipe': 's_ste_fp8', 'model': 'gpt2', 'shape': {'batch': 8, 'length': 4}}
  >>> print(markdown([step | row | {'device': 'NVIDIA A100'}]))
  On one NVIDIA A100:
  <BLANKLINE>
  | what | method | sparse, ms | dense, ms | times faster |
  |---|---|---|---|---|
  | training step, gpt2, 8 x 4 | S-STE, FP8 | 2.00 | 3.00 | **1.50** † |
  """
  head = ['| what | method | sparse, ms | dense, ms | times faster |', '|---|---|---|---|---|']
  tables = []
  for device in _devices(records):
    lines = [f'On one {device}:', '', *head]
    here = [record for record in records if record.get('device') == device]
    for bench, name in _PROGRAMS.items():
      lines += [_row(name, record) for record in here if record['bench'] == bench]
    tables.append('\n'.join(lines))
  return '\n\n'.join(tables)


def _row(name: str, record: Record) -> str:
  shape, bursts, found, sustained = record['shape'], ratios(record), lower(record), traced(record)
  sizes = ('tokens', 'd', 'hidden') if record['bench'] == 'ffn' else ('batch', 'length')
  kind = record['activation'] if record['bench'] == 'ffn' else record['model']

  def faster(baseline: str) -> str:
    text, burst = f'{found[baseline]:.2f}', f'{bursts[baseline]:.2f}'
    text = f'**{text}**' if baseline == 'dense' else text
    if record['bench'] == 'ffn' and baseline not in sustained:
      return f'{text} (bursts alone)'
    return text if burst in text else f'{text} ({burst} in bursts)'

  dense, times = f'{record["baselines"]["dense"]["median_ms"]:.2f}', faster('dense')
  if 'dense_fp8' in found:
    dense += f'; FP8 {record["baselines"]["dense_fp8"]["median_ms"]:.2f}'
    times += f'; over FP8 {faster("dense_fp8")}'
  what = f'{name}, {kind}, {" x ".join(str(shape[size]) for size in sizes)}'
  mark = ' †' if provenance.faults(record) else ''
  return f'| {what} | {_method(record)} | {milliseconds(record):.2f} | {dense} | {times}{mark} |'


def _method(record: Record) -> str:
  name = _METHODS.get(recipe := str(record['recipe']), recipe)
  return f'{name}, {pattern(record)}' if 'pattern' in record else name


def _devices(records: Sequence[Record]) -> list[Any]:
  """Those of blocks and steps, that with most of them first."""
  return [device for device, _ in Counter(r.get('device') for r in records if r['bench'] in _PROGRAMS).most_common()]


def figure_rows(
  records: Sequence[Record], at_best: Mapping[str, list[tuple[str, float]]] | None = None
) -> dict[str, list[tuple[str, float]]]:
  """Blocks of 16,384 tokens and whole steps, of the device with most of these records: what, and times faster.

  The lower figure of bursts and trace; a block that was measured in bursts alone is left out, and so is, if any record
  stands by itself, one that does not.

  Args:
    records: of the benchmarks.
    at_best: heading -> steps over a dense model at its best; if there are any, they stand in place of those of
      `records`, whose dense models are laid out as the sparse ones.

  Raises:
    ValueError: no such record.
  """
  shape = dict(tokens=16384, d=4096, hidden=16384)
  records = [record for record in records if not provenance.faults(record)] or records
  records = [record for record in records if record.get('device') in _devices(records)[:1]]
  blocks = [r for r in records if r['bench'] == 'ffn' and r['shape'] == shape and traced(r)]
  steps = [r for r in records if r['bench'] == 'train_step']
  if not blocks and not steps:
    raise ValueError('no record of a training step, nor of a traced block of 16384 x 4096 x 16384')

  def short(record: Record) -> str:
    return _method(record).replace(', bfloat16', '').replace('neuron level', 'V:N:M')

  groups = {
    'Feed-forward block, 16384 x 4096 x 16384, forward and backward': [
      (f'{short(r)}, {r["activation"].replace("_", " ")}', lower(r)['dense']) for r in blocks
    ],
  } | (at_best or {
    'Training step, optimizer included': [(f'{r["model"]}, {short(r)}', lower(r)['dense']) for r in steps],
  })  # fmt: skip
  return {name: [(what, round(times, 2)) for what, times in rows] for name, rows in groups.items() if rows}


def figure(records: Sequence[Record], at_best: Mapping[str, list[tuple[str, float]]] | None = None) -> str:
  """The picture of the README, an SVG file that says in its `<desc>` what it shows; see `figure_rows`."""
  rows = figure_rows(records, at_best)
  return charts.described(charts.speedups(rows, label='times faster than dense bfloat16'), rows)


def _cards(records: Sequence[Record]) -> str:
  cards = []
  for record in sorted(records, key=lambda record: BENCHES.index(record['bench'])):
    if record['bench'] in ('ffn', 'block', 'train_step') and record.get('headline'):
      name, ratio = max(lower(record).items(), default=('', 0.0), key=lambda pair: pair[0] == 'dense')
      cards.append((f'{ratio:.2f}x', f'{title(record)}, over {name.replace("_", " ")}', ratio < 1))
  return page_lib.cards(cards)


def _of_device(records: Sequence[Record]) -> list[str]:
  """Cards, then a section a kind of record."""
  parts = [_cards(records)]
  for bench in BENCHES:
    chosen = [record for record in records if record['bench'] == bench]
    if chosen:
      parts.append(section(bench, chosen))
      for note in dict.fromkeys(r['note'] for r in chosen if 'note' in r):
        about = '; '.join(title(r) for r in chosen if r.get('note') == note)
        parts.append(page_lib.paragraph(f'{about}: {note}.', note=True))
  return parts


def page(records: Sequence[Record]) -> str:
  """The HTML of the page; of several devices one after the other."""
  devices = sorted({record['device'] for record in records})
  versions = sorted({', '.join(f'{k} {v}' for k, v in record['versions'].items()) for record in records})
  parts = [page_lib.title('Measured speed', f'{"; ".join(devices)}. {"; ".join(versions)}. {len(records)} records.')]
  for device in sorted(devices, key=lambda device: -sum(record['device'] == device for record in records)):
    parts += [page_lib.title(device, part=True)] if len(devices) > 1 else []
    parts += _of_device([record for record in records if record['device'] == device])
  commands = sorted({str(record.get('command')) for record in records})
  return page_lib.page('Measured speed', [*parts, page_lib.heading('Commands'), page_lib.listing(commands)])
