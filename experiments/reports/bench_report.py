"""`python -m experiments.reports.bench_report --out bench.html`: one page about the records, no network.

Every figure comes from a record; the latest of equal records counts. Records of small shapes made to test a benchmark
(`--tiny`) are left out.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
import json
from pathlib import Path
from typing import Any

from experiments.reports.bench_figures import dense_features, milliseconds, pattern, ratios, Record, speedups, title
from experiments.reports.bench_sections import section

RESULTS = Path(__file__).parents[1] / 'results'
BENCHES = (
  'ffn', 'ffn_check', 'tracking', 'ffn_pytorch', 'block', 'train_step', 'mesh', 'mesh_check', 'sparse_matmul',
  'float8_products', 'cusparselt', 'epilogue', 'vnm_matmul', 'attention', 'memory_bound',
)  # fmt: skip

_STYLE = """
:root { --ink: #1b1f24; --soft: #59636e; --rule: #dfe3e8; --panel: #f6f8fa }
* { box-sizing: border-box }
body { margin: 0; color: var(--ink); background: #fff; font: 15px/1.55 system-ui, 'DejaVu Sans', sans-serif }
main { max-width: 1200px; margin: 0 auto; padding: 40px 32px 72px }
h1 { font-size: 30px; margin: 0 0 6px } .device { margin-top: 64px } h2 { font-size: 20px; margin: 48px 0 4px }
h3 { font-size: 15px; margin: 26px 0 6px }
p { max-width: 92ch } .soft { color: var(--soft); margin: 0 0 14px }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; margin: 22px 0 }
.card { background: var(--panel); border-radius: 10px; padding: 14px 16px; overflow-wrap: anywhere }
.card b { display: block; font-size: 25px; font-variant-numeric: tabular-nums } .card span { color: var(--soft) }
.card.below b { color: #b3261e }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th { text-align: left; font-size: 13px; color: var(--soft); border-bottom: 2px solid var(--rule) }
th, td { padding: 7px 14px 7px 0; vertical-align: top } td { border-bottom: 1px solid var(--rule) }
th.n, td.n { text-align: right; white-space: pre } td.below { color: #b3261e }
.note { color: var(--soft); font-size: 13px; margin: 10px 0 }
li code { overflow-wrap: anywhere } details { color: var(--soft) } summary { cursor: pointer }
svg { width: 100%; max-width: 1000px; height: auto; display: block; margin: 10px 0 }
svg text { font: 12px system-ui, 'DejaVu Sans', sans-serif; fill: var(--ink) } svg .soft { fill: var(--soft) }
"""


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

  >>> row = {'median_ms': 2.0, 'baselines': {'dense': {'median_ms': 3.0}, 'dense_fp8': {'median_ms': 2.5}}}
  >>> ffn = {'bench': 'ffn', 'recipe': 's_ste_fp8', 'activation': 'gelu', 'shape': {'tokens': 8, 'd': 4, 'hidden': 16}}
  >>> print(markdown([ffn | row | {'device': 'NVIDIA A100'}]))
  On one NVIDIA A100:
  <BLANKLINE>
  | what | method | sparse, ms | dense, ms | times faster |
  |---|---|---|---|---|
  | feed-forward block, gelu, 8 x 4 x 16 | S-STE, FP8 | 2.00 | 3.00; FP8 2.50 | **1.50**; over FP8 1.25 |
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
  shape, found = record['shape'], ratios(record)
  sizes = ('tokens', 'd', 'hidden') if record['bench'] == 'ffn' else ('batch', 'length')
  kind = record['activation'] if record['bench'] == 'ffn' else record['model']
  dense, faster = f'{record["baselines"]["dense"]["median_ms"]:.2f}', f'**{found["dense"]:.2f}**'
  if 'dense_fp8' in found:
    dense += f'; FP8 {record["baselines"]["dense_fp8"]["median_ms"]:.2f}'
    faster += f'; over FP8 {found["dense_fp8"]:.2f}'
  what = f'{name}, {kind}, {" x ".join(str(shape[size]) for size in sizes)}'
  return f'| {what} | {_method(record)} | {milliseconds(record):.2f} | {dense} | {faster} |'


def _method(record: Record) -> str:
  name = _METHODS.get(recipe := str(record['recipe']), recipe)
  return f'{name}, {pattern(record)}' if 'pattern' in record else name


def _devices(records: Sequence[Record]) -> list[Any]:
  """Those of blocks and steps, that with most of them first."""
  return [device for device, _ in Counter(r.get('device') for r in records if r['bench'] in _PROGRAMS).most_common()]


def figure(records: Sequence[Record]) -> str:
  """Blocks of 16,384 tokens and whole steps: how many times faster than dense bfloat16. The picture of the README.

  Of the device with most of these records.

  Raises:
    ValueError: no such record.
  """
  shape = dict(tokens=16384, d=4096, hidden=16384)
  records = [record for record in records if record.get('device') in _devices(records)[:1]]
  blocks = [r for r in records if r['bench'] == 'ffn' and r['shape'] == shape]
  steps = [r for r in records if r['bench'] == 'train_step']
  if not blocks and not steps:
    raise ValueError('no record of a training step, nor of a block of 16384 x 4096 x 16384')

  def short(record: Record) -> str:
    return _method(record).replace(', bfloat16', '').replace('neuron level', 'V:N:M')

  groups = {
    'Feed-forward block, 16384 x 4096 x 16384, forward and backward': [
      (f'{short(r)}, {r["activation"].replace("_", " ")}', ratios(r)['dense']) for r in blocks
    ],
    'Training step, optimizer included': [(f'{r["model"]}, {short(r)}', ratios(r)['dense']) for r in steps],
  }
  return speedups({name: rows for name, rows in groups.items() if rows}, label='times faster than dense bfloat16')


def _cards(records: Sequence[Record]) -> str:
  cards = []
  for record in sorted(records, key=lambda record: BENCHES.index(record['bench'])):
    if record['bench'] in ('ffn', 'block', 'train_step') and record.get('headline'):
      name, ratio = max(ratios(record).items(), default=('', 0.0), key=lambda pair: pair[0] == 'dense')
      below = ' below' if ratio < 1 else ''
      over = name.replace('_', ' ')
      what = escape(f'{title(record)}, over {over}')
      cards.append(f'<div class="card{below}"><b>{ratio:.2f}x</b><span>{what}</span></div>')
  return f'<div class="cards">{"".join(cards)}</div>' if cards else ''


def _of_device(records: Sequence[Record]) -> list[str]:
  """Cards, then a section a kind of record."""
  parts = [_cards(records)]
  for bench in BENCHES:
    chosen = [record for record in records if record['bench'] == bench]
    if chosen:
      parts.append(section(bench, chosen))
      for note in dict.fromkeys(r['note'] for r in chosen if 'note' in r):
        about = '; '.join(title(r) for r in chosen if r.get('note') == note)
        parts.append(f'<p class="note">{escape(about)}: {escape(note)}.</p>')
  return parts


def page(records: Sequence[Record]) -> str:
  """The HTML of the page; of several devices one after the other."""
  devices = sorted({record['device'] for record in records})
  versions = sorted({', '.join(f'{k} {v}' for k, v in record['versions'].items()) for record in records})
  parts = [
    '<h1>Measured speed</h1>',
    f'<p class="soft">{escape("; ".join(devices))}. {escape("; ".join(versions))}. {len(records)} records.</p>',
  ]
  for device in sorted(devices, key=lambda device: -sum(record['device'] == device for record in records)):
    parts += [f'<h1 class="device">{escape(device)}</h1>'] if len(devices) > 1 else []
    parts += _of_device([record for record in records if record['device'] == device])
  commands = sorted({str(record.get('command')) for record in records})
  items = ''.join(f'<li><code>{escape(c)}</code></li>' for c in commands)
  parts.append(f'<h2>Commands</h2><ul>{items}</ul>')
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
    '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Measured speed</title>'
    f'<style>{_STYLE}</style></head><body><main>\n' + '\n'.join(parts) + '\n</main></body></html>\n'
  )


def main(argv: Sequence[str] | None = None) -> None:
  """Writes the page."""
  parser = argparse.ArgumentParser(prog='python -m experiments.reports.bench_report', description='A page on records.')
  parser.add_argument('records', nargs='*', type=Path, help='JSON-lines files (default: all in experiments/results)')
  parser.add_argument('--out', type=Path, default=Path('bench.html'), help='the page (default: %(default)s)')
  parser.add_argument('--markdown', action='store_true', help='print the tables of docs/speed.md instead')
  parser.add_argument('--figure', type=Path, metavar='SVG', help='write the picture of the README instead')
  options = parser.parse_args(argv)
  records = load(options.records or RESULTS.glob('*.jsonl'))
  if not records:
    parser.error(f'no records of {", ".join(BENCHES)} found')
  if options.markdown:
    print(markdown(records))
    return
  if options.figure:
    options.figure.write_text(figure(records))
    return
  options.out.parent.mkdir(parents=True, exist_ok=True)
  options.out.write_text(page(records))
  print(f'{options.out}: {len(records)} records')


if __name__ == '__main__':
  main()
