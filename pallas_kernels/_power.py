"""Clock and power of the GPU while a block of code keeps it busy, and what holds the clock back.

A kernel that needs fewer cycles and one that gets more of them a second, for less energy, look the same to a timer.
The figures are NVML's, by the package `nvidia-ml-py` where that is installed, otherwise by `nvidia-smi`.
"""

import collections
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import importlib
import statistics
import subprocess
import threading
import time
from typing import Any

from pallas_kernels import _device

# NVML's bits for what lowers the clock by itself; not for idleness nor for limits that a user set.
REASONS = {0x4: 'power', 0x8: 'hardware', 0x10: 'other_gpus', 0x20: 'heat', 0x40: 'hardware_heat', 0x80: 'power_brake'}
_COLUMNS = 'clocks.sm,power.draw.instant,clocks_event_reasons.active'
_PATIENCE_S = 3.0  # for the first sample, and for the last


@dataclasses.dataclass(frozen=True)
class Sample:
  """One look, at `time.perf_counter()`: clock of the multiprocessors, power of the board at that moment, `REASONS`."""

  seconds: float
  clock_mhz: float
  power_w: float
  reasons: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Reading:
  """What was seen of a block.

  >>> Reading((Sample(0.0, 1400.0, 690.0), Sample(0.1, 1500.0, 700.0, ('power',)))).fields(2.0)
  {'clock_mhz': 1450.0, 'power_w': 695.0, 'joule': 1.39, 'held_back': {'power': 0.5}}
  """

  samples: tuple[Sample, ...] = ()

  def fields(self, ms: float) -> dict[str, Any]:
    """Fields for the record of a call that takes `ms`: medians, energy, share of samples by reason; None if unknown."""
    if not self.samples:
      return dict(clock_mhz=None, power_w=None, joule=None, held_back=None)
    clock, power = (statistics.median(getattr(s, name) for s in self.samples) for name in ('clock_mhz', 'power_w'))
    counts = collections.Counter(name for s in self.samples for name in s.reasons)
    held_back = {name: count / len(self.samples) for name, count in counts.items()}
    return dict(clock_mhz=clock, power_w=power, joule=power * ms / 1e3, held_back=held_back)


@contextlib.contextmanager
def recorded(gpu: str | None = None, *, every_s: float = 0.02) -> Iterator[Callable[[], Reading]]:
  """Samples a GPU (index or UUID by NVML's count, None: JAX's first) beside a block; call what it gives afterwards."""
  samples, begun, ended = list[Sample](), threading.Event(), threading.Event()
  gpu = gpu or _device.listed()

  def look() -> None:
    for sample in _samples(gpu, every_s) if gpu else ():
      if ended.is_set():
        break
      samples.append(sample)
      begun.set()
    begun.set()

  thread = threading.Thread(target=look, daemon=True)
  thread.start()
  begun.wait(_PATIENCE_S)
  try:
    yield lambda: Reading(tuple(samples))
  finally:
    ended.set()
    thread.join(_PATIENCE_S)


def _samples(gpu: str, every_s: float) -> Iterator[Sample]:
  try:
    nvml = importlib.import_module('pynvml')
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdigit() else nvml.nvmlDeviceGetHandleByUUID(gpu)
    while True:
      (power,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
      if power.nvmlReturn:
        raise NotImplementedError('this GPU does not tell its power at a moment')
      clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
      yield _sample(clock, power.value.uiVal / 1e3, nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
      time.sleep(every_s)
  except Exception:  # the package's own class of errors has no name where it is not installed
    yield from _by_smi(gpu, every_s)


def _by_smi(gpu: str, every_s: float) -> Iterator[Sample]:
  options = f'--id={gpu}', f'--query-gpu={_COLUMNS}', '--format=csv,noheader,nounits', f'--loop-ms={every_s * 1e3:.0f}'
  with contextlib.suppress(OSError), subprocess.Popen(['nvidia-smi', *options], stdout=subprocess.PIPE, text=True) as p:
    try:
      for line in p.stdout or ():
        with contextlib.suppress(ValueError):  # '[N/A]', or a message
          clock, power, bits = line.split(',')
          yield _sample(float(clock), float(power), int(bits, 16))
    finally:
      p.kill()


def _sample(clock_mhz: float, power_w: float, bits: int) -> Sample:
  return Sample(time.perf_counter(), clock_mhz, power_w, tuple(name for bit, name in REASONS.items() if bits & bit))
