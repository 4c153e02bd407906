"""Tables in a terminal."""

from collections.abc import Collection, Iterable, Sequence

from rich.table import Table


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()) -> Table:
  """Rows under their heads, of which those in `right` stand at the right."""
  made = Table(box=None, padding=(0, 2), header_style='bold')
  for name in head:
    made.add_column(name, justify='right' if name in right else 'left')
  for row in rows:
    made.add_row(*row)
  return made
