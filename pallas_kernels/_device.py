"""What GPU this is: `current()` describes the device that JAX would run on."""

from collections.abc import Sequence
import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax

from pallas_kernels.arch import Arch, of_capability


@dataclasses.dataclass(frozen=True)
class Device:
  """A GPU as the dispatcher sees it.

  Attributes:
    name: as the driver spells it, 'NVIDIA H100 80GB HBM3'; 'cpu' without a GPU.
    platform: 'gpu' or 'cpu'.
    capability: compute capability as (major, minor); (0, 0) off NVIDIA.
    num_sms: streaming multiprocessors; 0 off NVIDIA.
  """

  name: str
  platform: str
  capability: tuple[int, int] = (0, 0)
  num_sms: int = 0

  @property
  def slug(self) -> str:
    """The name as a folder under `tuned/`: 'nvidia_h100_80gb_hbm3'."""
    return re.sub(r'[^a-z0-9]+', '_', self.name.lower()).strip('_')

  @property
  def arch(self) -> Arch:
    """Its generation."""
    return of_capability(self.capability)


def describe(device: Any) -> Device:
  """The `Device` of a JAX device."""
  capability = str(getattr(device, 'compute_capability', '0.0'))
  if device.platform != 'gpu' or not re.fullmatch(r'\d+\.\d+', capability):
    return Device(device.platform, device.platform)
  major, minor = capability.split('.')
  return Device(device.device_kind, 'gpu', (int(major), int(minor)), int(getattr(device, 'core_count', 0)))


@functools.cache
def current() -> Device:
  """The device that a computation without explicit placement runs on."""
  return describe(jax.devices()[0])


def arrays_are_whole() -> bool:
  """Whether what is being traced sees undivided arrays: one device, or inside a `jax.shard_map` over all axes.

  Otherwise a mesh may divide them, and a custom call by itself would make XLA gather them; see `_partitioning`.
  """
  return jax.device_count() == 1 or jax.sharding.get_abstract_mesh().are_all_axes_manual


def environment() -> dict[str, Any]:
  """What a benchmark record says of where it was made: which device, driver, versions, commit, command, time."""
  device = current()
  return dict(
    device=device.name,
    gpu=_which_gpu(),
    driver=_output('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader') if device.num_sms else None,
    versions={name: importlib.metadata.version(name) for name in ('jax', 'jaxlib', 'numpy')},
    commit=commit(),
    command=_command(sys.argv),
    when=datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
  )


def listed() -> str | None:
  """JAX's first GPU as the driver's tools name it, by index or UUID; None without one."""
  if current().platform != 'gpu':
    return None
  ordinal, visible = jax.devices()[0].local_hardware_id, os.environ.get('CUDA_VISIBLE_DEVICES')
  return visible.split(',')[ordinal] if visible else str(ordinal)  # JAX counts the listed GPUs


def _which_gpu() -> str | None:
  """The beginning of the GPU's UUID: two of a kind differ by some percent."""
  if (gpu := listed()) is None:
    return None
  uuid = _output('nvidia-smi', '-i', gpu, '--query-gpu=uuid', '--format=csv,noheader')
  return uuid and uuid[: len('GPU-01234567')]


def commit() -> str | None:
  """The commit of the source, wherever the process runs; a copy without its history is told by `SPARSE24_COMMIT`."""
  if told := os.environ.get('SPARSE24_COMMIT'):
    return told
  file = pathlib.Path(__file__)
  git = 'git', '-C', str(file.parent)
  # Of a copy that is installed inside another repository, that one's commit says nothing.
  tracked = _output(*git, 'ls-files', '--error-unmatch', file.name)
  return tracked and _output(*git, 'describe', '--always', '--dirty', '--exclude=*')


def _command(argv: Sequence[str]) -> str:
  script = pathlib.Path(argv[0])
  program = f'-m {script.parent.name}' if script.name == '__main__.py' else script.name
  # Paths are cut to their last part: the rest would say whose machine it is.
  return ' '.join(['python', program, *(re.sub('(^|=)/([^/]*/)*', r'\1', a.rstrip('/')) for a in argv[1:])])


def _output(*command: str) -> str | None:
  try:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split('\n')[0].strip() or None
  except (OSError, subprocess.CalledProcessError):
    return None
