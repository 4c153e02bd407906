"""Opens cuSPARSELt, registers the FFI handlers that call it, and asks it what it offers.

The library comes with the wheel nvidia-cusparselt-cu13 (the extra `cuda`), with PyTorch, or from the system; it is
looked for at run time. `SPARSE24_JAX_CUSPARSELT` names a file and then nothing else is tried.
"""

from collections.abc import Iterator
import ctypes
import dataclasses
import functools
import importlib.util
import os
import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ffi import build

COMPRESS = 'sparse24_cusparselt_compress'
MATMUL = 'sparse24_cusparselt_matmul'
LIBRARY = 'SPARSE24_JAX_CUSPARSELT'
_FILE = 'libcusparseLt.so.0'
# Under site-packages: where the wheels put it up to 0.8 and from 0.9 on.
_WHEEL_FOLDERS = ('nvidia/cusparselt/lib', 'nvidia/cu13/lib', 'nvidia/cu12/lib')
# cudaDataType, from CUDA's library_types.h.
CUDA_TYPES = {'float32': 0, 'float16': 2, 'bfloat16': 14, 'float8_e4m3fn': 28, 'float8_e5m2': 29}
_MESSAGE_BYTES = 2048

_lock = threading.Lock()


class _Problem(ctypes.Structure):
  _fields_ = [
    (name, ctypes.c_int64)
    for name in ('m', 'n', 'k', 'type', 'out_type', 'b_kn', 'out_nm', 'algorithm', 'split_k', 'split_k_mode',
                 'split_k_buffers')
  ]


@dataclasses.dataclass(frozen=True)
class Config:
  """Which of cuSPARSELt's kernels multiplies. Ids mean something else in every version and on every GPU.

  Attributes:
    algorithm: id, from 0; -1 leaves the choice to the library.
    split_k: pieces of the sum; 0 leaves it to the library, 1 does not split.
    split_k_mode: how they are added: 1 in one kernel, 2 in two; 3 heuristic, 4 data-parallel, 5 split-k, 6 stream-k;
      0 leaves it to the library.
    split_k_buffers: buffers for the partial sums of mode 2; 0 leaves it to the library.
  """

  algorithm: int = -1
  split_k: int = 0
  split_k_mode: int = 0
  split_k_buffers: int = 0


def library() -> ctypes.CDLL:
  """The handlers with cuSPARSELt open behind them.

  Raises:
    NotImplementedError: cuSPARSELt is missing or of a version that is not served, or the handlers cannot be built.
  """
  with _lock:
    return _open()


@functools.cache
def _open() -> ctypes.CDLL:
  handlers = build.load()
  for name in ('open', 'plan', 'algorithms', 'plans_made'):
    getattr(handlers, f'sparse24_cusparselt_{name}').restype = ctypes.c_int64
  reasons = []
  for path in candidates():
    try:
      _answer(handlers.sparse24_cusparselt_open, os.fsencode(path))
    except NotImplementedError as e:
      reasons.append(f'{path}: {e}')
    else:
      return handlers
  raise NotImplementedError(
    'cuSPARSELt 0.8.0 to 0.10 is needed and was not found; install it with pip install "sparse24-jax[cuda]", or name'
    f' the file in {LIBRARY}. Tried: ' + '; '.join(reasons)
  )


def candidates() -> Iterator[str]:
  """Paths under which the library may be, best first."""
  named = os.environ.get(LIBRARY)
  if named:
    yield named
    return
  spec = importlib.util.find_spec('nvidia')
  for folder in (spec.submodule_search_locations or ()) if spec else ():
    for inside in _WHEEL_FOLDERS:
      path = pathlib.Path(folder).parent / inside / _FILE
      if path.is_file():
        yield str(path)
  yield _FILE  # the linker's own search


def version() -> tuple[int, int, int]:
  """Version of the open cuSPARSELt."""
  found = _answer(library().sparse24_cusparselt_open, b'')
  return found // 10000, found // 100 % 100, found % 100


def register() -> None:
  """Makes `COMPRESS` and `MATMUL` known to XLA for CUDA. Cheap to repeat.

  Raises:
    NotImplementedError: see `library`.
  """
  handlers = library()
  # With the plug-ins found, JAX registers at once and an error surfaces here; before, it would break the first use of
  # any GPU.
  jax.devices()
  with _lock:
    _register(handlers)


@functools.cache
def _register(handlers: ctypes.CDLL) -> None:
  # For CUDA alone: the handlers ask for a stream, and a platform that has none refuses them, for good.
  for name in (COMPRESS, MATMUL):
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(handlers, name)), platform='CUDA')


def algorithms(
  m: int, n: int, k: int, dtype: Any, out_dtype: Any, *, b_layout: str, out_layout: str
) -> int:
  """How many algorithm ids the library has for a problem on the first device; NotImplementedError if it takes none."""
  problem = _problem(m, n, k, dtype, out_dtype, b_layout, out_layout, Config())
  return _answer(library().sparse24_cusparselt_algorithms, ctypes.c_int64(0), ctypes.byref(problem))


def workspace_bytes(
  m: int, n: int, k: int, dtype: Any, out_dtype: Any, *, b_layout: str, out_layout: str, config: Config
) -> int:
  """Bytes of workspace of a plan on the first device, which this makes; NotImplementedError if it cannot be made."""
  problem = _problem(m, n, k, dtype, out_dtype, b_layout, out_layout, config)
  return _answer(library().sparse24_cusparselt_plan, ctypes.c_int64(0), ctypes.byref(problem))


def _problem(
  m: int, n: int, k: int, dtype: Any, out_dtype: Any, b_layout: str, out_layout: str, config: Config
) -> _Problem:
  types = [CUDA_TYPES[jnp.dtype(t).name] for t in (dtype, out_dtype)]
  return _Problem(m, n, k, *types, b_layout == 'kn', out_layout == 'nm', *dataclasses.astuple(config))


def _answer(function: Any, *args: Any) -> int:
  """What a function of the library returns; its message as NotImplementedError if that is negative."""
  message = ctypes.create_string_buffer(_MESSAGE_BYTES)
  found = function(*args, message, ctypes.c_int64(_MESSAGE_BYTES))
  if found < 0:
    raise NotImplementedError(message.value.decode(errors='replace'))
  return found
