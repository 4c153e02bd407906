"""Gated activations and activation backward passes of [tokens, features].

With a gate, z holds gate and up side by side, as one matmul with concatenated weights writes them. What packs a sample
of its result has two back ends, `reference` (plain jnp, fused by XLA) and `triton` (compute capability 8.0 and newer);
the rest are element-wise passes, which XLA runs at copy bandwidth.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels.activations import activation_of
from pallas_kernels.formats import check_floating
from pallas_kernels.gated_activation import reference
from pallas_kernels.pack.api import candidates, check_scale, values_dtype
from pallas_kernels.pack.reference import Packed

__all__ = ['activation_backward', 'activation_backward_amax', 'activation_backward_pack', 'gated_activation']

Array = jax.Array


def gated_activation(z: Array, *, activation: str = 'silu') -> Array:
  """h = activation(gate) * up: SwiGLU with 'silu', GEGLU (tanh form) with 'gelu'.

  Args:
    z: [tokens, 2 features].
    activation: 'silu', 'gelu', 'gelu_exact', 'relu' or 'squared_relu'.

  Returns:
    [tokens, features], dtype of `z`; float32 inside.

  Raises:
    ValueError: shapes, dtype or activation do not fit.

  Source: Shazeer, "GLU variants improve transformer", arXiv 2002.05202.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.gated_activation.api import gated_activation
  >>> gated_activation(jnp.array([[0.0, 1.0, 2.0, 4.0]]), activation='relu').tolist()
  [[0.0, 4.0]]
  """
  _check(z, None, activation, True)
  return reference.gated_activation(z, activation=activation)


def activation_backward(dh: Array, z: Array, *, activation: str = 'silu', gated: bool = True) -> Array:
  """The cotangent of z from that of h, for h = activation(z) or, if `gated`, activation(gate) * up.

  Args:
    dh: shape of h.
    z: what the activation was applied to, dtype of `dh`.
    activation: 'silu', 'gelu', 'gelu_exact', 'relu' or 'squared_relu'.
    gated: whether `z` holds gate and up.

  Returns:
    Shape and dtype of `z`.

  Raises:
    ValueError: shapes, dtypes or activation do not fit.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.gated_activation.api import activation_backward
  >>> activation_backward(jnp.ones((1, 2)), jnp.array([[-1.0, 3.0]]), activation='squared_relu', gated=False).tolist()
  [[0.0, 6.0]]
  """
  _check(z, dh, activation, gated)
  return reference.activation_backward(dh, z, activation=activation, gated=gated)


def activation_backward_pack(
  dh: Array, z: Array, key: Array, scale: Array | None = None, *, activation: str = 'silu', gated: bool = True,
  origin: tuple[Array | int, Array | int, Array | int] = (0, 0, 0), dtype: Any = None,
  implementation: _dispatch.Implementation = None,
) -> Packed:  # fmt: skip
  """`activation_backward`, and the MVUE operand of its result for the weight gradient, in one pass.

  The same as `mvue_pack(dz, key, scale)` of the dz in the dtype of `z`, whose rounded values it samples: the operand is
  [features, tokens]. In float8 that dz is never written.

  In float8 the scale must be known before. `activation_backward_amax` gives the maximum exactly, by a pass that reads
  dh and z. A bound costs fewer bytes (`pack/LOG.md`): the derivatives of 'gelu' and 'silu' stay below 1.13, so 1.13
  amax(dh) bounds an ungated dz, at the price of a few of the 31 binades of e5m2.

  Args:
    dh: shape of h.
    z: what the activation was applied to, dtype of `dh`.
    key: a JAX random key.
    scale: in float8 a float32 scalar that brings dz to the range of `dtype`; the operand takes half of it. Else None.
    activation: 'silu', 'gelu', 'gelu_exact', 'relu' or 'squared_relu'.
    gated: whether `z` holds gate and up.
    origin: as in `mvue24`.
    dtype: of the packed values, as in `mvue_pack`: float8_e5m2, float8_e4m3fn, or None for that of `z`, bfloat16 for
      float32.
    implementation: 'reference', 'triton' (float8: compute capability 8.9), a tuple of them in order, or None to choose.

  Returns:
    The operand of a sample of dz along tokens, and dz, shape of `z`; in float8 times scale / 2, and times scale.

  Raises:
    ValueError: shapes, dtypes or activation do not fit, float8 lacks a scale or another dtype has one, or the named
      implementation refuses.

  >>> import jax, jax.numpy as jnp
  >>> from pallas_kernels.gated_activation.api import activation_backward_pack
  >>> dh, z = jnp.ones((128, 64), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
  >>> packed = activation_backward_pack(dh, z, jax.random.key(0))
  >>> packed.dense.shape, packed.operand.shape
  ((128, 128), (128, 128))
  """
  _check(z, dh, activation, gated)
  if z.shape[0] % 4 or z.shape[1] % 4 or dh.shape[-1] % 4:
    raise ValueError(f'tokens and features must be multiples of four, found z {z.shape}, dh {dh.shape}')
  dtype = values_dtype(z, dtype, 'z', float8=True)
  scale, op = check_scale(scale, dtype, z, 'z'), 'activation_backward_pack'
  backends = _dispatch.in_jnp_and_triton(op, 'gated_activation')
  return _dispatch.dispatch(
    op, backends, implementation, candidates(dtype), dh, z, key, scale,
    activation=activation, gated=gated, origin=origin, dtype=dtype,
  )  # fmt: skip


def activation_backward_amax(
  dh: Array, z: Array, *, activation: str = 'silu', gated: bool = True
) -> Array:
  """The largest magnitude of `activation_backward`, a float32 scalar, without writing it: XLA fuses it into one read.

  Args:
    dh: shape of h.
    z: what the activation was applied to, dtype of `dh`.
    activation: 'silu', 'gelu', 'gelu_exact', 'relu' or 'squared_relu'.
    gated: whether `z` holds gate and up.

  Raises:
    ValueError: shapes, dtypes or the activation do not fit.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.gated_activation.api import activation_backward_amax
  >>> dh, z = jnp.ones((1, 2)), jnp.array([[-1.0, 3.0]])
  >>> float(activation_backward_amax(dh, z, activation='squared_relu', gated=False))
  6.0
  """
  _check(z, dh, activation, gated)
  dz = reference.activation_backward_parts(dh, z, activation=activation, gated=gated)
  # The parts are not joined first: a concatenation would be written to memory.
  return functools.reduce(jnp.maximum, [jnp.max(jnp.abs(part)) for part in dz]).astype(jnp.float32)


def _check(z: Array, dh: Array | None, activation: str, gated: bool) -> None:
  activation_of(activation)
  check_floating(z, 'z')
  if z.ndim != 2:
    raise ValueError(f'z must be a matrix, found shape {z.shape}')
  if gated and z.shape[1] % 2:
    raise ValueError(f'z of shape {z.shape} has an odd length along axis -1; gate and up need an even one')
  expected = (z.shape[0], z.shape[1] // (2 if gated else 1))
  if dh is not None and (dh.shape != expected or dh.dtype != z.dtype):
    raise ValueError(f'dh must be {z.dtype} of shape {expected}, found {dh.dtype} of shape {dh.shape}')
