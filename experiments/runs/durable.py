"""Small JSON files of a run's folder: written whole or not at all, and errors that name the file."""

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: str | Path, text: str) -> None:
  """Replaces a file at once, so that neither a kill nor a power cut leaves half of it or an empty one."""
  path = Path(path)
  new = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  with new.open('w') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(new, path)


def write_json(path: str | Path, value: Any) -> None:
  """Like `write_text`, of JSON-able data."""
  write_text(path, json.dumps(value, indent=2) + '\n')


def read_json(path: str | Path) -> dict[str, Any]:
  """Reads a JSON file that holds an object.

  Raises:
    ValueError: the file is empty, cut, or something else; names it.
  """
  try:
    value = json.loads(Path(path).read_text())
  except ValueError as error:  # of JSON, or bytes that are no text
    what = 'is empty' if not Path(path).stat().st_size else f'is not JSON ({error})'
    raise ValueError(f'{path} {what}; put back a copy, or start the run in another folder') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path} holds no JSON object but {type(value).__name__}; put back a copy')
  return value
