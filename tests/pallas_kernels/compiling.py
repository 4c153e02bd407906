"""Kernels as machine code for a GPU that is not there, and what compilers say of them: registers, spills, instructions.

`compile_report` is of Mosaic GPU kernels, and needs the CUDA plugin wheels but no driver; `compile_for` of Triton's.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat
from tests.targets import TARGETS

# Enough of each GPU's description for XLA and ptxas. Bandwidths and clocks do not reach the kernels' code. Without the
# version of CUDA, for which XLA's rewriter of float8 matmuls asks, these would be bfloat16 ones.
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
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""
# The target that this process compiles for, once it has.
_targets: dict[str, str] = {}
POINTERS = {
  'bfloat16': '*bf16', 'float16': '*fp16', 'float32': '*fp32', 'uint16': '*u16', 'uint32': '*u32', 'int32': '*i32',
  'float8_e4m3fn': '*fp8e4nv', 'float8_e5m2': '*fp8e5',
}  # fmt: skip


def can_compile_for_gpu() -> bool:
  """Whether the CUDA plugin wheels are installed."""
  return importlib.util.find_spec('jax_cuda13_plugin') is not None


def description(target: str) -> str:
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

  topology = topologies.get_topology_desc(
    platform='cuda', target_config=description(target), topology='1x1x1'
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


def _read_report(ptxas: str, ptx: str) -> CompileReport:
  registers = [int(x) for x in re.findall(r'Used (\d+) registers', ptxas)]
  spills = [int(x) for x in re.findall(r'(\d+) bytes spill', ptxas)]
  warnings = tuple(x.strip() for x in ptxas.splitlines() if 'warning' in x.lower() or '(C75' in x)
  return CompileReport(max(registers, default=0), sum(spills), warnings, ptx)


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


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What ptxas made of a kernel.

  Attributes:
    registers: a thread.
    stack_bytes: of local memory a thread; spilled registers live there.
    shared_bytes: of shared memory a program.
    ptx: its PTX.
    sass: its disassembly.
  """

  registers: int
  stack_bytes: int
  shared_bytes: int
  ptx: str
  sass: str

  def count(self, instruction: str) -> int:
    """SASS instructions whose name starts with `instruction`."""
    return len(re.findall(rf'^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?{re.escape(instruction)}', self.sass, re.MULTILINE))


def compile_for(
  kernel: Any, arrays: Sequence[Any], constants: Mapping[str, Any], *, compute_capability: int, num_warps: int
) -> Compiled:
  """Compiles `kernel` to machine code without a GPU.

  Args:
    kernel: a `@triton.jit` function.
    arrays: dtypes of its arrays, in order.
    constants: its compile-time constants.
    compute_capability: 80, 86, 90.
    num_warps: warps a program.
  """
  import triton
  from triton.backends.compiler import GPUTarget
  from triton.compiler import ASTSource

  names = kernel.arg_names
  signature = {n: POINTERS[jnp.dtype(d).name] for n, d in zip(names, arrays, strict=False)}
  aligned = {(i,): [['tt.divisibility', 16]] for i in range(len(arrays))}
  source = ASTSource(
    kernel, signature=signature | dict.fromkeys(constants, 'constexpr'), constexprs=dict(constants), attrs=aligned
  )
  made = triton.compile(
    source, target=GPUTarget('cuda', compute_capability, 32), options={'num_warps': num_warps}
  )
  tools = pathlib.Path(triton.__file__).parent / 'backends/nvidia/bin'
  with tempfile.NamedTemporaryFile(suffix='.cubin') as f:
    f.write(made.asm['cubin'])
    f.flush()
    usage = subprocess.run([tools / 'cuobjdump', '-res-usage', f.name], capture_output=True, text=True, check=True)
    sass = subprocess.run([tools / 'cuobjdump', '-sass', f.name], capture_output=True, text=True, check=True).stdout
  report = usage.stdout + usage.stderr
  found = {k: int(v) for k, v in re.findall(r'(REG|STACK|LOCAL):(\d+)', report)}
  return Compiled(
    found['REG'], found['STACK'] + found['LOCAL'], made.metadata.shared, made.asm['ptx'], sass
  )
