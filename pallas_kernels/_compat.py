"""The private and unstable JAX names that the kernels need, in one place.

Mosaic GPU has no sparse wgmma, so the kernel writes the instruction itself and touches names that JAX may move. Kernels
import them from here; when a JAX release breaks one, this is the file to repair. Nothing here needs a GPU to import.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import hashlib
import io
import json
import math
import pickle
import statistics
from typing import Any

import jax
from jax._src import config as jax_config
from jax._src import distributed
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental import serialize_executable
from jax.experimental.mosaic.gpu import core, fragmented_array, memref_transpose, mma_utils, profiler, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, func, llvm, nvvm, vector
from jaxlib.mlir.passmanager import PassManager
from jaxlib.mosaic.python import mosaic_gpu as mosaic_gpu_dialect

__all__ = [
  'ACCUMULATOR', 'FRAGMENTED_ACCUMULATOR', 'FRAGMENTED_WGMMA', 'arith', 'assumed_capability', 'configuration',
  'device_times_ms', 'fragmented_array', 'interpret_params', 'ir', 'is_same_call', 'llvm', 'make_anonymous',
  'memref_transpose', 'mma_utils', 'nvvm', 'races_found', 'told_by_process_0', 'utils', 'vector',
]

# Accumulators in one register an element. The public layout pairs them, and LLVM then splits and rejoins every pair
# around every wgmma.
ACCUMULATOR = plgpu.Layout._WGMMA_ACC_32BIT
FRAGMENTED_ACCUMULATOR = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
FRAGMENTED_WGMMA = fragmented_array.WGMMA_LAYOUT


@contextlib.contextmanager
def assumed_capability(major: int, minor: int) -> Iterator[None]:
  """Tells Mosaic GPU the capability to compile for; without a device it would assume 9.0."""
  modules = [module for module in (core, utils) if hasattr(module, '_infer_arch')]
  saved = [module._infer_arch for module in modules]
  for module in modules:
    module._infer_arch = lambda: (major, minor)
  try:
    yield
  finally:
    for module, infer in zip(modules, saved, strict=True):
      module._infer_arch = infer


def mosaic_target() -> tuple[int, int]:
  """The compute capability that Mosaic GPU lowers for."""
  return utils._infer_arch()


def lowered_kernel(call: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct], wide: bool) -> bytes:
  """A module of one Mosaic GPU kernel, anonymous, and what it takes around it; `wide` is whether JAX has 64 bits."""
  with jax.enable_x64(wide):
    lowered: Any = jax.jit(call).trace(*arguments).lower(lowering_platforms=('cuda',)).compiler_ir('stablehlo')
  # JAX keeps it, and threads that lower the same kernel at once get the same one: what is changed is a copy.
  context = mlir.make_ir_context()
  mosaic_gpu_dialect.register_dialect(context)
  module: Any = ir.Module.parse(_bytecode(lowered), context)

  def visit(operation: Any) -> Any:
    if operation.name == 'stablehlo.custom_call' and 'mhlo.backend_config' in operation.attributes:
      make_anonymous(operation)
    return ir.WalkResult.ADVANCE

  module.operation.walk(visit)
  with module.context:
    PassManager.parse('builtin.module(strip-debuginfo)').run(module.operation)
  return _bytecode(module)


def _bytecode(module: Any, **options: Any) -> bytes:
  code = io.BytesIO()
  module.operation.write_bytecode(code, **options)
  return code.getvalue()


def call_of_lowered(context: Any, module: bytes, arguments: Sequence[Any], out_types: Sequence[Any]) -> Sequence[Any]:
  """What the kernel of `lowered_kernel` returns, in the module that is being lowered."""
  whole = context.module_context
  name = mlir.merge_mlir_modules(
    whole.module, 'lowered_kernel', ir.Module.parse(module, whole.context), whole.symbol_table
  )
  types = [mlir.aval_to_ir_type(whole, out) for out in context.avals_out]
  return func.CallOp(types, ir.FlatSymbolRefAttr.get(name), list(arguments)).results


def gpu_here(context: Any) -> Any:
  """The GPU that is lowered for; None if it is not this process', as a topology's, or if there are other ones."""
  device, *others = jax.devices()
  here = device.platform == 'gpu' and context.module_context.backend == device.client and not others
  return device if here else None


def serialized_executable(
  f: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct], wide: bool, device: Any
) -> bytes:
  """A program for one device, compiled, as a pickle; `wide` is whether JAX has 64 bits."""
  sharding = jax.sharding.SingleDeviceSharding(device)
  # Not by way of JAX's cache on disk: what was read there does not serialize whole, on CPUs at least.
  with jax.enable_x64(wide), jax_config.persistent_cache_min_compile_time_secs(math.inf):
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments]
    compiled = jax.jit(f).lower(*placed).compile()
  return pickle.dumps(serialize_executable.serialize(compiled))


def load_executable(kept: bytes, device: Any) -> Any:
  """The program of `serialized_executable`, on a device of a process that may be another."""
  return serialize_executable.deserialize_and_load(
    *pickle.loads(kept), backend=device.client, execution_devices=[device]
  )


def make_anonymous(call: Any) -> None:
  """Takes out of a custom call's Mosaic GPU kernel what two of the same differ in: its number and lines of sources."""
  config = call.attributes['mhlo.backend_config']
  with call.context as context, call.location:
    unknown, context.allow_unregistered_dialects = context.allow_unregistered_dialects, True
    try:
      module = ir.Module.parse(ir.StringAttr(config['module']).value_bytes)
      PassManager.parse('builtin.module(strip-debuginfo)').run(module.operation)
    finally:
      context.allow_unregistered_dialects = unknown
    if 'mosaic_gpu.dump_basename' in module.operation.attributes:
      del module.operation.attributes['mosaic_gpu.dump_basename']
    kernel = _bytecode(module, desired_version=0)
    changed = {'module': kernel, 'kernel_hash': hashlib.sha256(kernel).digest()}
    kept = {named.name: named.attr for named in config if named.name not in changed}
    config = kept | {name: ir.StringAttr.get(value) for name, value in changed.items()}
    call.attributes['mhlo.backend_config'] = ir.DictAttr.get(config)


def configuration(results: Sequence[Any]) -> bytes | None:
  """What a custom call is told, from its results in a module; None if they are of something else."""
  call = results[0].owner
  if call.name != 'stablehlo.custom_call' or 'backend_config' not in call.attributes:
    return None
  return ir.StringAttr(call.attributes['backend_config']).value_bytes


def is_same_call(results: Sequence[Any], others: Sequence[Any]) -> bool:
  """Whether two custom calls in a module are alike; the second, which nobody uses yet, is taken out."""
  one, other = results[0].owner, others[0].owner
  found = [{name: call.attributes[name] for name in call.attributes} for call in (one, other)]
  alike = one.name == other.name and found[0] == found[1]
  other.erase()
  return alike


def interpret_params(*, detect_races: bool = True) -> Any:
  """Parameters that run a Mosaic GPU kernel on the CPU; a race is no error, `races_found` tells of it."""
  # By default jax 0.12 raises at a race; 0.11 cannot.
  warns = 'on_race' in {field.name for field in dataclasses.fields(plgpu.InterpretGPUParams)}
  return plgpu.InterpretGPUParams(detect_races=detect_races, **{'on_race': 'warn'} if warns else {})


def races_found() -> bool:
  """Whether the last interpreted kernel raced."""
  return interpret_pallas_call.get_races().races_found


def device_times_ms(
  f: Callable[..., Any], args: Sequence[jax.Array], iterations: int, *, detach: bool = True
) -> list[float]:
  """Time of each of `iterations` calls on the GPU by CUPTI: the sum of its kernels, without launch gaps.

  With `detach` CUPTI leaves the process afterwards, so that other profilers can come; without it the next measurement
  starts about ten times sooner.
  """
  _, times = profiler.Cupti(finalize=detach).measure(f, iterations=iterations)(*args)
  if times is None:
    raise NotImplementedError('CUPTI saw no kernel: is this an NVIDIA GPU?')
  return [float(ms) for ms in times] if isinstance(times, list | tuple) else [float(times)]


def median_ms(f: Callable[..., Any], args: Sequence[jax.Array], iterations: int = 20) -> float:
  """Median of `device_times_ms`."""
  return statistics.median(device_times_ms(f, args, iterations))


def told_by_process_0(name: str, make: Callable[[], Any], wait_s: int) -> Any:
  """What `make` returns in process 0, as JSON can hold it, in every process that asks for `name`.

  By the store of `jax.distributed`: no device takes part, so that it serves while a program is traced.

  Raises:
    RuntimeError: process 0 has not said it within so many seconds.
  """
  if jax.process_count() == 1:
    return make()
  client, name = distributed.global_state.client, f'sparse24/{hashlib.sha256(name.encode()).hexdigest()}'
  if client is None:  # as in simulations of several processes
    return None
  if jax.process_index() == 0:
    found = make()
    client.key_value_set(name, json.dumps(found), allow_overwrite=True)
    return found
  try:
    return json.loads(client.blocking_key_value_get(name, wait_s * 1000))
  except jax.errors.JaxRuntimeError as e:
    raise RuntimeError(
      f'process {jax.process_index()} waited {wait_s} s for what process 0 was to find of a kernel. Processes must'
      ' trace the same programs; where this one traces by itself, set SPARSE24_JAX_CHECKS=off in all of them'
    ) from e
