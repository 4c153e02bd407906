"""Small JSON files of a run's folder: written whole or not at all, and errors that name the file."""

import errno
import json
import os
from pathlib import Path
from typing import Any, Literal, TextIO


def open_own(path: str | Path, mode: Literal['w', 'a', 'a+']) -> TextIO:
  """Opens a text file of a run's folder to write in it.

  Raises:
    ValueError: it is a link. A folder from elsewhere could lead a run to any file of its user.
  """
  try:
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
  except OSError as error:
    if error.errno != errno.ELOOP:
      raise
    raise _is_link(path) from error


def require_own(*paths: str | Path) -> None:
  """Raises ValueError for a path of a run's folder that is a link, before anything is read or written there."""
  for path in paths:
    if os.path.islink(path):
      raise _is_link(path)


def _is_link(path: str | Path) -> ValueError:
  return ValueError(
    f'{path} is a link, and a run writes into its own folder alone: put what it leads to there, or train in another'
    ' folder'
  )


def write_text(path: str | Path, text: str) -> None:
  """Replaces a file at once, so that neither a kill nor a power cut leaves half of it or an empty one.

  Raises:
    ValueError: it is a link.
  """
  path = Path(path)
  require_own(path)
  new = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  with open_own(new, 'w') as file:
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
  except (ValueError, RecursionError) as error:  # of JSON, or bytes that are no text
    what = 'is empty' if not Path(path).stat().st_size else f'is not JSON ({error})'
    raise ValueError(f'{path} {what}; put back a copy, or start the run in another folder') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path} holds no JSON object but {type(value).__name__}; put back a copy')
  return value
