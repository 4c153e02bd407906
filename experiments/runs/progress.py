"""What a run tells about itself while it lasts: how far it is, and what its time went to.

A progress bar has loss, tokens a second and flip rate; where there is no terminal, plain lines have.
"""

from collections.abc import Mapping
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

SPENT_ON = ('training', 'compiling', 'evaluation', 'checkpoints')


class Stopwatch:
  """Seconds of a run's loop by what they were spent on, of earlier attempts as far as checkpoints tell.

  Args:
    spent: of earlier attempts.

  Attributes:
    spent: seconds, a key each of `SPENT_ON`.

  >>> watch = Stopwatch({'training': 60.0})
  >>> watch.lap('compiling')
  >>> watch.spent['training'], watch.spent['compiling'] >= 0
  (60.0, True)
  """

  def __init__(self, spent: Mapping[str, float] | None = None):
    self.spent = dict.fromkeys(SPENT_ON, 0.0) | dict(spent or {})
    self._last = time.monotonic()

  def lap(self, on: str) -> None:
    """Counts the time since the last lap, or since the start."""
    now = time.monotonic()
    self.spent[on] += now - self._last
    self._last = now

  @property
  def total(self) -> float:
    """All seconds."""
    return sum(self.spent.values())


class Progress:
  """Shows how far a run is.

  Args:
    name: run name.
    start: steps done before this attempt.
    total: steps of the whole run.
    quiet: show nothing.
  """

  def __init__(self, name: str, start: int, total: int, *, quiet: bool = False):
    self._name, self._total = name, total
    self._console = Console(highlight=False)
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

  def update(self, step: int, *, loss: float, flip_rate: float | None, tokens_per_s: float) -> None:
    """Shows that `step` steps are done; no flip rate where no masks are compared."""
    now = time.monotonic()
    text = f'loss {loss:.3f}  {tokens_per_s / 1e3:6.1f} k tokens/s'
    text += '' if flip_rate is None else f'  flip rate {flip_rate:.4f}'
    if self._bar:
      self._bar.update(self._task, completed=step, text=text)
    elif not self._quiet and (now - self._printed > 10 or step == self._total):
      self._printed = now
      self._console.print(f'{self._name}: step {step}/{self._total}  {text}', soft_wrap=True)
