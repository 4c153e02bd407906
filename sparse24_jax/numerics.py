"""Checks of values, and FP8 in simulation: rounded to an 8-bit format and back, matmuls in float32."""

from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify
import jax.numpy as jnp

# In a traced program, of numbers that are rounded by arithmetic: no dtype tells them.
ROUNDED_TO_FP8 = 'sparse24 fp8'


def check_no_nan(x: Array, name: str) -> None:
  """Raises an error under `jax.experimental.checkify` if `x` holds a NaN; elsewhere it does nothing.

  The functions that users call on arrays use it. Inside layers and refreshes it would keep XLA and Flax from dropping
  code, so the projections call the unchecked ops.
  """
  checkify.debug_check(jnp.logical_not(jnp.any(jnp.isnan(x))), f'{name} holds a NaN')


def check_finite(x: Array, name: str) -> None:
  """Like `check_no_nan`, for NaN and infinities."""
  checkify.debug_check(jnp.all(jnp.isfinite(x)), f'{name} holds a NaN or an infinity')


def round_to_fp8(x: Array, to: Any) -> Array:
  """`x` as an FP8 tensor core would see it: scaled to the format's range by its largest magnitude, rounded, restored.

  Current per-tensor scaling with no margin; a zero tensor stays zero. The rounding of the *values* is that of real
  FP8; the accumulation is left to the matmul. A NaN or an infinity stays one, and may spoil other entries.

  Args:
    x: any shape and float dtype.
    to: the format, float8_e4m3fn (largest 448) or float8_e5m2 (largest 57344).

  Returns:
    Shape and dtype of `x`.

  Source: Hu et al., arXiv 2409.09099, section 5.2.

  >>> import jax.numpy as jnp
  >>> round_to_fp8(jnp.array([448.0, 1.0, 0.3]), jnp.float8_e4m3fn).tolist()
  [448.0, 1.0, 0.3125]
  """
  largest = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
  limits = jnp.finfo(to)
  scale = jnp.float32(limits.max) / jnp.where(largest > 0, largest, 1.0)
  # A subnormal maximum would make the scale infinite.
  scale = jnp.minimum(scale, jnp.finfo(jnp.float32).max)
  rounded = (_on_grid(x.astype(jnp.float32) * scale, limits) / scale).astype(x.dtype)
  return checkpoint_name(rounded, ROUNDED_TO_FP8) if isinstance(rounded, jax.core.Tracer) else rounded


def _on_grid(x: Array, limits: jnp.finfo) -> Array:
  """`x`, float32, rounded to the nearest number of a narrower format, ties to even.

  By arithmetic: on GPUs XLA takes a cast to fewer bits and back for a no-op (`xla_allow_excess_precision`), and
  `lax.reduce_precision` does not know the range of e4m3fn.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  binade = jax.lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)  # the power of two at or below |x|
  step = jnp.maximum(binade, jnp.float32(limits.smallest_normal)) * jnp.float32(limits.eps)
  return jnp.where(jnp.isfinite(x), jnp.round(x / step) * step, x)
