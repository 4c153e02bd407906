"""Gated activations and activation backward passes, in either layout that the sparse matmul writes.

`axis` is the axis of features: -1 for [tokens, features], -2 for the transpose. With a gate, z holds gate and up one
after the other along it, as one matmul with concatenated weights writes them. Back ends: `reference` (plain jnp, fused
by XLA) and `triton` (compute capability 8.0 and newer).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels.formats import check_floating
from pallas_kernels.gated_activation import reference
from pallas_kernels.gated_activation.reference import ACTIVATIONS
from pallas_kernels.pack.api import candidates, candidates8
from pallas_kernels.pack.reference import is_float8, Packed8
from pallas_kernels.sparse_matmul.operand import SparseOperand

__all__ = [
  'ACTIVATIONS', 'activation_backward', 'activation_backward_amax', 'activation_backward_pack',
  'activation_backward_pack8', 'gated_activation',
]  # fmt: skip

Array = jax.Array


def _call(op: str, implementation: str | None, *args: Any, **kwargs: Any) -> Any:
  backends = {name: f'pallas_kernels.gated_activation.{name}:{op}' for name in ('reference', 'triton')}
  # Without a pack these are plain element-wise passes, which XLA runs at copy bandwidth.
  packers = {'activation_backward_pack': candidates, 'activation_backward_pack8': candidates8}
  names = packers[op]() if op in packers else ['reference']
  return _dispatch.dispatch(op, backends, implementation, names, *args, **kwargs)


def gated_activation(
  z: Array, *, activation: str = 'silu', axis: int = -1, implementation: str | None = None
) -> Array:
  """h = activation(gate) * up: SwiGLU with 'silu', GEGLU (tanh form) with 'gelu'.

  Args:
    z: [tokens, 2 features], or [2 features, tokens] with `axis=-2`.
    activation: 'silu', 'gelu', 'relu' or 'squared_relu'.
    axis: the axis of features.
    implementation: 'reference', 'triton', or None to choose.

  Returns:
    [tokens, features] or [features, tokens], dtype of `z`; float32 inside.

  Raises:
    ValueError: shapes, dtype or activation do not fit, or the named implementation refuses.

  Source: Shazeer, "GLU variants improve transformer", arXiv 2002.05202.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.gated_activation.api import gated_activation
  >>> gated_activation(jnp.array([[0.0, 1.0, 2.0, 4.0]]), activation='relu').tolist()
  [[0.0, 4.0]]
  """
  axis = _check(z, None, activation, True, axis)
  return _call('gated_activation', implementation, z, activation=activation, axis=axis)


def activation_backward(
  dh: Array, z: Array, *, activation: str = 'silu', gated: bool = True, axis: int = -1,
  implementation: str | None = None,
) -> Array:  # fmt: skip
  """The cotangent of z from that of h, for h = activation(z) or, if `gated`, activation(gate) * up.

  Args:
    dh: shape of h.
    z: what the activation was applied to, dtype of `dh`.
    activation: 'silu', 'gelu', 'relu' or 'squared_relu'.
    gated: whether `z` holds gate and up.
    axis: the axis of features.
    implementation: 'reference', 'triton', or None to choose.

  Returns:
    Shape and dtype of `z`.

  Raises:
    ValueError: shapes, dtypes or activation do not fit, or the named implementation refuses.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.gated_activation.api import activation_backward
  >>> activation_backward(jnp.ones((1, 2)), jnp.array([[-1.0, 3.0]]), activation='squared_relu', gated=False).tolist()
  [[0.0, 6.0]]
  """
  axis = _check(z, dh, activation, gated, axis)
  return _call('activation_backward', implementation, dh, z, activation=activation, gated=gated, axis=axis)


def activation_backward_pack(
  dh: Array, z: Array, key: Array, *, activation: str = 'silu', gated: bool = True, axis: int = -1,
  origin: tuple[Array | int, Array | int, Array | int] = (0, 0, 0), implementation: str | None = None,
) -> tuple[Array, SparseOperand]:  # fmt: skip
  """`activation_backward`, and the MVUE operand of its result for the weight gradient, in one pass.

  The same as `mvue_pack(dz, key)` of the result, whose rounded values it samples: the operand is [features, tokens].

  Args:
    dh: shape of h.
    z: what the activation was applied to, dtype of `dh`.
    key: a JAX random key.
    activation: 'silu', 'gelu', 'relu' or 'squared_relu'.
    gated: whether `z` holds gate and up.
    axis: the axis of features.
    origin: as in `mvue24`.
    implementation: 'reference', 'triton', or None to choose.

  Returns:
    (dz, operand of dz along tokens).

  Raises:
    ValueError: shapes, dtypes or activation do not fit, or the named implementation refuses.

  >>> import jax, jax.numpy as jnp
  >>> from pallas_kernels.gated_activation.api import activation_backward_pack
  >>> dh, z = jnp.ones((128, 64), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
  >>> dz, operand = activation_backward_pack(dh, z, jax.random.key(0))
  >>> dz.shape, operand.shape
  ((128, 128), (128, 128))
  """
  axis = _check_pack(dh, z, activation, gated, axis)
  return _call(
    'activation_backward_pack', implementation, dh, z, key,
    activation=activation, gated=gated, axis=axis, origin=origin,
  )  # fmt: skip


def activation_backward_pack8(
  dh: Array, z: Array, key: Array, scale: Array, *, activation: str = 'silu', gated: bool = True, axis: int = -1,
  origin: tuple[Array | int, Array | int, Array | int] = (0, 0, 0), dtype: Any = jnp.float8_e5m2,
  implementation: str | None = None,
) -> Packed8:  # fmt: skip
  """`activation_backward` in float8 alone, and the MVUE operand of it, in one pass.

  The same as `mvue_pack8(dz, key, scale)` of the dz in the dtype of `z`, which is never written. The scale must be
  known before. `activation_backward_amax` gives the maximum exactly by a pass that reads dh and z: bytes an entry of an
  ungated dz in bfloat16 are 4 there and 5.6 here, against 6 for `activation_backward`, 2 for its maximum and 3.6 for
  `mvue_pack8`; gated 3 and 4.6 against 5, 2 and 3.6. A bound costs less still: the derivatives of 'gelu' and 'silu'
  stay below 1.13, so 1.13 amax(dh) bounds an ungated dz for 2 bytes, at the price of a few of the 31 binades of e5m2.

  Args:
    dh: shape of h.
    z: what the activation was applied to, dtype of `dh`.
    key: a JAX random key.
    scale: float32 scalar that brings dz to the range of `dtype`; the operand takes half of it.
    activation: 'silu', 'gelu', 'relu' or 'squared_relu'.
    gated: whether `z` holds gate and up.
    axis: the axis of features.
    origin: as in `mvue24`.
    dtype: float8_e5m2 or float8_e4m3fn.
    implementation: 'reference', 'triton' (compute capability 8.9), or None to choose.

  Returns:
    The operand of a sample of dz along tokens, times scale / 2; and dz times scale, shape of `z`.

  Raises:
    ValueError: shapes, dtypes or activation do not fit, or the named implementation refuses.

  >>> import jax, jax.numpy as jnp
  >>> from pallas_kernels.gated_activation.api import activation_backward_pack8
  >>> dh, z = jnp.ones((128, 64), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
  >>> packed = activation_backward_pack8(dh, z, jax.random.key(0), jnp.float32(1000))
  >>> packed.dense.dtype.name, packed.operand.shape
  ('float8_e5m2', (128, 128))
  """
  axis = _check_pack(dh, z, activation, gated, axis)
  if not is_float8(jnp.dtype(dtype)):
    raise ValueError(f'dtype must be float8_e4m3fn or float8_e5m2, found {jnp.dtype(dtype)}')
  if jnp.shape(scale):
    raise ValueError(f'scale must be a scalar, found shape {jnp.shape(scale)}')
  return _call(
    'activation_backward_pack8', implementation, dh, z, key, jnp.asarray(scale, jnp.float32),
    activation=activation, gated=gated, axis=axis, origin=origin, dtype=jnp.dtype(dtype),
  )  # fmt: skip


def activation_backward_amax(
  dh: Array, z: Array, *, activation: str = 'silu', gated: bool = True, axis: int = -1
) -> Array:
  """The largest magnitude of `activation_backward`, a float32 scalar, without writing it: XLA fuses it into one read.

  Args:
    dh: shape of h.
    z: what the activation was applied to, dtype of `dh`.
    activation: 'silu', 'gelu', 'relu' or 'squared_relu'.
    gated: whether `z` holds gate and up.
    axis: the axis of features.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.gated_activation.api import activation_backward_amax
  >>> dh, z = jnp.ones((1, 2)), jnp.array([[-1.0, 3.0]])
  >>> float(activation_backward_amax(dh, z, activation='squared_relu', gated=False))
  6.0
  """
  axis = _check(z, dh, activation, gated, axis)
  dz = reference.activation_backward_parts(dh, z, activation=activation, gated=gated, axis=axis)
  # The parts are not joined first: a concatenation would be written to memory.
  return functools.reduce(jnp.maximum, [jnp.max(jnp.abs(part)) for part in dz]).astype(jnp.float32)


def _check_pack(dh: Array, z: Array, activation: str, gated: bool, axis: int) -> int:
  axis = _check(z, dh, activation, gated, axis)
  if z.shape[0] % 4 or z.shape[1] % 4 or dh.shape[axis] % 4:
    raise ValueError(f'tokens and features must be multiples of four, found z {z.shape}, dh {dh.shape}')
  return axis


def _check(z: Array, dh: Array | None, activation: str, gated: bool, axis: int) -> int:
  if activation not in ACTIVATIONS:
    raise ValueError(f'activation={activation!r}: known are {sorted(ACTIVATIONS)}')
  check_floating(z, 'z')
  if z.ndim != 2:
    raise ValueError(f'z must be a matrix, found shape {z.shape}')
  if axis not in (-1, -2, 0, 1):
    raise ValueError(f'axis={axis} must be an axis of z, which has two')
  axis = axis if axis < 0 else axis - 2
  if gated and z.shape[axis] % 2:
    raise ValueError(f'z of shape {z.shape} has an odd length along axis {axis}; gate and up need an even one')
  expected = list(z.shape)
  expected[axis] //= 2 if gated else 1
  if dh is not None and (dh.shape != tuple(expected) or dh.dtype != z.dtype):
    raise ValueError(f'dh must be {z.dtype} of shape {tuple(expected)}, found {dh.dtype} of shape {dh.shape}')
  return axis
