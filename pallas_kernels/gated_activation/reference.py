"""Gated activations and the backward of activations, in plain jnp: float32 inside, one rounding at the end."""

import jax
import jax.numpy as jnp

from pallas_kernels._program import traced_once
from pallas_kernels.activations import ACTIVATIONS
from pallas_kernels.pack import reference as pack
from pallas_kernels.pack.reference import Packed

Array = jax.Array

@traced_once('activation')
def gated_activation(z: Array, *, activation: str) -> Array:
  """See `api.gated_activation`."""
  gate, up = jnp.split(z.astype(jnp.float32), 2, axis=-1)
  return (ACTIVATIONS[activation].value_and_slope(gate)[0] * up).astype(z.dtype)


@traced_once('activation', 'gated')
def activation_backward(dh: Array, z: Array, *, activation: str, gated: bool) -> Array:
  """See `api.activation_backward`."""
  parts = activation_backward_parts(dh, z, activation=activation, gated=gated)
  return jnp.concatenate(parts, axis=-1) if gated else parts[0]


def activation_backward_parts(dh: Array, z: Array, *, activation: str, gated: bool) -> list[Array]:
  """[dz], or the cotangents of gate and up if `gated`, in the dtype of `z`."""
  dh, wide = dh.astype(jnp.float32), z.astype(jnp.float32)
  if not gated:
    return [(dh * ACTIVATIONS[activation].value_and_slope(wide)[1]).astype(z.dtype)]
  gate, up = jnp.split(wide, 2, axis=-1)
  value, slope = ACTIVATIONS[activation].value_and_slope(gate)
  return [(dh * up * slope).astype(z.dtype), (dh * value).astype(z.dtype)]


def activation_backward_pack(
  dh: Array, z: Array, key: Array, scale: Array | None = None, *, activation: str, gated: bool,
  origin: tuple[Array | int, Array | int, Array | int], dtype: jnp.dtype,
) -> Packed:  # fmt: skip
  """See `api.activation_backward_pack`."""
  dz = activation_backward(dh, z, activation=activation, gated=gated)
  packed = pack.mvue_pack(dz, key, scale, origin=origin, dtype=dtype)
  return Packed(packed.operand, dz if scale is None else packed.dense)
