"""The data folder: where it is, one preparation at a time, and what a person sees meanwhile."""

from collections.abc import Iterator
import contextlib
import fcntl
import os
import pathlib
import time

from rich import progress as rich_progress
from rich.console import Console

from experiments.runs.data.units import DataError

ENVIRONMENT_VARIABLE = 'SPARSE24_DATA_DIR'
_LOG_EVERY = 10.0  # seconds between lines where there is no terminal


def data_root(data_dir: str | os.PathLike | None) -> pathlib.Path:
  """Returns the folder that holds prepared data.

  Args:
    data_dir: An existing folder; None takes the environment variable SPARSE24_DATA_DIR, and without it
      `$XDG_CACHE_HOME/sparse24_jax` or `~/.cache/sparse24_jax`, which is created.

  Raises:
    DataError: A named folder does not exist (it is not created: an unmounted disk would go unnoticed), or the default
      one cannot be created.
  """
  source = 'data_dir' if data_dir else ENVIRONMENT_VARIABLE
  named = data_dir or os.environ.get(ENVIRONMENT_VARIABLE)
  if named:
    root = pathlib.Path(named).expanduser().absolute()
    if not root.is_dir():
      raise DataError(f'{source} is not an existing folder: {root}. Create it (mkdir -p {root}), or name another one')
    return root
  cache = os.environ.get('XDG_CACHE_HOME') or pathlib.Path('~/.cache').expanduser()
  root = pathlib.Path(cache).absolute() / 'sparse24_jax'
  try:
    root.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise _unwritable(root, e) from e
  return root


def _unwritable(root: pathlib.Path, error: OSError) -> DataError:
  return DataError(
    f'cannot write to the data folder {root} ({error.strerror}); free space or permit writing there, or name another'
    f' folder through data_dir or {ENVIRONMENT_VARIABLE}'
  )


@contextlib.contextmanager
def preparing(root: pathlib.Path) -> Iterator[None]:
  """Holds the data folder's lock, so that of several processes one prepares and the others find the result.

  Raises:
    DataError: The folder cannot be written to, or an operating system error (a full disk) ended the preparation.
  """
  try:
    with (root / '.lock').open('w') as lock:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        _console().print(f'another process prepares data in {root}; waiting for it', soft_wrap=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
      yield
  except OSError as e:
    raise _unwritable(root, e) from e


def _console() -> Console:
  return Console(stderr=True, highlight=False)


def tell(line: str) -> None:
  """Says something about the data that a person should know."""
  _console().print(line, soft_wrap=True, markup=False)


class Progress:
  """Counts items on a bar where there is a terminal, and in a log line every ten seconds elsewhere.

  Says nothing until the first item, so that work found already done leaves no trace.

  >>> with Progress('counting', total=2) as progress:
  ...   progress.advance()
  """

  def __init__(self, label: str, total: int | None = None, unit: str = 'documents'):
    self._label, self._total, self._unit = label, total, unit
    self._console = _console()
    self._bar = None
    self._count = 0

  def __enter__(self):
    self._started = self._logged = time.monotonic()
    return self

  def _announce(self) -> None:
    if self._console.is_terminal:
      columns = (
        rich_progress.TextColumn('{task.description}'),
        rich_progress.BarColumn(),
        rich_progress.TextColumn('{task.completed:,.0f} {task.fields[unit]}'),
        rich_progress.TimeElapsedColumn(),
      )
      self._bar = rich_progress.Progress(*columns, console=self._console, transient=True)
      self._task = self._bar.add_task(self._label, total=self._total, unit=self._unit)
      self._bar.start()
    else:
      self._print(f'{self._label} ...')

  def advance(self, count: int = 1) -> None:
    """Counts `count` more items."""
    if not self._count:
      self._announce()
    self._count += count
    if self._bar is not None:
      self._bar.advance(self._task, count)
    elif time.monotonic() - self._logged > _LOG_EVERY:
      self._logged = time.monotonic()
      of_total = f' of {self._total:,}' if self._total else ''
      self._print(f'{self._label}: {self._count:,}{of_total} {self._unit}')

  def __exit__(self, kind, value, traceback):
    if self._bar is not None:
      self._bar.stop()
    if kind is None and self._count:
      seconds = time.monotonic() - self._started
      self._print(f'{self._label}: {self._count:,} {self._unit} in {seconds:.1f} s')

  def _print(self, line: str) -> None:
    self._console.print(line, soft_wrap=True, markup=False)
