"""A table of dense models by positions and normalisation of queries and keys: their losses at each rate."""

from collections.abc import Iterable, Mapping
from typing import Any

from experiments.reports import tables


def markdown(records: Iterable[Mapping[str, Any]]) -> str:
  """A row a style, a column a rate: the final losses, seed by seed.

  >>> run = {'model': {'positions': 'rotary', 'qk_norm': True}, 'rate': 0.006, 'seed': 0, 'loss': 1.25}
  >>> print(markdown([{**run, 'seed': 1, 'loss': None}, run, {**run, 'rate': 0.003}]))
  | positions | queries and keys normalised | rate 0.003 | rate 0.006 |
  | --- | --- | --- | --- |
  | rotary | yes | 1.250 | 1.250, diverged |
  """
  found: dict[tuple[str, bool], dict[float, list[str]]] = {}
  for record in sorted(records, key=lambda r: (r['model']['positions'], r['model']['qk_norm'], r['seed'])):
    losses = found.setdefault((record['model']['positions'], record['model']['qk_norm']), {})
    loss = 'diverged' if record['loss'] is None else f'{record["loss"]:.3f}'
    losses.setdefault(record['rate'], []).append(loss)
  rates = sorted({rate for losses in found.values() for rate in losses})
  head = ['positions', 'queries and keys normalised', *(f'rate {rate:g}' for rate in rates)]
  rows = [
    [positions, 'yes' if normalised else 'no', *(', '.join(losses.get(rate, [])) for rate in rates)]
    for (positions, normalised), losses in found.items()
  ]
  return tables.markdown(head, rows)
