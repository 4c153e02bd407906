"""Tables in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
  """A table in Markdown, without an end of line after its last row.

  >>> print(markdown(['decay', 'loss'], [[0.006, '1.25'], ['', '']]))
  | decay | loss |
  | --- | --- |
  | 0.006 | 1.25 |
  |  |  |
  """
  return '\n'.join(f'| {" | ".join(map(str, cells))} |' for cells in (head, ['---'] * len(head), *rows))
