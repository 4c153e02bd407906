"""Mosaic GPU kernels that a program traces, lowers and compiles once, however many layers of a model call them.

JAX inlines a kernel into its caller, lowers it at each call (half a second of Python) and writes two things into it
that say nothing of what it computes: how many kernels the process lowered before, and the lines of its sources and of
the program that calls it. So no two kernels are the same to the tables that hold lowered and compiled ones, and a
program is not found again in JAX's cache on disk when a line of the caller has moved. Here calls go through one
`jax.jit`, which is lowered to one function of a program, and both are taken out, as JAX does with kernels for TPUs.
"""

from collections.abc import Callable, Sequence
import os
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_kernels import _compat as compat

_kernel_p = Primitive('mosaic_kernel')
_kernel_p.multiple_results = True


def once(call: Callable[..., Any], out_types: Sequence[Any]) -> Callable[..., tuple[jax.Array, ...]]:
  """A kernel, a function of arrays that returns a tuple of `out_types`; keep what is returned and call it everywhere.

  Under `jax.vmap` one launch follows another: batching the grid would share barriers and flags of a launch.
  """

  def mosaic_kernel(*args: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_kernel_p.bind(*args, call=call, out_types=tuple(out_types)))

  return jax.jit(jax.custom_batching.sequential_vmap(mosaic_kernel))


@_kernel_p.def_abstract_eval
def _types(*_: Any, call: Any, out_types: Sequence[Any]) -> list[Any]:
  del call
  return [jax.core.ShapedArray(out.shape, out.dtype) for out in out_types]


def _lower(context: Any, *args: Any, call: Callable[..., Any], out_types: Any) -> Any:
  del out_types
  results = mlir.lower_fun(call, multiple_results=True)(context, *args)
  # Who has kernels written to files wants each under a name of its own, with its lines.
  if 'MOSAIC_GPU_DUMP_TO' not in os.environ:
    compat.make_anonymous(results[0].owner)
  return results


mlir.register_lowering(_kernel_p, _lower, platform='cuda')
