"""The main job: dense, plain-STE and FST twins of a byte-level GPT-2 on embedded real text, and a report about them.

Claim: at equal steps a 2:4 run tracks its dense twin, and the flip rate of FST rises, then falls.
Cost: three runs of 4,000 steps, three to four minutes in all on 2 cores.
Command: python -m experiments
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.reports import report
from experiments.runs import methods, records, terminal

METHODS = ('dense', 'ste', 'fst')


def run(
  folder: str | Path, *, seed: int = 0, tiny: bool = False, overrides: Sequence[str] = (), data: Any = None
) -> Path:
  """Trains the three twins, or finishes what an interrupted call began, and writes the report.

  Args:
    folder: gets one folder a run, and report.html.
    seed: of all three.
    tiny: the twin for tests.
    overrides: 'section.key=value' strings.
    data: batches in place of the corpus.

  Returns:
    The path of the report.
  """
  folders = methods.run_all('nano', METHODS, [seed], folder, tiny=tiny, overrides=overrides, data=data)
  path = report.write_report(folders, Path(folder) / 'report.html', title='Dense, plain STE and FST on real text')
  show_table(folders)
  print(f'report: {path.resolve()}')
  return path


def show_table(folders: Sequence[Path]) -> None:
  """Prints the comparison of the given runs."""
  figures = ('validation loss', 'minus dense', 'peak flip rate', 'late flip rate', 'seconds')
  found = report.table_rows(report.finished(records.group(records.find_runs(folders))))
  rows = [
    (label, f'{loss} {spread}'.strip(), difference, peak, tail, seconds)
    for label, _, loss, spread, difference, _, peak, tail, seconds in found
  ]
  Console().print(terminal.table(('method', *figures), rows, right=figures))
