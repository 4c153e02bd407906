"""Ends a run between two steps when it is told to: by SIGTERM, by Ctrl-C, or by a notice that the machine goes away.

A first signal lets the step in flight end and a checkpoint be written; a second one ends the process at once. Of
several processes each may get the signal at another step; JAX's preemption service then finds a step for all of them.
"""

from collections.abc import Iterator
import contextlib
import os
import signal
import threading
from typing import Any

from jax.experimental import multihost_utils

from experiments.runs import hosts

# What `python -m experiments` ends with, see docs/hosts.md. 75 is EX_TEMPFAIL: to be started again.
STATUS = {signal.SIGTERM: 75, signal.SIGINT: 130}


class StoppedError(Exception):
  """The run was told to stop, and did.

  Attributes:
    status: what the process should end with.
  """

  def __init__(self, message: str, told_by: signal.Signals):
    super().__init__(message)
    self.status = STATUS[told_by]


class Stop:
  """Whether the run was told to stop, see `listening`."""

  def __init__(self):
    self._told_by: signal.Signals | None = None

  def told_by(self, step: int) -> signal.Signals | None:
    """The signal that tells the run to stop after `step`, if there is one; every process must ask at every step."""
    if hosts.several() and multihost_utils.reached_preemption_sync_point(step):
      self._told_by = signal.SIGTERM  # JAX says so at one step only, and a run may be rolled back before it ends.
    return self._told_by

  def hear(self, number: int, _: Any) -> None:
    """Handles a signal."""
    signal.signal(number, signal.SIG_DFL)
    if hosts.several():  # only SIGTERM is agreed upon
      os.kill(os.getpid(), signal.SIGTERM)
    else:
      self._told_by = signal.Signals(number)


@contextlib.contextmanager
def listening() -> Iterator[Stop]:
  """Listens for signals while a run lasts; outside the main thread, where Python hears none, only for preemption."""
  stop = Stop()
  if threading.current_thread() is not threading.main_thread():
    yield stop
    return
  # With several processes JAX has its own handler of SIGTERM.
  numbers = (signal.SIGINT,) if hosts.several() else (signal.SIGINT, signal.SIGTERM)
  before = {number: signal.signal(number, stop.hear) for number in numbers}
  try:
    yield stop
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
