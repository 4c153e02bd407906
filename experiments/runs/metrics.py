"""A run's measurements: JSON lines that resume exactly, and TensorBoard events.

``metrics.jsonl`` holds only what the run determines (losses, flip rates), so the file of a resumed run equals that of
an uninterrupted one byte for byte; ``timing.jsonl`` holds what the clock determines.
"""

from collections.abc import Iterator, Mapping
import json
import os
from pathlib import Path
from typing import Any

import tensorboardX

METRICS = 'metrics.jsonl'
TIMING = 'timing.jsonl'


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
  """Yields the records of a JSON-lines file; a last line cut short by a kill is left out."""
  path = Path(path)
  if not path.exists():
    return
  for line in path.read_text().splitlines(keepends=True):
    if line.endswith('\n'):
      yield json.loads(line)


def _truncate(path: Path, step: int) -> None:
  """Drops the records after `step`, in a new file that replaces the old one at once."""
  kept = [record for record in read_records(path) if record['step'] <= step]
  new = path.with_suffix('.tmp')
  new.write_text(''.join(json.dumps(record) + '\n' for record in kept))
  os.replace(new, path)


class MetricsWriter:
  """Writes the measurements of one run.

  Args:
    folder: the run's folder; made when missing.
    step: step that the run starts or resumes from; later records of an interrupted attempt are removed.
  """

  def __init__(self, folder: str | Path, *, step: int = 0):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (METRICS, TIMING):
      _truncate(folder / name, step)
    self._files = {name: (folder / name).open('a') for name in (METRICS, TIMING)}
    self._board = tensorboardX.SummaryWriter(str(folder / 'tensorboard'), purge_step=step + 1 if step else None)

  def __enter__(self) -> 'MetricsWriter':
    return self

  def __exit__(self, *_: Any) -> None:
    for file in self._files.values():
      file.close()
    self._board.close()

  def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    """Writes one record; numbers, also those one level down, become TensorBoard scalars `kind/name`.

    Args:
      kind: 'train', 'validation' or 'timing'.
      step: optimizer steps done.
      values: JSON-able; floats are written with full precision.

    Raises:
      ValueError: a number that is not finite.
    """
    file = self._files[TIMING if kind == 'timing' else METRICS]
    file.write(json.dumps({'step': step, 'kind': kind, **values}, allow_nan=False) + '\n')
    file.flush()
    for name, value in values.items():
      for key, number in value.items() if isinstance(value, Mapping) else [('', value)]:
        if isinstance(number, (int, float)):
          self._board.add_scalar(f'{kind}/{name}' + (f'/{key}' if key else ''), number, step)
