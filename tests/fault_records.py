"""The records of `make faults` and `make soak`, and the page about them, docs/faults.md.

Each case and each soak is a line of `experiments/results/faults.jsonl`, with the commit it was tried at. A command that
is started again at the same commit goes on with the cases that are not there yet.
"""

from collections.abc import Collection, Iterable, Mapping
import json
from pathlib import Path
import shlex
import subprocess
import sys
import textwrap
from typing import Any

from experiments.runs import durable
from experiments.runs.environment import environment
from tests.pallas_kernels import sanitize

ROOT = Path(__file__).parents[1]
RECORDS, PAGE = ROOT / 'experiments' / 'results' / 'faults.jsonl', ROOT / 'docs' / 'faults.md'
SANITIZED = RECORDS.with_name('sanitize.jsonl')  # what `python -m tests.pallas_kernels.sanitize --out` wrote, a line
OUTCOMES = ('survived', 'refused', 'lost')

type Record = Mapping[str, Any]


def read(path: Path = RECORDS) -> list[dict[str, Any]]:
  """All records."""
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(record: Record, path: Path = RECORDS, page: Path = PAGE) -> None:
  """Puts a record in the place of that of the same name, and writes the page anew."""
  command = shlex.join(['python', '-m', _module(), *sys.argv[1:]])
  new = {**record, **environment(), 'commit': commit(), 'command': command}
  records = {each['name']: each for each in read(path)} | {record['name']: new}
  durable.write_text(path, ''.join(json.dumps(each) + '\n' for each in records.values()))
  write_page(records.values(), page)


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


def write_page(records: Iterable[Record], page: Path = PAGE) -> None:
  """Writes docs/faults.md."""
  records = list(records)
  cases = [record for record in records if 'survived' in record]
  soaks = [record for record in records if 'steps' in record]
  text = '# Faults that were injected\n\n'
  if cases:
    text += _cases(cases)
  if soaks:
    text += '\n## Soak\n\n' + '\n'.join(_soak(record) for record in soaks)
  text += ''.join(_sanitized(record) for record in read(SANITIZED))
  durable.write_text(page, text)


def _cases(cases: list[Record]) -> str:
  versions = {record['versions']['jax'] for record in cases}
  commits = {record['commit'][:8] for record in cases}
  rows = '\n'.join(
    f'| {r["name"]} | {" | ".join(str(r[kind]) for kind in OUTCOMES)} | {r["expected"]} |' for r in cases
  )
  totals = ' | '.join(f'**{sum(r[kind] for r in cases)}**' for kind in OUTCOMES)
  lead = (
    f'Written by `make faults` (JAX {", ".join(sorted(versions))}, 8 simulated CPU devices, a tiny GPT-2 with '
    f'transposable masks, made-up text; commit {", ".join(sorted(commits))}). *Survived*: started again, the run ends '
    'with the bits of one to which nothing happened, unless the last column says otherwise. *Refused*: a status that '
    'is not 0, and a message that names what is wrong. *Lost*: neither.'
  )
  return (
    textwrap.fill(lead, 118) + '\n\n<!-- records: faults.jsonl -->\n'
    '| fault | survived | refused | lost | what is expected |\n|---|---:|---:|---:|---|\n'
    f'{rows}\n| **all** | {totals} | |\n'
  )


def _soak(record: Record) -> str:
  found = '; '.join(record['bad']) or (
    'metrics and the last checkpoint have the bits of a run that nobody disturbed, and no process compiled anything '
    'after it had settled'
  )
  text = (
    f'`{record["command"]}` (commit {record["commit"][:8]}): {record["steps"]:,} steps with masks refreshed every '
    f'fourth step, two phases and a checkpoint every 200 steps, {record["sigkill"]} times SIGKILL and '
    f'{record["sigterm"]} times SIGTERM at random. {found[0].upper() + found[1:]}. Memory within a process grew by '
    f'{record["growth_mib"]:.1f} MiB at most, of {record["mib"]:.0f} MiB; in the undisturbed run, from step '
    f'{record["settled"]:,} to the end of its first phase, by {record["alone_growth_mib"]:.1f} MiB.'
  )
  return textwrap.fill(text, 118, break_on_hyphens=False) + '\n'


def _sanitized(record: Record) -> str:
  text = (
    f"`{record['command']}` ({record['device'].removeprefix('1 x ')}, compute-sanitizer {record['version']}, JAX "
    f"{record['versions']['jax']}, commit {record['commit'][:8]}): kernels under NVIDIA's tools, on tiles that "
    'are not full, with infinities and NaN; positions of kept values that no packer makes, and rows of V:N:M blocks '
    'of -5 and 10^9. Arrays are allocations of their own. Results that mean something are compared with the '
    'reference or with the nearest lawful operand. racecheck looks at shared memory alone.'
  )
  rows = ''.join(
    f'| {name.replace("_", " ")} | {" | ".join(_found(cases.get(name)) for cases in record["tools"].values())} |\n'
    for name in sorted(sanitize.CASES)
  )
  return (
    '\n## Kernels under compute-sanitizer\n\n' + textwrap.fill(text, 118, break_on_hyphens=False) + '\n\n'
    f'<!-- records: {SANITIZED.name} -->\n| kernels | {" | ".join(record["tools"])} |\n|---|---|---|\n{rows}'
  )


def _found(case: Record | None) -> str:
  """What a tool says of a case; its summary without what is around it."""
  if case is None:
    return 'not run yet: newer than this record'
  if case['status'] is None:
    return 'the time was over'
  said = ' '.join(line.strip('= ').partition('SUMMARY: ')[2] for line in case['summary'])
  return said.replace(' displayed', '') if case['status'] == 0 else f'**failed**: {said}'
