"""Tuning in several processes: each compiles its own problems, and they take the card in turns.

Compiling a kernel takes Python a third of a second that no thread shares, and a problem has ten; measuring them takes
about as long, and no two measurements may overlap. So one process measures while the others compile.
"""

from collections.abc import Callable
import fcntl
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
import traceback
from typing import Any


class Turn:
  """A lock between processes, on a file; TimeoutError for whose turn comes too late.

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
      raise TimeoutError

  def __exit__(self, *_: object) -> None:
    self._file.close()


def run(job: Callable[[int, Turn], bool], processes: int, seconds: float) -> int:
  """Calls `job(i, turn)` for i = 0, 1, ... until one answers that there is no such i.

  Args:
    job: picklable; returns False if i is past the last. What it raises is printed, and the next i follows.
    processes: how many; each takes the next i when it is done with one.
    seconds: after so many nothing is begun, and no turn is given.

  Returns:
    How many jobs failed.
  """
  deadline = time.time() + seconds
  context = multiprocessing.get_context('spawn')
  taken, failed = context.Value('i', 0), context.Value('i', 0)
  # Each would otherwise reserve most of the card's memory.
  os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  with tempfile.TemporaryDirectory() as folder:
    turn = Turn(pathlib.Path(folder) / 'lock', deadline)
    workers = [
      context.Process(target=_work, args=(job, turn, taken, failed, list(sys.argv))) for _ in range(processes)
    ]
    for worker in workers:
      worker.start()
    for worker in workers:
      worker.join()
  # One that died did not count itself.
  return failed.value + sum(worker.exitcode != 0 for worker in workers)


def _work(job: Callable[[int, Turn], bool], turn: Turn, taken: Any, failed: Any, argv: list[str]) -> None:
  # Records say by which command they were made.
  sys.argv = argv
  while time.time() < turn.deadline:
    with taken.get_lock():
      i, taken.value = taken.value, taken.value + 1
    try:
      if not job(i, turn):
        return
    except TimeoutError:
      return
    except Exception:
      with failed.get_lock():
        failed.value += 1
      print(f'job {i} failed:\n{traceback.format_exc()}', flush=True)
