"""Which figures of the documents' sentences are carried by the tables beside them, or by records.

A sentence may use the numbers of the tables under its heading (of the second or third order), and what follows from the
records that these cite: losses of methods at their best, differences and shares of time, seed by seed, with 95%
intervals. What lies elsewhere is named in a comment, `<!-- said: race.jsonl?seconds=70.0; speed.md#kernels -->`: all
numbers of the records that the conditions leave; or the tables of a part of a document. `pack.jsonl?against=pytorch` is
how many times as fast as that baseline records are. Of a file of tuned settings, say
`pallas_kernels/tuned/nvidia_h200/sparse_matmul.json?n=16`, it is how many times as fast as dense the choices are.
Records are read without the code that makes the tables.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path
import re
import statistics
from typing import Any

import numpy as np
import scipy.special

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / 'experiments' / 'results'
# Of these both numbers are looked for together; others by themselves.
_INTERVAL = re.compile(r'(\d+\.\d+)%? ± (\d+\.\d+)')
_NUMBER = re.compile(r'(?<![\w.])(\d[\d,]*\.\d+(?:e-?\d+)?)(?![\w.]*\d)')
# What is no sentence, or no result: code, targets of links, headings, tables, papers, versions, settings and sizes.
_OTHER = (
  r'(?s)<!--.*?-->', r'(?s)```.*?```', r'`[^`]*`', r'\]\([^)\s]*\)', r'(?m)^#.*$', r'(?m)^\|.*$', r'\b\d{4}\.\d{5}\b',
  r'(?:[Pp]ython|PyTorch|jax|Haliax|Apache-)\s?[\d.]+', r'\d+(?:\.\d+)?e-\d+', r'\d+(?:\.\d+)? ?[MB]\b',
)  # fmt: skip

_LONG = 8  # a list of so many is of samples
_CURVES = ('validation', 'train')  # of a run: what a sentence says of it is how it ends

# Of one method with one setting, seed -> final loss.
type Losses = Mapping[int, float]


@dataclasses.dataclass(frozen=True)
class Section:
  """What stands under a heading of the second or third order, up to the next.

  Attributes:
    title: the heading; '' before the first.
    text: all of it.
  """

  title: str
  text: str

  def prose(self) -> str:
    """Its sentences."""
    text = self.text
    for other in _OTHER:
      text = re.sub(other, ' ', text)
    return ' '.join(text.split())

  def cells(self) -> set[str]:
    """The numbers of its tables as they are written there."""
    return set(re.findall(r'\d[\d,]*\.?\d*(?:e-?\d+)?', self._tables()))

  def intervals(self) -> set[tuple[float, float]]:
    """The intervals of its tables, which may be over runs of several records."""
    found = re.findall(r'(\d+\.?\d*) ± (\d+\.?\d*)', self._tables())
    return {(float(mean), float(half)) for mean, half in found}

  def _tables(self) -> str:
    return '\n'.join(line for line in self.text.splitlines() if line.startswith('|'))

  def cited(self, what: str) -> list[str]:
    """What its comments list, those for tables ('records') or those for sentences ('said')."""
    listed = re.findall(rf'<!-- {what}: (?!none, )(.*?) -->', self.text, re.DOTALL)
    return [name for each in listed for name in re.split(r'\s*;\s*', ' '.join(each.split()))]

  def facts(self) -> 'Facts':
    """What its sentences may say."""
    facts = Facts()
    facts.take(self)
    for name in self.cited('said'):
      page, _, anchor = name.partition('#')
      if page.endswith('.md'):
        others = [s for s in sections((ROOT / page).read_text()) if not anchor or s.anchor == anchor]
        if not others:
          raise ValueError(f'{name}: no such part')
        for other in others:
          facts.take(other)
      else:
        facts.take_all(_records(name))
    return facts

  @property
  def anchor(self) -> str:
    """The anchor of its heading, as links name it."""
    return re.sub(r'[^\w\- ]', '', self.title.lower()).replace(' ', '-')


def sections(text: str) -> list[Section]:
  """The sections of a document, in their order."""
  parts = re.split(r'(?m)^(?=###? )', text)
  return [Section((re.match(r'###? (.*)', part) or ['', ''])[1], part) for part in parts]


class Facts:
  """What records say: numbers with their intervals, and numbers."""

  def __init__(self) -> None:
    self.intervals: set[tuple[float, float]] = set()
    self.numbers: set[float] = set()

  def take(self, section: Section) -> None:
    """The tables of a section, and what follows from the records that they cite."""
    self.numbers |= {float(cell.replace(',', '')) for cell in section.cells()}
    self.intervals |= section.intervals()
    found = [_records(name) for name in sorted(set(section.cited('records'))) if '.jsonl' in name]
    # A method may have been run later than its dense twin, into another file.
    self._add_losses([record for records in found for record in records if 'validation_loss' in record])
    for records in found:
      self._add_losses([record for record in records if 'rate' in record])
      self._add_times([record for record in records if 'step_ms' in record and 'loss' in record])

  def take_all(self, records: Sequence[Mapping[str, Any]]) -> None:
    """Numbers of records, but for curves and long lists; what their losses differ by; means of a search's settings."""
    self.numbers |= {abs(number) for record in records for number in _leaves(record)}
    self._add_losses(records)
    self._add_steps([record for record in records if 'amortised_ms' in record and 'layout' in record])
    settings: dict[tuple[float, float], list[float]] = {}
    for record in records:
      if record.get('seed') in record.get('searched_with', ()) and record['loss'] is not None:
        settings.setdefault((record['rate'], record['decay']), []).append(record['loss'])
    self.numbers |= {statistics.fmean(losses) for losses in settings.values()}

  def carries(self, written: str, half: str = '') -> bool:
    """Whether some fact, rounded as this is written, is this; half an interval may be rounded up."""
    digits = len(written.partition('.')[2])
    if not half:
      return any(f'{number:.{digits}f}' == written.replace(',', '') for number in self.numbers)
    more = len(half.partition('.')[2])
    up = 0.5 * 10**-more
    return any(
      f'{mean:.{digits}f}' == written and half in (f'{own:.{more}f}', f'{own + up:.{more}f}')
      for mean, own in self.intervals
    )

  def _add_losses(self, records: Sequence[Mapping[str, Any]]) -> None:
    methods = [*_compared(records).values()]
    for losses in methods:
      self._interval([*losses.values()])
      if len(losses) > 1:
        mean = statistics.fmean(losses.values())
        self.numbers |= {mean, min(losses.values()), max(losses.values())}
        self.intervals.add((mean, statistics.stdev(losses.values())))
    for a, b in itertools.permutations(methods, 2):
      if both := sorted(a.keys() & b.keys()):  # seeds
        self._interval([a[seed] - b[seed] for seed in both])
        self._interval([100 * (a[seed] / b[seed] - 1) for seed in both])

  def _add_times(self, records: Sequence[Mapping[str, Any]]) -> None:
    for a, b in itertools.permutations(_curves(records).values(), 2):
      self._interval([
        share for seed in sorted(a.keys() & b.keys()) if (share := _share_of_time(a[seed], b[seed])) is not None
      ])  # fmt: skip
    self.numbers |= {a['step_ms'] / b['step_ms'] for a, b in itertools.permutations(records, 2)}
    # By the runs' own clocks, which may differ from that of the race.
    best = [[1e3 * r['wall_s'] / r['steps'] for r in own] for own in _best(records).values()]
    self.numbers |= {ms for own in best for ms in own}
    self.numbers |= {statistics.fmean(a) / statistics.fmean(b) for a, b in itertools.permutations(best, 2)}
    self.numbers |= {1e-6 * r['steps'] * r['batch'] * r['length'] for r in records} | {r['wall_s'] for r in records}

  def _add_steps(self, records: Sequence[Mapping[str, Any]]) -> None:
    """How many times as fast as dense each method's step is, by medians over processes."""
    times: dict[tuple[str, str], dict[str, list[float]]] = {}
    for r in records:
      times.setdefault((r['model'], r['layout']), {}).setdefault(r['recipe'], []).append(r['amortised_ms'])
    for methods in times.values():
      dense = statistics.median(methods.get('dense', [math.nan]))
      self.numbers |= {dense / statistics.median(own) for own in methods.values()}

  def _interval(self, values: Sequence[float]) -> None:
    """A sentence may name the values of one or two seeds without an interval."""
    if len(values) <= 2:
      self.numbers |= {abs(value) for value in values}
    if len(values) > 1:
      half = scipy.special.stdtrit(len(values) - 1, 0.975) * statistics.stdev(values) / math.sqrt(len(values))
      self.intervals.add((abs(statistics.fmean(values)), half))


@functools.cache
def _records(citation: str) -> Sequence[Mapping[str, Any]]:
  name, _, conditions = citation.partition('?')
  wanted = dict(condition.partition('=')[::2] for condition in conditions.split('&') if condition)
  against = wanted.pop('against', None)
  if name.endswith('.json'):
    found = [_tuned(entry) for entry in json.loads((ROOT / name).read_text())['entries']]
  else:
    found = [{**json.loads(line), 'file': name} for line in (RESULTS / name).read_text().splitlines()]
  found = [record for record in found if all(str(record.get(key)) == value for key, value in wanted.items())]
  if against:
    twins = [(r, twin) for r in found if (twin := (r.get('baselines') or {}).get(against)) and twin.get('median_ms')]
    found = [{'times': twin['median_ms'] / r['median_ms']} for r, twin in twins]
  if not found:
    raise ValueError(f'{citation}: no such record')
  return found


def _tuned(entry: Mapping[str, Any]) -> Mapping[str, Any]:
  """A shape, and dense over what was chosen for it, by medians of the bursts that both took in turns."""
  (chosen,) = (c for c in (*entry['candidates'], entry['baseline']) if entry['choice'].items() <= c.items())
  samples = chosen.get('final_samples_ms') or chosen['samples_ms']
  return {**entry['key'], 'times': statistics.median(entry['baseline']['samples_ms']) / statistics.median(samples)}


def _leaves(value: Any) -> Iterable[float]:
  if isinstance(value, int | float) and not isinstance(value, bool):
    yield value
  elif isinstance(value, Mapping):
    for key, each in value.items():
      if key not in _CURVES:
        yield from _leaves(each)
  elif isinstance(value, list) and len(value) < _LONG:
    for each in value:
      yield from _leaves(each)


def _best(records: Sequence[Mapping[str, Any]]) -> dict[Any, list[Mapping[str, Any]]]:
  """(race or grid, method) -> whole runs at the setting that the seeds of the search found best, those seeds first."""
  found: dict[Any, list[Mapping[str, Any]]] = {}
  for record in records:
    if 'rate' in record and record.get('share') == 1 and 'loss' in record:
      race = tuple(str(record.get(key)) for key in ('experiment', 'size', 'style', 'seconds', 'equal_steps'))
      found.setdefault((race, record['contender'], record.get('dense_phase')), []).append(record)
  for key, own in found.items():
    search = own[0].get('searched_with') or [Counter(r['seed'] for r in own).most_common(1)[0][0]]
    settings: dict[tuple[float, float], list[float]] = {}
    for record in own:
      if record['seed'] in search:
        loss = math.inf if record['loss'] is None else record['loss']
        settings.setdefault((record['rate'], record['decay']), []).append(loss)
    best = min(settings, key=lambda setting: statistics.fmean(settings[setting]))
    found[key] = [r for r in own if (r['rate'], r['decay']) == best and r['loss'] is not None]
  return found


def _compared(records: Sequence[Mapping[str, Any]]) -> Mapping[Any, Losses]:
  found: dict[Any, dict[int, float]] = {}
  for record in records:
    if 'validation_loss' in record:
      settings = (record.get(key) for key in ('file', 'experiment', 'label', 'steps', 'recipe_kwargs'))
      found.setdefault(json.dumps([*settings]), {})[record['seed']] = record['validation_loss']
  for key, own in _best(records).items():
    search = own[0].get('searched_with') or ()
    others = {r['seed']: r['loss'] for r in own if r['seed'] not in search}
    found[key] = others or {r['seed']: r['loss'] for r in own}
  return found


def _curves(records: Sequence[Mapping[str, Any]]) -> dict[Any, dict[int, Sequence[Sequence[float]]]]:
  """The curves of races at equal seconds: seed -> (seconds, loss) of each evaluation."""
  return {
    key: {r['seed']: [(seconds, loss) for _, seconds, loss in r['validation']] for r in own}
    for key, own in _best(records).items() if own and own[0].get('seconds')
  }  # fmt: skip


def _share_of_time(curve: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float | None:
  seconds, losses = map(np.asarray, zip(*curve, strict=True))
  end_seconds, end = other[-1]
  reached = losses <= end
  if not reached.any() or reached[0]:
    return None
  i = int(reached.argmax())
  at = np.interp(end, losses[[i, i - 1]], seconds[[i, i - 1]])
  return float(at / end_seconds)


def compared(name: str) -> list[Losses]:
  """The final losses of each method of a file, at its best."""
  return [*_compared(_records(name)).values()]


def uncarried(section: Section) -> list[str]:
  """The figures of a section's sentences that nothing carries."""
  facts, prose, missing = section.facts(), section.prose(), []
  for written, half in _INTERVAL.findall(prose):
    if not facts.carries(written, half):
      missing.append(f'{written} ± {half}')
  missing += [number for number in _NUMBER.findall(_INTERVAL.sub(' ', prose)) if not facts.carries(number)]
  return missing
