"""A run's measurements: JSON lines that resume exactly, and TensorBoard events.

``metrics.jsonl`` holds only what the run determines (losses, flip rates), so the file of a resumed run equals that of
an uninterrupted one byte for byte; ``timing.jsonl`` holds what the clock determines.
"""

from collections.abc import Iterator, Mapping
import contextlib
import json
import os
from pathlib import Path
from typing import Any, TextIO

import tensorboardX

from experiments.runs import durable, hosts

METRICS = 'metrics.jsonl'
TIMING = 'timing.jsonl'


def read_records(path: str | Path, *, kind: str = 'kind') -> Iterator[dict[str, Any]]:
  """Yields the records of a JSON-lines file; bad lines at its end, which a kill or a power cut leaves, are left out.

  Args:
    path: the file; one that is not there has no records.
    kind: the field that each has beside 'step'.

  Raises:
    ValueError: a line before the last good one is no record; names file and line.
  """
  path = Path(path)
  if not path.exists():
    return
  bad = None
  for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
    record = _record(line, kind)
    if record is None:
      bad = bad or number
    elif bad:
      raise ValueError(
        f'{path}, line {bad} is no record, with good ones after it: the file was changed or damaged; put back a copy, '
        'or remove that line to go without it'
      )
    else:
      yield record


def _record(line: bytes, kind: str) -> dict[str, Any] | None:
  try:
    record = json.loads(line) if line.endswith(b'\n') else None
  except (ValueError, RecursionError):
    return None
  fits = isinstance(record, dict) and isinstance(record.get('step'), int) and isinstance(record.get(kind), str)
  return record if fits else None


def _truncate(path: Path, step: int) -> None:
  """Drops the records after `step`."""
  kept = [record for record in read_records(path) if record['step'] <= step]
  durable.write_text(path, ''.join(json.dumps(record) + '\n' for record in kept))


@contextlib.contextmanager
def _naming(file: TextIO) -> Iterator[None]:
  """An error of writing names the file."""
  try:
    yield
  except OSError as error:
    raise OSError(error.errno, error.strerror, file.name) from error


class MetricsWriter:
  """Writes the measurements of one run; of several processes only the first writes.

  Args:
    folder: the run's folder; made when missing.
    step: step that the run starts or resumes from; later records of an interrupted attempt are removed.

  Raises:
    ValueError: one of its files, or the folder of TensorBoard's, is a link.
  """

  def __init__(self, folder: str | Path, *, step: int = 0):
    self._files: dict[str, TextIO] = {}
    if not hosts.first():
      return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    board = folder / 'tensorboard'
    durable.require_own(folder / METRICS, folder / TIMING, board)
    for name in (METRICS, TIMING):
      _truncate(folder / name, step)
    self._files = {name: durable.open_own(folder / name, 'a') for name in (METRICS, TIMING)}
    self._board = tensorboardX.SummaryWriter(str(board), purge_step=step + 1 if step else None)

  def __enter__(self) -> 'MetricsWriter':
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
    for file in self._files.values():
      # What could not be written is tried again, and would hide the error that tells of it.
      with _naming(file) if kind is None else contextlib.suppress(OSError):
        file.close()
    if self._files:
      self._board.close()

  def sync(self) -> None:
    """Brings what was written to the disk, so that a checkpoint never knows more than these files."""
    for file in self._files.values():
      with _naming(file):
        os.fsync(file.fileno())

  def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    """Writes one record; numbers, also those one level down, become TensorBoard scalars `kind/name`.

    Args:
      kind: 'train', 'validation' or 'timing'.
      step: optimizer steps done.
      values: JSON-able; floats are written with full precision.

    Raises:
      ValueError: a number that is not finite.
    """
    if not self._files:
      return
    line = json.dumps({'step': step, 'kind': kind, **values}, allow_nan=False)
    file = self._files[TIMING if kind == 'timing' else METRICS]
    with _naming(file):
      file.write(line + '\n')
      file.flush()
    for name, value in values.items():
      for key, number in value.items() if isinstance(value, Mapping) else [('', value)]:
        if isinstance(number, (int, float)):
          self._board.add_scalar(f'{kind}/{name}' + (f'/{key}' if key else ''), number, step)
