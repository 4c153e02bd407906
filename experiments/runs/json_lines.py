"""Files of records: JSON, one a line."""

from collections.abc import Iterable, Mapping
import json
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
  """All records of a file."""
  return [json.loads(line) for line in path.read_text().splitlines()]


def append(path: Path, *records: Mapping[str, Any]) -> None:
  """Adds records to a file, which is made when missing."""
  with path.open('a') as file:
    file.write(_lines(records))


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
  """Puts records in the place of what a file has."""
  path.write_text(_lines(records))


def _lines(records: Iterable[Mapping[str, Any]]) -> str:
  return ''.join(json.dumps(record) + '\n' for record in records)
