"""What a short search of the masked decay costs: its choice among whole runs, against the best of all whole runs."""

from collections.abc import Collection, Mapping, Sequence
import math
import statistics
from typing import Any


def markdown(records: Sequence[Mapping[str, Any]]) -> str:
  """A row a model and rate, and one where the rate is chosen too; records are of `grid`, whole runs and short ones."""
  lines = [
    '| model | rate | best decay of whole runs | validation loss | decay by short runs | loss with it | percent above |'
    ' one seed searches: at most |',
    '| --- | --- | --- | --- | --- | --- | --- | --- |',
  ]
  for size in dict.fromkeys(r['model']['size'] for r in records):
    own = [r for r in records if r['model']['size'] == size]
    rates = sorted({r['rate'] for r in own})
    for chosen in [*([rate] for rate in rates), *([rates] if len(rates) > 1 else [])]:
      lines.append(f'| {" | ".join([size, *row([r for r in own if r["rate"] in chosen])])} |')
  return '\n'.join(lines)


def row(records: Sequence[Mapping[str, Any]]) -> list[str]:
  """Cells of one search; where it has several rates it chooses the rate as well.

  >>> def run(share, decay, seed, loss):
  ...   return {'share': share, 'rate': 0.01, 'decay': decay, 'seed': seed, 'loss': loss}
  >>> whole = [run(1.0, 1e-3, 0, 2.0), run(1.0, 1e-3, 1, 2.2), run(1.0, 1e-2, 0, 2.0), run(1.0, 1e-2, 1, 2.1)]
  >>> row([*whole, run(0.25, 1e-3, 0, 3.0), run(0.25, 1e-3, 1, 3.4), run(0.25, 1e-2, 0, 3.1), run(0.25, 1e-2, 1, 3.2)])
  ['0.01', '0.01', '2.0500', '0.01', '2.0500', '0.00', '2.44']
  """
  seeds = sorted({r['seed'] for r in records})
  whole, short = (_losses([r for r in records if (r['share'] < 1) == is_short], seeds) for is_short in (False, True))
  best, found = _best(whole), _best(short)
  alone = [_best(_losses([r for r in records if r['share'] < 1], [seed])) for seed in seeds]
  rates = sorted({r['rate'] for r in records})
  several = len(rates) > 1

  def said(setting: tuple[float, float]) -> str:
    return f'{setting[1]:g}' + (f', rate {setting[0]:g}' if several else '')

  def above(setting: tuple[float, float]) -> str:
    return f'{100 * (whole[setting] / whole[best] - 1):.2f}'

  return [
    'chosen too' if several else f'{rates[0]:g}', said(best), f'{whole[best]:.4f}', said(found),
    f'{whole[found]:.4f}', above(found), above(max(alone, key=lambda setting: whole[setting])),
  ]  # fmt: skip


def _losses(records: Sequence[Mapping[str, Any]], seeds: Collection[int]) -> dict[tuple[float, float], float]:
  """(rate, decay) -> mean loss over these seeds; infinite where one diverged."""
  each: dict[tuple[float, float], list[float]] = {}
  for r in records:
    if r['seed'] in seeds:
      each.setdefault((r['rate'], r['decay']), []).append(math.inf if r['loss'] is None else r['loss'])
  return {setting: statistics.fmean(losses) for setting, losses in each.items()}


def _best(losses: Mapping[tuple[float, float], float]) -> tuple[float, float]:
  return min(losses, key=lambda setting: losses[setting])
