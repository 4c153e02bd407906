"""`python -m experiments.bench.best_steps --out FILE`: training steps of each method at its best, dense ones as well.

What a method gains is told against the best that the dense model can do, and that depends on how the model is laid out.
So each method, dense and dense FP8 among them, is offered the same layouts: layers unrolled or in a scan, nothing
recomputed, all but the matmuls, or whole blocks, and XLA's flags (`Case.layouts` says which). The fastest counts. All
of them have attention by cuDNN, logits in bfloat16 with sums in float32, float32 weights and moments, and the state
donated.

First all programs are compiled, in processes side by side, into one folder. Then each is timed in a process of its own,
one at a time: all layouts once, and the best of each method again, in the opposite order of methods every other time. A
record is one layout of one method in one process.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
import concurrent.futures
import dataclasses
import json
import math
import os
from pathlib import Path
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from experiments.bench import measure
from experiments.bench.step_cases import CASES, FLAGS, Layout, METHODS
from experiments.bench.timed_step import Step
from experiments.runs.models import gpt2, llama
from pallas_kernels import _bench

MODULE = 'experiments.bench.best_steps'
_MEMORY = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false', 'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.93'}
_AHEAD = 4  # processes that are traced while another is timed


def work(options: Any) -> int:
  """A process of its own: compiles, says so, and times when it is told to."""
  case, method, layout = options.one
  step = Step(CASES[case], method, Layout.named(layout), tiny=options.tiny)
  print(json.dumps(step.compile()), flush=True)
  if sys.stdin.readline().strip() == 'time':
    steps = 2 if options.tiny else CASES[case].steps
    print(json.dumps(step.time(steps, options.bursts, profile=options.profile)), flush=True)
  return 0


@dataclasses.dataclass(frozen=True)
class Job:
  """One program."""

  case: str
  method: str
  layout: str

  @property
  def weight(self) -> int:
    """About how long it takes to compile: those that take longest begin first."""
    case, layout = CASES[self.case], Layout.named(self.layout)
    layers = case.fields.get('num_layers') or (gpt2 if case.family == 'gpt2' else llama).SIZES[case.size]['num_layers']
    return (1 if layout.scan else layers) * (1 if METHODS[self.method].recipe == 'dense' else 2)

  def __str__(self) -> str:
    return f'{self.case} {self.method} {self.layout}'


class Worker:
  """The process of a job: it compiles, and times when it is told."""

  def __init__(self, job: Job, options: Any):
    command = [sys.executable, '-m', MODULE, '--one', job.case, job.method, job.layout, '--out', str(options.out)]
    command += ['--bursts', str(options.bursts), *(['--tiny'] if options.tiny else [])]
    command += ['--profile'] if options.profile else []
    flags = f'{os.environ.get("XLA_FLAGS", "")} {FLAGS[Layout.named(job.layout).flags]}'.strip()
    env = os.environ | _MEMORY | dict(
      XLA_FLAGS=flags, JAX_COMPILATION_CACHE_DIR=str(options.cache), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
    )  # fmt: skip
    self._log = tempfile.TemporaryFile('w+')  # noqa: SIM115, closed by `end`
    self._process = subprocess.Popen(
      command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
    )

  def tell(self, word: str) -> None:
    """Writes a line to it."""
    assert self._process.stdin
    self._process.stdin.write(word + '\n')
    self._process.stdin.flush()

  def answer(self) -> dict[str, Any]:
    """The line of JSON that it prints next.

    Raises:
      RuntimeError: it ended instead; with what it said last.
    """
    assert self._process.stdout
    for line in self._process.stdout:
      if line.startswith('{'):
        return json.loads(line)
    status = self._process.wait()
    self._log.seek(0)
    said = [line for line in self._log.read().splitlines() if 'Error' in line or 'EXHAUSTED' in line]
    raise RuntimeError(f'exit status {status}: {" ".join(said)[-600:]}')

  def end(self) -> None:
    """Ends it, whatever it does."""
    self._process.kill()
    self._process.wait()
    self._log.close()


def compile_all(jobs: Iterable[Job], options: Any) -> dict[Job, dict[str, Any]]:
  """Compiles in processes side by side; returns what each program is, without those that failed."""

  def one(job: Job) -> dict[str, Any] | None:
    start, worker = time.monotonic(), Worker(job, options)
    try:
      found = worker.answer()
      print(f'{job}: compiled, {time.monotonic() - start:.0f} s, {found["memory_gb"]}', flush=True)
      return found
    except RuntimeError as error:
      print(f'{job}: failed: {error}', flush=True)
      return None
    finally:
      worker.end()

  order = sorted(jobs, key=lambda job: -job.weight)
  with concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
    return {job: found for job, found in zip(order, pool.map(one, order), strict=True) if found}


def timed(jobs: Sequence[Job], options: Any) -> Iterator[tuple[Job, dict[str, Any]]]:
  """Times jobs one after another; the next ones are traced meanwhile. A job that fails costs the others nothing."""
  waiting: list[tuple[Job, Worker]] = []
  todo = list(jobs)
  try:
    while todo or waiting:
      while todo and len(waiting) < _AHEAD:
        job = todo.pop(0)
        waiting.append((job, Worker(job, options)))
      job, worker = waiting.pop(0)
      try:
        made = worker.answer()
        worker.tell('time')
        yield job, made | worker.answer()
      except RuntimeError as error:
        print(f'{job}: failed: {error}', flush=True)
      finally:
        worker.end()
  finally:
    for _, worker in waiting:
      worker.end()


def best(found: Iterable[tuple[Job, Mapping[str, Any]]]) -> dict[str, Job]:
  """Method -> its fastest layout.

  >>> a, b = Job('gpt2-124m', 'dense', 'scan'), Job('gpt2-124m', 'dense', 'unrolled')
  >>> best([(a, {'amortised_ms': 2.0}), (b, {'amortised_ms': 1.0})])['dense'].layout
  'unrolled'
  """
  fastest: dict[str, tuple[float, Job]] = {}
  for job, row in found:
    fastest[job.method] = min(fastest.get(job.method, (math.inf, job)), (row['amortised_ms'], job), key=lambda x: x[0])
  return {method: job for method, (_, job) in fastest.items()}


def run(case: str, jobs: Sequence[Job], options: Any, head: Mapping[str, Any], until: float) -> None:
  """Times the compiled layouts of a case, and the best of each method again; appends the records."""
  rows: list[tuple[Job, dict[str, Any]]] = []
  chosen = list(jobs)
  for process in range(options.processes):
    for job, row in timed(chosen if process % 2 == 0 else chosen[::-1], options):
      record = dict(
        bench='best_steps', **head, op='train_step', model=case, recipe=job.method,
        label=METHODS[job.method].label, layout=job.layout, moment=CASES[case].moment, process=process,
        **row, headline=not options.tiny,
      )  # fmt: skip
      _bench.append(options.out, record)
      rows.append((job, row))
      print(f'{job}: {row["amortised_ms"]:.2f} ms, MFU {row["mfu"]:.3f}', flush=True)
      if time.monotonic() > until:
        print(f'{case}: stopped, the time is over', flush=True)
        return
    chosen = [job for job in jobs if job in best(rows).values()]
  say(case, rows)


def say(case: str, rows: Sequence[tuple[Job, Mapping[str, Any]]]) -> None:
  """Prints each method at its best beside dense at its best."""
  ms = {
    method: statistics.median(row['amortised_ms'] for other, row in rows if other == job)
    for method, job in best(rows).items()
  }
  for method, job in best(rows).items():
    times = f', {ms["dense"] / ms[method]:.3f} of dense' if 'dense' in ms else ''
    print(f'{case}: {method} at its best, {job.layout}: {ms[method]:.2f} ms{times}', flush=True)


def main(argv: Sequence[str] | None = None) -> int:
  """Measures the selected models; returns the number of programs that failed to compile."""
  parser = measure.plain_parser(MODULE, __doc__)
  parser.add_argument('--select', nargs='+', default=['gpt2-124m'], choices=tuple(CASES), metavar='CASE')
  parser.add_argument('--methods', nargs='+', choices=tuple(METHODS), metavar='METHOD', help="(default: the case's)")
  parser.add_argument('--layouts', nargs='+', metavar='LAYOUT', help="(default: the case's)")
  parser.add_argument('--processes', type=int, default=3, help='that time the best layout (default: %(default)s)')
  parser.add_argument('--bursts', type=int, default=1, help='in each process (default: %(default)s)')
  parser.add_argument('--parallel', type=int, default=12, help='programs compiled at once (default: %(default)s)')
  parser.add_argument('--seconds', type=float, default=math.inf, help='nothing is timed after so many')
  parser.add_argument('--cache', type=Path, help='folder of compiled programs (default: one that is removed)')
  parser.add_argument('--profile', action='store_true', help='also says where the time of a step goes')
  parser.add_argument('--tiny', action='store_true', help='small shapes, to see that it runs')
  parser.add_argument('--one', nargs=3, help=argparse.SUPPRESS)
  options = parser.parse_args(argv)
  if options.one:
    return work(options)
  for layout in options.layouts or ():
    Layout.named(layout)
  os.environ.update(_MEMORY)  # this process only asks for the GPU's name
  measure.check_gpu(parser, options)
  head, until = measure.environment(MODULE, argv), time.monotonic() + options.seconds
  jobs = [
    Job(case, method, layout)
    for case in options.select
    for method in options.methods or CASES[case].methods
    for layout in options.layouts or CASES[case].layouts
  ]
  with tempfile.TemporaryDirectory() as folder:
    options.cache = options.cache or Path(folder)
    made = compile_all(jobs, options)
    for case in options.select:
      if time.monotonic() < until:
        run(case, [job for job in jobs if job in made and job.case == case], options, head, until)
  return len(jobs) - len(made)


if __name__ == '__main__':
  raise SystemExit(main())
