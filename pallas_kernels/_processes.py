"""Tuning in several processes: each compiles its own problems, and they take the GPU in turns.

Compiling a kernel takes Python a third of a second that no thread shares, and a problem has ten; measuring them takes
about as long, and no two measurements may overlap. So one process measures while the others compile.
"""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import fcntl
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
import traceback
from typing import Any, NamedTuple

# A worker may sit in a library that does not heed a signal.
_STOP_SECONDS = 5.0


class Ended(NamedTuple):
  """How many jobs failed, and how many were left out since time ran out."""

  failed: int
  left: int


class LateTurnError(Exception):
  """The turn came after the deadline."""


class Turn:
  """A lock between processes, on a file; LateTurnError for whose turn comes too late.

  >>> with Turn(pathlib.Path(tempfile.mkdtemp()) / 'lock', deadline=time.time() + 60):
  ...   pass
  """

  def __init__(self, path: pathlib.Path, deadline: float):
    self.path, self.deadline = path, deadline

  def __enter__(self) -> None:
    self._file = self.path.open('w')
    fcntl.flock(self._file, fcntl.LOCK_EX)
    if time.time() > self.deadline:
      self._file.close()
      raise LateTurnError

  def __exit__(self, *_: object) -> None:
    self._file.close()


def run(job: Callable[[int, Turn], object], count: int, processes: int, seconds: float) -> Ended:
  """Calls `job(i, turn)` for every i below `count`, in their order.

  Args:
    job: picklable. What it raises is printed, and the next i follows.
    count: of jobs.
    processes: how many; each takes the next i when it is done with one.
    seconds: after so many nothing is begun, and no turn is given: the job that waits for one is left out.

  Returns:
    How many jobs failed, those included that no process is left for, and how many were left out. No process outlives
    the call, whatever exception ends it.
  """
  deadline = time.time() + seconds
  context = multiprocessing.get_context('spawn')
  taken, failed, late = (context.Value('i', 0) for _ in range(3))
  with tempfile.TemporaryDirectory() as folder:
    turn = Turn(pathlib.Path(folder) / 'lock', deadline)
    args = (job, count, turn, taken, failed, late, list(sys.argv))
    workers = [context.Process(target=_work, args=args) for _ in range(processes)]
    try:
      with shared_gpu():
        for worker in workers:
          worker.start()
      for worker in workers:
        worker.join()
    finally:
      stop(workers)
  # One that died did not count itself.
  died = sum(worker.exitcode != 0 for worker in workers)
  rest = max(0, count - taken.value)
  if died == processes:
    return Ended(failed.value + died + rest, late.value)
  return Ended(failed.value + died, late.value + rest)


@contextlib.contextmanager
def shared_gpu() -> Iterator[None]:
  """Lets processes start that do not reserve most of the GPU's memory each; afterwards the environment is as before."""
  name = 'XLA_PYTHON_CLIENT_PREALLOCATE'
  if name in os.environ:
    yield
    return
  os.environ[name] = 'false'
  try:
    yield
  finally:
    os.environ.pop(name, None)


def stop(workers: Iterable[Any]) -> None:
  """Ends those of the processes that still run."""
  alive = [worker for worker in workers if worker.is_alive()]
  for worker in alive:
    worker.terminate()
  for worker in alive:
    worker.join(_STOP_SECONDS)
    if worker.is_alive():
      worker.kill()
      worker.join()


def _work(
  job: Callable[[int, Turn], object], count: int, turn: Turn, taken: Any, failed: Any, late: Any, argv: list[str]
) -> None:
  # Records say by which command they were made.
  sys.argv = argv
  while time.time() < turn.deadline:
    with taken.get_lock():
      i, taken.value = taken.value, min(count, taken.value + 1)
    if i >= count:
      return
    try:
      job(i, turn)
    except LateTurnError:
      with late.get_lock():
        late.value += 1
      print(f'job {i} left out: time ran out before its turn', flush=True)
    except Exception:
      with failed.get_lock():
        failed.value += 1
      print(f'job {i} failed:\n{traceback.format_exc()}', flush=True)
