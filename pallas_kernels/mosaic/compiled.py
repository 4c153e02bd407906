"""Compiled Mosaic GPU kernels, kept on disk for the next process.

XLA compiles a kernel in each process anew, one after another. JAX's plug-in holds a process' kernels in a table, by a
hash of what was lowered, and an executable of one kernel alone puts it there when it is loaded. So when a kernel is
lowered for this process' GPU, its executable is loaded from the `_disk_cache`; where there is none, the kernel is
compiled alone, and kept. The program that calls it then finds it in the table. Nothing runs these executables, and a
program whose kernels are not in the table compiles them itself: it is the same, later.

What is kept is a pickle with machine code for the GPU, and for the processor that launches it: who may write such a
file may run code here. `_disk_cache` reads none that somebody else could have written.
"""

from collections.abc import Callable, Sequence
import functools
import hashlib
import logging
import os
from pathlib import Path
import threading
from typing import Any

import jax

from pallas_kernels import _compat as compat
from pallas_kernels import _disk_cache
from pallas_kernels._dispatch import log_once

_lock = threading.Lock()
_seen: set[str] = set()


def is_on() -> bool:
  """Whether compiled kernels are kept: where there is a folder, unless Mosaic writes down what it compiles."""
  dumps = any(name.startswith('MOSAIC_GPU_DUMP') for name in os.environ)
  return not dumps and _disk_cache.folder() is not None


def keep(
  key: str, module: bytes, kernel: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct], wide: bool,
  context: Any,
) -> None:  # fmt: skip
  """Puts a kernel into the plug-in's table, from disk or by compiling it; once a process, and a failure is only logged.

  Nothing is done for another GPU than this process' own.

  Args:
    key: what lowering it depends on.
    module: what was lowered of it.
    kernel: a function that calls it, as programs do.
    arguments: what it takes.
    wide: whether JAX has 64 bits.
    context: in which it was lowered.
  """
  if (device := _tried(compat.gpu_here, context)) is None:
    return
  with _lock:
    # Compiling it alone lowers it, and comes here again. Nor do other threads wait: who finds no kernel compiles it.
    if key in _seen:
      return
    _seen.add(key)
  if (machine := _tried(_machine, device)) is None:
    return
  key = repr(['compiled', key, hashlib.sha256(module).hexdigest(), *machine])
  if (kept := _disk_cache.read(key)) is not None and _tried(compat.load_executable, kept, device):
    return
  if made := _tried(compat.serialized_executable, kernel, arguments, wide, device):
    _disk_cache.write(key, made)


def _machine(device: Any) -> list[Any]:
  """The GPU, what compiles for it, and the processors."""
  flags = os.environ.get('XLA_FLAGS')
  return [device.device_kind, device.compute_capability, device.client.platform_version, flags, _processors()]


@functools.cache
def _processors() -> list[str]:
  """What the processors are and can do; on Arm the names of the lines are the latter ones."""
  names = ('model name', 'flags', 'CPU ', 'Features')
  return sorted({x for x in Path('/proc/cpuinfo').read_text().splitlines() if x.startswith(names)})


def _tried(f: Callable[..., Any], *args: Any) -> Any:
  """What a function returns; None, and a warning, where it fails."""
  try:
    return f(*args)
  except Exception as e:  # JAX and its plug-in have errors of many kinds, and pickle has any
    log_once(f'a compiled kernel was not loaded or kept: {type(e).__name__}: {e}', level=logging.WARNING)
    return None
