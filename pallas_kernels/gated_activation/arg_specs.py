"""What the activations' kernels are checked and timed on, and the settings that are tried."""

from collections.abc import Callable
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _triton
from pallas_kernels._passes import Case, normal, tiles
from pallas_kernels.gated_activation import api, costs
from pallas_kernels.gated_activation import reference as gated_reference

gated = _triton.kernels('pallas_kernels.gated_activation.triton')
BF16, F32, E5M2 = jnp.dtype(jnp.bfloat16), jnp.float32, jnp.dtype(jnp.float8_e5m2)
ORIGIN = dict(origin=(0, 0, 0))
TOKENS, HIDDEN = 16384, 8192
ENTRIES = TOKENS * HIDDEN


def cases() -> list[Case]:
  """All rows; the lists of settings start with the default. Largest magnitudes, which make scales, are XLA's passes."""
  halves, whole = tiles('16x16x4', '16x16x8', '16x32x16'), tiles('16x16x4', '16x16x8', '16x32x8')

  def backward(gate: bool) -> Callable[[jax.Array], tuple[Any, ...]]:
    def make(key: jax.Array) -> tuple[Any, ...]:
      z = normal((TOKENS, HIDDEN * (2 if gate else 1)))(jax.random.key(3))
      return normal((TOKENS, HIDDEN))(key), z, jax.random.key(2)
    return make

  rows = []
  for activation in ('silu', 'gelu'):
    shape = (TOKENS, 2 * HIDDEN)
    rows.append(Case(
      costs.gated_activation(ENTRIES, 2, activation=activation), shape,
      lambda key, shape=shape: (normal(shape)(key),), None,
      lambda z, a=activation: gated_reference.gated_activation(z, activation=a), (),
    ))  # fmt: skip
  for activation, gate in (('silu', True), ('gelu', True), ('gelu', False), ('squared_relu', False)):
    make, options = backward(gate), dict(activation=activation, gated=gate)
    shape = (TOKENS, HIDDEN)
    rows.append(Case(
      costs.activation_backward(ENTRIES, 2, **options), shape, lambda key, make=make: make(key)[:2], None,
      lambda d, z, o=options: gated_reference.activation_backward(d, z, **o), (),
    ))  # fmt: skip
    packed = options | dict(dtype=BF16, **ORIGIN)
    rows.append(Case(
      costs.activation_backward_pack(ENTRIES, 2, 2, **options), shape, make,
      lambda d, z, k, config, o=packed: gated.activation_backward_pack(d, z, k, config=config, **o),
      lambda d, z, k, o=packed: gated_reference.activation_backward_pack(d, z, k, **o),
      halves if gate else whole,
    ))  # fmt: skip
  for name, gate, configs in (
    ('gelu', False, tiles('16x32x8', '16x16x4', '16x16x2', '16x16x8', '32x16x4', '32x16x8', '16x32x4', '64x16x8')),
    ('silu', True, tiles('16x16x4', '16x16x8', '16x32x16', '32x16x16', '32x16x8', '16x32x8')),
  ):  # fmt: skip
    tokens, features = (16384, 16384) if not gate else (16384, 8192)
    options = dict(activation=name, gated=gate)
    packed = options | dict(dtype=E5M2, **ORIGIN)
    rows.append(Case(
      costs.activation_backward_pack(tokens * features, 2, 1, **options), (tokens, features),
      lambda key, t=tokens, f=features, g=gate: (
        normal((t, f))(key), normal((t, 2 * f if g else f))(jax.random.key(3)), jax.random.key(1), F32(5e3)
      ),
      lambda d, z, k, s, config, o=packed: gated.activation_backward_pack(d, z, k, s, config=config, **o),
      None, configs,
    ))  # fmt: skip
  for name, gate, dh, z in (
    ('gelu', False, (16384, 16384), (16384, 16384)), ('silu', True, (TOKENS, HIDDEN), (TOKENS, 2 * HIDDEN))
  ):  # fmt: skip
    rows.append(Case(
      costs.activation_backward_amax(math.prod(dh), 2, activation=name, gated=gate), dh,
      lambda key, dh=dh, z=z: (normal(dh)(key), normal(z)(jax.random.key(1))), None,
      lambda d, z, a=name, g=gate: api.activation_backward_amax(d, z, activation=a, gated=g), (),
    ))  # fmt: skip
  return rows
