"""What a short search of the masked decay costs: its choice among whole runs, against the best of all whole runs."""

from collections.abc import Collection, Mapping, Sequence
import math
import statistics
from typing import Any


def losses_markdown(columns: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
  """A row a decay: the mean loss of the whole runs in each column, if it was tried there.

  >>> print(losses_markdown({'nano': [{'share': 1.0, 'decay': 0.006, 'loss': 1.25}], 'small': []}))
  | decay | nano | small |
  | --- | --- | --- |
  | 0.006 | 1.2500 |  |
  """
  found = {title: _losses([r for r in records if r['share'] == 1]) for title, records in columns.items()}
  lines = [f'| decay | {" | ".join(found)} |', f'| --- |{" --- |" * len(found)}']
  for decay in sorted({decay for losses in found.values() for decay in losses}):
    cells = (f'{losses[decay]:.4f}' if decay in losses else '' for losses in found.values())
    lines.append(f'| {decay:g} | {" | ".join(cells)} |')
  return '\n'.join(lines)


def markdown(records: Sequence[Mapping[str, Any]]) -> str:
  """A row a model and length of the short runs; records are of `grid`, each model's at one rate."""
  lines = [
    '| model | share of the steps | decay by short runs | validation loss of whole runs with it | best decay of whole'
    ' runs | loss | percent above | one seed searches: at most |',
    '| --- | --- | --- | --- | --- | --- | --- | --- |',
  ]
  for size in dict.fromkeys(r['experiment'] for r in records):
    own = [r for r in records if r['experiment'] == size]
    whole = [r for r in own if r['share'] == 1]
    for share in sorted({r['share'] for r in own} - {1.0}):
      cells = row(whole, [r for r in own if r['share'] == share])
      lines.append(f'| {" | ".join([size, f"{share:g}", *cells])} |')
  return '\n'.join(lines)


def row(whole: Sequence[Mapping[str, Any]], short: Sequence[Mapping[str, Any]]) -> list[str]:
  """Cells of one search.

  >>> def run(decay, seed, loss):
  ...   return {'decay': decay, 'seed': seed, 'loss': loss}
  >>> whole = [run(1e-3, 0, 2.0), run(1e-3, 1, 2.2), run(1e-2, 0, 2.0), run(1e-2, 1, 2.1)]
  >>> row(whole, [run(1e-3, 0, 3.0), run(1e-3, 1, 3.4), run(1e-2, 0, 3.1), run(1e-2, 1, 3.2)])
  ['0.01', '2.0500', '0.01', '2.0500', '0.00', '2.44']
  """
  losses, seeds = _losses(whole), sorted({r['seed'] for r in short})
  best, found = _best(losses), _best(_losses(short))
  alone = [_best(_losses([r for r in short if r['seed'] == seed])) for seed in seeds]

  def above(decay: float) -> str:
    return f'{100 * (losses[decay] / losses[best] - 1):.2f}'

  return [
    f'{found:g}', f'{losses[found]:.4f}', f'{best:g}', f'{losses[best]:.4f}', above(found),
    above(max(alone, key=lambda decay: losses[decay])),
  ]  # fmt: skip


def _losses(records: Collection[Mapping[str, Any]]) -> dict[float, float]:
  """Decay -> mean loss over the seeds; infinite where one diverged."""
  each: dict[float, list[float]] = {}
  for r in records:
    each.setdefault(r['decay'], []).append(math.inf if r['loss'] is None else r['loss'])
  return {decay: statistics.fmean(losses) for decay, losses in each.items()}


def _best(losses: Mapping[float, float]) -> float:
  return min(losses, key=lambda decay: losses[decay])
