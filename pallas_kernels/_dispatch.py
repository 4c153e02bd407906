"""Which back end answers a call.

The protocol between an op's `api.py` and its back ends: a back end that cannot serve a call raises NotImplementedError
with the reason. With `implementation=None` the next candidate is asked; a back end that the user named must answer, and
its reason becomes a ValueError. Nothing else crosses an `api.py`. Back ends are imported when first asked, so that an
absent optional dependency costs nobody else.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import importlib
import logging
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _device
from pallas_kernels._varying import vary_like

ARRAYS = (jax.Array, np.ndarray)
# A back end that has to answer, several of which the first that can does, or None: those of the device at hand.
Implementation = str | tuple[str, ...] | None
_OUT_DTYPES = ('float32', 'bfloat16', 'float16')


def load(path: str) -> Callable[..., Any]:
  """Imports `'package.module:function'`; NotImplementedError if a dependency is missing."""
  module, _, name = path.partition(':')
  try:
    return getattr(importlib.import_module(module), name)
  except ImportError as e:
    raise NotImplementedError(f'{module} cannot be imported: {e}') from e


@functools.cache
def log_once(
  message: str, logger: str = 'pallas_kernels', level: int = logging.INFO, place: tuple[tuple[str, int], ...] = ()
) -> None:
  """Logs a message, the first time that a process has it; with a `place` (`lines_of_calls`), that it has it there."""
  del place
  logging.getLogger(logger).log(level, message)


def lines_of_calls() -> tuple[tuple[str, int], ...]:
  """File and line of each call that leads here: the same in every pass of a loop, and others from another place."""
  return tuple((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))


def backend_of(op: str, implementation: str | None, backends: Mapping[str, str], itemsize: int = 2) -> str | None:
  """The back end that a user's name means: 'sparse' is this package's kernel, and which one the GPU decides.

  Args:
    op: name of the op.
    implementation: what the user named.
    backends: of the op.
    itemsize: bytes of the entries that are multiplied.

  Raises:
    ValueError: the name is neither None, nor 'sparse', nor a key of `backends`; or no kernel of this GPU serves.

  >>> backend_of('sparse_matmul', 'dense', {'dense': 'pallas_kernels.sparse_matmul.dense:sparse_matmul'})
  'dense'
  """
  if implementation == 'sparse':
    device = _device.current()
    if 'triton' in backends:
      return 'triton'
    kernel = device.arch.kernel(op, itemsize)
    if kernel is None:
      others = sorted(backends.keys() & {'cusparselt', 'dense', 'reference'})
      raise ValueError(
        f"{op}: implementation='sparse' has no {8 * itemsize}-bit kernel for {device.name}; accepted there are {others}"
      )
    return kernel.backend
  if implementation is not None and implementation not in backends:
    known = sorted({*backends, 'sparse'})
    raise ValueError(f'{op}: implementation={implementation!r} is unknown; known are None and {known}')
  return implementation


def check_type(name: str, value: Any, *accepted: type) -> None:
  """ValueError unless the argument called `name` is one of the types.

  >>> check_type('b', [1.0], jax.Array)
  Traceback (most recent call last):
  ValueError: b must be of type Array, found list
  """
  if not isinstance(value, accepted):
    names = ' or '.join('None' if t is type(None) else t.__name__ for t in accepted)
    raise ValueError(f'{name} must be of type {names}, found {_kind(value)}')


def _kind(value: Any) -> str:
  return f'an array of shape {value.shape}' if isinstance(value, ARRAYS) else type(value).__name__


def check_out_dtype(dtype: Any) -> None:
  """ValueError unless matmuls are written in this dtype."""
  if jnp.dtype(dtype).name not in _OUT_DTYPES:
    raise ValueError(f'out_dtype must be one of {_OUT_DTYPES}, found {jnp.dtype(dtype).name}')


def in_jnp_and_triton(op: str, folder: str) -> dict[str, str]:
  """The back ends of an op that a folder of this package has in both."""
  return {name: f'pallas_kernels.{folder}.{name}:{op}' for name in ('reference', 'triton')}


def dispatch(
  op: str,
  backends: Mapping[str, str],
  implementation: Implementation,
  candidates: Sequence[str],
  *args: Any,
  **kwargs: Any,
) -> Any:
  """Calls the named back end, or the first of `candidates` that accepts the call.

  Args:
    op: name of the op, for messages.
    backends: name -> `'module:function'`; all functions take the same arguments.
    implementation: a key of `backends`, 'sparse' for this package's kernel, several such names, or None.
    candidates: names to try in order when `implementation` is None; best first.
    *args: passed on; inside `jax.shard_map` the result varies over the mesh axes of any of them.
    **kwargs: passed on.

  Raises:
    ValueError: unknown name, or no name among several; the named back end refused, or all candidates did; the message
      holds every reason.

  >>> dispatch('abs', {'python': 'builtins:abs'}, None, ['python'], -3)
  3
  """
  if isinstance(implementation, tuple) and not all(isinstance(name, str) for name in implementation or (None,)):
    known = sorted({*backends, 'sparse'})
    raise ValueError(f'{op}: implementation={implementation!r} must be None, or one or several of {known}')
  named = (implementation,) if isinstance(implementation, str) else implementation
  names = candidates if named is None else [backend_of(op, name, backends) or name for name in named]
  reasons = []
  for name in names:
    try:
      return vary_like(load(backends[name])(*args, **kwargs), args)
    except NotImplementedError as e:
      reasons.append(f'{name}: {e}')
      if not isinstance(implementation, str):
        log_once(f'{op}: passing over {name}: {e}')
  raise ValueError(f'{op}: no implementation accepts this call. ' + '; '.join(reasons))
