"""What a search of the masked decay costs, by short runs or flip rates: its choice against the best of whole runs."""

from collections.abc import Collection, Mapping, Sequence
import statistics
from typing import Any

from experiments.reports import tables
from experiments.runs.race.search import mean_losses
from sparse24_jax.tuning import FEASIBLE_BAND


def losses_markdown(columns: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
  """A row a decay: the mean loss of the whole runs in each column, if it was tried there.

  >>> print(losses_markdown({'nano': [{'share': 1.0, 'decay': 0.006, 'loss': 1.25}], 'small': []}))
  | decay | nano | small |
  | --- | --- | --- |
  | 0.006 | 1.2500 |  |
  """
  found = {title: _losses([r for r in records if r['share'] == 1]) for title, records in columns.items()}
  rows = [
    [f'{decay:g}', *(f'{losses[decay]:.4f}' if decay in losses else '' for losses in found.values())]
    for decay in sorted({decay for losses in found.values() for decay in losses})
  ]
  return tables.markdown(['decay', *found], rows)


def markdown(records: Sequence[Mapping[str, Any]]) -> str:
  """A row a model and length of the short runs; records are of `grid`, each model's at one rate."""
  head = [
    'model', 'share of the steps', 'decay by short runs', 'validation loss of whole runs with it',
    'best decay of whole runs', 'loss', 'percent above', 'one seed searches: at most',
  ]  # fmt: skip
  rows = []
  for size in dict.fromkeys(r['experiment'] for r in records):
    own = [r for r in records if r['experiment'] == size]
    whole = [r for r in own if r['share'] == 1]
    for share in sorted({r['share'] for r in own} - {1.0}):
      rows.append([size, f'{share:g}', *row(whole, [r for r in own if r['share'] == share])])
  return tables.markdown(head, rows)


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


def flips_markdown(records: Sequence[Mapping[str, Any]], dense: Sequence[Mapping[str, Any]]) -> str:
  """A row a decay: flip rates over those of dense runs at each evaluation before 80% of the steps, and the final loss.

  80% because FST is dense in the last sixth of its steps; what it flips there tells nothing of the decay. The largest
  decay inside `FEASIBLE_BAND` is chosen, as `tune_masked_decay` chooses; others inside are feasible.

  Args:
    records: whole runs of FST, of `grid`, at one rate.
    dense: runs with the same rate, steps and seeds.

  Raises:
    ValueError: dense runs that are not like that.

  >>> def run(decay, loss, *rates):
  ...   evaluated = zip((100, 200, 300), rates)
  ...   return {'decay': decay, 'rate': 1.0, 'seed': 0, 'share': 1.0, 'steps': 300, 'loss': loss,
  ...           'flip_rate': {'refreshes': [[*pair] for pair in evaluated]}}
  >>> sparse = [run(1e-4, 2.0, 0.2, 0.1, 0.0), run(1e-3, 2.1, 0.1, 0.07, 0.0), run(1e-2, 2.2, 0.05, 0.01, 0.0)]
  >>> print(flips_markdown(sparse, [run(0.0, 1.9, 0.2, 0.1, 0.05)]))
  | decay | flip rate over dense's at step 100 | 200 | validation loss | percent above the best | minus it, by seed |
  | --- | --- | --- | --- | --- | --- |
  | 0.0001 | 1.000 | 1.000 | 2.0000 |  |  |
  | 0.001 | 0.500 | 0.700, chosen | 2.1000 | 5.00 | +0.1000 |
  | 0.01 | 0.250 | 0.100 | 2.2000 | 10.00 | +0.2000 |
  """
  whole = [r for r in records if r['share'] == 1]
  settings = ({(r['rate'], r['steps'], r['seed']) for r in each} for each in (whole, dense))
  if len(set(map(frozenset, settings))) != 1:
    raise ValueError('the dense runs have other rates, steps or seeds than those of FST')
  steps = [step for step, _ in dense[0]['flip_rate']['refreshes'] if step <= 0.8 * dense[0]['steps']]
  each: dict[float, list[Mapping[str, Any]]] = {}
  for r in sorted(whole, key=lambda r: (r['decay'], r['seed'])):
    each.setdefault(r['decay'], []).append(r)
  watched = _flips(dense, steps)
  ratios = {decay: [a / b for a, b in zip(_flips(own, steps), watched, strict=True)] for decay, own in each.items()}
  low, high = FEASIBLE_BAND
  feasible = [[decay for decay in each if low <= ratios[decay][i] <= high] for i in range(len(steps))]
  losses = _losses(whole)
  best = _best(losses)
  first, *others = (f'{step:,}' for step in steps)
  head = [
    'decay', f"flip rate over dense's at step {first}", *others, 'validation loss', 'percent above the best',
    'minus it, by seed',
  ]  # fmt: skip
  rows = []
  for decay, own in each.items():
    cells = [f'{decay:g}']
    for ratio, inside in zip(ratios[decay], feasible, strict=True):
      said = ', chosen' if decay == max(inside, default=None) else ', feasible' if decay in inside else ''
      cells.append(f'{ratio:.3f}{said}')
    cells.append(f'{losses[decay]:.4f}')
    by_seed = (f'{a["loss"] - b["loss"]:+.4f}' for a, b in zip(own, each[best], strict=True))
    cells += ['', ''] if decay == best else [f'{100 * (losses[decay] / losses[best] - 1):.2f}', ', '.join(by_seed)]
    rows.append(cells)
  return tables.markdown(head, rows)


def _flips(records: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> list[float]:
  """Mean flip rate over the seeds, of the last refresh before each of the steps."""
  found = [dict(r['flip_rate']['refreshes']) for r in records]
  return [statistics.fmean(rates[step] for rates in found) for step in steps]


def _losses(records: Collection[Mapping[str, Any]]) -> dict[float, float]:
  return mean_losses(records, lambda record: record['decay'])


def _best(losses: Mapping[float, float]) -> float:
  return min(losses, key=lambda decay: losses[decay])
