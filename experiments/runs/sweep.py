"""Many methods on one device at once: a process each, results as they come, and an end that is kept.

A model of a few million parameters leaves a large GPU waiting for its host and its compiler. Processes side by side
fill it: while one compiles or dispatches, others compute. Every process trains one method, seed after seed, and
compiles each program once.

Command: python -m experiments sweep --config small --methods equal-flops --minutes 5
"""

from collections.abc import Sequence
import json
import multiprocessing
import os
from pathlib import Path
import sys
import time
import traceback
from typing import Any

from experiments.runs import method_table, methods
from pallas_kernels import _processes

_POLL_SECONDS = 1.0


def sweep(
  folder: str | Path,
  *,
  experiment: str,
  names: Sequence[str],
  seeds: Sequence[int] = (0, 1, 2),
  minutes: float = 0.0,
  tiny: bool = False,
  overrides: Sequence[str] = (),
) -> int:
  """Trains each method in a process of its own, all at once.

  The same folder given to `compare` then gives records and report. Finished runs are not run again.

  Args:
    folder: gets one folder a run, and a log a method.
    experiment: see `experiment.load_config`.
    names: keys of `METHODS` or `GROUPS` of `method_table`.
    seeds: each process trains them in this order.
    minutes: after these, whatever still trains is stopped; 0 waits for all.
    tiny: the experiment's tiny twin.
    overrides: 'section.key=value' strings.

  Returns:
    The number of processes that failed, were stopped or ended without all their runs.

  Raises:
    ValueError: see `methods.run_all`; no process has been started then.
  """
  methods.load_checked(experiment, names, tiny=tiny, overrides=overrides)
  folder, start = Path(folder), time.monotonic()
  folder.mkdir(parents=True, exist_ok=True)
  context = multiprocessing.get_context('spawn')
  processes = {}
  told: set[Path] = set()
  try:
    with _processes.shared_gpu():
      for method in method_table.expand(names):
        args = (experiment, method, list(seeds), str(folder), tiny, list(overrides))
        process = context.Process(target=_train, args=args, name=method)
        process.start()
        processes[method] = process
    while any(process.is_alive() for process in processes.values()):
      if minutes and time.monotonic() - start > 60 * minutes:
        print(f'{time.monotonic() - start:6.1f} s: stopped', flush=True)
        break
      time.sleep(_POLL_SECONDS)
      _tell(folder, told, start)
  finally:
    _processes.stop(processes.values())
    _tell(folder, told, start)
  failed = [name for name, process in processes.items() if process.exitcode != 0]
  for name in failed:
    log = folder / f'{name}.log'
    print(f'{name}: not finished; end of {log.name}:\n{_tail(log)}', flush=True)
  return len(failed)


def _train(experiment: str, method: str, seeds: list[int], folder: str, tiny: bool, overrides: list[str]) -> None:
  """The body of a process."""
  log = (Path(folder) / f'{method}.log').open('w', buffering=1)
  os.dup2(log.fileno(), 1)
  os.dup2(log.fileno(), 2)
  try:
    methods.run_all(experiment, [method], seeds, folder, tiny=tiny, overrides=overrides)
  except Exception:  # of a library, of a device: it belongs into the log, where it is looked for
    traceback.print_exc()
    sys.exit(1)


def _tell(folder: Path, told: set[Path], start: float) -> None:
  """Prints a line for each run that finished since the last call."""
  new = sorted(set(folder.glob('*/summary.json')) - told)
  for path in new:
    try:
      summary: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError:  # being written
      continue
    told.add(path)
    print(
      f'{time.monotonic() - start:6.1f} s: {path.parent.name}: validation loss {summary["validation_loss"]:.4f} after '
      f'{summary["steps"]} steps, {summary["seconds"]:.0f} s',
      flush=True,
    )


def _tail(log: Path) -> str:
  if not log.exists():
    return '  (none)'
  return '\n'.join(f'  {line[:400]}' for line in log.read_text().splitlines()[-6:])
