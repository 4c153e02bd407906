"""What the packing kernels are checked and timed on, and the settings that are tried."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _triton
from pallas_kernels._passes import Case, normal, tiles
from pallas_kernels.costs import Move
from pallas_kernels.pack import costs, reference

pack = _triton.kernels('pallas_kernels.pack.triton')
BF16, F32 = jnp.bfloat16, jnp.float32
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
ORIGIN = (0, 0, 0)
WEIGHT, ACTIVATIONS = (16384, 4096), (16384, 8192)


def cases() -> list[Case]:
  """All rows; the lists of settings start with the default."""
  some = tiles('16x16x2', '32x16x4', '16x16x4', '16x32x4')
  few, fewer_warps_first = tiles('16x16x4', '16x16x2'), tiles('16x16x2', '16x16x4')

  def codes(key: jax.Array) -> jax.Array:
    return jax.jit(functools.partial(reference.transposable_pack, dtype=BF16))(normal(WEIGHT)(key)).codes

  rows, weight = [], math.prod(WEIGHT)
  for dtype in (BF16, jnp.float32):
    rows.append(Case(
      costs.transposable_pack(weight, jnp.dtype(dtype).itemsize, 2), WEIGHT,
      lambda key, dtype=dtype: (normal(WEIGHT, dtype)(key),),
      lambda w, config: pack.transposable_pack(w, dtype=BF16, config=config),
      lambda w: reference.transposable_pack(w, dtype=BF16), some if dtype == BF16 else few,
      dtype=jnp.dtype(dtype).name,
    ))  # fmt: skip
  rows.append(Case(
    costs.masked_pack(weight, 2, 2), WEIGHT, lambda key: (normal(WEIGHT)(key), codes(jax.random.key(9))),
    lambda w, old, config: pack.masked_pack(w, old, dtype=BF16, config=config),
    lambda w, old: reference.masked_pack(w, old, dtype=BF16), few,
  ))  # fmt: skip
  for axis in (-2, -1):
    rows.append(Case(
      costs.soft_threshold_pack(weight, 2, 2, axis=axis), WEIGHT, lambda key: (normal(WEIGHT)(key), jnp.float32(1.48)),
      lambda w, s, config, axis=axis: pack.soft_threshold_pack(w, s, axis=axis, dtype=BF16, config=config),
      lambda w, s, axis=axis: reference.soft_threshold_pack(w, s, axis=axis, dtype=BF16),
      fewer_warps_first if axis == -2 else few,
    ))  # fmt: skip
  rows.append(Case(
    costs.mvue_pack(math.prod(ACTIVATIONS), 2, 2), ACTIVATIONS,
    lambda key: (normal(ACTIVATIONS)(key), jax.random.key(1)),
    lambda x, k, config: pack.mvue_pack(x, k, origin=ORIGIN, dtype=BF16, config=config),
    lambda x, k: reference.mvue_pack(x, k, origin=ORIGIN, dtype=BF16),
    tiles('16x16x2', '16x16x4', '16x32x4', '32x16x4'),
  ))  # fmt: skip
  for shape in ((16384, 4096), (16384, 16384)):
    small = shape[1] == 4096
    rows.append(Case(
      costs.mvue_pack(math.prod(shape), 2, 1), shape,
      lambda key, s=shape: (normal(s)(key), jax.random.key(1), F32(1e4)),
      lambda x, k, s, config: pack.mvue_pack(x, k, s, origin=ORIGIN, dtype=E5M2, config=config),
      (lambda x, k, s: reference.mvue_pack(x, k, s, origin=ORIGIN, dtype=E5M2))
      if small else None,
      tiles('16x32x4', '16x16x2', '16x16x4', '16x16x8', '32x16x4', '16x32x2', '32x16x8', '16x32x8', '64x16x8'),
    ))  # fmt: skip
  for dtype in (BF16, F32):
    rows.append(Case(
      costs.masked_pack(weight, jnp.dtype(dtype).itemsize, 1), WEIGHT,
      lambda key, d=dtype: (normal(WEIGHT, d)(key), codes(jax.random.key(9)), F32(100)),
      lambda w, old, s, config: pack.masked_pack(w, old, s, dtype=E4M3, config=config),
      (lambda w, old, s: reference.masked_pack(w, old, s, dtype=E4M3)) if dtype == BF16 else None,
      tiles('16x16x2', '16x16x4', '32x16x4', '16x32x4', '32x32x8'), dtype=jnp.dtype(dtype).name,
    ))  # fmt: skip
  for dtype, settings in ((BF16, fewer_warps_first), (F32, few)):
    rows.append(Case(
      costs.soft_threshold_pack(weight, jnp.dtype(dtype).itemsize, 1), WEIGHT[::-1],
      lambda key, d=dtype: (normal(WEIGHT[::-1], d)(key), F32(100)),
      lambda w, s, config: pack.soft_threshold_pack(w, s, axis=-2, dtype=E4M3, config=config),
      (lambda w, s: reference.soft_threshold_pack(w, s, axis=-2, dtype=E4M3))
      if dtype == BF16 else None,
      settings + tiles('32x16x4', '16x32x4', '32x32x8'), dtype=jnp.dtype(dtype).name,
    ))  # fmt: skip
  return [*rows, masked_decay()]


def masked_decay() -> Case:
  """AdamW with masked decay of one weight in plain jnp: what XLA makes of it."""

  def inputs(key: jax.Array) -> tuple[Any, ...]:
    g, m, p = (jax.random.normal(k, WEIGHT, F32) for k in jax.random.split(key, 3))
    mask = reference.code_mask(jax.random.bits(key, (WEIGHT[0] // 4, WEIGHT[1] // 4), jnp.uint16))
    return g, m, jnp.abs(m), p, mask

  def step(g: Any, m: Any, v: Any, p: Any, mask: Any) -> Any:
    g = g + jnp.where(mask, 0.0, 6e-5 * p)
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    return m, v, p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p)

  # Four arrays and a mask are read, three written.
  move = Move('adamw_masked_decay', 29 * math.prod(WEIGHT))
  return Case(move, WEIGHT, inputs, None, step, (), dtype='float32', mode='step')
