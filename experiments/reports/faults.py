"""docs/faults.md: what became of injected faults, of runs that were killed, and of kernels under compute-sanitizer."""

from collections.abc import Iterable, Mapping, Sequence
import textwrap
from typing import Any

from experiments.reports import provenance, tables

OUTCOMES = ('survived', 'refused', 'lost')
# What `python -m tests.pallas_kernels.sanitize` runs. A record may be older than some of them.
SANITIZED = (
  'activations', 'attention', 'few_columns_by_steps', 'float8', 'hostile_metadata', 'matmuls', 'packers', 'vnm_ops',
)

type Record = Mapping[str, Any]


def page(records: Iterable[Record] | None = None) -> str:
  """The whole of docs/faults.md.

  Args:
    records: of cases and soaks; None takes those that are committed.
  """
  records = provenance.read('faults.jsonl') if records is None else list(records)
  cases = [record for record in records if 'survived' in record]
  soaks = [record for record in records if 'steps' in record]
  text = '# Faults that were injected\n\n'
  if cases:
    text += _cases(cases)
  if soaks:
    text += '\n## Soak\n\n' + '\n'.join(_soak(record) for record in soaks)
  return text + ''.join(_sanitized(record) for record in provenance.read('sanitize.jsonl'))


def _cases(cases: Sequence[Record]) -> str:
  versions = {record['versions']['jax'] for record in cases}
  commits = {record['commit'][:8] for record in cases}
  table = tables.markdown(
    ['fault', *OUTCOMES, 'what is expected'],
    [[r['name'], *(r[kind] for kind in OUTCOMES), r['expected']] for r in cases],
  )
  totals = ' | '.join(f'**{sum(r[kind] for r in cases)}**' for kind in OUTCOMES)
  lead = (
    f'From the records of `make faults` (JAX {", ".join(sorted(versions))}, 8 simulated CPU devices, a tiny GPT-2 with '
    f'transposable masks, made-up text; commit {", ".join(sorted(commits))}). *Survived*: the run, started again, ends '
    'with the same bits as one that nothing disturbed, unless the last column says otherwise. *Refused*: it ends with '
    'a status that is not 0, and a message that names what is wrong. *Lost*: neither.'
  )
  return (
    textwrap.fill(lead, 118, break_on_hyphens=False)
    + f'\n\n<!-- records: faults.jsonl -->\n{table}\n| **all** | {totals} | |\n'
  )


def _soak(record: Record) -> str:
  found = '; '.join(record['bad']) or (
    'metrics and the last checkpoint are bit for bit those of a run that nothing disturbed, and no process compiled '
    'anything after it had settled'
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
    f"{record['versions']['jax']}, commit {record['commit'][:8]}): kernels under NVIDIA's tools, on tiles that are not "
    'full and on values with infinities and NaN. Hostile operands have positions of kept values that no packer '
    'writes, and rows -5 and 10^9 in V:N:M blocks. Every array is an allocation of its own, so that a read beside it '
    'is seen. Where a result is defined, it is compared with the reference, for hostile operands with that of the '
    'nearest lawful one. racecheck looks at shared memory alone.'
  )
  rows = [
    [name.replace('_', ' '), *(_found(cases.get(name)) for cases in record['tools'].values())] for name in SANITIZED
  ]
  return (
    '\n## Kernels under compute-sanitizer\n\n' + textwrap.fill(text, 118, break_on_hyphens=False) + '\n\n'
    f'<!-- records: sanitize.jsonl -->\n{tables.markdown(["kernels", *record["tools"]], rows)}\n'
  )


def _found(case: Record | None) -> str:
  """What a tool says of a case; its summary without what is around it."""
  if case is None:
    return 'not run yet: newer than this record'
  if case['status'] is None:
    return 'the time was over'
  said = ' '.join(line.strip('= ').partition('SUMMARY: ')[2] for line in case['summary'])
  return said.replace(' displayed', '') if case['status'] == 0 else f'**failed**: {said}'
