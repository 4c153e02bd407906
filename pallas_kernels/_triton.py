"""Calling Triton kernels from JAX, and compiling them for a GPU that is not there.

The one place that knows jax-triton. It is imported on the first call, since it raises on machines without the CUDA
plugin. Kernels are `@triton.jit` functions whose arrays come first, inputs before outputs, all other parameters being
compile-time constants by keyword.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import functools
import importlib
import importlib.metadata
import os
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
import jaxlib.version

from pallas_kernels import _compat, _device, _disk_cache

_TARGET = 'triton_kernel_call'
_PLAIN = (int, float, str, tuple, type(None))
# Where there is no GPU: the compute capability to lower for, 90 say.
_lowering_for: int | None = None
_MOST_PROGRAMS = 65535  # of CUDA, along any axis of a grid but the first


@functools.cache
def _jax_triton() -> Any:
  try:
    # jax-triton sets the cache folder to the empty string, which breaks direct compilation in the same process.
    saved = os.environ.get('TRITON_CACHE_DIR')
    import jax_triton
  except Exception as e:
    raise NotImplementedError(f'jax-triton cannot be used here: {e}') from e
  finally:
    os.environ.pop('TRITON_CACHE_DIR', None) if saved is None else os.environ.__setitem__('TRITON_CACHE_DIR', saved)
  return jax_triton


@functools.cache
def why_absent() -> str | None:
  """Why no Triton kernel can be called here, or None if one can."""
  try:
    _jax_triton()
  except NotImplementedError as e:
    return str(e)
  return None


def kernels(module: str) -> Any:
  """A module of Triton kernels, or None where Triton is not installed: programs have their --help all the same."""
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as e:
    if (e.name or '').partition('.')[0] != 'triton':
      raise
    return None


def check_program(parser: argparse.ArgumentParser) -> None:
  """Ends a program that measures Triton kernels, saying why, where none can be called."""
  if why := why_absent():
    parser.error(f'{why}; pip install "sparse24-jax[cuda]" brings what it takes')
  if (device := _device.current()).platform != 'gpu':
    parser.error(f'this runs on a GPU, and JAX finds {device.name!r} here')


def call(
  kernel: Any,
  *args: jax.Array,
  out_shape: Sequence[jax.ShapeDtypeStruct],
  grid: tuple[int, ...],
  num_warps: int,
  compute_capability: int | None = None,
  zeroed_outputs: tuple[int, ...] = (),
  input_output_aliases: Mapping[int, int] | None = None,
  **constants: Any,
) -> tuple[jax.Array, ...]:
  """Runs `kernel` on the GPU.

  Args:
    kernel: a `@triton.jit` function.
    *args: its input arrays.
    out_shape: its outputs.
    grid: number of programs along up to three axes.
    num_warps: warps a program.
    compute_capability: 80, 86, 90, to lower for a GPU that is not there; None asks the driver.
    zeroed_outputs: outputs, by number, that the kernel finds holding zeros.
    input_output_aliases: input number -> number of the output that takes its place in memory; the kernel is given both.
    **constants: its compile-time constants.

  Raises:
    NotImplementedError: jax-triton is absent or cannot be used, or the grid is larger than CUDA's.
  """
  if max(grid[1:], default=0) > _MOST_PROGRAMS:
    raise NotImplementedError(
      f'{kernel.__name__} on a grid of {grid} programs: CUDA takes {_MOST_PROGRAMS:,} along its second or third axis'
    )
  if compute_capability is None and _lowering_for is not None:
    compute_capability = _lowering_for
  options = dict(
    num_warps=num_warps, compute_capability=compute_capability, zeroed_outputs=zeroed_outputs,
    input_output_aliases=tuple((input_output_aliases or {}).items()), **constants,
  )  # fmt: skip
  shapes = tuple(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in out_shape)
  return _launcher(kernel, shapes, grid, tuple(options.items()))(*args)


@functools.cache
def _launcher(kernel: Any, out_shape: tuple[Any, ...], grid: tuple[int, ...], options: tuple[tuple[str, Any], ...]):
  """One function for calls alike, so that JAX traces and lowers it once however many layers of a model call it."""
  given = dict(options)
  aliases = dict(given.pop('input_output_aliases'))

  def call(*args: jax.Array) -> tuple[jax.Array, ...]:
    return _jax_triton().triton_call(
      *args, kernel=kernel, out_shape=list(out_shape), grid=grid, input_output_aliases=aliases, **given
    )

  def triton_kernel(*args: jax.Array) -> tuple[jax.Array, ...]:
    _jax_triton()
    return tuple(_kernel_p.bind(*args, call=call, kernel=kernel, out_types=out_shape, grid=grid, options=options))

  # jax-triton has no batching rule: under vmap one launch after another.
  return jax.jit(jax.custom_batching.sequential_vmap(triton_kernel))


_kernel_p = Primitive('triton_kernel')
_kernel_p.multiple_results = True


@_kernel_p.def_abstract_eval
def _types(*_: Any, out_types: Sequence[Any], **__: Any) -> list[Any]:
  return [jax.core.ShapedArray(out.shape, out.dtype) for out in out_types]


def _lower_by_jax_triton(context: Any, *args: Any, call: Callable[..., Any], **_: Any) -> Any:
  return mlir.lower_fun(call, multiple_results=True)(context, *args)


def _lower(context: Any, *args: Any, call: Callable[..., Any], kernel: Any, options: Any, **what: Any) -> Any:
  """The call as jax-triton makes it, or made it before: Triton's front end takes up to a second a kernel."""
  types = [[(a.shape, a.dtype.name) for a in avals] for avals in (context.avals_in, context.avals_out)]
  key = _identity(kernel, (types, what['grid'], options))
  aliases = dict(dict(options)['input_output_aliases'])

  def custom_call(config: bytes) -> Any:
    rule = jax.ffi.ffi_lowering(_TARGET, api_version=2, backend_config=config, operand_output_aliases=aliases)
    return rule(context, *args)

  if key and (config := _disk_cache.read(key)):
    return custom_call(config)
  results = _lower_by_jax_triton(context, *args, call=call)
  config = _compat.configuration(results) if key else None
  # What another version of jax-triton writes in another way is not kept.
  if key and config and _compat.is_same_call(results, custom_call(config)):
    _disk_cache.write(key, config)
  return results


mlir.register_lowering(_kernel_p, _lower_by_jax_triton)
mlir.register_lowering(_kernel_p, _lower, platform='cuda')


def _identity(kernel: Any, what: Any) -> str | None:
  """Text that differs wherever what Triton makes of a call may differ, or None if there is no such text."""
  types, grid, options = what
  given = dict(options)
  capability = given.pop('compute_capability') or 10 * _device.current().capability[0] + _device.current().capability[1]
  if not capability or not all(isinstance(value, _PLAIN) for value in given.values()):
    return None
  return repr([_compilers(), kernel.cache_key, types, grid, sorted(given.items()), capability])


@functools.cache
def _compilers() -> Any:
  """Versions of what makes machine code of a kernel, and what the environment tells them."""
  import triton
  from triton._C import libtriton

  names = ('jax', 'jaxlib', 'jax-triton', 'triton')
  library = os.stat(libtriton.__file__)
  settings = libtriton.get_cache_invalidating_env_vars()
  # As installed, and as imported, which is another one if it was upgraded since.
  versions = [importlib.metadata.version(name) for name in names]
  versions += [jax.__version__, jaxlib.version.__version__, triton.__version__]
  return versions, library.st_size, library.st_mtime_ns, sorted(settings.items())
