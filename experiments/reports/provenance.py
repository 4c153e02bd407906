"""Whether a record stands by itself, and which records the documents cite.

A table of a document is preceded by a comment that says which records its figures are from:

  <!-- records: best_steps.jsonl; ffn.jsonl?device=NVIDIA H200 -->
  <!-- records: none, these are settings -->

Files are those of `experiments/results/`, each with conditions on fields of its records after a question mark, or
paths from the root of the project. Those of `experiments/results/` all stand by themselves.
"""

from collections.abc import Mapping
import dataclasses
import functools
import json
from pathlib import Path
import re
import subprocess
from typing import Any

from experiments.runs import json_lines

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / 'experiments' / 'results'
NOT_IN_GIT = 'a commit that is not in git'
GONE = 'a program that is gone'
# Commands that `python -m experiments` had once.
_GONE = ('together',)
# How records call what another command or option does today.
_MOVED = {
  'experiments.race': 'experiments race',
  'experiments.scale': 'experiments scale',
  'experiments.bench.neuron_level --select packs': 'pallas_kernels bench vnm_matmul --select packs',
}
_RENAMED = {'--together': '--population'}

_COMMENT = re.compile(r'<!-- records: (.*?) -->\n', re.DOTALL)
_COMMAND = re.compile(r'python -m ((?:experiments|pallas_kernels|sparse24_jax|tests)[.\w]*)(?: (\S+)|$)')


@dataclasses.dataclass(frozen=True)
class Cited:
  """A table of a document.

  Attributes:
    document: its path.
    line: of the table's head, from 1.
    text: the table.
    citations: what its comment lists; None without a comment, empty where there is nothing to cite.
    said: the text of its section before it.
  """

  document: Path
  line: int
  text: str
  citations: tuple[str, ...] | None
  said: str = ''


def faults(record: Mapping[str, Any]) -> tuple[str, ...]:
  """Why a record does not stand by itself; empty if it does.

  >>> faults({'commit': 'df15449+', 'command': 'a driver, not kept'})
  ('uncommitted changes', 'no command that is kept')
  """
  commit = str(record.get('commit') or '')
  found = []
  if not commit:
    found.append('no commit')
  elif not re.fullmatch('[0-9a-f]{7,40}', commit):
    found.append('uncommitted changes')
  elif not _in_git(commit):
    found.append(NOT_IN_GIT)
  if not (command := _COMMAND.match(today(str(record.get('command') or '')))):
    found.append('no command that is kept')
  elif not is_program(command[1]) or (command[1] == 'experiments' and command[2] in _GONE):
    found.append(GONE)
  if 'median_ms' in record and len(record.get('samples_ms', ())) < 3:
    found.append('a median of fewer than three samples')
  return tuple(found)


def today(command: str) -> str:
  """The command that does today what a record says was run.

  >>> today('python -m experiments.race --size wide2048')
  'python -m experiments race --size wide2048'
  """
  for then, now in _MOVED.items():
    command = re.sub(rf'python -m {re.escape(then)}(?= |$)', f'python -m {now}', command)
  for then, now in _RENAMED.items():
    command = command.replace(f' {then} ', f' {now} ')
  return command


@functools.cache
def is_program(module: str) -> bool:
  """Whether `python -m MODULE` runs a program of this project.

  >>> is_program('experiments'), is_program('experiments.reports')
  (True, False)
  """
  path = ROOT / module.replace('.', '/')
  file = path / '__main__.py' if path.is_dir() else path.with_suffix('.py')
  return file.is_file() and "__name__ == '__main__'" in file.read_text()


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(['git', *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@functools.cache
def has_history() -> bool:
  """Whether this is a checkout with all commits, in which those of records can be looked for."""
  try:
    return _git('rev-parse', '--is-shallow-repository').stdout.strip() == 'false'
  except OSError:  # no git
    return False


@functools.cache
def _in_git(commit: str) -> bool:
  return not has_history() or _git('cat-file', '-e', f'{commit}^{{commit}}').returncode == 0


def read(citation: str) -> list[dict[str, Any]]:
  """The records that a citation means.

  Raises:
    ValueError: no such file, or no record in it that the conditions hold for.
  """
  name, _, conditions = citation.partition('?')
  path = RESULTS / name if '/' not in name else ROOT / name
  if not path.is_file():
    raise ValueError(f'{citation}: no file {path.relative_to(ROOT)}')
  found = json_lines.read(path) if path.suffix == '.jsonl' else _tuned(path)
  for condition in filter(None, conditions.split('&')):
    key, _, value = condition.partition('=')
    found = [record for record in found if str(record.get(key)) == value]
  if not found:
    raise ValueError(f'{citation}: no such record')
  return found


def _tuned(path: Path) -> list[dict[str, Any]]:
  """What a tuner wrote: its head is the record of all entries, but for those that say otherwise."""
  content = json.loads(path.read_text())
  head = {key: value for key, value in content.items() if key != 'entries'}
  return [head, *({**head, **entry['by']} for entry in content.get('entries', ()) if 'by' in entry)]


def tables(document: Path) -> list[Cited]:
  """The tables of a document that have figures, with what their comments cite."""
  text = document.read_text()
  found = []
  for match in re.finditer(r'^\|.*\n\|[-| :]+\|\n(?:\|.*\n?)*', text, re.MULTILINE):
    body = match.group().split('\n', 2)[2]
    if not re.search(r'\d', body):
      continue
    before = text[: match.start()]
    comments = [*_COMMENT.finditer(before)]
    # One comment may serve several tables of a section.
    near = comments and '\n#' not in before[comments[-1].end() :]
    citations = None
    if near:
      listed = comments[-1].group(1)
      citations = () if listed.startswith('none, ') else tuple(re.split(r'\s*;\s*', ' '.join(listed.split())))
    said = ' '.join(before[before.rfind('\n## ') + 1 :].split())
    found.append(Cited(document, before.count('\n') + 1, match.group(), citations, said))
  return found


def problems(cited: Cited) -> list[str]:
  """What is wrong with how a table cites its records."""
  where = f'{cited.document.name}, line {cited.line}'
  if cited.citations is None:
    return [f'{where}: a table of figures without <!-- records: ... -->']
  try:
    records = [record for citation in cited.citations for record in read(citation)]
  except ValueError as error:
    return [f'{where}: {error}']
  found = sorted({fault for record in records for fault in faults(record)})
  if found:
    return [f'{where}: its records do not stand by themselves: {", ".join(found)}']
  if any(map(_timed_once, records)) and 'one process' not in cited.said and 'processes |' not in cited.text:
    return [f'{where}: its times are of one process each, not three, and its section does not say "one process"']
  return []


def _timed_once(record: Mapping[str, Any]) -> bool:
  """Whether a record has times of a program that nothing says was timed by other processes, too."""
  return bool({'samples_ms', 'median_ms', 'paths'} & record.keys()) and 'process' not in record
