"""Mosaic GPU kernels that a program traces, lowers and compiles once, however many layers of a model call them.

JAX inlines a kernel into its caller, lowers it at each call (half a second of Python) and writes two things into it
that say nothing of what it computes: how many kernels the process lowered before, and the lines of its sources and of
the program that calls it. So no two kernels are the same to the tables that hold lowered and compiled ones, and a
program is not found again in JAX's cache on disk when a line of the caller has moved. Here calls go through one
`jax.jit`, which is lowered to one function of a program, and both are taken out, as JAX does with kernels for TPUs.
What is lowered is kept in the `_disk_cache` for the next process; `compiled` keeps what that is compiled to.
"""

from collections.abc import Callable, Sequence
import concurrent.futures
import functools
import os
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_kernels import _compat as compat
from pallas_kernels import _disk_cache
from pallas_kernels.mosaic import compiled

_kernel_p = Primitive('mosaic_kernel')
_kernel_p.multiple_results = True


def once(
  call: Callable[..., Any], out_types: Sequence[Any], name: str, *settings: Any
) -> Callable[..., tuple[jax.Array, ...]]:
  """A kernel, a function of arrays that returns a tuple of `out_types`; keep what is returned and call it everywhere.

  Under `jax.vmap` one launch follows another: batching the grid would share barriers and flags of a launch.

  Args:
    call: the kernel.
    out_types: what it returns.
    name: by which this package's sources make it.
    *settings: all that they make it of, which `repr` tells apart.
  """

  def mosaic_kernel(*args: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_kernel_p.bind(*args, call=call, out_types=tuple(out_types), identity=repr((name, *settings))))

  return jax.jit(jax.custom_batching.sequential_vmap(mosaic_kernel))


@_kernel_p.def_abstract_eval
def _types(*_: Any, call: Any, out_types: Sequence[Any], identity: str) -> list[Any]:
  del call, identity
  return [jax.core.ShapedArray(out.shape, out.dtype) for out in out_types]


def _lower(context: Any, *args: Any, call: Callable[..., Any], out_types: Any, identity: str) -> Any:
  # Who has kernels written to files wants each under a name of its own, with its lines.
  if 'MOSAIC_GPU_DUMP_TO' in os.environ:
    return mlir.lower_fun(call, multiple_results=True)(context, *args)
  types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in context.avals_in]
  wide = bool(jax.config.jax_enable_x64)
  # In a thread of its own: a mesh and the like of who traces are no part of a kernel, nor of what it is kept under.
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    target = pool.submit(compat.mosaic_target).result()
    key = repr([identity, [(a.shape, a.dtype.name) for a in types], wide, target, *_settings()])
    if (module := _disk_cache.read(key)) is None:
      module = pool.submit(compat.lowered_kernel, call, types, wide).result()
      _disk_cache.write(key, module)
    if compiled.is_on():
      alone = functools.partial(_kernel_p.bind, call=call, out_types=out_types, identity=identity)
      pool.submit(compiled.keep, key, module, alone, types, wide, context).result()
  return compat.call_of_lowered(context, module, args, out_types)


def _settings() -> list[Any]:
  """What may change how a kernel is lowered, beside the kernel itself."""
  return [_disk_cache.compiled_from(), sorted(item for item in os.environ.items() if item[0].startswith('MOSAIC_GPU_'))]


mlir.register_lowering(_kernel_p, _lower, platform='cuda')
