"""What the answers of the guide rest on: blocks, steps and comparisons, in tables."""

from collections.abc import Mapping, Sequence
import math
import textwrap

from experiments.reports import race_table
from experiments.reports.evidence import block_of, contender_of, Evidence, far, interval, parted, Step

LEGEND = (
  "What this rests on. Loss is above (+) or below (-) dense's of the same comparison, which has squared ReLU too where"
  ' that is said, or that of the model which a title names; ± is the 95% interval over seeds, and a figure'
  " without one is of one seed. Time is the share of dense's time after which a method has dense's final"
  " loss. Lead is the share of the method's time after which the first with several seeds has the method's final loss."
  ' = is not parted from that first one by the seeds. * has its best rate or decay at an edge of its search, so that a'
  ' wider one may find a better; ° searched none. The models compared are GPT-2 on bytes, with rotary positions and'
  ' normalised queries and keys.'
)

_NAME = 56  # characters of a line that a name takes, where losses follow
_STEP_NAME = 38  # and where times and a model do


def tables(
  faster: Mapping[str, float | None], found: Mapping[str, Sequence[Evidence]], timed: Mapping[str, Step],
  d: int,
) -> list[str]:  # fmt: skip
  """All that is on record: blocks, steps, and each comparison with its methods by loss, the nearest width first."""
  blocks: dict[tuple[tuple[str | None, float, bool], str], list[str]] = {}
  for name, gain in faster.items():
    said, its = 'not known' if gain is None else f'{gain:.2f}', contender_of(name)
    blocks.setdefault((block_of(name), str(its.kwargs.get('policy'))), [its.label, said])
  times = [
    [step.label, f'{step.times:.2f}', f'{step.least:.2f} to {step.most:.2f}',
     f'{step.where}, {step.device.removeprefix("NVIDIA ")}']
    for step in timed.values()
  ]  # fmt: skip
  title = 'Times as fast as a dense feed-forward block of the size asked about, by the records of kernels:'
  lines = _table(title, [*blocks.values()])
  lines += _table('Times as fast as dense, a step, by three processes or more, and their range:', times, _STEP_NAME)
  comparisons: dict[tuple[str, str], list[Evidence]] = {}
  for e in (e for each in found.values() for e in each):
    comparisons.setdefault((e.where, e.device), []).append(e)
  for each in sorted(comparisons.values(), key=lambda each: far(each[0].width, d)):
    each.sort(key=lambda e: e.mean)
    first = next((e for e in each if len(e.percent) > 1), each[0])
    race = first.equal == 'seconds'
    rows = [['', *(['time', 'lead'] if race else []), 'loss']]
    for e in each:
      mark = '°' if e.own.searched == 1 else '*' * e.own.edge
      mark += ' =' * (e is not first and len(e.behind(first)) > 1 and not parted(e, first))
      lead = race_table.shares_of_time(first.own, e.own) if race and e is not first else []
      times = [_share(e.shares), _share(lead)] if race else []
      rows.append([f'{e.who}{mark}', *times, _interval(e.percent, '+.1f', '%')])
    against = '' if first.against in ('dense', 'dense_relu2') else f', against {first.dense.title}'
    lines += _table(f'{first.where}, {first.device}{against}:', rows)
  return lines


def _table(title: str, rows: Sequence[Sequence[str]], name: int = _NAME) -> list[str]:
  """Lines of a table; a first cell of more than `name` characters takes several, and the others stand on its last."""
  if not rows:
    return []
  lines = []
  for first, *others in rows:
    *above, last = textwrap.wrap(first, name, subsequent_indent='  ', break_on_hyphens=False) or ['']
    lines += [[part, *([''] * len(others))] for part in above] + [[last, *others]]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return ['', title, *('  ' + '  '.join(map(str.ljust, line, widths)).rstrip() for line in lines)]


def _share(values: Sequence[float]) -> str:
  return 'never' if math.inf in values else _interval(values) if values else ''


def _interval(values: Sequence[float], form: str = '.2f', unit: str = '') -> str:
  return interval(values, form, unit).removesuffix(', one seed')
