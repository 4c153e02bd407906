"""Runs Triton kernels on NumPy arrays in Triton's interpreter: no GPU, no torch.

The interpreter is chosen when kernels are decorated, so such tests run in a process of their own (`run_interpreted`).
"""

from collections.abc import Mapping, Sequence
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np

HAS_TRITON = importlib.util.find_spec('triton') is not None


def run_interpreted(*ops: str, only: Sequence[str] = ()) -> str:
  """Runs the interpreted tests of ops (`interpreted/__main__.py`, which pytest leaves alone) with the interpreter on.

  Args:
    ops: names of folders; one process runs all.
    only: patterns of names of tests, such as 'vnm.*test_rows0', all if empty.

  Returns its output, or raises AssertionError with it.
  """
  modules = [f'tests.pallas_kernels.{op}.interpreted.__main__' for op in ops]
  chosen = [argument for pattern in only for argument in ('-k', f'*{pattern}')]
  done = subprocess.run(
    [sys.executable, '-m', 'unittest', *chosen, *modules],
    cwd=pathlib.Path(__file__).parents[2], capture_output=True, text=True, check=False,
    # The launchers' own arithmetic as under conftest. References run once, and XLA would optimize them for longer.
    env=os.environ | {
      'TRITON_INTERPRET': '1', 'JAX_PLATFORMS': 'cpu', 'JAX_NUMPY_RANK_PROMOTION': 'raise',
      'JAX_NUMPY_DTYPE_PROMOTION': 'strict', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    },
  )  # fmt: skip
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout + done.stderr


class _Storage:
  def __init__(self, array: np.ndarray):
    self.array = array

  def data_ptr(self) -> int:
    return self.array.ctypes.data

  def cpu(self) -> '_Storage':
    return _Storage(self.array.copy())

  def copy_(self, other: '_Storage') -> None:
    self.array[...] = other.array


class Tensor:
  """What the interpreter asks of a tensor, over a NumPy array."""

  def __init__(self, array: np.ndarray):
    self.array = np.ascontiguousarray(array)
    self.store = _Storage(self.array)

  @property
  def dtype(self) -> str:
    return self.store.array.dtype.name

  @property
  def shape(self) -> tuple[int, ...]:
    return self.store.array.shape

  def data_ptr(self) -> int:
    return self.store.data_ptr()

  def untyped_storage(self) -> _Storage:
    return self.store

  def new_empty(self, *_: Any, **__: Any) -> 'Tensor':
    return Tensor(np.empty(0, self.store.array.dtype))

  def set_(self, storage: _Storage, *_: Any) -> None:
    self.store = storage
    self.array = storage.array

  def storage_offset(self) -> int:
    return 0

  def size(self) -> tuple[int, ...]:
    return self.shape

  def stride(self) -> tuple[int, ...]:
    return tuple(x // self.store.array.itemsize for x in self.store.array.strides)


def round_to_nearest_even() -> None:
  """Makes the interpreter round float32 to bfloat16 as the hardware does; it truncates."""
  from triton.runtime import interpreter

  def trunc(self: Any, source: Any, dtype: Any) -> Any:
    if source.dtype.scalar.name == 'fp32' and dtype.scalar.name == 'bf16':
      return interpreter.TensorHandle(source.data.astype(ml_dtypes.bfloat16).view(np.uint16), dtype.scalar)
    return self.cast_impl(source, dtype)

  interpreter.InterpreterBuilder.create_fp_trunc = trunc


def numbers_before_nan() -> None:
  """Makes the interpreter's maximum and minimum of a number and a NaN the number, as the hardware's are; it is NaN."""
  from triton.runtime import interpreter

  for name, f in (('create_maxnumf', np.fmax), ('create_minnumf', np.fmin)):
    setattr(interpreter.InterpreterBuilder, name, lambda self, x, y, f=f: self.binary_op(x, y, f))


class _Results:
  """What an inline instruction gives back: one tensor."""

  def __init__(self, handle: Any):
    self._handle = handle

  def get_result(self, _: int) -> Any:
    return self._handle


def _permute_bytes(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
  """What `prmt.b32` does."""
  both = a.astype(np.uint64) | b.astype(np.uint64) << 32
  parts = []
  for i in range(4):
    byte = both >> (8 * (selector >> 4 * i & 7).astype(np.uint64)) & 0xFF
    parts.append(np.where(selector >> 4 * i & 8, byte // 128 * 0xFF, byte) << 8 * i)
  return sum(parts).astype(np.uint32)


def _square_positive(pairs: np.ndarray, asm: str) -> np.ndarray:
  """relu(x)^2 of both 16-bit halves of words."""
  x = np.ascontiguousarray(pairs).view(ml_dtypes.bfloat16 if 'bf16' in asm else np.float16).astype(np.float32)
  x = np.where(x <= 0, np.float32(0), x)
  with np.errstate(over='ignore'):
    y = (x * x).astype(ml_dtypes.bfloat16 if 'bf16' in asm else np.float16)
  return y.view(np.uint32).reshape(pairs.shape)


# Exact to float32 rounding here; the hardware's are off by an ulp or two.
_FLOAT = {
  'ex2.approx.ftz.f32 $0, $1;': np.exp2, 'rcp.approx.ftz.f32 $0, $1;': np.reciprocal,
  'set.gt.f32.f32 $0, $1, $2;': np.greater, 'set.ge.f32.f32 $0, $1, $2;': np.greater_equal,
}  # fmt: skip


# Addresses of the lines that programs asked to have brought into the L2 cache.
fetched: list[int] = []


def inline_instructions() -> None:
  """Gives the interpreter the pieces of inline PTX that the kernels use.

  Fetches into a cache, byte permutations, copies, comparisons as numbers, relu(x)^2 of two entries, powers of two,
  reciprocals, two float32 to two of 16 bits, and two or four to float8.
  """
  import triton.language as tl
  from triton.runtime import interpreter

  def inline(self: Any, asm: str, constraints: str, values: Any, types: Any, pure: bool, pack: int) -> Any:
    data = [v.data for v in values]
    if 'prefetch.global.L2' in asm:
      fetched.extend(data[0][data[1] != 0].tolist())
      return _Results(interpreter.TensorHandle(np.zeros(data[0].shape, np.uint32), tl.uint32))
    if asm == 'prmt.b32 $0, $1, $2, $3;':
      return _Results(interpreter.TensorHandle(_permute_bytes(*data), tl.uint32))
    if asm == 'mov.b32 $0, $1;':
      if constraints.startswith('=f'):
        return _Results(interpreter.TensorHandle(np.ascontiguousarray(data[0]).view(np.float32), tl.float32))
      return _Results(interpreter.TensorHandle(data[0], tl.uint32))
    if asm in _FLOAT:
      with np.errstate(over='ignore', divide='ignore'):
        return _Results(interpreter.TensorHandle(_FLOAT[asm](*data).astype(np.float32), tl.float32))
    if rounding := re.fullmatch(r'cvt\.rn\.(bf16|f16)x2\.f32 \$0, \$2, \$1;', asm):
      dtype = {'bf16': ml_dtypes.bfloat16, 'f16': np.float16}[rounding[1]]
      with np.errstate(over='ignore'):
        low, high = (v.astype(dtype).view(np.uint16).astype(np.uint32) for v in data)
      return _Results(interpreter.TensorHandle(low | high << 16, tl.uint32))
    if 'max.NaN' in asm:
      return _Results(interpreter.TensorHandle(_square_positive(data[0], asm), tl.uint32))
    (name,) = set(re.findall(r'cvt\.rn\.satfinite\.(\w+)x2\.f32', asm))
    dtype = {'e4m3': ml_dtypes.float8_e4m3fn, 'e5m2': ml_dtypes.float8_e5m2}[name]
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    # The PTX instruction takes the upper half first.
    order = ['low, $2, $1', *(['high, $4, $3'] if len(values) == 4 else []), '{low, high}']
    assert re.findall(r'\w+, \$\d, \$\d|\{low, high\}', asm) == order
    assert len(values) == 4 or 'mov.b16 high, 0;' in asm
    entries = [np.clip(v.data, -largest, largest).astype(dtype).view(np.uint8).astype(np.uint32) for v in values]
    return _Results(interpreter.TensorHandle(sum(e << (8 * i) for i, e in enumerate(entries)), tl.uint32))

  interpreter.InterpreterBuilder.create_inline_asm = inline


def run(
  kernel: Any,
  grid: tuple[int, ...],
  inputs: Sequence[Any],
  outputs: Sequence[tuple[tuple[int, ...], Any]],
  constants: Mapping[str, Any],
  *,
  zero_last: bool = False,
) -> list[np.ndarray]:
  """Outputs of `kernel` over `grid`.

  They are given as (shape, dtype) and filled with a pattern first, the last one with zeros if `zero_last`.
  """
  round_to_nearest_even()
  numbers_before_nan()
  inline_instructions()
  made = []
  for shape, dtype in outputs:
    raw = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xA5, np.uint8)
    made.append(Tensor(raw.view(dtype).reshape(shape)))
  if zero_last:
    made[-1].array[...] = 0
  kernel[grid](*(Tensor(np.array(x)) for x in inputs), *made, **constants)
  return [t.array for t in made]


def assert_equal_float8(found: np.ndarray, expected: Any) -> None:
  """Equal bits in float8 arrays; one NaN is as good as another."""
  found, expected = np.asarray(found), np.asarray(expected)
  assert found.dtype == expected.dtype
  nan = np.isnan(expected.astype(np.float32))
  np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), nan)
  np.testing.assert_array_equal(np.where(nan, 0, found.view(np.uint8)), np.where(nan, 0, expected.view(np.uint8)))
