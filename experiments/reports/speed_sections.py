"""Sections of the page about benchmark records: a heading, bars and tables for each benchmark."""

from collections.abc import Sequence
from typing import Any

from experiments.reports import page
from experiments.reports.charts import bars, stacked
from experiments.reports.speed_records import milliseconds, ratios, Record, title, traced

_ROLES = ('forward', 'input_grad', 'weight_grad')


def _ratio_text(record: Record, separator: str = ', ') -> str:
  return separator.join(f'{ratio:.3f} {name.replace("_", " ")}' for name, ratio in ratios(record).items())


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
    calls, ratio = record.get('sparse_calls') or {}, _ratio_text(record)
    if of_trace := traced(record):
      ratio += '; traced ' + ', '.join(f'{ratio:.3f}' for ratio in of_trace.values())
    if gains := record.get('run_speedup'):
      ratio += f'; of a whole run, {record["sparse_share"]:.0%} of it sparse, {gains["dense"]:.3f}'
    rows.append([
      title(record), f'{milliseconds(record):.3f}',
      ', '.join(f'{row["median_ms"]:.3f} {name.replace("_", " ")}' for name, row in record['baselines'].items()),
      ratio, speed, ' / '.join(str(calls[role]) for role in _ROLES if role in calls),
    ])  # fmt: skip
  heading, lead = heads[bench]
  if bench == 'ffn_pytorch' and (wrong := [r['error'] for r in records if (r.get('error') or 0) > 1e-2]):
    lead += (
      f' The relative error of its matmuls is {min(wrong):.2f} to {max(wrong):.2f}: the layout that the packer writes'
      ' is not the one that the matmul reads on this GPU. The times stand, the numbers do not.'
    )
  parts = [
    page.heading(heading, f'{lead} Medians over interleaved bursts in both orders; a trace is sustained.'),
    bars(charts, label=heading),
    page.table(['case', 'ms', 'baselines, ms', 'times faster than', 'speed', 'sparse calls F / dX / dW'], rows),
  ]  # fmt: skip
  for record in records:
    profile = {twin: summary for twin, summary in (record.get('profile') or {}).items() if summary}
    if profile:
      parts.append(page.figure(
        stacked(profile, label=f'device time of {title(record)}'),
        f'Where the time goes, in a few traced steps: {title(record)}',
      ))  # fmt: skip
      kinds = list(next(iter(profile.values()))['by_kind_ms'])
      cells = [[k, *(f'{s["by_kind_ms"][k]:.3f}' for s in profile.values())] for k in kinds]
      cells += [[k.removesuffix('_ms'), *(f'{s[k]:.3f}' for s in profile.values())] for k in ('busy_ms', 'idle_ms')]
      rows_of_kinds = page.table(['ms a step', *profile], [row for row in cells if any(float(c) for c in row[1:])])
      parts.append(page.folded('as a table', rows_of_kinds))
  return '\n'.join(parts)


_ZEROS = '"dense" has the same matrix, whose zeros save power; "dense without zeros", where measured, random numbers.'
_PRODUCTS = {
  'sparse_matmul': ('Sparse matmul', f'One kernel against the best dense XLA matmul of the same layout. {_ZEROS}'),
  'float8_products': ('The matmuls of an FP8 layer', 'Two of the three are sparse; the input gradient is dense FP8.'),
  'cusparselt': (
    'Beside cuSPARSELt', "Its fastest algorithm that is right and repeats, and the one that it takes by itself."
  ),
  'epilogue': (
    'What an epilogue costs',
    'An up-projection that writes GELU(z) and z; the same without z, without GELU, in two passes.',
  ),
  'vnm_matmul': (
    'V:N:M matmul', f'Rows of the other operand gathered for each block, against the dense matmul. {_ZEROS}'
  ),
}


def _matmul(bench: str, records: Sequence[Record]) -> str:
  rows = [
    [title(r), f'{r["median_ms"]:.3f}', f'{r["tflops"]:,.0f}' if 'tflops' in r else '',
     _ratio_text(r, '\n'),
     '\n'.join(f'{b["sustained_ms"] / r["sustained_ms"]:.3f} {name.replace("_", " ")}'
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
    page.heading(heading, lead),
    bars(chart, label=heading),
    page.table(['problem', 'ms', 'logical TFLOP/s', 'times faster than', 'the same, sustained', 'error'], rows),
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
  lead = (
    'Relative Frobenius errors against the float32 reference, on the '
    'GPU. MVUE picks by the values that it is given, so rounding now and then picks another entry: weight gradients '
    'are compared without sampling; with it, beside the plain op in the same dtype; and the mean of samples beside the '
    'unsampled gradient, over what their spread lets expect (about 1 if unbiased). Last: the kernels beside XLA, with '
    'the same operands and samples.'
  )
  heads = ['block', 'tensor', 'without sampling', 'with', 'plain op, with', 'mean of samples', 'beside XLA']
  return page.heading('Gradients of a block', lead) + page.table(heads, rows)


def _tracking(records: Sequence[Record]) -> str:
  """Section of training with the kernels beside training with the reference op."""
  parts = [page.heading('Training with the kernels and without')]
  for record in records:
    rows = [
      [recipe, ', '.join(f'{d:+.4f}' for d in found['difference']), f'{found["spread"]:.4f}',
       'yes' if found['tracks'] else 'no']
      for recipe, found in record['comparisons'].items()
    ]  # fmt: skip
    shape = record['shape']
    parts.append(page.paragraph(
      f'{record["model"]}, {shape["layers"]} layers, width {shape["width"]}, {record["steps"]} '
      f'steps of {shape["batch"]} x {shape["length"]} bytes of text, {record["seeds"]} seeds. Validation loss with the '
      'kernels minus that with the plain op, seed by seed, beside the spread of seeds.'
    ))  # fmt: skip
    parts.append(page.table(['recipe', 'difference, nats a byte', 'spread of seeds', 'within'], rows))
  return ''.join(parts)


def _attention(records: Sequence[Record]) -> str:
  """Section of sparse attention: back ends side by side, and full causal attention."""
  times = [
    (title(r), {r['implementation']: r['median_ms']} | {n: b['median_ms'] for n, b in r['baselines'].items()})
    for r in records
  ]
  names = list(dict.fromkeys(name for _, found in times for name in found))
  rows = [
    [case, *(f'{found[name]:.3f}' if name in found else '' for name in names), f'{100 * r["computed_share"]:.0f}%',
     f'{max(value for errors in r["error"].values() for value in errors.values()):.1e}']
    for (case, found), r in zip(times, records, strict=True)
  ]  # fmt: skip
  of_device = all(r.get('clock') == 'device' for r in records)
  what = 'ms of its kernels' if of_device else 'ms by the wall clock, which below 0.3 ms is that of the host'
  lead = f'Forward and backward, {what}, by back end; full is causal attention without a pattern, by cuDNN.'
  heads = ['case', *names, 'of all scores, computed', 'largest error']
  return page.heading('Sparse attention', lead) + bars(times, label='attention') + page.table(heads, rows)


def _mesh_checks(records: Sequence[Record]) -> str:
  """Section of results on several GPUs beside those of one."""
  rows = [
    [record['op'].removeprefix('check-'), ' / '.join(part), f'{value:.1e}' if isinstance(value, float) else str(value)]
    for record in records
    for *part, value in _leaves(record['error'])
  ]
  lead = (
    'The same op on all devices and on one: relative errors, and of sample the share of entries that were drawn '
    'otherwise.'
  )
  return page.heading('Several GPUs beside one', lead) + page.table(['what', 'of', 'value'], rows)


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[Any, ...]]:
  """(key, ..., value) of nested dicts."""
  if not isinstance(tree, dict):
    return [(*path, tree)]
  return [leaf for key, value in tree.items() for leaf in _leaves(value, (*path, key))]


def _memory_bound(records: Sequence[Record]) -> str:
  names = [f'{title(r)} {r["role"].replace("_", " ")}' if r['op'] == 'vnm_pack' else title(r) for r in records]
  shares = [
    (name, {r['implementation']: 100 * r['copy_share']}) for name, r in zip(names, records, strict=True)
  ]  # fmt: skip
  rows = [
    [name, r['implementation'], f'{r["median_ms"]:.4f}', f'{100 * r["copy_share"]:.0f}%', _ratio_text(r)]
    for name, r in zip(names, records, strict=True)
  ]
  lead = (
    'Bytes that must move over time, as a share of a plain copy: of words of four bytes, in records of an H100 of '
    'bfloat16.'
  )
  return '\n'.join([
    page.heading('Memory-bound kernels', lead),
    bars(shares, label='share of copy bandwidth', unit='%'),
    page.table(['kernel', 'written in', 'ms', 'of copy bandwidth', 'times faster than'], rows),
  ])  # fmt: skip


def section(bench: str, records: Sequence[Record]) -> str:
  """The HTML of one benchmark's section.

  Args:
    bench: of all records.
    records: not empty.
  """
  match bench:
    case 'memory_bound':
      return _memory_bound(records)
    case 'ffn_check':
      return _checks(records)
    case 'attention':
      return _attention(records)
    case 'mesh_check':
      return _mesh_checks(records)
    case 'tracking':
      return _tracking(records)
    case _:
      return (_matmul if bench in _PRODUCTS else _steps)(bench, records)
