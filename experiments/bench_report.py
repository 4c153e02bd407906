"""`python -m experiments.bench_report --out bench.html`: one page about the benchmark records, no network, no script.

Every figure comes from a record; the latest of equal records counts. Records of small shapes made to test a benchmark
(`--tiny`) are left out.
"""

import argparse
from collections.abc import Iterable, Sequence
from html import escape
import json
from pathlib import Path
from typing import Any

from experiments.bench_figures import bars, milliseconds, ratios, Record, stacked, table, title

RESULTS = Path(__file__).parent / 'results'
BENCHES = (
  'ffn', 'ffn_check', 'tracking', 'ffn_pytorch', 'block', 'train_step', 'mesh', 'mesh_check', 'sparse_matmul',
  'float8_products', 'cusparselt', 'epilogue', 'memory_bound',
)  # fmt: skip
_ROLES = ('forward', 'input_grad', 'weight_grad')

_STYLE = """
:root { --ink: #1b1f24; --soft: #59636e; --rule: #dfe3e8; --panel: #f6f8fa }
* { box-sizing: border-box }
body { margin: 0; color: var(--ink); background: #fff; font: 15px/1.55 system-ui, 'DejaVu Sans', sans-serif }
main { max-width: 1200px; margin: 0 auto; padding: 40px 32px 72px }
h1 { font-size: 30px; margin: 0 0 6px } h2 { font-size: 20px; margin: 48px 0 4px }
h3 { font-size: 15px; margin: 26px 0 6px }
p { max-width: 92ch } .soft { color: var(--soft); margin: 0 0 14px }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; margin: 22px 0 }
.card { background: var(--panel); border-radius: 10px; padding: 14px 16px }
.card b { display: block; font-size: 25px; font-variant-numeric: tabular-nums } .card span { color: var(--soft) }
.card.below b { color: #b3261e }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th { text-align: left; font-size: 13px; color: var(--soft); border-bottom: 2px solid var(--rule) }
th, td { padding: 7px 14px 7px 0; vertical-align: top } td { border-bottom: 1px solid var(--rule) }
th.n, td.n { text-align: right; white-space: nowrap } td.below { color: #b3261e }
.note { color: var(--soft); font-size: 13px; margin: 10px 0 }
details { color: var(--soft) } summary { cursor: pointer }
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
        found[json.dumps(_identity(record), sort_keys=True)] = record
  return list(found.values())


def _identity(record: Record) -> list[Any]:
  keys = 'bench device op role model recipe activation pattern dtype weights shape layouts mode remat mesh'
  return [record.get(key) for key in keys.split()]


def _ratio_text(record: Record) -> str:
  return ', '.join(f'{ratio:.3f} {name.replace("_", " ")}' for name, ratio in ratios(record).items())


def _steps(bench: str, records: Sequence[Record]) -> str:
  """Section of the benchmarks with dense twins: ffn, block, train_step."""
  heads = {
    'ffn': ('Feed-forward block', 'Forward and backward, packing and MVUE inside, masks given.'),
    'ffn_pytorch': ('The same by PyTorch', "Its 2:4 operators at their best algorithm, against PyTorch's dense block."),
    'block': ('Transformer block', 'Forward and backward of a whole block, packing inside.'),
    'train_step': ('Training step', 'Optimizer, decay, packing and mask search inside; searches spread over 40 steps.'),
    'mesh': ('Several GPUs', 'Tokens divided among the devices. The dense twin runs on the same mesh.'),
  }
  rows, charts = [], []
  for record in records:
    times = {'sparse': milliseconds(record)} | {n: row['median_ms'] for n, row in record['baselines'].items()}
    charts.append((title(record), times))
    speed = f'{record["tflops"]:.0f} TFLOP/s, logical' if 'tflops' in record else ''
    if 'tokens_per_s' in record:
      speed = f'{record["tokens_per_s"]:,.0f} tokens/s'
    calls = record.get('sparse_calls') or {}
    rows.append([
      title(record), f'{milliseconds(record):.3f}',
      ', '.join(f'{row["median_ms"]:.3f} {name.replace("_", " ")}' for name, row in record['baselines'].items()),
      _ratio_text(record), speed, ' / '.join(str(calls.get(role, '')) for role in _ROLES),
    ])  # fmt: skip
  heading, lead = heads[bench]
  if bench == 'ffn_pytorch' and (wrong := [r['error'] for r in records if (r.get('error') or 0) > 1e-2]):
    lead += (
      f' The relative error of its products is {min(wrong):.2f} to {max(wrong):.2f}: the layout that the packer writes'
      ' is not the one that the matmul reads on this card. The times stand, the numbers do not.'
    )
  parts = [
    f'<h2>{heading}</h2><p class="soft">{lead} Medians over interleaved bursts in both orders.</p>',
    bars(charts, label=heading),
    table(['case', 'ms', 'baselines, ms', 'times faster than', 'speed', 'sparse calls F / dX / dW'], rows),
  ]  # fmt: skip
  for record in records:
    profile = {twin: summary for twin, summary in (record.get('profile') or {}).items() if summary}
    if profile:
      parts.append(f'<h3>Where the time goes, in a few traced steps: {escape(title(record))}</h3>')
      parts.append(stacked(profile, label=f'device time of {title(record)}'))
      kinds = list(next(iter(profile.values()))['by_kind_ms'])
      cells = [[k, *(f'{s["by_kind_ms"][k]:.3f}' for s in profile.values())] for k in kinds]
      cells += [[k.removesuffix('_ms'), *(f'{s[k]:.3f}' for s in profile.values())] for k in ('busy_ms', 'idle_ms')]
      rows_of_kinds = table(['ms a step', *profile], [row for row in cells if any(float(c) for c in row[1:])])
      parts.append(f'<details><summary>as a table</summary>{rows_of_kinds}</details>')
  return '\n'.join(parts)


_PRODUCTS = {
  'sparse_matmul': ('Sparse matmul', 'One kernel against the best dense XLA matmul of the same layout.'),
  'float8_products': ('The products of an FP8 layer', 'Two of the three are sparse; the input gradient is dense FP8.'),
  'cusparselt': (
    'Beside cuSPARSELt', "Its fastest algorithm that is right and repeats, and the one that it takes by itself."
  ),
  'epilogue': (
    'What an epilogue costs',
    'An up-projection that writes GELU(z) and z; the same without z, without GELU, in two passes.',
  ),
}


def _matmul(bench: str, records: Sequence[Record]) -> str:
  rows = [
    [title(r), f'{r["median_ms"]:.3f}', f'{r["tflops"]:,.0f}' if 'tflops' in r else '', _ratio_text(r),
     ', '.join(f'{b["sustained_ms"] / r["sustained_ms"]:.3f} {name.replace("_", " ")}'
               for name, b in r['baselines'].items() if 'sustained_ms' in b),
     f'{r["error"]:.1e}' if 'error' in r else '']
    for r in records
  ]  # fmt: skip
  chart = [
    (title(r), {'dense_fp8' if r['op'] == 'fp8_dot' else 'sparse': r['median_ms']}
     | {n: b['median_ms'] for n, b in r['baselines'].items()})
    for r in records
  ]  # fmt: skip
  heading, lead = _PRODUCTS[bench]
  return '\n'.join([
    f'<h2>{heading}</h2><p class="soft">{lead}</p>',
    bars(chart, label=heading),
    table(['problem', 'ms', 'logical TFLOP/s', 'times faster than', 'the same, sustained', 'error'], rows),
  ])  # fmt: skip


def _checks(records: Sequence[Record]) -> str:
  """Section of the gradients of a block beside those of the float32 reference."""
  rows = []
  for record in records:
    error = record['error']
    rows += [
      [title(record), name, f'{exact:.2e}', f'{error["sampled"][name]:.2e}', f'{error["yardstick"][name]:.2e}',
       f'{error["unbiased"][name]:.3f}' if name in error['unbiased'] else '',
       f'{error["decompressed"][name]:.2e}' if 'decompressed' in error else '']
      for name, exact in error['exact'].items()
    ]  # fmt: skip
  return (
    '<h2>Gradients of a block</h2><p class="soft">Relative Frobenius errors against the float32 reference, on the '
    'card. MVUE picks by the values that it is given, so rounding now and then picks another entry: weight gradients '
    'are compared without sampling; with it, beside the plain op in the same dtype; and the mean of samples beside the '
    'unsampled gradient, over what their spread lets expect (about 1 if unbiased). Last: the kernels beside XLA, with '
    'the same operands and samples.</p>'
    + table(['block', 'tensor', 'without sampling', 'with', 'plain op, with', 'mean of samples', 'beside XLA'], rows)
  )


def _tracking(records: Sequence[Record]) -> str:
  """Section of training with the kernels beside training with the reference op."""
  parts = []
  for record in records:
    rows = [
      [recipe, ', '.join(f'{d:+.4f}' for d in found['difference']), f'{found["spread"]:.4f}',
       'yes' if found['tracks'] else 'no']
      for recipe, found in record['comparisons'].items()
    ]  # fmt: skip
    shape = record['shape']
    parts.append(
      f'<p class="soft">{escape(record["model"])}, {shape["layers"]} layers, width {shape["width"]}, {record["steps"]} '
      f'steps of {shape["batch"]} x {shape["length"]} bytes of text, {record["seeds"]} seeds. Validation loss with the '
      'kernels minus that with the plain op, seed by seed, beside the spread of seeds.</p>'
      + table(['recipe', 'difference, nats a byte', 'spread of seeds', 'within'], rows)
    )
  return '<h2>Training with the kernels and without</h2>' + ''.join(parts)


def _mesh_checks(records: Sequence[Record]) -> str:
  """Section of results on several GPUs beside those of one."""
  rows = [
    [record['op'].removeprefix('check-'), ' / '.join(part), f'{value:.1e}' if isinstance(value, float) else str(value)]
    for record in records
    for *part, value in _leaves(record['error'])
  ]
  return (
    '<h2>Several GPUs beside one</h2><p class="soft">The same op on all devices and on one: relative errors, and of '
    'sample the share of entries that were drawn otherwise.</p>' + table(['what', 'of', 'value'], rows)
  )


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[Any, ...]]:
  """(key, ..., value) of nested dicts."""
  if not isinstance(tree, dict):
    return [(*path, tree)]
  return [leaf for key, value in tree.items() for leaf in _leaves(value, (*path, key))]


def _memory_bound(records: Sequence[Record]) -> str:
  shares = [(title(r), {r['implementation']: 100 * r['copy_share']}) for r in records]
  rows = [
    [title(r), r['implementation'], f'{r["median_ms"]:.4f}', f'{100 * r["copy_share"]:.0f}%', _ratio_text(r)]
    for r in records
  ]
  return '\n'.join([
    '<h2>Memory-bound kernels</h2><p class="soft">Bytes that must move over time, as a share of a plain copy.</p>',
    bars(shares, label='share of copy bandwidth', unit='%'),
    table(['kernel', 'written in', 'ms', 'of copy bandwidth', 'times faster than'], rows),
  ])  # fmt: skip


_METHODS = {
  'transposable_srste': 'FST, bfloat16', 's_ste': 'S-STE, bfloat16', 's_ste_fp8': 'S-STE, FP8',
  'mixed_sparsity_24': 'MST within 2:4, bfloat16',
}  # fmt: skip
_PROGRAMS = {'ffn': 'feed-forward block', 'block': 'transformer block', 'train_step': 'training step'}


def markdown(records: Sequence[Record]) -> str:
  """The records of blocks and steps as the table of the README.

  >>> row = {'median_ms': 2.0, 'baselines': {'dense': {'median_ms': 3.0}, 'dense_fp8': {'median_ms': 2.5}}}
  >>> ffn = {'bench': 'ffn', 'recipe': 's_ste_fp8', 'activation': 'gelu', 'shape': {'tokens': 8, 'd': 4, 'hidden': 16}}
  >>> print(markdown([ffn | row]).splitlines()[-1])
  | feed-forward block, gelu, 8 x 4 x 16 | S-STE, FP8 | 2.00 | 3.00; FP8 2.50 | **1.50**; over FP8 1.25 |
  """
  lines = ['| what | method | sparse, ms | dense, ms | times faster |', '|---|---|---|---|---|']
  for bench, name in _PROGRAMS.items():
    for record in (record for record in records if record['bench'] == bench):
      shape, found = record['shape'], ratios(record)
      sizes = ('tokens', 'd', 'hidden') if bench == 'ffn' else ('batch', 'length')
      kind = record['activation'] if bench == 'ffn' else record['model']
      dense, faster = f'{record["baselines"]["dense"]["median_ms"]:.2f}', f'**{found["dense"]:.2f}**'
      if 'dense_fp8' in found:
        dense += f'; FP8 {record["baselines"]["dense_fp8"]["median_ms"]:.2f}'
        faster += f'; over FP8 {found["dense_fp8"]:.2f}'
      what = f'{name}, {kind}, {" x ".join(str(shape[size]) for size in sizes)}'
      method = _METHODS.get(record['recipe'], record['recipe'])
      lines.append(f'| {what} | {method} | {milliseconds(record):.2f} | {dense} | {faster} |')
  return '\n'.join(lines)


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


def page(records: Sequence[Record]) -> str:
  """The HTML of the page."""
  devices = sorted({record['device'] for record in records})
  versions = sorted({', '.join(f'{k} {v}' for k, v in record['versions'].items()) for record in records})
  parts = [
    '<h1>Measured speed</h1>',
    f'<p class="soft">{escape("; ".join(devices))}. {escape("; ".join(versions))}. {len(records)} records.</p>',
    _cards(records),
  ]
  for bench in BENCHES:
    chosen = [record for record in records if record['bench'] == bench]
    if chosen:
      match bench:
        case 'memory_bound':
          parts.append(_memory_bound(chosen))
        case 'ffn_check':
          parts.append(_checks(chosen))
        case 'mesh_check':
          parts.append(_mesh_checks(chosen))
        case 'tracking':
          parts.append(_tracking(chosen))
        case _:
          parts.append((_matmul if bench in _PRODUCTS else _steps)(bench, chosen))
      for note in dict.fromkeys(r['note'] for r in chosen if 'note' in r):
        about = '; '.join(title(r) for r in chosen if r.get('note') == note)
        parts.append(f'<p class="note">{escape(about)}: {escape(note)}.</p>')
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
  parser = argparse.ArgumentParser(prog='python -m experiments.bench_report', description='A page about the records.')
  parser.add_argument('records', nargs='*', type=Path, help='JSON-lines files (default: all in experiments/results)')
  parser.add_argument('--out', type=Path, default=Path('bench.html'), help='the page (default: %(default)s)')
  parser.add_argument('--markdown', action='store_true', help='print the table of the README instead')
  options = parser.parse_args(argv)
  records = load(options.records or RESULTS.glob('*.jsonl'))
  if not records:
    parser.error(f'no records of {", ".join(BENCHES)} found')
  if options.markdown:
    print(markdown(records))
    return
  options.out.parent.mkdir(parents=True, exist_ok=True)
  options.out.write_text(page(records))
  print(f'{options.out}: {len(records)} records')


if __name__ == '__main__':
  main()
