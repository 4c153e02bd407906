"""`quantize` in Triton: one read, both layouts written."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels import _triton
from pallas_kernels.pack.reference import is_float8
from pallas_kernels.quantize._kernels import quantize_kernel
from pallas_kernels.triton_blocks.launch import check_float8, check_size, Config

Array = jax.Array

# 128 x 128 entries a program: both layouts are written in runs of 128 bytes.
DEFAULT = Config(32, 32, 8)


def quantize(
  x: Array, scale: Array, *, dtype: jnp.dtype, transpose: str, config: Config | None = None
) -> Array | tuple[Array, Array]:
  """See `api.quantize`."""
  rows, columns = x.shape[-2:]
  if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or not is_float8(dtype):
    raise NotImplementedError(f'the Triton quantiser turns bfloat16, float16 or float32 into float8, found {x.dtype}')
  if rows % 4 or columns % 4:
    raise NotImplementedError(f'the Triton quantiser takes whole 4x4 blocks, found {rows} x {columns}')
  check_size(x)
  check_float8()
  config = config or DEFAULT
  batches = math.prod(x.shape[:-2])
  plain, transposed = transpose != 'only', transpose != 'no'
  made = _triton.call(
    quantize_kernel, x, scale.astype(jnp.float32).reshape(batches),
    out_shape=[
      jax.ShapeDtypeStruct(x.shape if plain else (1,), dtype),
      jax.ShapeDtypeStruct((*x.shape[:-2], columns, rows) if transposed else (1,), dtype),
    ],
    grid=config.grid(batches, rows, columns), num_warps=config.num_warps, PLAIN=plain, TRANSPOSED=transposed,
    **config.constants(rows, columns),
  )  # fmt: skip
  return (made[0], made[1]) if transpose == 'both' else made[int(transposed)]
