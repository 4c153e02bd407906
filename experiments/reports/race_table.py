"""`python -m experiments.reports.race_table FILE`: what races ended with, as the tables that the docs have."""

import argparse
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
import dataclasses
import math
from pathlib import Path
import statistics
from typing import Any

from experiments.reports import reached, tables
from experiments.reports.claims import half_width
from experiments.runs import json_lines
from experiments.runs.race.contenders import CONTENDERS
from experiments.runs.race.search import mean_losses, or_inf

# Ends the name of a contender whose dense end has become FP8 since.
IN_16_BITS = '_with_16_bit_dense_end'


def title(record: Mapping[str, Any]) -> str:
  """The race, or tuned comparison, that a record is of.

  >>> title({'size': '124m', 'style': 'gpt2', 'equal_steps': 1200})
  '124m, gpt2, 1,200 steps each'
  >>> title({'size': 'wide2048', 'style': 'rotary', 'equal_steps': None, 'seconds': 55.0})
  'wide2048, rotary, 55 s each'
  """
  steps = record['equal_steps']
  each = f'{steps:,} steps each' if steps else f'{record["seconds"]:g} s each'
  if 'experiment' in record:
    return f'{record["experiment"]}, {each}'
  return f'{record["size"]}, {record["style"]}, {each}'


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
  """Records of each race of a file, by its title; a contender of races is called as it is today, not as it was then.

  One whose dense end has become FP8 since is another contender.

  Raises:
    ValueError: records of one race say that they are of several texts, whose losses do not compare.
  """
  races: dict[str, list[dict[str, Any]]] = {}
  for record in json_lines.read(path):
    if 'experiment' not in record and (today := CONTENDERS.get(record['contender'])):
      record['title'] = today.label
      if today.dense_phase != record.get('dense_phase'):
        record['contender'] += IN_16_BITS
        record['title'] += ', dense end in 16 bits'
    races.setdefault(title(record), []).append(record)
  for name, records in races.items():
    if len(texts := {record['text'] for record in records if record.get('text')}) > 1:
      of = ', '.join(sorted(texts))
      raise ValueError(f'{path.name}, {name}: records of the texts {of}, whose losses do not compare')
  return races


def dense_of(names: Collection[str]) -> str | None:
  """The dense model that contenders are compared with: in a race of squared-ReLU models that with squared ReLU."""
  return next((name for name in ('dense', 'dense_relu2') if name in names), None)


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
  """A row a contender, by loss: label, milliseconds, times faster, TFLOP/s, steps, losses a rate, seed by seed.

  A contender that trained on several devices has the least and the most of milliseconds and steps. Times of runs that
  say that other programs `disturbed` them are left out.
  """
  runs = _whole(records)
  against = dense_of({r['contender'] for r in runs})
  dense: dict[str, list[float]] = {}
  for r in runs:
    if r['contender'] == against and not r.get('disturbed'):
      dense.setdefault(r.get('commit', ''), []).append(r['step_ms'])
  found = []
  for name in dict.fromkeys(r['contender'] for r in runs):
    own = [r for r in runs if r['contender'] == name]
    losses: dict[str, list[float | None]] = {}
    for r in sorted(own, key=lambda r: (r['rate'], r['decay'], r['seed'])):
      settings = f'{r["rate"]:g}' + (f', decay {r["decay"]:g}' if r['decay'] else '')
      losses.setdefault(settings, []).append(r['loss'])
    said = '; '.join(f'{settings}: ' + ', '.join(map(_loss, each)) for settings, each in losses.items())
    best = min(sum(map(or_inf, each)) / len(each) for each in losses.values())
    faster = speed = ''
    timed = [r for r in own if not r.get('disturbed')]
    if ms := [r['step_ms'] for r in timed]:
      mean = statistics.fmean(set(ms))
      # At the commits at which both ran, since sessions had GPUs of their own; where there is none, of all sessions.
      beside = [(statistics.fmean(set(dense[at])), r['step_ms']) for r in timed if (at := r.get('commit', '')) in dense]
      pairs = beside or [(statistics.fmean({x for each in dense.values() for x in each}), mean)] if dense else []
      faster = f'{statistics.fmean({a / b for a, b in pairs}):.2f}' if pairs else ''
      speed = f'{teraflops({**own[0], "step_ms": mean}):.0f}'
    row = [own[0]['title'], _range(ms, '.1f'), faster, speed, _range([r['steps'] for r in own], 'd'), said]
    found.append((best, row))
  return [row for _, row in sorted(found, key=lambda pair: pair[0])]


@dataclasses.dataclass(frozen=True)
class Seeds:
  """The results of a contender at the rate that its search chose, seed by seed.

  Attributes:
    title: its label.
    rate: of the lowest loss of the first seed.
    decay: likewise; 0 where there is none.
    searched: how many trials the search had.
    edge: whether no lower, or no higher, rate or decay was tried, so that the best may lie beyond.
    of_search: whether the losses are of the very seeds that chose, because no others were run after a grid.
    losses: seed -> final loss; infinite where it diverged.
    curves: seed -> (seconds, loss) of each evaluation.
    shorter: (seconds, final loss) of runs with fewer seconds, each with a schedule of its own.
    slower: seed -> how many times the seconds of its curve the run took, by its own clock; 1 where that is not known.
  """

  title: str
  rate: float
  decay: float
  searched: int
  edge: bool
  of_search: bool
  losses: Mapping[int, float]
  curves: Mapping[int, Sequence[tuple[float, float]]]
  shorter: Sequence[tuple[float, float]]
  slower: Mapping[int, float] = dataclasses.field(default_factory=dict)

  @property
  def mean(self) -> float:
    """Final loss over all seeds."""
    return statistics.fmean(self.losses.values())


def by_seed(records: Iterable[Mapping[str, Any]]) -> dict[str, Seeds]:
  """Contenders by their mean loss, each at the rate (and decay) that was best for the seeds that searched.

  Records of a grid name these seeds, and the losses are those of other seeds. Without a name it is the seed of most
  trials, which counts among the losses.
  """
  records = [r for r in records if 'loss' in r]
  found = {}
  for name in dict.fromkeys(r['contender'] for r in _whole(records)):
    own = [r for r in records if r['contender'] == name]
    named = own[0].get('searched_with')
    # The first of seeds with equally many trials.
    search = named or [seed for seed, _ in Counter(r['seed'] for r in _whole(own)).most_common(1)]
    trials = mean_losses((r for r in _whole(own) if r['seed'] in search), lambda r: (r['rate'], r['decay']))
    rate, decay = best = min(trials, key=lambda setting: trials[setting])
    alike = [r for r in own if (r['rate'], r['decay']) == best]
    others = [r for r in alike if not named or r['seed'] not in named]
    same = others or alike
    axes = [[other for other, its in trials if its == decay]]
    if decay:
      axes.append([its for other, its in trials if other == rate])
    found[name] = Seeds(
      own[0]['title'], rate, decay, len(trials),
      any(value in (min(axis), max(axis)) for value, axis in zip(best, axes, strict=False)),
      not others,
      {r['seed']: or_inf(r['loss']) for r in _whole(same)},
      {r['seed']: [(seconds, or_inf(loss)) for _, seconds, loss in r['validation']] for r in _whole(same)},
      [(r['share'] * r['seconds'], or_inf(r['loss'])) for r in same if r['share'] < 1],
      {r['seed']: r['wall_s'] / seconds for r in _whole(same) if 'wall_s' in r and (seconds := r['validation'][-1][1])},
    )  # fmt: skip
  return dict(sorted(found.items(), key=lambda item: item[1].mean))


def shares_of_time(own: Seeds, dense: Seeds) -> list[float]:
  """Seed by seed, the share of dense's seconds after which a contender is at dense's final loss; infinite: never."""
  both = own.curves.keys() & dense.curves.keys()
  return [reached.share_of_time(own.curves[seed], dense.curves[seed]) for seed in sorted(both)]


def seeds_rows(found: Mapping[str, Seeds], against: str) -> list[list[str]]:
  """A row a contender: label, rate, seeds, loss, `against` minus it, share of time, time to dense's loss, shorter runs.

  The share of time is that after which the lower of a contender and `against` is at the other's final loss. Intervals
  are 95% intervals of the mean over seeds; differences and shares compare the same seed.
  """
  rows, plain = [], dense_of(found)
  for name, own in found.items():
    losses = list(own.losses.values())
    pairs = pairs_of(found[against], own)
    lower, other = (own, found[against]) if sum(pairs) > 0 else (found[against], own)
    times, shares = [], []
    if plain and name != plain:
      times = [reached.seconds_to(curve, found[plain].mean) for curve in own.curves.values()]
      shares = shares_of_time(own, found[plain])
    shorter = '; '.join(f'{loss:.3f} after {seconds:g} s' for seconds, loss in own.shorter)
    rows.append([
      own.title, f'{own.rate:g}', str(len(losses)), interval(losses, ''),
      '' if name == against else interval(pairs, '+'),
      share(shares_of_time(lower, other)) if name != against and all(map(math.isfinite, pairs)) else '',
      '' if not times else 'never' if None in times else _range([t for t in times if t is not None], '.1f'),
      share(shares), shorter,
    ])  # fmt: skip
  return rows


def steps_rows(found: Mapping[str, Seeds], against: str) -> list[list[str]]:
  """A row a contender of as many steps: label, its best rate and decay, trials, seeds, loss, minus `against`, percent.

  Intervals are 95% intervals of the mean over seeds; differences compare the same seed.
  """
  rows = []
  for name, own in found.items():
    rows.append([
      own.title, f'{own.rate:g}' + (f', {own.decay:g}' if own.decay else '') + (', at an edge' if own.edge else ''),
      str(own.searched), str(len(own.losses)) + (', which chose' if own.of_search else ''),
      interval(list(own.losses.values()), ''),
      '' if name == against else interval(pairs_of(own, found[against]), '+'),
      '' if name == against else interval(percent_above(own, found[against]), '+', 2),
    ])  # fmt: skip
  return rows


def pairs_of(a: Seeds, b: Seeds) -> list[float]:
  """Final losses of `a` minus those of `b`, for the seeds that both have."""
  return [a.losses[seed] - loss for seed, loss in b.losses.items() if seed in a.losses]


def percent_above(own: Seeds, other: Seeds) -> list[float]:
  """By how many percent final losses are above those of another, for the seeds that both have."""
  return [100 * (own.losses[seed] / loss - 1) for seed, loss in other.losses.items() if seed in own.losses]


def _whole(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
  return [r for r in records if 'loss' in r and r['share'] == 1.0]


def _loss(loss: float | None) -> str:
  return 'diverged' if loss is None else f'{loss:.3f}'


def _range(values: Sequence[float], digits: str) -> str:
  if not values:
    return ''
  least, most = (format(value, digits) for value in (min(values), max(values)))
  return least if least == most else f'{least} to {most}'


def interval(values: Sequence[float], sign: str = '', digits: int = 4) -> str:
  """The mean of values and half its 95% interval, in words where there is none; `sign` '+' shows that of the mean.

  >>> interval([1.5, 1.7]), interval([0.25], '+')
  ('1.6000 ± 1.2706', '+0.250, one seed')
  """
  if not values:
    return ''
  if not all(map(math.isfinite, values)):
    return 'diverged'
  if len(values) == 1:
    return f'{values[0]:{sign}.{min(digits, 3)}f}, one seed'
  return f'{statistics.fmean(values):{sign}.{digits}f} ± {half_width(values):.{digits}f}'


def share(shares: Sequence[float]) -> str:
  return 'never' if math.inf in shares else interval(shares, '', 2)


def lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A table without the columns that are empty: a race need not have a dense model, or shorter runs."""
  kept = [i for i, _ in enumerate(head) if any(row[i] for row in rows)]
  return tables.markdown([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


def markdown(records: Iterable[Mapping[str, Any]]) -> str:
  """The table of one race."""
  head = ['contender', 'ms a step', 'times faster', 'TFLOP/s', 'steps', 'validation loss at each rate, seed by seed']
  return lines(head, rows(records))


def seeds_markdown(records: Iterable[Mapping[str, Any]], against: str | None = None) -> str:
  """The table over seeds of one race, against the contender of the lowest mean of those with the most seeds."""
  found = by_seed(records)
  if against not in found:
    most = max(len(own.losses) for own in found.values())
    against = next(name for name, own in found.items() if len(own.losses) == most)
  head = [
    'contender', 'rate', 'seeds', 'validation loss, 95% interval', f'{found[against].title} minus it',
    "share of time, the lower of the two at the other's final loss", "seconds to dense's final loss",
    "share of dense's time", 'shorter runs',
  ]  # fmt: skip
  return lines(head, seeds_rows(found, against))


def steps_markdown(records: Iterable[Mapping[str, Any]], against: str | None = None) -> str:
  """The table of methods with as many steps, against dense or, where it is not there, the best."""
  found = by_seed(records)
  if against not in found:
    against = dense_of(found) or next(iter(found))
  head = [
    'method', 'rate, decay', 'trials', 'seeds', 'validation loss, 95% interval', f'minus {found[against].title}',
    'percent of it',
  ]  # fmt: skip
  return lines(head, steps_rows(found, against))


def gap_markdown(
  records: Iterable[Mapping[str, Any]], ends: Sequence[float] = (1 / 3, 2 / 3, 5 / 6, 11 / 12, 1)
) -> str:
  """How far training losses are from those of dense on the same batches, part by part of a race of equal steps.

  Args:
    records: of one race.
    ends: of the parts, as shares of the steps.

  Returns:
    A row a contender at its best setting: the mean over the batches that were logged in each part, and over seeds.
  """
  runs, found = _whole(records), by_seed(records)
  steps = runs[0]['equal_steps']
  losses = {
    (r['contender'], r['seed']): {row[0]: row[1] for row in r['train']}
    for r in runs if r['rate'] == found[r['contender']].rate and r['decay'] == found[r['contender']].decay
  }  # fmt: skip
  parts = [(round(steps * begin), round(steps * end)) for begin, end in zip((0, *ends), ends, strict=False)]
  rows, plain = [], dense_of(found)
  for name in found:
    seeds = [seed for contender, seed in losses if contender == name and (plain, seed) in losses]
    if name == plain or not seeds:
      continue
    pairs = [(losses[name, seed], losses[plain, seed]) for seed in seeds]
    means = [
      statistics.mean(own[step] - dense[step] for own, dense in pairs for step in dense if begin < step <= end)
      for begin, end in parts
    ]
    rows.append([found[name].title, str(len(seeds)), *(f'{mean:+.4f}' for mean in means)])
  return lines(['training loss minus dense, steps', 'seeds', *(f'{b + 1:,} to {e:,}' for b, e in parts)], rows)


def main(argv: Sequence[str] | None = None) -> int:
  """Prints every race of the files."""
  parser = argparse.ArgumentParser(
    prog='python -m experiments.reports.race_table', description=(__doc__ or '').partition('\n')[0]
  )
  parser.add_argument('file', type=Path)
  parser.add_argument('--against', help='contender of differences (default: the best; dense at equal steps)')
  options = parser.parse_args(argv)
  for name, records in read(options.file).items():
    print(f'{name}\n')
    if not _whole(records):
      continue
    if all('shape' in r for r in records):
      print(f'{markdown(records)}\n')
    seeds = steps_markdown if records[0]['equal_steps'] else seeds_markdown
    print(f'{seeds(records, options.against)}\n')
  return 0


if __name__ == '__main__':
  raise SystemExit(main())
