"""FP8 in simulation: values rounded to an 8-bit format and back, products in float32."""

from typing import Literal

import jax
import jax.numpy as jnp

Array = jax.Array
Format = Literal['e4m3', 'e5m2']

_FORMATS = {'e4m3': jnp.float8_e4m3fn, 'e5m2': jnp.float8_e5m2}


def round_to_fp8(x: Array, fmt: Format) -> Array:
  """`x` as an FP8 tensor core would see it: scaled to the format's range by its largest magnitude, rounded, restored.

  Current per-tensor scaling with no margin; a zero tensor stays zero. The rounding of the *values* is that of real
  FP8; the accumulation is left to the matmul.

  Args:
    x: any shape and float dtype.
    fmt: `'e4m3'` (largest 448) for the forward, `'e5m2'` (largest 57344) for gradients.

  Returns:
    Shape and dtype of `x`.

  Source: Hu et al., arXiv 2409.09099, section 5.2.

  >>> import jax.numpy as jnp
  >>> round_to_fp8(jnp.array([448.0, 1.0, 0.3]), 'e4m3').tolist()
  [448.0, 1.0, 0.3125]
  """
  dtype = _FORMATS[fmt]
  largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
  scale = jnp.float32(jnp.finfo(dtype).max) / jnp.where(largest > 0, largest, 1.0)
  # A subnormal maximum would make the scale infinite.
  scale = jnp.minimum(scale, jnp.finfo(jnp.float32).max)
  return ((x.astype(jnp.float32) * scale).astype(dtype).astype(jnp.float32) / scale).astype(x.dtype)
