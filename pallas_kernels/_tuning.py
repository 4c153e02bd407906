"""Choice by measurement: verify candidates, time them in turns, keep what was measured, look it up again.

A candidate counts only after it agrees with the reference and gives the same bits on every run; a fast wrong answer is
the failure this guards against (vendor libraries have shipped both kinds). Timings are interleaved: one burst after
another differs by 4% with order and heat, rounds with idle gaps by less than 1%. Every sample is kept in
`tuned/<device>/<op>.json`, losers and rejects included, so that a choice can be questioned later.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
import math
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array

TUNED = pathlib.Path(__file__).parent / 'tuned'
# As many multiprocessors, other memory: products take as long, passes over memory less.
_SAME_CHIP = {'nvidia_h200': 'nvidia_h100_80gb_hbm3'}
# Rounding to bfloat16 costs 1.7e-3 in the Frobenius norm; a wrong position or a lost K step costs 1e-2 and more.
TOLERANCE = 4e-3
REPEATS = 20


@dataclasses.dataclass(frozen=True)
class Candidate:
  """Something that may serve a problem.

  Attributes:
    implementation: a back end's name.
    config: its settings as plain data, or None.
    f: compiled function.
    args: its arguments; candidates may hold the same problem in different formats.
    setup_ms: what a call costs besides `f`, such as making an operand that `args` holds ready-made; it is counted in
      the choice, and kept apart from the samples.
  """

  implementation: str
  config: Mapping[str, Any] | None
  f: Callable[..., Array]
  args: Sequence[Array]
  setup_ms: float = 0.0


@dataclasses.dataclass(frozen=True)
class Choice:
  """What `lookup` found.

  Attributes:
    implementation: the fastest verified back end, or 'dense'.
    config: its settings.
    key: the measured problem.
    distance: how far that is from the problem asked for, the largest |log2| of a ratio of sizes.
  """

  implementation: str
  config: Mapping[str, Any] | None
  key: Mapping[str, Any]
  distance: float


@jax.jit
def _same_bits(x: Array, y: Array) -> Array:
  bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
  return jnp.all(jax.lax.bitcast_convert_type(x, bits) == jax.lax.bitcast_convert_type(y, bits))


def verify(
  candidate: Candidate, expected: Array, *, tolerance: float = TOLERANCE, repeats: int = REPEATS
) -> tuple[float, str | None]:
  """Checks a candidate against the reference's float32 result and against itself.

  Returns:
    The relative error, and why the candidate is rejected, or None.
  """
  try:
    first = candidate.f(*candidate.args)
    error = relative_error(first, expected)
  except jax.errors.JaxRuntimeError as e:
    return math.inf, f'fails: {e}'
  if not error <= tolerance:  # also for nan
    return error, f'relative error {error:.2e} exceeds {tolerance:.0e}'
  # One is queued before the last is looked at, so that the card goes from run to run; more might not fit its memory.
  differing, last = 0, True
  for _ in range(repeats):
    same = _same_bits(first, candidate.f(*candidate.args))
    differing += not last
    last = same
  differing += not last
  return error, f'{differing} of {repeats} repeats differ in their bits' if differing else None


@jax.jit
def _error_terms(found: Array, expected: Array) -> tuple[Array, Array]:
  found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
  return jnp.sum(jnp.square(found - expected)), jnp.sum(jnp.square(expected))


def relative_error(found: Array, expected: Array) -> float:
  """||found - expected|| / ||expected|| in float32; nan if anything is. Of zeros 0 for zeros, infinite for others."""
  difference, norm = map(float, _error_terms(found, expected))
  if norm == 0:
    return difference * math.inf if difference else 0.0
  return math.sqrt(difference / norm)


def interleave(
  candidates: Sequence[Candidate],
  timer: Callable[[Callable[..., Any], Sequence[Array], int], Sequence[float]],
  *,
  rounds: int = 6,
  iterations: int = 20,
  gap_s: float = 0.25,
) -> list[list[float]]:
  """Times candidates in turns, in alternating order, with an idle gap before each burst.

  Args:
    candidates: at least one.
    timer: (f, args, iterations) -> time of each call in ms.
    rounds: bursts of each candidate.
    iterations: calls in a burst.
    gap_s: idle seconds before a burst, so that each starts from about the same temperature and clock.

  Returns:
    For each candidate the median of each of its bursts, in ms.
  """
  samples: list[list[float]] = [[] for _ in candidates]
  order = list(range(len(candidates)))
  for r in range(rounds):
    for i in order if r % 2 == 0 else reversed(order):
      time.sleep(gap_s)
      samples[i].append(statistics.median(timer(candidates[i].f, candidates[i].args, iterations)))
  return samples


def sustained_ms(f: Callable[..., Any], args: Sequence[Array], *, seconds: float = 1.0, batch: int = 20) -> float:
  """Wall-clock time of a call in a loop of at least `seconds`: the clock and temperature that training sees.

  One to two batches are queued at any time. A card that waits for the host after each batch rests meanwhile: its clock
  rises, and calls seem longer all the same (half a millisecond by 6%, one by 2%).
  """
  before = jax.block_until_ready(f(*args))
  start, calls = time.perf_counter(), 0
  while time.perf_counter() - start < seconds:
    for _ in range(batch):
      out = f(*args)
    jax.block_until_ready(before)
    before, calls = out, calls + batch
  jax.block_until_ready(before)
  return (time.perf_counter() - start) / calls * 1e3


def tune(
  key: Mapping[str, Any],
  baseline: Candidate,
  candidates: Sequence[Candidate],
  expected: Array,
  timer: Callable[..., Sequence[float]],
  *,
  finalists: int = 3,
  hopeless: float = 1.15,
  others: Mapping[str, Candidate] | None = None,
  quick: Mapping[str, Any] | None = None,
  final: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """Verifies and times all candidates, then the best few at length against the baseline.

  Args:
    key: what the problem is looked up by.
    baseline: the dense choice.
    candidates: verified before they are timed.
    expected: the reference's float32 result.
    timer: see `interleave`.
    finalists: how many of each implementation enter the second heat.
    hopeless: what needs so many times the best of its implementation in the first round gets no further one.
    others: further dense ways by name, such as one in a wider dtype: timed with the finalists and never chosen.
    quick: arguments of the first `interleave`.
    final: arguments of the second.

  Returns:
    An entry for `save`: `key`, `baseline`, `candidates` (all, with errors, reasons and samples) and `choice`; where
    there are any, `others`.
  """
  rows: list[dict[str, Any]] = []
  for c in candidates:
    error, reason = verify(c, expected)
    config = None if c.config is None else dict(c.config)
    setup = dict(setup_ms=c.setup_ms) if c.setup_ms else {}
    error = error if math.isfinite(error) else None  # JSON has no nan
    rows.append(dict(implementation=c.implementation, config=config, error=error, rejected=reason) | setup)
  good = [i for i, row in enumerate(rows) if row['rejected'] is None]
  if good:
    settings = dict(rounds=2, iterations=10) | dict(quick or {})
    for i, samples in _quick_heat(candidates, good, timer, hopeless, **settings).items():
      rows[i]['samples_ms'] = samples
    good = _fastest_of_each(rows, good, finalists)
  others = dict(others or {})
  heat = interleave([baseline, *(candidates[i] for i in good), *others.values()], timer, **(final or {}))
  for i, samples in zip(good, heat[1 : 1 + len(good)], strict=True):
    rows[i]['final_samples_ms'] = samples
  baseline_row = dict(implementation=baseline.implementation, config=baseline.config, samples_ms=heat[0])
  other_rows = {
    name: dict(config=other.config, samples_ms=samples)
    for (name, other), samples in zip(others.items(), heat[1 + len(good) :], strict=True)
  }
  times = {i: statistics.median(rows[i]['final_samples_ms']) + candidates[i].setup_ms for i in good}
  best = min(times, key=times.__getitem__, default=None)
  if best is None or times[best] >= statistics.median(heat[0]):
    choice = dict(implementation=baseline.implementation, config=baseline.config)
  else:
    choice = dict(implementation=rows[best]['implementation'], config=rows[best]['config'])
  entry = dict(key=dict(key), baseline=baseline_row, candidates=rows, choice=choice)
  return entry | {'others': other_rows} if others else entry


def _quick_heat(
  candidates: Sequence[Candidate], good: Sequence[int], timer: Callable[..., Sequence[float]], hopeless: float,
  *, rounds: int, **settings: Any,
) -> dict[int, list[float]]:
  """Samples by index of the `good` candidates: one of each, and more of those that may still win."""
  heat = interleave([candidates[i] for i in good], timer, rounds=1, **settings)
  samples = dict(zip(good, heat, strict=True))
  best: dict[str, float] = {}
  for i in good:
    name = candidates[i].implementation
    best[name] = min(best.get(name, math.inf), samples[i][0])
  # Last first, as turns alternate.
  left = [i for i in reversed(good) if samples[i][0] <= hopeless * best[candidates[i].implementation]]
  if rounds > 1:
    more = interleave([candidates[i] for i in left], timer, rounds=rounds - 1, **settings)
    for i, found in zip(left, more, strict=True):
      samples[i] += found
  return samples


def _fastest_of_each(rows: Sequence[Mapping[str, Any]], indices: Sequence[int], count: int) -> list[int]:
  """The `count` fastest of each implementation, fastest first."""
  taken: dict[str, int] = {}
  out = []
  for i in sorted(indices, key=lambda i: statistics.median(rows[i]['samples_ms'])):
    name = rows[i]['implementation']
    taken[name] = taken.get(name, 0) + 1
    if taken[name] <= count:
      out.append(i)
  return out


def entry_of(path: pathlib.Path, key: Mapping[str, Any]) -> Mapping[str, Any] | None:
  """The entry of exactly this problem, or None."""
  return next((e for e in _entries(path) if e['key'] == dict(key)), None)


def merged(rows: Sequence[Mapping[str, Any]], old: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
  """`rows` followed by those of an older entry whose implementation and settings are not among them.

  The older rows' second heat was another one than that of `rows`: it is kept under another name, so that nobody
  compares the two.
  """
  new = [(row['implementation'], row['config']) for row in rows]
  kept = [] if old is None else [r for r in old['candidates'] if (r['implementation'], r['config']) not in new]

  def renamed(name: str) -> str:
    return 'earlier_final_samples_ms' if name == 'final_samples_ms' else name

  return [*rows, *({renamed(name): value for name, value in row.items()} for row in kept)]


def save(path: pathlib.Path, header: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> None:
  """Writes entries, replacing those of the same key that are there already.

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
  _entries.cache_clear()


def record(folder: pathlib.Path, device: str, name: str) -> pathlib.Path:
  """A record of a card: its own, or until it has one that of a card with the same chip.

  >>> record(TUNED, 'nvidia_h200', 'sparse_matmul').parent.name
  'nvidia_h100_80gb_hbm3'
  """
  own = folder / device / f'{name}.json'
  return own if own.exists() else folder / _SAME_CHIP.get(device, device) / own.name


@functools.cache
def _entries(path: pathlib.Path) -> tuple[Mapping[str, Any], ...]:
  return tuple(json.loads(path.read_text())['entries']) if path.exists() else ()


def lookup(
  device: str, op: str, key: Mapping[str, Any], *, implementation: str | None = None, reach: float = 1.0,
  folder: pathlib.Path = TUNED,
) -> Choice | None:
  """The choice for the nearest measured problem.

  Args:
    device: `Device.slug`; see `record`.
    op: name of the op.
    key: integers (sizes) may differ from a measured problem's; everything else must be equal.
    implementation: the best settings of this back end, whether or not it won; None takes the winner.
    reach: the largest |log2| of a ratio of sizes that still counts as near: 1 is a factor of two.
    folder: of the records.

  Returns:
    None if nothing near was measured.

  >>> lookup('no_such_card', 'sparse_matmul', {'m': 64}) is None
  True
  """
  best = None
  for found in _entries(record(folder, device, op)):
    distance = _distance(key, found['key'])
    if distance <= reach and (best is None or distance < best[0]):
      chosen = found['choice'] if implementation is None else best_of(found, implementation)
      if chosen is not None:
        best = (distance, found['key'], chosen)
  if best is None:
    return None
  return Choice(best[2]['implementation'], best[2]['config'], best[1], best[0])


def expected_ms(
  device: str, op: str, key: Mapping[str, Any], *, reach: float = 1.0, folder: pathlib.Path = TUNED
) -> dict[str, float]:
  """Milliseconds by implementation, 'dense' included, of a problem: the nearest measured one's, scaled by their sizes.

  Set-up costs count. Empty if nothing near was measured. What was timed beside (`others` of `tune`) is there, too.

  >>> expected_ms('no_such_card', 'sparse_matmul', {'m': 64})
  {}
  """
  near = lookup(device, op, key, reach=reach, folder=folder)
  if near is None:
    return {}
  entry = next(e for e in _entries(record(folder, device, op)) if e['key'] == near.key)
  sizes = [n for n, v in key.items() if isinstance(v, int) and not isinstance(v, bool)]
  scale = math.prod(key[n] / near.key[n] for n in sizes)
  found = {'dense': statistics.median(entry['baseline']['samples_ms'])}
  for name in {row['implementation'] for row in entry['candidates']}:
    if (row := best_of(entry, name)) is not None:
      found[name] = statistics.median(row.get('final_samples_ms', row['samples_ms'])) + row.get('setup_ms', 0.0)
  for name, row in entry.get('others', {}).items():
    found[name] = statistics.median(row['samples_ms'])
  return {name: ms * scale for name, ms in found.items()}


def best_of(entry: Mapping[str, Any], implementation: str) -> Mapping[str, Any] | None:
  """The fastest verified candidate of a back end in an entry, judged by its longest heat."""
  rows = [
    r for r in entry['candidates'] if r['implementation'] == implementation and r['rejected'] is None
  ]

  def order(row: Mapping[str, Any]) -> tuple[bool, float]:
    final = row.get('final_samples_ms')
    return final is None, statistics.median(final or row['samples_ms'])

  return min(rows, key=order, default=None)


def _distance(asked: Mapping[str, Any], measured: Mapping[str, Any]) -> float:
  if asked.keys() != measured.keys():
    return math.inf
  distance = 0.0
  for name, value in asked.items():
    if isinstance(value, int) and not isinstance(value, bool):
      distance = max(distance, abs(math.log2(value / measured[name])))
    elif value != measured[name]:
      return math.inf
  return distance
