"""`python -m experiments.bench run --out FOLDER`: the benchmarks behind docs/speed.md on the GPU at hand, one by one.

Each is one of the programs beside this file (or of `pallas_kernels`) in a process of its own, which is stopped when it
takes longer than it may. What is timed is timed by three processes: all measurements once, then in the opposite order,
then again. Records say which process made them and lie in FOLDER, a JSON-lines file and a log a process; the same
command goes on where it ended. `python -m experiments.bench keep FOLDER/*.jsonl` puts them in place of older ones.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import itertools
import json
import os
from pathlib import Path
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

from experiments.bench import ffn, step_cases
from experiments.reports.provenance import RESULTS
from experiments.reports.speed import identity
from experiments.runs import json_lines

_FINISHED = 'finished.json'


_FST = tuple(ffn.GROUPS['bf16'][1:])
_TWO_OF_FOUR_TOKENS = [
  f'ffn-{pattern}-two_of_four_tokens-16384x4096x16384' for pattern in ('128x2x8', '128x2x16', '64x2x8', '64x2x16')
]
_FP8 = tuple(name for name in ffn.GROUPS['fp8'] if '16384x4096' in name)
_FP8_32768 = tuple(name for name in ffn.GROUPS['fp8'] if name.startswith('s_ste') and name not in _FP8)


@dataclasses.dataclass(frozen=True)
class Measurement:
  """A program with its arguments.

  Attributes:
    command: what follows `python -m`, but for `--out`.
    seconds: after which it is stopped, chosen with an H100 in mind, compiling included.
    devices: GPUs that it needs.
    processes: that run it, one after another: one where nothing is timed, or where the program sees to its own.
  """

  command: str
  seconds: int
  devices: int = 1
  processes: int = 3

  def arguments(self, out: Path) -> list[str]:
    """The command line that appends records to `out`."""
    return [sys.executable, '-m', *shlex.split(self.command), '--out', str(out)]


def _blocks(rest: str, seconds: int) -> Measurement:
  return Measurement(f'experiments.bench.ffn {rest}', seconds, processes=1 if '--check-only' in rest else 3)


def _vnm(rest: str, seconds: int) -> Measurement:
  return Measurement(f'experiments.bench.neuron_level {rest}', seconds)


def _mesh(rest: str, seconds: int = 240, processes: int = 3) -> Measurement:
  return Measurement(f'experiments.bench.mesh --devices 2 {rest}', seconds, devices=2, processes=processes)


# What says whether the kernels are right comes first, then what most readers ask for.
MEASUREMENTS = {
  'verify': Measurement('pallas_kernels verify --count 200 --seconds 150', 240, processes=1),
  'verify-mma': Measurement(
    'pallas_kernels verify --count 50 --seconds 60 --implementation mosaic_gpu_sm80', 150, processes=1
  ),
  'fst-check': _blocks('--check-only --select bf16', 150),
  'fp8-check': _blocks('--check-only --select fp8', 240),
  'fst-block': _blocks('--select fst-gelu-16384x4096x16384 --skip-check --explain --rounds 4 --steps 60', 150),
  'fst-blocks': _blocks(f'--select {" ".join(_FST)} --skip-check --explain --rounds 4 --steps 6', 180),
  'fp8-blocks': _blocks(f'--select {" ".join(_FP8)} --skip-check --explain --rounds 3 --steps 20', 300),
  'fp8-blocks-32768': _blocks(f'--select {" ".join(_FP8_32768)} --skip-check --explain --rounds 4 --steps 30', 240),
  'vnm-blocks': _vnm('--select block --explain', 180),
  'vnm-blocks-settings': _vnm(
    f'--select ffn-128x2x8-dense_neurons-16384x4096x16384 {" ".join(_TWO_OF_FOUR_TOKENS)} --explain', 180,
  ),
  **{
    f'best-steps-{model.removeprefix("gpt2-")}': Measurement(
      f'experiments.bench.best_steps --select {model}', 900, processes=1
    )
    for model in step_cases.CASES
  },
  'compile-time': Measurement(
    'experiments.bench.compile_time --select dense fst s_ste_fp8_all --layouts unrolled', 900, processes=1
  ),
  'matmuls': Measurement('pallas_kernels bench sparse_matmul --select headline square', 240),
  'bounds': Measurement('pallas_kernels bounds', 480),
  'fp8-matmuls': Measurement('pallas_kernels bench quantize --only matmuls --skip-check --iterations 12', 180),
  'vnm-matmuls': Measurement('pallas_kernels bench vnm_matmul --select matmul', 120),
  'packers': Measurement('pallas_kernels bench pack', 420),
  'activations': Measurement('pallas_kernels bench gated_activation', 240),
  'vnm-packers': Measurement('pallas_kernels bench vnm_matmul --select packs', 150),
  'quantize': Measurement('pallas_kernels bench quantize --only quantize amax --first-config --iterations 20', 120),
  'attention': Measurement('pallas_kernels bench sparse_attention --rounds 3 --steps 8 --select 4k 16k 1k', 240),
  'pytorch': Measurement('experiments.bench.pytorch_ffn', 150),
  'mesh-check': _mesh('--select check-sample check-ffn check-gpt2', processes=1),
  'mesh-block': _mesh('--select fst-gelu-32768x4096x16384 --one --rounds 4 --steps 30'),
  'mesh-gpt2-774m': _mesh('--select gpt2-774m --rounds 2 --steps 10'),
  'fsdp': _mesh('--select check-fsdp gpt2-774m gpt2-1558m --sharding fsdp --rounds 2 --steps 8', 420),
}  # fmt: skip


def run(chosen: Iterable[str], folder: Path, seconds: float) -> int:
  """Runs what is not finished in `folder` yet; returns how many failed, were stopped, or found no time.

  Args:
    chosen: keys of `MEASUREMENTS`.
    folder: gets `NAME-PROCESS.jsonl` and `NAME-PROCESS.log`, without the process where there is one alone.
    seconds: none is begun that may take longer than what is left of these.
  """
  folder.mkdir(parents=True, exist_ok=True)
  deadline = time.monotonic() + seconds
  finished = _finished(folder)
  missing = 0
  for measurement, process, name in _in_turns(tuple(chosen)):
    records = folder / f'{name}.jsonl'
    if finished.get(name) == measurement.command:
      print(f'{name}: finished before', flush=True)
      continue
    if time.monotonic() + measurement.seconds > deadline:
      print(f'{name}: left out, it may take {measurement.seconds} s', flush=True)
      missing += 1
      continue
    records.unlink(missing_ok=True)  # of an attempt that was stopped
    start, log = time.monotonic(), folder / f'{name}.log'
    code = _run_one(measurement.arguments(records), log, measurement.seconds)
    if code == 0 and not (records.exists() and records.stat().st_size):
      outcome = 'failed, no record'
    else:
      outcome = {0: 'finished', None: 'stopped'}.get(code, f'failed, exit status {code}')
    last = ([''] + log.read_text(errors='replace').splitlines())[-1]
    print(f'{name}: {outcome}, {time.monotonic() - start:.0f} s. {last}'.rstrip(), flush=True)
    if measurement.processes > 1 and records.exists():
      json_lines.write(records, [record | {'process': process} for record in json_lines.read(records)])
    if outcome == 'finished':
      finished[name] = measurement.command
      (folder / 'finished.new').write_text(json.dumps(finished, indent=2) + '\n')
      (folder / 'finished.new').replace(folder / _FINISHED)
    missing += outcome != 'finished'
  return missing


def _in_turns(chosen: Sequence[str]) -> Iterator[tuple[Measurement, int, str]]:
  """Each measurement with each of its processes, and what its files are called; every other time in opposite order."""
  for process in range(max((MEASUREMENTS[name].processes for name in chosen), default=0)):
    for name in chosen[:: -1 if process % 2 else 1]:
      measurement = MEASUREMENTS[name]
      if process < measurement.processes:
        yield measurement, process, name if measurement.processes == 1 else f'{name}-{process}'


def _finished(folder: Path) -> dict[str, str]:
  """Names -> commands."""
  path = folder / _FINISHED
  return json.loads(path.read_text()) if path.exists() else {}


def _run_one(command: Sequence[str], log: Path, seconds: float) -> int | None:
  """Exit status; None if it was stopped. Nothing that it started runs on, also where this program is told to end."""
  with log.open('w') as file, _ending_by_exception():
    process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
      return process.wait(seconds)
    except subprocess.TimeoutExpired:
      return None
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()


@contextlib.contextmanager
def _ending_by_exception() -> Iterator[None]:
  """Makes SystemExit of the signals by which schedulers, `timeout` and lost terminals end a program."""

  def end(number: int, frame: Any) -> None:
    del frame
    raise SystemExit(128 + number)

  before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def keep(paths: Iterable[Path], results: Path = RESULTS, *, poorer: bool = False) -> dict[str, int]:
  """Puts records among those of `results`: in the place of one that measured the same, else at the end of a file.

  A record of one of several processes takes the place of that process's, or else of one that does not say its process.
  One that does not say it takes none of theirs: it stays out, as `run` would have said it.

  Args:
    paths: JSON-lines files.
    results: folder. A record that replaces none goes to a file with others of its kind, best of its recipe, or to one
      named after it.
    poorer: replace also a record that has more samples, a profile or baselines that the new one lacks.

  Returns:
    Name of each changed file -> records that it got.
  """
  files = {path: json_lines.read(path) for path in sorted(results.glob('*.jsonl'))}
  changed = Counter[str]()
  for record in itertools.chain.from_iterable(map(json_lines.read, paths)):
    alike = [(path, i) for path, old in files.items() for i, other in enumerate(old) if _same(record, other)]
    processes = {place: files[place[0]][place[1]].get('process') for place in alike}
    equal = [place for place in alike if processes[place] == record.get('process')]
    equal = equal or [place for place in alike if processes[place] is None]
    if alike and not equal and record.get('process') is None:
      print(f'{alike[-1][0].name}, line {alike[-1][1] + 1}, stays: it says its process, and the new record does not')
      continue
    if equal:
      path, place = equal[-1]  # the one that counts
      if (lost := _lost(record, files[path][place])) and not poorer:
        print(f'{path.name}, line {place + 1}, stays: the new record has {lost}')
        continue
      files[path][place] = record
    else:
      path = _home(record, files) or results / f'{record["bench"]}.jsonl'
      files.setdefault(path, []).append(record)
    changed[path.name] += 1
  for path in (path for path in files if path.name in changed):
    json_lines.write(path, files[path])
  return changed


def _home(record: Mapping[str, Any], files: Mapping[Path, Sequence[Mapping[str, Any]]]) -> Path | None:
  for keys in (('bench', 'recipe'), ('bench',)):
    for path, old in files.items():
      if any(all(other.get(key) == record.get(key) for key in keys) for other in old):
        return path
  return None


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
  """Whether two records measured the same, by whichever process."""
  also = ('implementation', 'seed') if a['bench'] == 'verify' else ()
  found, other = (identity({**record, 'process': None}) for record in (a, b))
  return found == other and all(a.get(key) == b.get(key) for key in also)


def _lost(new: Mapping[str, Any], old: Mapping[str, Any]) -> str:
  """Says what the new record lacks and the old one has; '' if nothing."""
  samples = [len(record.get('samples_ms', ())) for record in (new, old)]
  baselines = old.get('baselines', {}).keys() - new.get('baselines', {}).keys()
  found = [f'{samples[0]} samples for {samples[1]}'] if samples[0] < samples[1] else []
  found += ['no profile'] if old.get('profile') and not new.get('profile') else []
  return ', '.join(found + [f'no baseline {name!r}' for name in sorted(baselines)])


def main(argv: Sequence[str] | None = None) -> int:
  """The command line; exit status 1 if something is missing."""
  parser = argparse.ArgumentParser(
    prog='python -m experiments bench', description='The benchmarks behind docs/speed.md, on the GPU at hand.'
  )
  commands = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
  runs = commands.add_parser('run', help='measure; the same command goes on where it ended')
  runs.add_argument('--out', type=Path, help='folder of records and logs')
  runs.add_argument(
    '--select', nargs='+', metavar='NAME', choices=MEASUREMENTS, help='some of them (default: all that need one GPU)'
  )
  runs.add_argument('--seconds', type=float, default=float('inf'), help='begin none that could end later')
  runs.add_argument('--list', action='store_true', help='print what is chosen, and what it may take, and stop')
  keeps = commands.add_parser('keep', help='put records in the place of older ones in experiments/results')
  keeps.add_argument('records', nargs='+', type=Path, help='JSON-lines files')
  keeps.add_argument('--poorer', action='store_true', help='also in the place of records with more samples or parts')
  options = parser.parse_args(argv)
  if options.command == 'keep':
    for name, count in keep(options.records, poorer=options.poorer).items():
      print(f'{RESULTS / name}: {count} records')
    return 0
  chosen = options.select or [name for name, measurement in MEASUREMENTS.items() if measurement.devices == 1]
  if options.list:
    for name in chosen:
      measurement = MEASUREMENTS[name]
      print(f'{name:24} {measurement.processes} x {measurement.seconds:4} s  {measurement.command}')
    return 0
  if options.out is None:
    runs.error('the following arguments are required: --out')
  return 1 if run(chosen, options.out, options.seconds) else 0


if __name__ == '__main__':
  raise SystemExit(main())
