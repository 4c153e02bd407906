"""Files of records: JSON, one a line.

A kill may cut the last line. It is no record then, and the next one takes its place.
"""

from collections.abc import Iterable, Mapping
import json
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
  """All records of a file.

  Raises:
    ValueError: a line but a last one that was cut is no record.
  """
  *lines, last = path.read_bytes().split(b'\n')
  records = []
  for number, line in enumerate(lines, 1):
    if (record := _record(line)) is None:
      raise ValueError(f'{path}, line {number} is no record: put back a copy of the file, or remove that line')
    records.append(record)
  return records if (record := _record(last)) is None else [*records, record]


def append(path: Path, *records: Mapping[str, Any]) -> None:
  """Adds records to a file, which is made when missing."""
  with path.open('a+b') as file:
    file.seek(0)
    *_, last = file.read().split(b'\n')
    if _record(last) is None:
      file.truncate(file.tell() - len(last))
    elif last:
      file.write(b'\n')
    file.write(_lines(records))


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
  """Puts records in the place of what a file has."""
  path.write_bytes(_lines(records))


def _record(line: bytes) -> dict[str, Any] | None:
  try:
    record = json.loads(line)
  except ValueError:
    return None
  return record if isinstance(record, dict) else None


def _lines(records: Iterable[Mapping[str, Any]]) -> bytes:
  return ''.join(json.dumps(record) + '\n' for record in records).encode()
