"""Gated activations and the backward of activations, in plain jnp: float32 inside, one rounding at the end."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.pack import reference as pack
from pallas_kernels.pack.reference import Packed8
from pallas_kernels.sparse_matmul.operand import SparseOperand

Array = jax.Array

_GELU = math.sqrt(2 / math.pi)


def _silu(z: Array) -> tuple[Array, Array]:
  s = jax.nn.sigmoid(z)
  return z * s, s * (1 + z * (1 - s))


def _gelu(z: Array) -> tuple[Array, Array]:
  # 0.5 (1 + tanh(y)) = sigmoid(2 y): one exponential, and the derivative needs nothing more.
  s = jax.nn.sigmoid(2 * _GELU * (z + 0.044715 * z * z * z))
  return z * s, s + z * s * (1 - s) * (2 * _GELU) * (1 + 3 * 0.044715 * z * z)


def _relu(z: Array) -> tuple[Array, Array]:
  return jnp.maximum(z, 0), (z > 0).astype(z.dtype)


def _squared_relu(z: Array) -> tuple[Array, Array]:
  r = jnp.maximum(z, 0)
  return r * r, 2 * r


# Name -> function of float32 that gives (activation, derivative).
ACTIVATIONS = {'silu': _silu, 'gelu': _gelu, 'relu': _relu, 'squared_relu': _squared_relu}


def gated_activation(z: Array, *, activation: str) -> Array:
  """See `api.gated_activation`."""
  gate, up = jnp.split(z.astype(jnp.float32), 2, axis=-1)
  return (ACTIVATIONS[activation](gate)[0] * up).astype(z.dtype)


def activation_backward(dh: Array, z: Array, *, activation: str, gated: bool) -> Array:
  """See `api.activation_backward`."""
  parts = activation_backward_parts(dh, z, activation=activation, gated=gated)
  return jnp.concatenate(parts, axis=-1) if gated else parts[0]


def activation_backward_parts(dh: Array, z: Array, *, activation: str, gated: bool) -> list[Array]:
  """[dz], or the cotangents of gate and up if `gated`, in the dtype of `z`."""
  dh, wide = dh.astype(jnp.float32), z.astype(jnp.float32)
  if not gated:
    return [(dh * ACTIVATIONS[activation](wide)[1]).astype(z.dtype)]
  gate, up = jnp.split(wide, 2, axis=-1)
  value, slope = ACTIVATIONS[activation](gate)
  return [(dh * up * slope).astype(z.dtype), (dh * value).astype(z.dtype)]


def activation_backward_pack(
  dh: Array, z: Array, key: Array, *, activation: str, gated: bool,
  origin: tuple[Array | int, Array | int, Array | int],
) -> tuple[Array, SparseOperand]:  # fmt: skip
  """See `api.activation_backward_pack`."""
  dz = activation_backward(dh, z, activation=activation, gated=gated)
  return dz, pack.mvue_pack(dz, key, axis=-2, origin=origin, dtype=dz.dtype)


def activation_backward_pack8(
  dh: Array, z: Array, key: Array, scale: Array, *, activation: str, gated: bool,
  origin: tuple[Array | int, Array | int, Array | int], dtype: jnp.dtype,
) -> Packed8:  # fmt: skip
  """See `api.activation_backward_pack8`."""
  dz = activation_backward(dh, z, activation=activation, gated=gated)
  return pack.mvue_pack8(dz, key, scale, axis=-2, origin=origin, dtype=dtype, with_dense=True)
