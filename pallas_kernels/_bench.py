"""What the `bench.py` of ops and the benchmarks of steps share: functions timed in turns, records, options.

What is compared runs in one process, in alternating order, each burst with several calls in flight, so that what is
timed is the device and neither the host's latency nor a cold clock.
"""

import argparse
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
import concurrent.futures
import dataclasses
import itertools
import json
from pathlib import Path
import statistics
import time
from typing import Any

import jax

from pallas_kernels import _compat

_GAP_S = 0.05  # of rest before a burst
_TRIES = 3
# What CUPTI says of a burst of which it did not record all kernels.
_LOST = ('records were dropped', 'is not divisible by', 'not consistent across')
_COMPILERS = 12
_MESSAGE, _LINE = 6000, 600  # characters that are shown of an error: of a case that failed, of a function left out


def stream_ms(call: Callable[[], Any], steps: int, *, depth: int = 3) -> list[float]:
  """Wall-clock milliseconds of each of `steps` calls, `depth` of them in flight: from one completion to the next.

  Untimed calls surround them. The end of the first starts the clock. Those behind keep the host as far ahead at the end
  as in the middle: a step of more launches than a stream holds is nearly over when its call returns, and what is still
  in flight after the last call would seem to take no time.
  """
  pending: deque[Any] = deque()
  stamps: list[float] = []
  for _ in range(steps + depth):
    pending.append(call())
    if len(pending) == depth:
      jax.block_until_ready(pending.popleft())
      stamps.append(time.perf_counter())
  jax.block_until_ready(pending)
  return [1e3 * (end - start) for start, end in itertools.pairwise(stamps)]


def turns[T](names: Iterable[T], rounds: int) -> Iterator[T]:
  """Every name once a round; even rounds in the order given, odd rounds reversed.

  >>> ''.join(turns('abc', 2))
  'abccba'
  """
  order = list(names)
  for r in range(rounds):
    yield from order if r % 2 == 0 else reversed(order)


def in_turns(
  names: Iterable[str], rounds: int, burst: Callable[[str], list[float]]
) -> dict[str, dict[str, Any]]:
  """The `timing` of each name, in `turns`; `burst` gives the milliseconds of each of its calls."""
  bursts: dict[str, list[list[float]]] = {name: [] for name in names}
  for name in turns(bursts, rounds):
    bursts[name].append(burst(name))
  return {name: timing(found) for name, found in bursts.items()}


def timer(f: Callable[..., Any], args: Sequence[Any], iterations: int, *, detach: bool = True) -> list[float]:
  """Milliseconds of each call: of its kernels alone on a GPU, by the wall clock elsewhere.

  Args:
    f: compiled.
    args: its arguments.
    iterations: calls.
    detach: see `device_times_ms`.
  """
  if jax.default_backend() != 'gpu':
    return stream_ms(lambda: f(*args), iterations)
  for _ in range(_TRIES - 1):
    try:
      return _compat.device_times_ms(f, args, iterations, detach=detach)
    except RuntimeError as error:
      if not any(lost in str(error) for lost in _LOST):
        raise
      print(f'  timed again: {str(error)[:200]}', flush=True)
  return _compat.device_times_ms(f, args, iterations, detach=detach)


def timed(
  calls: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]], options: Any, *, detach: bool = True
) -> dict[str, dict[str, Any]]:
  """Times compiled functions by `timer`, in `turns`.

  Args:
    calls: name -> (function, arguments).
    options: of the command line: `rounds`, `steps`, `tiny`.
    detach: see `device_times_ms`.

  Returns:
    name -> `timing`, and as 'clock' whether that is 'device' time or 'wall' time.
  """

  def burst(name: str) -> list[float]:
    time.sleep(0.0 if options.tiny else _GAP_S)
    return timer(*calls[name], options.steps, detach=detach)

  clock = 'device' if jax.default_backend() == 'gpu' else 'wall'
  return {name: row | {'clock': clock} for name, row in in_turns(calls, options.rounds, burst).items()}


def timing(bursts: Sequence[list[float]]) -> dict[str, Any]:
  """Samples, their median, and the medians of the two orders of running.

  >>> timing([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]])
  {'samples_ms': [1.0, 2.0, 3.0, 4.0, 4.0, 4.0], 'median_ms': 3.5, 'median_ms_by_order': [2.0, 4.0]}
  """
  samples = [round(ms, 4) for burst in bursts for ms in burst]
  orders = [[ms for burst in bursts[i::2] for ms in burst] for i in (0, 1)]
  return dict(
    samples_ms=samples,
    median_ms=round(statistics.median(samples), 4),
    median_ms_by_order=[round(statistics.median(order), 4) for order in orders if order],
  )


def speedup(rows: Mapping[str, Mapping[str, Any]], ms: float) -> dict[str, float]:
  """How many times as long as `ms` each row of `timing` takes.

  >>> speedup({'dense': {'median_ms': 3.0}}, 2.0)
  {'dense': 1.5}
  """
  return {name: round(row['median_ms'] / ms, 4) for name, row in rows.items()}


def clipped(message: Any, length: int) -> str:
  """A long message without its middle: what failed stands first or, as where XLA calls Python, behind a traceback.

  >>> clipped('0123456789' * 2, 13)
  '01 ... 456789'
  """
  text, left = str(message), ' ... '
  kept = length - len(left)
  return text if len(text) <= length else text[: kept // 4] + left + text[kept // 4 - kept :]


def compile_step(f: Any, args: Sequence[Any], *options: Any) -> Any:
  """The jitted function compiled for its arguments by XLA's options, or the error in place of one that is refused."""
  try:
    return f.lower(*args).compile(*options)
  except (ValueError, RuntimeError) as error:  # JAX's own and NotImplementedError are RuntimeErrors
    return error


def compile_all[K: Hashable](
  jobs: Mapping[K, tuple[Any, Sequence[Any]]], *, needed: Collection[K] = (), threads: int | None = None
) -> dict[K, Any]:
  """Compiles in threads; what is refused is left out, with a line that says why.

  Args:
    jobs: name -> (jitted function, its arguments or their shapes).
    needed: names that must not be left out.
    threads: as many as jobs unless given.

  Raises:
    ValueError, RuntimeError: that of a refused job which is needed.
  """
  with concurrent.futures.ThreadPoolExecutor(threads or len(jobs)) as pool:
    made = dict(zip(jobs, pool.map(lambda job: compile_step(*job), jobs.values()), strict=True))
  for name, error in [item for item in made.items() if isinstance(item[1], Exception)]:
    if name in needed:
      raise error
    print(f'  {name} does not compile: {clipped(error, _LINE)}', flush=True)
    del made[name]
  return made


def memory(compiled: Any) -> dict[str, float] | None:
  """GB that a compiled step holds at once: arguments, results that do not replace one, and temporaries."""
  analysis = compiled.memory_analysis()
  if analysis is None:
    return None
  kept = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
  gb = dict(arguments=analysis.argument_size_in_bytes, temporaries=analysis.temp_size_in_bytes)
  gb['total'] = kept + analysis.temp_size_in_bytes
  return {name: round(size / 1e9, 3) for name, size in gb.items()}


@dataclasses.dataclass(frozen=True)
class Plan:
  """How a case is measured.

  Attributes:
    jobs: name -> (function, arguments or their shapes), compiled ahead with those of all other cases.
    run: compiled functions by name, without those that were refused -> the record.
  """

  jobs: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]]
  run: Callable[[Mapping[str, Any]], dict[str, Any]]


def append(out: Path, record: Mapping[str, Any]) -> None:
  """Adds one line to a JSON-lines file."""
  out.parent.mkdir(parents=True, exist_ok=True)
  with out.open('a') as file:
    file.write(json.dumps(record) + '\n')


def run_each(
  names: Iterable[str],
  run: Callable[[str], Mapping[str, Any]],
  out: Path,
  summary: Callable[[Mapping[str, Any]], str],
) -> int:
  """Runs cases one after another; a case that fails costs the others nothing.

  Args:
    names: of the cases.
    run: name -> record, which is appended to `out` at once.
    out: JSON-lines file.
    summary: of a record, in a line.

  Returns:
    The number of cases that failed.
  """
  failed = 0
  for name in names:
    try:
      record = run(name)
    except (ValueError, RuntimeError) as error:
      print(f'{name}: failed: {type(error).__name__}: {clipped(error, _MESSAGE)}', flush=True)
      failed += 1
      continue
    append(out, record)
    print(f'{name}: {summary(record)}', flush=True)
  return failed


class _Compiled(dict[str, Any]):
  """Compiled functions of a plan, by name."""

  def __missing__(self, name: str) -> Any:
    raise ValueError(f'{name!r} was not compiled')  # a KeyError would be an error of the program


def run_plans(plans: Mapping[str, Plan], out: Path, summary: Callable[[Mapping[str, Any]], str]) -> int:
  """Compiles what all plans need at once, then measures as `run_each` does; returns the number that failed."""
  clock = Clock()
  jobs = {f'{case}: {name}': (jax.jit(f), args) for case, p in plans.items() for name, (f, args) in p.jobs.items()}
  made = compile_all(jobs, threads=_COMPILERS)
  clock.lap('compiling')

  def run(case: str) -> dict[str, Any]:
    names = plans[case].jobs
    return plans[case].run(_Compiled({name: made[key] for name in names if (key := f'{case}: {name}') in made}))

  failed = run_each(plans, run, out, summary)
  clock.lap('timing')
  return failed


def arguments(parser: argparse.ArgumentParser, choices: Collection[str], default: Sequence[str]) -> None:
  """The options of what times cases in turns."""
  parser.add_argument(
    '--select', nargs='+', default=list(default), choices=choices, metavar='CASE',
    help=f'one or more of: {", ".join(choices)} (default: {" ".join(default)})',
  )  # fmt: skip
  parser.add_argument('--rounds', type=int, default=4, help='bursts of each twin (default: %(default)s)')
  parser.add_argument('--steps', type=int, default=8, help='steps a burst (default: %(default)s)')
  parser.add_argument('--tiny', action='store_true', help='small shapes and plain jax.numpy, to see that it runs')


def selected(options: argparse.Namespace, groups: Mapping[str, Sequence[str]]) -> list[str]:
  """The cases that `--select` asks for, by their names or those of groups; each once."""
  return list(dict.fromkeys(case for name in options.select for case in groups.get(name, [name])))


class Clock:
  """Prints how long each part of a run took: device time is scarce."""

  def __init__(self):
    self._start = self._last = time.perf_counter()

  def lap(self, what: str) -> None:
    """Prints the seconds since the last lap."""
    now = time.perf_counter()
    print(f'  [{now - self._start:6.1f} s] {what}: {now - self._last:.1f} s', flush=True)
    self._last = now
