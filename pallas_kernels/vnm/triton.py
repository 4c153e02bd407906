"""V:N:M packers in Triton: one pass over the activations."""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import _triton
from pallas_kernels.sparse_matmul.operand import SparseOperand, words_shape
from pallas_kernels.vnm._kernels import pack_kernel
from pallas_kernels.vnm.format import VNMOperand

_GROUPS = 16  # a program's, 64 compact columns


def constants(
  r: int, c: int, v: int, m: int, *, transposed: bool, spread: bool, activation: str | None, gradient: bool,
  masked: bool = False,
) -> dict[str, Any]:
  """Compile-time constants of the kernel for A [r, c], stored transposed or not."""
  return dict(
    R=r, C=c, ROW_STRIDE=1 if transposed else c, COLUMN_STRIDE=r if transposed else 1, V=v, M=m, SPREAD=spread,
    SQUARED_RELU=activation == 'squared_relu', GRADIENT=gradient, MASKED=masked,
  )


def grid(r: int, c: int, v: int, m: int) -> tuple[int, int]:
  return c // (_GROUPS * m), r // v


def warps(m: int) -> int:
  """Thirty-two entries a thread, of 64 rows at a time."""
  return m


def vnm_pack(
  x: Array, *, v: int, m: int, axis: int = -1, spread: bool = False, activation: str | None = None,
  gradient: Array | None = None, pattern: VNMOperand | None = None, masked: bool = False,
) -> tuple[VNMOperand, Array | None]:
  """See `api.vnm_pack`."""
  r, c = x.shape if axis == -1 else x.shape[::-1]
  if x.dtype not in (jnp.bfloat16, jnp.float16):
    raise NotImplementedError(f'the Triton packer takes bfloat16 and float16, found {x.dtype}')
  if v % 64 or m not in (4, 8, 16) or r % v or c % (_GROUPS * m):
    raise NotImplementedError(
      f'the Triton packer takes V in multiples of 64, M of 4, 8 or 16 and columns in multiples of 16 M; found'
      f' {v}:2:{m} of [{r}, {c}]'
    )
  if x.size >= 2**31:
    raise NotImplementedError(f'the Triton packer counts entries in 31 bits, found {x.shape}')
  compact = 4 * c // m
  small = gradient is not None  # the pattern is known, its words and rows are not written again
  shapes = [
    jax.ShapeDtypeStruct((r, compact // 2), x.dtype),
    jax.ShapeDtypeStruct((1,) if small else words_shape(r, compact), jnp.uint32),
    jax.ShapeDtypeStruct((1,) if small else (r // v, compact), jnp.int32),
    jax.ShapeDtypeStruct(x.shape if masked else (1,), x.dtype),
  ]
  values, words, rows, dense = _triton.call(
    pack_kernel, x, jnp.zeros((1,), x.dtype) if gradient is None else gradient, out_shape=shapes, grid=grid(r, c, v, m),
    num_warps=warps(m),
    **constants(
      r, c, v, m, transposed=axis == -2, spread=spread, activation=activation, gradient=small, masked=masked
    ),
  )  # fmt: skip
  if pattern is not None:
    words, rows = pattern.compact.words, pattern.rows
  return VNMOperand(SparseOperand(values, words), rows, m), dense if masked else None
