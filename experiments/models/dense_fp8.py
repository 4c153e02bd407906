"""The dense FP8 baseline: every matmul of a layer in FP8 with current scaling, both gradients included.

Operands are scaled to the range of their format by their own largest magnitude, just in time: e4m3 for activations and
weights, e5m2 for output gradients (Micikevicius et al., arXiv 2209.05433). 8-bit matmuls want both operands contiguous
along the axis that is summed, so what two matmuls read is quantised both ways round, in one pass where there is a
kernel for it.
"""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels.quantize import api

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def both_ways(x: Array, dtype: Any) -> tuple[Array, Array, Array]:
  """x `[R, C]` in float8, its transpose, and the factor that undoes the scale."""
  scale, factor = api.current_scale(api.amax(x), dtype)
  plain, transposed = api.quantize(x, scale, dtype=dtype, transpose='both')
  return plain, transposed, factor


@jax.custom_vjp
def fp8_dot(x: Array, w: Array) -> Array:
  """x w for `[tokens, in]` and `[in, out]`, and both gradients, in FP8; dtype of `x`.

  >>> import jax.numpy as jnp
  >>> fp8_dot(jnp.ones((4, 16), jnp.bfloat16), jnp.ones((16, 16), jnp.bfloat16))[0, 0].item()
  16.0
  """
  return _forward(x, w)[0]


def _forward(x: Array, w: Array) -> tuple[Array, Any]:
  x8, x8_transposed, x_factor = both_ways(x, E4M3)
  w8, w8_transposed, w_factor = both_ways(w, E4M3)
  z = api.fp8_dot(x8, w8_transposed, x_factor, w_factor, out_dtype=x.dtype)
  return z, (x8_transposed, x_factor, w8, w_factor)


def _backward(residuals: Any, dz: Array) -> tuple[Array, Array]:
  x8_transposed, x_factor, w8, w_factor = residuals
  dz8, dz8_transposed, dz_factor = both_ways(dz, E5M2)
  dx = api.fp8_dot(dz8, w8, dz_factor, w_factor, out_dtype=dz.dtype)
  return dx, api.fp8_dot(x8_transposed, dz8_transposed, x_factor, dz_factor, out_dtype=dz.dtype)


fp8_dot.defvjp(_forward, _backward)
