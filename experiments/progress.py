"""A progress bar with loss, tokens a second and flip rate; plain lines where there is no terminal."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
  """Shows how far a run is.

  Args:
    name: run name.
    start: steps done before this attempt.
    total: steps of the whole run.
    tokens_per_step: to show tokens a second.
    quiet: show nothing.
  """

  def __init__(self, name: str, start: int, total: int, tokens_per_step: int, *, quiet: bool = False):
    self._name, self._step, self._total, self._tokens_per_step = name, start, total, tokens_per_step
    self._console = Console(highlight=False)
    self._clock = time.monotonic()
    self._printed = 0.0
    self._bar: RichProgress | None = None
    self._quiet = quiet
    if self._console.is_terminal and not quiet:
      self._bar = RichProgress(
        TextColumn('{task.description:<22}'),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn('{task.fields[text]}'),
        TimeRemainingColumn(),
        console=self._console,
      )
      self._task = self._bar.add_task(name, total=total, completed=start, text='compiling')

  def __enter__(self) -> 'Progress':
    if self._bar:
      self._bar.start()
    return self

  def __exit__(self, *_: Any) -> None:
    if self._bar:
      self._bar.stop()

  def restart_clock(self) -> None:
    """Leaves the time since the last call (an evaluation, a checkpoint) out of the next figure for speed."""
    self._clock = time.monotonic()

  def update(self, step: int, *, loss: float, flip_rate: float) -> float:
    """Shows that `step` steps are done; returns tokens a second since the last call."""
    now = time.monotonic()
    speed = (step - self._step) * self._tokens_per_step / max(now - self._clock, 1e-9)
    self._step, self._clock = step, now
    text = f'loss {loss:.3f}  {speed / 1e3:6.1f} k tokens/s  flip rate {flip_rate:.4f}'
    if self._bar:
      self._bar.update(self._task, completed=step, text=text)
    elif not self._quiet and (now - self._printed > 10 or step == self._total):
      self._printed = now
      self._console.print(f'{self._name}: step {step}/{self._total}  {text}')
    return speed
