"""What was measured on a GPU: kept in `tuned/<device>/<op>.json`, and looked up by what is near.

An entry is a problem (`key`) with every sample of it, losers and rejects included, so that a choice can be questioned
later; `_tuning.tune` makes them.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import json
import math
import pathlib
import statistics
from typing import Any

from pallas_kernels._dispatch import log_once

TUNED = pathlib.Path(__file__).parent / 'tuned'
# As many multiprocessors, other memory: matmuls take as long, passes over memory less.
_SAME_CHIP = {'nvidia_h200': 'nvidia_h100_80gb_hbm3'}
# What a row has of heats after the first, see `merged`.
_LATER_HEATS = (
  'final_samples_ms', 'sustained_ms', 'sustained_samples_ms', 'clock_mhz', 'power_w', 'joule', 'held_back',
)  # fmt: skip
# As many bytes, the same instructions: until one is measured itself, its problems take the other's records.
_SAME_WORK = {'float16': 'bfloat16', 'float8_e4m3fn': 'float8_e5m2'}


@dataclasses.dataclass(frozen=True)
class Choice:
  """What `lookup` found.

  Attributes:
    implementation: the fastest verified back end, or 'dense'.
    config: its settings.
    key: the measured problem; of float16 it may be one of bfloat16, of e4m3 one of e5m2.
    distance: how far that is from the problem asked for, the largest |log2| of a ratio of sizes.
  """

  implementation: str
  config: Mapping[str, Any] | None
  key: Mapping[str, Any]
  distance: float


def measured_devices() -> list[str]:
  """The devices that have records."""
  return sorted(path.name for path in TUNED.iterdir() if path.is_dir())


def device_meant(name: str) -> str:
  """The only device with records that has `name` among the words of its own; `name` if none or several have.

  >>> device_meant('h100'), device_meant('nvidia'), device_meant('A100'), device_meant('h20')
  ('nvidia_h100_80gb_hbm3', 'nvidia', 'A100', 'h20')
  """
  known = measured_devices()
  found = [slug for slug in known if f'_{name.lower()}_' in f'_{slug}_']
  return found[0] if len(found) == 1 and name not in known else name


def path_of(folder: pathlib.Path, device: str, name: str) -> pathlib.Path:
  """A record of a GPU: its own, or if it has none that of a GPU with the same chip.

  >>> path_of(TUNED, 'nvidia_h200', 'memory_bound').parent.name
  'nvidia_h100_80gb_hbm3'
  """
  own, *others = paths_of(folder, device, name)
  return next((path for path in (own, *others) if path.exists()), [own, *others][-1])


def paths_of(folder: pathlib.Path, device: str, name: str) -> tuple[pathlib.Path, ...]:
  """Records that serve a GPU: its own, then for what is not near anything in them those of a GPU with the same chip.

  >>> [path.parent.name for path in paths_of(TUNED, 'nvidia_h200', 'sparse_matmul')]
  ['nvidia_h200', 'nvidia_h100_80gb_hbm3']
  """
  return tuple(folder / slug / f'{name}.json' for slug in dict.fromkeys((device, _SAME_CHIP.get(device, device))))


@functools.cache
def entries_of(path: pathlib.Path) -> tuple[Mapping[str, Any], ...]:
  """All entries of a record; none if there is no such file. ValueError names one that is damaged."""
  if not path.exists():
    return ()
  try:
    entries = json.loads(path.read_text())['entries']
    whole = all(isinstance(e['key'], dict) and {'implementation', 'config'} <= set(e['choice']) for e in entries)
  except (ValueError, LookupError, TypeError, RecursionError) as error:
    raise ValueError(f'{path} is no record of tuning ({type(error).__name__}: {error}); put back a copy') from error
  if not whole:
    raise ValueError(f'{path} is no record of tuning: an entry has no key, or no choice; put back a copy')
  return tuple(entries)


def entry_of(path: pathlib.Path, key: Mapping[str, Any]) -> Mapping[str, Any] | None:
  """The entry of exactly this problem, or None."""
  return next((e for e in entries_of(path) if e['key'] == dict(key)), None)


def lookup(
  device: str, op: str, key: Mapping[str, Any], *, implementation: str | None = None, reach: float = 1.0,
  folder: pathlib.Path = TUNED,
) -> Choice | None:
  """The choice for the nearest measured problem: by its farthest size, of several by all of them.

  Args:
    device: `Device.slug`; what is near a problem of its own record is not looked up in another's (`paths_of`), but that
      problem itself is.
    op: name of the op.
    key: integers (sizes) may differ from a measured problem's; everything else must be equal, but that float16 takes
      what was measured in bfloat16 where nothing near was in float16, inputs and outputs alike, and e4m3, as for a
      gradient, what was in e5m2; a log line says so.
    implementation: the best settings of this back end, whether or not it won; None takes the winner.
    reach: the largest |log2| of a ratio of sizes that still counts as near: 1 is a factor of two.
    folder: of the records.

  Returns:
    None if nothing near was measured.

  >>> lookup('no_such_gpu', 'sparse_matmul', {'m': 64}) is None
  True
  """
  alike = {name: _SAME_WORK.get(value, value) for name, value in key.items()}
  records = [entries_of(path) for path in paths_of(folder, device, op)]
  for asked in (key,) if alike == key else (key, alike):
    found = [choice for each in records if (choice := _nearest(each, asked, implementation, reach))]
    if found:
      if asked is not key:
        other = f'measured in {key["dtype"]}; records of {alike["dtype"]} serve'
        log_once(f'{op}: on {device} nothing near some problems was {other}')
      return next((choice for choice in found if choice.distance == 0), found[0])
  return None


def _nearest(
  entries: Sequence[Mapping[str, Any]], key: Mapping[str, Any], implementation: str | None, reach: float
) -> Choice | None:
  near = []
  for entry in entries:
    farthest, together = _distances(key, entry['key'])
    if farthest <= reach:
      chosen = entry['choice'] if implementation is None else best_of(entry, implementation)
      if chosen is not None:
        choice = Choice(chosen['implementation'], chosen['config'], entry['key'], farthest)
        near.append((farthest, together, choice))
  return min(near, key=lambda found: found[:2])[2] if near else None


def expected_ms(
  device: str, op: str, key: Mapping[str, Any], *, folder: pathlib.Path = TUNED
) -> dict[str, float]:
  """Milliseconds by implementation, 'dense' included, of a problem: the nearest measured one's, scaled by their sizes.

  Set-up costs count. What was timed beside (`others` of `_tuning.tune`) is there, too. Near is what `lookup` finds, so
  that times of float16 may be those of bfloat16. Empty where nothing near was measured.

  >>> expected_ms('no_such_gpu', 'sparse_matmul', {'m': 64})
  {}
  """
  near = lookup(device, op, key, folder=folder)
  if near is None:
    return {}
  entry = next(e for path in paths_of(folder, device, op) for e in entries_of(path) if e['key'] == near.key)
  scale = math.prod(size / near.key[name] for name, size in key.items() if isinstance(size, int))
  return {name: ms * scale for name, ms in times_ms(entry).items()}


def times_ms(entry: Mapping[str, Any]) -> dict[str, float]:
  """Milliseconds by implementation of an entry, 'dense' and what was timed beside included."""
  others = {name: _ms(row, entry) for name, row in entry.get('others', {}).items()}
  return {'dense': _ms(entry['baseline'], entry)} | sparse_ms(entry) | others


def sparse_ms(entry: Mapping[str, Any]) -> dict[str, float]:
  """Milliseconds of each back end's fastest verified candidate in an entry, set-up included."""
  best = {name: best_of(entry, name) for name in {row['implementation'] for row in entry['candidates']}}
  return {
    name: _ms(row, entry) + row.get('setup_ms', 0.0) for name, row in best.items()
    if row is not None and ('sustained_ms' in row or 'sustained_ms' not in entry['baseline'])
  }


def _ms(row: Mapping[str, Any], entry: Mapping[str, Any]) -> float:
  """The time of a row, by loops where these judged the entry: times of bursts are no match for theirs."""
  if 'sustained_ms' in entry['baseline']:
    return row['sustained_ms']
  return statistics.median(row.get('final_samples_ms', row['samples_ms']))


def best_of(entry: Mapping[str, Any], implementation: str) -> Mapping[str, Any] | None:
  """The fastest verified candidate of a back end in an entry, judged by its longest heat."""
  rows = [
    r for r in entry['candidates'] if r['implementation'] == implementation and r['rejected'] is None
  ]

  def order(row: Mapping[str, Any]) -> tuple[int, float]:
    final, setup = row.get('final_samples_ms'), row.get('setup_ms', 0.0)
    if 'sustained_ms' in row:
      return 0, row['sustained_ms'] + setup
    return 2 if final is None else 1, statistics.median(final or row['samples_ms']) + setup

  return min(rows, key=order, default=None)


def _distances(asked: Mapping[str, Any], measured: Mapping[str, Any]) -> tuple[float, float]:
  """|log2| of the ratios of sizes: the largest, and their sum; infinite for problems of another kind."""
  if asked.keys() != measured.keys():
    return math.inf, math.inf
  sizes = {name for name, value in asked.items() if isinstance(value, int)}
  if any(asked[name] != measured[name] for name in asked.keys() - sizes):
    return math.inf, math.inf
  if not all(isinstance(measured[name], int) and measured[name] > 0 for name in sizes):
    return math.inf, math.inf
  ratios = [abs(math.log2(asked[name] / measured[name])) for name in sizes]
  return max(ratios, default=0.0), math.fsum(ratios)


def merged(rows: Sequence[Mapping[str, Any]], old: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
  """`rows` followed by those of an older entry whose implementation and settings are not among them.

  The older rows' later heats were other ones than those of `rows`: they are kept under other names, so that nobody
  compares the two.
  """
  new = [(row['implementation'], row['config']) for row in rows]
  kept = [] if old is None else [r for r in old['candidates'] if (r['implementation'], r['config']) not in new]

  def renamed(name: str) -> str:
    return f'earlier_{name}' if name in _LATER_HEATS else name

  return [*rows, *({renamed(name): value for name, value in row.items()} for row in kept)]


def save(path: pathlib.Path, header: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> None:
  """Writes entries, replacing those of the same key that are there already.

  What was traced before keeps the settings that it has.

  A record grows by many runs: the header is that of the last, so each entry says as `by` which one it is of. Entries
  without it are older than that rule.
  """
  by = {name: header[name] for name in ('commit', 'command', 'when') if name in header}
  entries = [{**entry, 'by': by} if by else entry for entry in entries]
  old = json.loads(path.read_text())['entries'] if path.exists() else []
  keys = [e['key'] for e in entries]
  path.parent.mkdir(parents=True, exist_ok=True)
  lines = [json.dumps(e) for e in (*(e for e in old if e['key'] not in keys), *entries)]
  head = json.dumps(dict(header), indent=1)[:-2]
  path.write_text(head + ',\n "entries": [\n' + ',\n'.join(lines) + '\n]\n}\n')
  entries_of.cache_clear()
