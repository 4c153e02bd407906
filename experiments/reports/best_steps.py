"""The table of steps at their best: each method in its fastest layout beside dense and dense FP8 in theirs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
import dataclasses
from pathlib import Path
import statistics
from typing import Any

from experiments.reports import provenance, tables
from experiments.runs import json_lines

FILE = 'best_steps.jsonl'
_PROCESSES = 3  # that settle a time


@dataclasses.dataclass(frozen=True)
class Best:
  """One method at its best on one model and GPU.

  Attributes:
    ms: median over processes of a step with its share of the mask searches.
    least: the lowest of them.
    most: the highest.
    layout: what was fastest.
    others: layout -> ms of those that were not.
    record: one of its records.
    processes: that timed it.
    beside: the methods that were timed in the same session; where dense was not, the fastest dense of any.
  """

  ms: float
  least: float
  most: float
  layout: str
  others: Mapping[str, float]
  record: Mapping[str, Any]
  processes: int
  beside: Mapping[str, 'Best'] = dataclasses.field(default_factory=dict)


def load(path: Path = provenance.RESULTS / FILE) -> dict[tuple[str, str], dict[str, Best]]:
  """(device, model) -> method -> it at its best; methods and models in the order of the records.

  If a method was measured in several sessions, the newest counts of those in which three processes timed it. A session
  is of one commit and one GPU: two programs have no common median, nor have two GPUs of a kind, some percent apart.
  Records of before 29 November 2026 do not say which GPU it was.
  """
  sessions: dict[tuple[str, str, Any], dict[str, dict[str, list[Any]]]] = defaultdict(lambda: defaultdict(dict))
  records = [record for record in json_lines.read(path) if record['headline']]
  for record in records:
    layouts = sessions[record['device'], record['model'], _session(record)][record['recipe']]
    layouts.setdefault(record['layout'], []).append(record)
  bests = {key: {method: _best(layouts) for method, layouts in each.items()} for key, each in sessions.items()}
  dense: dict[tuple[str, str], list[Best]] = defaultdict(list)
  for (device, model, _), of_session in bests.items():
    dense[device, model] += [of_session['dense']] if 'dense' in of_session else []
  found: dict[tuple[str, str], dict[str, Best]] = defaultdict(dict)
  for device, model, method in dict.fromkeys((r['device'], r['model'], r['recipe']) for r in records):
    of_session = max(
      (each for key, each in bests.items() if key[:2] == (device, model) and method in each),
      key=lambda each: (each[method].processes >= _PROCESSES, each[method].record['when']),
    )
    beside = dict(of_session)
    if timed := dense[device, model]:
      beside.setdefault('dense', min(timed, key=lambda best: (best.processes < _PROCESSES, best.ms)))
    found[device, model][method] = dataclasses.replace(of_session[method], beside=beside)
  return dict(found)


def _session(record: Mapping[str, Any]) -> tuple[str, str | None]:
  return record['commit'], record.get('gpu')


def _best(layouts: Mapping[str, Sequence[Mapping[str, Any]]]) -> Best:
  ms = {name: statistics.median(record['amortised_ms'] for record in rows) for name, rows in layouts.items()}
  layout = min(ms, key=lambda name: (-len(layouts[name]), ms[name]))  # what was timed again had won
  others = {name: value for name, value in ms.items() if name != layout}
  own = [record['amortised_ms'] for record in layouts[layout]]
  return Best(ms[layout], min(own), max(own), layout, others, layouts[layout][-1], len(own))


def speedups(methods: Mapping[str, Best], over: str = 'dense') -> dict[str, float]:
  """Method -> how many times faster than the `over` that is beside it; without those that have none."""
  return {
    method: best.beside[over].ms / best.ms for method, best in methods.items() if method != over and over in best.beside
  }


def settled(best: Best) -> bool:
  """Whether a method and the dense one beside it were timed in three processes each."""
  return min(best.processes, best.beside['dense'].processes) >= _PROCESSES


def markdown(found: Mapping[tuple[str, str], Mapping[str, Best]]) -> str:
  """The table of `docs/speed.md`: a line a model and method, bold if three processes timed it."""
  head = [
    'model', 'method', 'step, ms (lowest to highest)', 'times faster than dense', 'than dense FP8', 'MFU', 'layout',
    'GB', 'processes',
  ]  # fmt: skip
  rows = []
  for (device, model), methods in found.items():
    over, over_fp8 = speedups(methods), speedups(methods, 'dense_fp8')
    shape = next(iter(methods.values())).record['shape']
    name = f'{model}, {shape["batch"]} x {shape["length"]}, {device.removeprefix("NVIDIA ")}'
    for method, best in methods.items():
      times = f'{over[method]:.2f}' if method in over else ''
      if times and settled(best):
        times = f'**{times}**'
      fp8 = f'{over_fp8[method]:.2f}' if method in over_fp8 and 'fp8' in method else ''
      mfu = best.record['mfu'] * best.record['amortised_ms'] / best.ms
      rows.append([
        name, best.record['label'], _steps(best), times, fp8, f'{mfu:.2f}', best.layout,
        f'{best.record["memory_gb"]["total"]:.0f}', best.processes,
      ])  # fmt: skip
      name = ''
  return tables.markdown(head, rows)


def figure_rows(found: Mapping[tuple[str, str], Mapping[str, Best]]) -> dict[str, list[tuple[str, float]]]:
  """Model -> methods that were timed in three processes: what, and times faster than dense at its best.

  Narrow models first.
  """

  def width(methods: Mapping[str, Best]) -> int:
    return next(iter(methods.values())).record['shape']['d']

  rows = {
    f'Training step, {model}, width {width(methods):,}, optimizer included': [
      (methods[method].record['label'], round(times, 2))
      for method, times in speedups(methods).items() if settled(methods[method])
    ]
    for (_, model), methods in sorted(found.items(), key=lambda item: width(item[1]))
  }  # fmt: skip
  return {model: methods for model, methods in rows.items() if methods}


def _steps(best: Best) -> str:
  return f'{best.ms:.1f}' + (f' ({best.least:.1f} to {best.most:.1f})' if best.processes > 1 else '')
