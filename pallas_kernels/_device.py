"""What GPU this is, and compilation for a GPU that is not there.

`current()` describes the device that JAX would run on; `compile_report` turns a function into machine code for a named
GPU on a machine without one (it needs the CUDA plugin wheels, no driver) and reads back registers, spills and
instruction counts. CI asserts on those.
"""

from collections.abc import Callable, Sequence
import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import jax

from pallas_kernels.arch import Arch, ARCHS, of_capability


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


# Enough of each GPU's description for XLA and ptxas. Bandwidths and clocks do not reach the kernels' code.
_TARGET = """
gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {smem_core} threads_per_core_limit: {threads} core_count: {sms} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 2000000000000 l2_cache_size: {l2} clock_rate_ghz: 1.5
  device_memory_size: 34359738368 shared_memory_per_block_optin: {smem_block}
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
# What is compiled for: sm_80, sm_86 and so on.
TARGETS = {each.name: each for each in ARCHS if each.example}


# The target that this process compiles for, once it has.
_targets: dict[str, str] = {}


def can_compile_for_gpu() -> bool:
  """Whether the CUDA plugin wheels are installed."""
  return importlib.util.find_spec('jax_cuda13_plugin') is not None


def target_device(target: str) -> Device:
  """The `Device` that `compile_report` compiles for."""
  generation = TARGETS[target]
  assert generation.example is not None
  return Device(generation.example.name, 'gpu', generation.capability, generation.example.sms)


def _description(target: str) -> str:
  """The GPU as XLA's compiler reads it."""
  generation, example = TARGETS[target], TARGETS[target].example
  assert example is not None
  major, minor = generation.capability
  return _TARGET.format(
    name=example.name, major=major, minor=minor, sms=example.sms, smem_core=example.shared_memory_per_sm,
    smem_block=generation.shared_memory, threads=example.threads_per_sm, l2=example.l2_bytes,
    features='feature_extension: ACCELERATED_FEATURES' if target.endswith('a') else '',
  )


@dataclasses.dataclass(frozen=True)
class CompileReport:
  """What ptxas said of the Mosaic GPU kernels of one function.

  Attributes:
    registers: the largest count of any kernel.
    spill_bytes: stores and loads of spilled registers, summed.
    warnings: ptxas' warnings, for instance C75xx: wgmma was serialised.
    ptx: text of all kernels.
  """

  registers: int
  spill_bytes: int
  warnings: tuple[str, ...]
  ptx: str

  @property
  def architecture(self) -> str:
    """What the PTX was written for: 'sm_90a'."""
    found = re.search(r'^\.target (\w+)', self.ptx, re.MULTILINE)
    return found.group(1) if found else ''

  def count(self, instruction: str) -> int:
    """Occurrences of a PTX instruction, by the start of its name."""
    return len(re.findall(rf'(?<![\w.]){re.escape(instruction)}', self.ptx))


def compile_report(
  f: Callable[..., Any], *args: jax.ShapeDtypeStruct, target: str = 'sm_90a'
) -> CompileReport:
  """Compiles `f` for `target` and reports on its Mosaic GPU kernels.

  Args:
    f: a function of arrays; it is jitted here.
    *args: shapes and dtypes.
    target: a key of `TARGETS`.

  Raises:
    NotImplementedError: the CUDA plugin wheels are absent.
    ValueError: this process compiled for another target before: Mosaic keeps the first one's ptxas settings.
  """
  if _targets.setdefault('first', target) != target:
    raise ValueError(f'this process compiles for {_targets["first"]}; compile for {target} in another one')
  if not can_compile_for_gpu():
    raise NotImplementedError('compiling for a GPU needs the cuda extra (jax-cuda13-plugin and jax-cuda13-pjrt)')
  from jax.experimental import topologies

  from pallas_kernels import _compat

  topology = topologies.get_topology_desc(
    platform='cuda', target_config=_description(target), topology='1x1x1'
  )
  sharding = jax.sharding.NamedSharding(topologies.make_mesh(topology, (1,), ('x',)), jax.sharding.PartitionSpec())
  structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in args]
  with tempfile.TemporaryDirectory() as folder:
    flags = {'MOSAIC_GPU_DUMP_TO': folder, 'MOSAIC_GPU_DUMP_PTX': '1', 'MOSAIC_GPU_DUMP_PTXAS': '1'}
    saved = {k: os.environ.get(k) for k in flags}
    os.environ.update(flags)
    try:
      with _compat.assumed_capability(*TARGETS[target].capability):
        jax.jit(f).lower(*structs).compile()
    finally:
      for k, v in saved.items():
        os.environ.pop(k) if v is None else os.environ.__setitem__(k, v)
    ptxas, ptx = (''.join(p.read_text() for p in sorted(pathlib.Path(folder).glob(f'*.{x}'))) for x in ('ptxas', 'ptx'))
  return _read_report(ptxas, ptx)


def disassemble(ptx: str, target: str = 'sm_90a') -> str:
  """Machine code of a kernel's PTX, for what only shows there: which physical registers an instruction got.

  Raises:
    NotImplementedError: ptxas or nvdisasm is not installed, or this ptxas is older than the PTX.
  """
  triton = importlib.util.find_spec('triton')
  bundled = pathlib.Path(triton.origin).parent / 'backends/nvidia/bin' if triton and triton.origin else pathlib.Path()
  ptxas, nvdisasm = shutil.which('ptxas'), shutil.which('nvdisasm') or shutil.which('nvdisasm', path=str(bundled))
  if not ptxas or not nvdisasm:
    raise NotImplementedError('disassembling needs ptxas and nvdisasm on the PATH')
  with tempfile.TemporaryDirectory() as folder:
    source, cubin = pathlib.Path(folder, 'kernel.ptx'), pathlib.Path(folder, 'kernel.cubin')
    source.write_text(ptx)
    done = subprocess.run([ptxas, f'-arch={target}', source, '-o', cubin], capture_output=True, text=True, check=False)
    if done.returncode:
      raise NotImplementedError(f'ptxas refused the PTX: {done.stdout}{done.stderr}')
    return subprocess.run([nvdisasm, cubin], capture_output=True, text=True, check=True).stdout


def _read_report(ptxas: str, ptx: str) -> CompileReport:
  registers = [int(x) for x in re.findall(r'Used (\d+) registers', ptxas)]
  spills = [int(x) for x in re.findall(r'(\d+) bytes spill', ptxas)]
  warnings = tuple(x.strip() for x in ptxas.splitlines() if 'warning' in x.lower() or '(C75' in x)
  return CompileReport(max(registers, default=0), sum(spills), warnings, ptx)


def struct(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
  """Short for `jax.ShapeDtypeStruct`."""
  return jax.ShapeDtypeStruct(tuple(shape), dtype)


def environment() -> dict[str, Any]:
  """What a benchmark record says of where it was made: device, driver, versions, commit, command, time."""
  device = current()
  return dict(
    device=device.name,
    driver=_output('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader') if device.num_sms else None,
    versions={name: importlib.metadata.version(name) for name in ('jax', 'jaxlib', 'numpy')},
    # A copy without its history is told which commit it is.
    commit=os.environ.get('SPARSE24_COMMIT') or _output('git', 'describe', '--always', '--dirty', '--exclude=*'),
    command=_command(sys.argv),
    when=datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
  )


def _command(argv: Sequence[str]) -> str:
  script = pathlib.Path(argv[0])
  program = f'-m {script.parent.name}' if script.name == '__main__.py' else script.name
  # Of a path only what does not say whose machine it is.
  return ' '.join(['python', program, *(re.sub('(^|=)/([^/]*/)*', r'\1', a.rstrip('/')) for a in argv[1:])])


def _output(*command: str) -> str | None:
  try:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split('\n')[0].strip() or None
  except (OSError, subprocess.CalledProcessError):
    return None
