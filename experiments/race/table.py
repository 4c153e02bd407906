"""`python -m experiments.race.table FILE`: what races ended with, as the tables that the docs have."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
import json
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[tuple[str, str, float], list[dict[str, Any]]]:
  """Records of each race: those of one size, style and number of seconds."""
  races: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
  for line in path.read_text().splitlines():
    record = json.loads(line)
    races.setdefault((record['size'], record.get('style', 'gpt2'), record['seconds']), []).append(record)
  return races


def teraflops(record: Mapping[str, Any]) -> float:
  """Logical TFLOP/s of a step: six a parameter of the layers and token, and causal attention.

  >>> shape = {'layers': 2, 'd': 64, 'hidden': 256, 'vocab': 256}
  >>> round(teraflops({'shape': shape, 'batch': 1, 'length': 1000, 'step_ms': 1.0}), 3)
  1.456
  """
  shape, tokens = record['shape'], record['batch'] * record['length']
  weights = shape['layers'] * (4 * shape['d'] ** 2 + 2 * shape['d'] * shape['hidden']) + shape['vocab'] * shape['d']
  attention = 6 * shape['layers'] * record['length'] * shape['d']
  return (6 * weights + attention) * tokens / record['step_ms'] / 1e9


def rows(records: Iterable[Mapping[str, Any]]) -> list[list[str]]:
  """A row a contender, by loss: label, milliseconds, times faster, TFLOP/s, steps, losses a rate, seed by seed."""
  records = list(records)
  runs = [r for r in records if r['bench'] == 'race' and r['share'] == 1.0]
  # Of a contender that was timed on both devices, the one that it trained on.
  dense = next((r['step_ms'] for r in runs if r['contender'] == 'dense'), None)
  found = []
  for name in dict.fromkeys(r['contender'] for r in runs):
    own = [r for r in runs if r['contender'] == name]
    losses: dict[float, list[float]] = {}
    for r in sorted(own, key=lambda r: (r['rate'], r['seed'])):
      losses.setdefault(r['rate'], []).append(r['loss'])
    said = '; '.join(f'{rate:g}: ' + ', '.join(f'{loss:.3f}' for loss in each) for rate, each in losses.items())
    best = min(sum(each) / len(each) for each in losses.values())
    faster = '' if dense is None else f'{dense / own[0]["step_ms"]:.2f}'
    row = [own[0]['title'], f'{own[0]["step_ms"]:.1f}', faster, f'{teraflops(own[0]):.0f}', str(own[0]['steps']), said]
    found.append((best, row))
  return [row for _, row in sorted(found, key=lambda pair: pair[0])]


def markdown(records: Iterable[Mapping[str, Any]]) -> str:
  """The table of one race."""
  head = ['contender', 'ms a step', 'times faster', 'TFLOP/s', 'steps', 'validation loss at each rate, seed by seed']
  lines = [head, ['---'] * len(head), *rows(records)]
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
  """Prints every race of the files."""
  parser = argparse.ArgumentParser(prog='python -m experiments.race.table', description=(__doc__ or '').split('\n')[0])
  parser.add_argument('file', type=Path)
  for (size, style, seconds), records in read(parser.parse_args(argv).file).items():
    print(f'{size}, {style}, {seconds:g} s\n\n{markdown(records)}\n')
  return 0


if __name__ == '__main__':
  raise SystemExit(main())
