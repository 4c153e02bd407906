"""What happened to a run that its settings do not say: resumed, steps skipped, rolled back, settings changed.

Each is a line of ``events.jsonl`` and a line on the standard error. Unlike the metrics these lines are never taken
back, so that they tell about every attempt.
"""

import json
from pathlib import Path
import sys
from typing import Any

from experiments.runs import durable, hosts, metrics

EVENTS = 'events.jsonl'


def tell(line: str) -> None:
  """Says something that must not go unseen, once for all processes."""
  if hosts.first():
    print(line, file=sys.stderr, flush=True)


def note(folder: str | Path, step: int, event: str, what: str, **fields: Any) -> None:
  """Writes down an event of a run and tells it; every process must call it.

  Args:
    folder: the run's folder.
    step: optimizer steps done when it happened.
    event: its kind, 'skipped' say.
    what: a sentence for the reader.
    **fields: JSON-able details.
  """
  tell(f'{folder}: {what}')
  line = json.dumps({'step': step, 'event': event, 'what': what, **fields}) + '\n'

  def append() -> None:
    with durable.open_own(Path(folder) / EVENTS, 'a') as file:
      file.write(line)

  hosts.by_first(f'write {EVENTS}', append)


def read(folder: str | Path) -> list[dict[str, Any]]:
  """The events of a run, in order.

  Raises:
    ValueError: the file is damaged; names it and the line.
  """
  return list(metrics.read_records(Path(folder) / EVENTS, kind='event'))
