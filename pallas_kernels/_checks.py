"""A kernel against the dense way, once, where no record of a GPU says which is faster.

The first time a problem is used that has no measurement near it, its predicted setting is compared with the reference
and timed in turns with the dense way. That costs two compilations and a few calls. The outcome is an entry like those
of the records. Dispatch follows it, logs it, and keeps it in the `_disk_cache` for the next process, under the GPU, the
problem, the setting, the sources of this package and the versions of what compiles them.
`SPARSE24_JAX_CHECKS=off` leaves such problems to the dense way.

Tracing may happen inside of other traces and meshes, which are a thread's own: the check has a thread for itself. Of
several processes, which must compile the same program, process 0 checks and the others follow. So an outcome counts
where it is asked for, and nobody looks up what this process happens to have checked before. A machine without the GPU,
which compiles for it ahead of time, checks nothing.
"""

from collections.abc import Callable, Mapping
import concurrent.futures
import json
import logging
import os
import statistics
import threading
from typing import Any

import jax

from pallas_kernels import _compat, _disk_cache
from pallas_kernels._device import describe, Device
from pallas_kernels._dispatch import log_once

VARIABLE = 'SPARSE24_JAX_CHECKS'
# Process 0 may be minutes behind the others when it traces: it reads data or restores a checkpoint.
_WAIT_S = 1800
Entry = Mapping[str, Any]

# By GPU, op, problem and setting; None where the check itself failed.
_made: dict[str, Entry | None] = {}
# Threads that trace one problem wait for one check of it; checks of several problems would disturb each other's times.
_asked: dict[str, threading.Lock] = {}
_checking = threading.Lock()


def possible(device: Device, op: str, itemsize: int = 2) -> bool:
  """Whether a problem of an op can be checked: the GPU is in this machine, and there is a kernel for such entries."""
  return device.arch.kernel(op, itemsize) is not None and os.environ.get(VARIABLE) != 'off' and _is_here(device)


def gain(entry: Entry) -> float | None:
  """How many times as fast as the dense way the kernel was; None if it was not timed: wrong, say."""
  rows = [row for row in entry['candidates'] if row['rejected'] is None and 'final_samples_ms' in row]
  times = [statistics.median(row['final_samples_ms']) for row in rows]
  return statistics.median(entry['baseline']['samples_ms']) / min(times) if times else None


def outcome(
  device: Device, op: str, key: Mapping[str, Any], setting: Any, check: Callable[[], Entry]
) -> Entry | None:
  """What the check of a problem found, now or before; None if it failed.

  Args:
    device: the GPU, for which a check is `possible`.
    op: name of the op.
    key: of the problem, as its records have it.
    setting: of the kernel: another one is another check.
    check: makes the entry.
  """
  problem = repr([device.name, device.num_sms, op, _text(key), repr(setting)])
  with _asked.setdefault(problem, threading.Lock()):
    if problem not in _made:
      _made[problem] = _compat.told_by_process_0(problem, lambda: _kept_or_made(problem, check), _WAIT_S)
      _say(device, op, key, _made[problem])
    return _made[problem]


def _kept_or_made(problem: str, check: Callable[[], Entry]) -> Entry | None:
  name = f'check {problem} {_disk_cache.compiled_from()}'
  kept = _disk_cache.read(name)
  if kept is not None:
    return json.loads(kept)
  try:
    with _checking, concurrent.futures.ThreadPoolExecutor(1) as alone:
      entry = json.dumps(alone.submit(check).result())
  except Exception as e:  # no memory left, a profiler that is in use: training goes on without
    log_once(f'a kernel could not be checked: {type(e).__name__}: {e}', level=logging.WARNING)
    return None
  _disk_cache.write(name, entry.encode())
  return json.loads(entry)


def _say(device: Device, op: str, key: Mapping[str, Any], entry: Entry | None) -> None:
  what = f'{op} {_text(key)} on {device.name}'
  if entry is None:
    log_once(f'{what}: dense, since the check failed; {VARIABLE}=off checks nothing', level=logging.WARNING)
    return
  rejected = [f'{row["implementation"]}: {row["rejected"]}' for row in entry['candidates'] if row['rejected']]
  if rejected:
    log_once(f'{what}: dense, since the kernel is wrong here: {"; ".join(rejected)}', level=logging.WARNING)
  elif not entry['candidates']:
    log_once(f'{what}: dense, since the kernel does not compile for it')
  elif (found := gain(entry)) is None:
    log_once(f'{what}: checked here, the kernels are right')
  else:
    log_once(f'{what}: {entry["choice"]["implementation"]}; checked here: the kernel is {found:.2f} times as fast')


def _is_here(device: Device) -> bool:
  return device.platform == 'gpu' and describe(jax.devices()[0]) == device


def _text(key: Mapping[str, Any]) -> str:
  return ' '.join(f'{name}={value}' for name, value in sorted(key.items()))
