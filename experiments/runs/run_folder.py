"""A run's folder: one process at a time trains in it, and a finished run has a summary there."""

from collections.abc import Iterator
import contextlib
import fcntl
import json
import os
from pathlib import Path
import socket
from typing import Any
import warnings

from experiments.runs import durable, events, hosts, records
from experiments.runs.experiment import Config


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
  """Keeps other processes from training in `folder`; the operating system lets go of it however this one ends.

  Raises:
    ValueError: another process holds it; names that.
  """
  with contextlib.ExitStack() as stack:
    hosts.by_first(f'train in {folder}', lambda: _lock(folder, stack))  # for all processes of the run
    yield


def _lock(folder: Path, stack: contextlib.ExitStack) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  lock = stack.enter_context(durable.open_own(folder / '.lock', 'a+'))
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    lock.seek(0)
    holder = lock.read() or 'another process'
    raise ValueError(f'{holder} trains in {folder}; wait for it, stop it, or name another folder') from None
  except OSError as error:  # some file systems of clusters have no locks
    message = f'{folder} cannot be locked ({error}): nothing keeps a second process from training in it'
    warnings.warn(message, stacklevel=2)
  lock.truncate(0)
  lock.write(f'process {os.getpid()} on {socket.gethostname()}')
  lock.flush()


def summary(folder: Path) -> dict[str, Any] | None:
  """The summary of a finished run, or None; one that cannot be read is made again."""
  file = folder / 'summary.json'
  if not file.exists():
    return None
  try:
    return durable.read_json(file)
  except ValueError as error:
    events.tell(f'{error}. It is made again.')
    return None


def finished(config: Config, folder: Path) -> dict[str, Any] | None:
  """The summary of a finished run of this very configuration."""
  if (found := summary(folder)) is None:
    return None
  # JSON makes lists of tuples.
  wanted = json.loads(json.dumps(config.to_dict()))
  if {**records.read_config(folder), 'bad_numbers': None} != {**wanted, 'bad_numbers': None}:
    raise ValueError(f'{folder} holds a run with other settings; name another folder, or remove it')
  return found
