"""The records of `make faults` and `make soak`; docs/faults.md is made of them (`experiments.reports.faults`).

Each case and each soak is a line of `experiments/results/faults.jsonl`, with the commit it was tried at. A command that
is started again at the same commit goes on with the cases that are not there yet.
"""

from collections.abc import Collection
import json
from pathlib import Path
import shlex
import subprocess
import sys
from typing import Any

from experiments.reports import faults
from experiments.runs import durable
from experiments.runs.environment import environment

ROOT = Path(__file__).parents[1]
RECORDS, PAGE = ROOT / 'experiments' / 'results' / 'faults.jsonl', ROOT / 'docs' / 'faults.md'
OUTCOMES = faults.OUTCOMES


def read(path: Path = RECORDS) -> list[dict[str, Any]]:
  """All records."""
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(record: faults.Record, path: Path = RECORDS, page: Path = PAGE) -> None:
  """Puts a record in the place of that of the same name, and writes the page anew."""
  command = shlex.join(['python', '-m', _module(), *sys.argv[1:]])
  new = {**record, **environment(), 'commit': commit(), 'command': command}
  records = {each['name']: each for each in read(path)} | {record['name']: new}
  durable.write_text(path, ''.join(json.dumps(each) + '\n' for each in records.values()))
  durable.write_text(page, faults.page(records.values()))


def _module() -> str:
  spec = getattr(sys.modules['__main__'], '__spec__', None)
  return spec.name if spec else Path(sys.argv[0]).stem


def commit() -> str:
  """Commit of the source, with '-dirty' after it when files differ, but for those that are written here."""
  apart = [f':!{path.relative_to(ROOT)}' for path in (RECORDS, PAGE)]

  def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(['git', *arguments], cwd=ROOT, capture_output=True, text=True, check=False)

  changed = git('diff', '--quiet', 'HEAD', '--', '.', *apart).returncode
  return git('rev-parse', 'HEAD').stdout.strip() + ('-dirty' if changed else '')


def tried(seed: int, path: Path = RECORDS) -> Collection[str]:
  """Names of the cases that were tried at this commit; of a source with changes none."""
  now = commit()
  return {r['name'] for r in read(path) if r['commit'] == now and r.get('seed') == seed and '-dirty' not in now}
