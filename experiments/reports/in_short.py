"""The two tables in which the page on quality begins: a line a comparison, losses after as many steps and seconds."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.reports import evidence
from experiments.reports import race_table as table

type Comparison = Sequence[Mapping[str, Any]]
# What the columns of equal steps are called, and their contenders; the first that took part counts. On the
# kernels S-STE runs in FP8.
_COLUMNS: Mapping[str, Sequence[str]] = {
  'SR-STE': ('sr_ste',),
  'S-STE (85 M: in FP8)': ('s_ste', 's_ste_fp8'),
  'S-STE, FP8, all linear layers': ('s_ste_fp8_all',),
  'FST': ('fst',),
  'FST, FP8, all linear layers': ('fst_fp8_all',),
  'dense, FFN half as wide': ('half_ffn',),
}


def equal_steps(comparisons: Mapping[str, Comparison]) -> str:
  """By how many percent methods end above dense after as many steps.

  Args:
    comparisons: records by the model that they are of.
  """
  rows = []
  for model, records in comparisons.items():
    found = table.by_seed(records)
    cells = (next((found[who] for who in names if who in found), None) for names in _COLUMNS.values())
    rows.append([
      model, f'{records[0]["equal_steps"]:,}', f'{found["dense"].mean:.3f}',
      *(table.interval(table.percent_above(own, found['dense']), '+', 1) if own else '' for own in cells),
    ])  # fmt: skip
  return table.lines(['parameters', 'steps', 'loss of dense', *_COLUMNS], rows)


def equal_seconds(races: Mapping[str, Comparison]) -> str:
  """The best sparse and the best dense model of each race, of those that ran with two seeds or more.

  Args:
    races: records by what the race is called.
  """
  rows = []
  for name, records in races.items():
    found = {who: own for who, own in table.by_seed(records).items() if len(own.losses) > 1 and who in evidence.NAMES}
    best = next(who for who in found if evidence.NAMES[who].recipe)
    own, rival = found[best], next(seeds for who, seeds in found.items() if not evidence.NAMES[who].recipe)
    twin = next((seeds for who, seeds in found.items() if _is_twin(who, best)), None)
    rows.append([
      name, f'{own.title}: {own.mean:.4f}', f'{rival.title}: {rival.mean:.4f}', *_between(own, rival),
      *(_between(own, twin) if twin else ('', '')),
    ])  # fmt: skip
  head = [
    'race', 'best sparse model', 'best dense model', 'sparse minus dense', 'share of time',
    'minus dense FP8 of its shape', 'share of time',
  ]  # fmt: skip
  return table.lines(head, rows)


def _is_twin(who: str, sparse: str) -> bool:
  """Whether it is the dense FP8 model of the shape of a sparse one."""
  recipe, width, fp8 = evidence.block_of(who)
  return recipe is None and fp8 and width == evidence.block_of(sparse)[1] and evidence.contender_of(who).size is None


def _between(own: table.Seeds, other: table.Seeds) -> tuple[str, str]:
  """The loss of one minus the other's, and the share of time after which the lower is at the other's final loss."""
  lower, higher = (own, other) if own.mean <= other.mean else (other, own)
  return table.interval(table.pairs_of(own, other), '+'), table.share(table.shares_of_time(lower, higher))
