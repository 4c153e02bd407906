"""Choice by measurement: verify candidates, time them in turns, take the fastest; `_records` keeps what was found.

A candidate counts only after it agrees with the reference and gives the same bits on every run; a fast wrong answer is
the failure this guards against (vendor libraries have shipped both kinds). Timings are interleaved, with
idle gaps: bursts one after another differ more, with order and heat.
"""

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import functools
import math
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _bench, _compat, _power

Array = jax.Array

# Rounding to bfloat16 costs 1.7e-3 in the Frobenius norm; a wrong position or a lost K step costs 1e-2 and more.
TOLERANCE = 4e-3
REPEATS = 20
# What needs so many times the best of its implementation in the first round gets no further one.
_HOPELESS = 1.15
_SUSTAINED_S = 1.1
_SHORTEST_OF_LOOPS_MS = 0.2
_COMPILERS = 12
# Other profilers have no business in a benchmark's process.
times_ms = functools.partial(_compat.device_times_ms, detach=False)


def let_others_profile() -> None:
  """Ends what `times_ms` keeps open: in a user's process other profilers have business."""
  _compat.device_times_ms(jax.jit(jnp.negative), (jnp.zeros(()),), 1)


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


def compile_all(jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
  """Compiled functions, or the exception that stands in a refused one's place, of (f, args[, compiler options])."""
  with concurrent.futures.ThreadPoolExecutor(_COMPILERS) as pool:
    return list(pool.map(lambda job: _bench.compile_step(jax.jit(job[0]), *job[1:]), jobs))


@jax.jit
def same_bits(x: Any, y: Any) -> Array:
  """Whether arrays, or trees of them, agree in every bit: 0.0 and -0.0 do not, equal NaNs do."""

  def same(x: Array, y: Array) -> Array:
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return jnp.all(jax.lax.bitcast_convert_type(x, bits) == jax.lax.bitcast_convert_type(y, bits))

  return jnp.all(jnp.stack(jax.tree.leaves(jax.tree.map(same, x, y))))


def verify(candidate: Candidate, expected: Array, *, repeats: int = REPEATS) -> tuple[float, str | None]:
  """Checks a candidate against the reference's float32 result and against itself.

  Returns:
    The relative error, and why the candidate is rejected, or None.
  """
  try:
    first = candidate.f(*candidate.args)
    # One result, or several that are to be the same.
    error = float(np.max([relative_error(x, expected) for x in jax.tree.leaves(first)]))
  except jax.errors.JaxRuntimeError as e:
    return math.inf, f'fails: {e}'
  if not error <= TOLERANCE:  # also for nan
    return error, f'relative error {error:.2e} exceeds {TOLERANCE:.0e}'
  # One is queued before the last is looked at, so that the GPU goes from run to run; more might not fit its memory.
  differing, last = 0, True
  for _ in range(repeats):
    same = same_bits(first, candidate.f(*candidate.args))
    differing += not last
    last = same
  differing += not last
  return error, f'{differing} of {repeats} repeats differ in their bits' if differing else None


@jax.jit
def _error_terms(found: Array, expected: Array) -> tuple[Array, Array]:
  found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
  return jnp.sum(jnp.square(found - expected)), jnp.sum(jnp.square(expected))


def relative_error(found: Array, expected: Array) -> float:
  """||found - expected|| / ||expected|| in float32; nan if anything is. If zeros are expected, 0 or inf."""
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
  for i in _bench.turns(range(len(candidates)), rounds):
    time.sleep(gap_s)
    samples[i].append(statistics.median(timer(candidates[i].f, candidates[i].args, iterations)))
  return samples


def sustained_ms(f: Callable[..., Any], args: Sequence[Array], *, seconds: float) -> float:
  """Wall-clock time of a call in a loop of at least `seconds`: the clock and temperature that training sees.

  20 to 40 calls are queued at any time. A GPU that waits for the host now and then rests meanwhile: its clock
  rises, and short calls seem longer all the same.
  """
  batch = 20
  before = jax.block_until_ready(f(*args))
  start, calls = time.perf_counter(), 0
  while time.perf_counter() - start < seconds:
    for _ in range(batch):
      out = f(*args)
    jax.block_until_ready(before)
    before, calls = out, calls + batch
  jax.block_until_ready(before)
  return (time.perf_counter() - start) / calls * 1e3


def sustained(
  calls: Sequence[tuple[Callable[..., Any], Sequence[Array]]], *, matmuls: int = 1
) -> list[dict[str, Any]]:
  """What a record says of each call (function, arguments) in loops of a second: times, clock, power.

  Times are those of one of its `matmuls`.
  Two loops each, in turns: the second starts as hot as the first ended.
  """
  loops: list[list[tuple[float, _power.Reading]]] = [[] for _ in calls]
  for _ in range(2):
    for found, (f, args) in zip(loops, calls, strict=True):
      with _power.recorded() as reading:
        ms = sustained_ms(f, args, seconds=_SUSTAINED_S) / matmuls
      found.append((ms, reading()))
  fields = []
  for found in loops:
    samples, readings = zip(*found, strict=True)
    ms = statistics.median(samples)
    seen = _power.Reading(tuple(s for reading in readings for s in reading.samples))
    fields.append(dict(sustained_samples_ms=samples, sustained_ms=ms) | seen.fields(ms))
  return fields


def tune(
  key: Mapping[str, Any],
  baseline: Candidate,
  candidates: Sequence[Candidate],
  expected: Array,
  timer: Callable[..., Sequence[float]],
  *,
  finalists: int = 3,
  others: Mapping[str, Candidate] | None = None,
  quick: Mapping[str, Any] | None = None,
  final: Mapping[str, Any] | None = None,
  loops_of: int | None = None,
) -> dict[str, Any]:
  """Verifies and times all candidates, then the best few at length against the baseline.

  Args:
    key: what the problem is looked up by.
    baseline: the dense choice.
    candidates: verified before they are timed.
    expected: the reference's float32 result.
    timer: see `interleave`.
    finalists: how many of each implementation enter the second heat.
    others: further dense ways by name, such as one in a wider dtype: timed with the finalists and never chosen.
    quick: arguments of the first `interleave`.
    final: arguments of the second.
    loops_of: matmuls a call, if loops of a second judge the finalists, at the clock that power leaves them in training;
      None if bursts do, as of calls that are too short for the host to keep the GPU busy.

  Returns:
    An entry for `_records.save`: `key`, `baseline`, `candidates` (all, with errors, reasons and samples) and `choice`;
    where there are any, `others`.
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
    for i, samples in _quick_heat(candidates, good, timer, **settings).items():
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
  dense_ms, found_ms = statistics.median(heat[0]), {i: statistics.median(rows[i]['final_samples_ms']) for i in good}
  if loops_of is not None and loops_of * min([dense_ms, *found_ms.values()]) >= _SHORTEST_OF_LOOPS_MS:
    pairs = [(baseline_row, baseline), *((rows[i], candidates[i]) for i in good)]
    pairs += [(other_rows[name], other) for name, other in others.items()]
    sustained_ms(baseline.f, baseline.args, seconds=_SUSTAINED_S)  # or dense alone would begin on a cool GPU
    fields = sustained([(c.f, c.args) for _, c in pairs], matmuls=loops_of)
    for (row, _), seen in zip(pairs, fields, strict=True):
      row.update(seen)
    dense_ms, found_ms = baseline_row['sustained_ms'], {i: rows[i]['sustained_ms'] for i in good}
  times = {i: ms + candidates[i].setup_ms for i, ms in found_ms.items()}
  best = min(times, key=times.__getitem__, default=None)
  if best is None or times[best] >= dense_ms:
    choice = dict(implementation=baseline.implementation, config=baseline.config)
  else:
    choice = dict(implementation=rows[best]['implementation'], config=rows[best]['config'])
  entry = dict(key=dict(key), baseline=baseline_row, candidates=rows, choice=choice)
  return entry | {'others': other_rows} if others else entry


def _quick_heat(
  candidates: Sequence[Candidate], good: Sequence[int], timer: Callable[..., Sequence[float]], *, rounds: int,
  **settings: Any,
) -> dict[int, list[float]]:
  """Samples by index of the `good` candidates: one of each, and more of those that may still win."""
  heat = interleave([candidates[i] for i in good], timer, rounds=1, **settings)
  samples = dict(zip(good, heat, strict=True))
  best: dict[str, float] = {}
  for i in good:
    name = candidates[i].implementation
    best[name] = min(best.get(name, math.inf), samples[i][0])
  # Last first, as turns alternate.
  left = [i for i in reversed(good) if samples[i][0] <= _HOPELESS * best[candidates[i].implementation]]
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
