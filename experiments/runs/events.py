"""What happened to a run that its settings do not say: steps skipped, roll-backs, changed settings, bad checkpoints.

Each is a line of ``events.jsonl`` and a line on the standard error. Unlike the metrics these lines are never taken
back, so that they tell about every attempt.
"""

import json
from pathlib import Path
import sys
from typing import Any

from experiments.runs import hosts

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
    with (Path(folder) / EVENTS).open('a') as file:
      file.write(line)

  hosts.by_first(f'write {EVENTS}', append)
