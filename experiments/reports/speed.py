"""What the benchmark records say: the tables of `docs/speed.md`, the picture of the README.

Every figure comes from a record; the latest of equal records counts. Records of small shapes made to test a benchmark
(`--tiny`) are left out.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
import json
from pathlib import Path
import statistics
from typing import Any

from experiments.reports import charts, tables
from experiments.runs.recipes import DENSE_SHARE

type Record = Mapping[str, Any]


def load(paths: Iterable[Path]) -> list[dict[str, Any]]:
  """Records of feed-forward blocks, the last of equal ones, without those of tiny shapes.

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
      if record.get('bench') == 'ffn' and '--tiny' not in str(record.get('command', '')):
        found[json.dumps(identity(record), sort_keys=True)] = record
  return list(found.values())


def identity(record: Record) -> list[Any]:
  """What was measured; of two records that agree in it the later counts."""
  keys = 'bench device op role model recipe activation pattern dense_features token_pattern dtype weights shape layouts'
  keys += ' mode remat mesh sharding xla_flags'
  keys += ' layout process'  # of `best_steps`
  return [record.get(key) for key in keys.split()]


def by_process(records: Iterable[Record]) -> list[list[Record]]:
  """Records of one thing together, each of another process; things in the order of their first records.

  Of several commits the newest counts: two programs have no common median.

  >>> rows = [{'op': op, 'process': process} for process in (0, 1) for op in 'ab']
  >>> [[row['process'] for row in many] for many in by_process([*rows, {'op': 'b', 'process': 0, 'commit': 'new'}])]
  [[0, 1], [0]]
  """
  found: dict[str, list[Record]] = {}
  for record in records:
    found.setdefault(json.dumps(identity({**record, 'process': None}), sort_keys=True), []).append(record)
  return [_of_newest_commit(many) for many in found.values()]


def _of_newest_commit(records: Sequence[Record]) -> list[Record]:
  newest = max(records, key=lambda r: (r.get('when') or '', r.get('commit') or ''))
  return [r for r in records if r.get('commit') == newest.get('commit')]


def spread(values: Iterable[float | None]) -> str:
  """The median of what several processes found, with its range where they differ; empty if it was not measured.

  >>> spread([1.5, 1.52, 1.49]), spread([1.5, None]), spread([None])
  ('1.50 (1.49 to 1.52)', '1.50', '')
  """
  found = sorted(value for value in values if value)
  if not found:
    return ''
  text, *ends = (f'{value:,.2f}' for value in (statistics.median(found), found[0], found[-1]))
  return text if ends[0] == ends[1] else f'{text} ({ends[0]} to {ends[1]})'


def pattern(record: Record) -> str:
  """The pattern of a record's activations, with that along tokens or the share of dense neurons where it is not usual.

  >>> pattern({'pattern': '128:2:8', 'dense_features': 0.2, 'token_pattern': None})
  '128:2:8 with 20% dense neurons'
  """
  if record['token_pattern']:
    return f'{record["pattern"]}, {record["token_pattern"]} along tokens'
  share = record['dense_features']
  return record['pattern'] + ('' if share == DENSE_SHARE else f' with {share:.0%} dense neurons')


def sizes(record: Record, *names: str) -> str:
  """The named sizes of a record's shape, as tables have them."""
  return ' x '.join(str(record['shape'][name]) for name in names)


def ratios(record: Record) -> dict[str, float]:
  """Baseline -> how many times longer it takes."""
  return {name: row['median_ms'] / record['median_ms'] for name, row in record.get('baselines', {}).items()}


def traced(record: Record) -> dict[str, float]:
  """Baseline -> how many times longer its steps take in a trace; {} where these were not traced."""
  times = {
    twin: summary['busy_ms'] + summary['idle_ms'] for twin, summary in (record.get('profile') or {}).items() if summary
  }
  if 'sparse' not in times:
    return {}
  return {name: ms / times['sparse'] for name, ms in times.items() if name != 'sparse'}


def lower(record: Record) -> dict[str, float]:
  """`ratios`, or those of a trace where these are lower: a burst is over before a GPU is warm.

  >>> row = {'median_ms': 2.0, 'baselines': {'dense': {'median_ms': 4.0}}}
  >>> profile = {'sparse': {'busy_ms': 2.0, 'idle_ms': 0.0}, 'dense': {'busy_ms': 3.5, 'idle_ms': 0.1}}
  >>> lower(row), lower(row | {'profile': profile})
  ({'dense': 2.0}, {'dense': 1.8})
  """
  found = traced(record)
  return {name: min(ratio, found.get(name, ratio)) for name, ratio in ratios(record).items()}


_METHODS = {
  'transposable_srste': 'FST, bfloat16', 'transposable_srste_fp8': 'FST, FP8', 's_ste': 'S-STE, bfloat16',
  's_ste_fp8': 'S-STE, FP8', 'neuron_level': 'neuron level, bfloat16',
}  # fmt: skip


def markdown(records: Sequence[Record]) -> str:
  """Blocks, the table of `docs/speed.md`; the device with most of them is named once, others in their rows.

  The lower figure of bursts and a trace, and of several processes the median, with its range.

  >>> row = {'median_ms': 2.0, 'baselines': {'dense': {'median_ms': 3.0}}, 'commit': None}
  >>> block = {'recipe': 's_ste_fp8', 'activation': 'gelu', 'shape': {'tokens': 8, 'd': 4, 'hidden': 16}}
  >>> print(markdown([block | row | {'device': 'NVIDIA A100'}]))
  On one NVIDIA A100:
  <BLANKLINE>
  | activation, sizes | method | sparse, ms | dense, ms | times faster | dense FP8, ms | than that | processes |
  | --- | --- | --- | --- | --- | --- | --- | --- |
  | gelu, 8 x 4 x 16 | S-STE, FP8 | 2.00 | 3.00 | **1.50** |  |  | 1 |
  """
  main, *others = _devices(records)
  head = ('activation, sizes', 'method', 'sparse, ms', 'dense, ms', 'times faster')
  head += ('dense FP8, ms', 'than that', 'processes')
  rows = []
  for device in (main, *others):
    where = '' if device == main else f', {device}'
    rows += [_row(many, where) for many in by_process(r for r in records if r.get('device') == device)]
  return f'On one {main}{", where a row names no other" if others else ""}:\n\n{tables.markdown(head, rows)}'


def _row(many: Sequence[Record], where: str) -> list[Any]:
  record = many[0]

  def ms(twin: str) -> str:
    twins = [r['baselines'][twin]['median_ms'] for r in many if twin in r['baselines']]
    return f'{statistics.median(twins):.2f}' if twins else ''

  times, over_fp8 = (spread(lower(r).get(twin) for r in many) for twin in ('dense', 'dense_fp8'))
  median, _, rest = times.partition(' ')
  what = f'{record["activation"]}, {sizes(record, "tokens", "d", "hidden")}{where}'
  return [
    what, _method(record), f'{statistics.median(r["median_ms"] for r in many):.2f}',
    ms('dense'), f'**{median}** {rest}'.strip(), ms('dense_fp8'), over_fp8, len(many),
  ]  # fmt: skip


def _method(record: Record) -> str:
  name = _METHODS.get(recipe := str(record['recipe']), recipe)
  return f'{name}, {pattern(record)}' if 'pattern' in record else name


def _published(record: Record) -> bool:
  return 'pattern' not in record or pattern(record) == record['pattern']


def _devices(records: Sequence[Record]) -> list[Any]:
  """The one with most records first."""
  return [device for device, _ in Counter(r.get('device') for r in records).most_common()]


def figure_rows(
  records: Sequence[Record], steps: Mapping[str, list[tuple[str, float]]]
) -> dict[str, list[tuple[str, float]]]:
  """Blocks of 16,384 tokens, of the device with most of these records, and whole steps: what, and times faster.

  Of a block the lower figure of bursts and trace; one that was measured in bursts alone is left out, and so is one
  whose settings are not those of a paper.

  Args:
    records: of blocks.
    steps: heading -> steps over a dense model at its best.

  Raises:
    ValueError: no such block.
  """
  shape, here = dict(tokens=16384, d=4096, hidden=16384), _devices(records)[:1]
  blocks = [r for r in records if r.get('device') in here and r['shape'] == shape and traced(r) and _published(r)]
  if not blocks:
    raise ValueError('no record of a traced block of 16384 x 4096 x 16384')

  def what(record: Record) -> str:
    method = _method(record).replace(', bfloat16', '').replace('neuron level', 'V:N:M')
    return f'{method}, {record["activation"].replace("_", " ")}'

  rows = [(what(many[0]), statistics.median(lower(r)['dense'] for r in many)) for many in by_process(blocks)]
  groups = {'Feed-forward block, 16384 x 4096 x 16384, forward and backward': rows, **steps}
  return {name: [(what, round(times, 2)) for what, times in rows] for name, rows in groups.items() if rows}


def figure(records: Sequence[Record], steps: Mapping[str, list[tuple[str, float]]]) -> str:
  """The picture of the README, an SVG file that says in its `<desc>` what it shows; see `figure_rows`."""
  rows = figure_rows(records, steps)
  return charts.described(charts.speedups(rows, label='times faster than dense bfloat16'), rows)
