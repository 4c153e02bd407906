"""Minimum-variance unbiased 2:4 pruning (MVUE)."""

import math

from jax import Array
import jax.numpy as jnp

from pallas_kernels import _partitioning
from pallas_kernels._program import traced_once
from pallas_kernels.formats import check_floating, check_groups, join_groups, split_groups
from pallas_kernels.two_of_four.philox import check_origin, group_uniforms, seed_words

# Sums of four stay finite in float32 when the magnitudes are scaled by a quarter; a power of two rounds nothing.
_DOWN, _UP = 0.25, 4.0


def mvue24(
  x: Array,
  key: Array,
  *,
  axis: int = -1,
  origin: tuple[Array | int, Array | int, Array | int] = (0, 0, 0),
) -> Array:
  """An unbiased 2:4 sample of `x` along `axis`; see `sparse24_jax.mvue24`."""
  axis = check_groups(x, axis, name='x')
  check_floating(x, 'x')
  check_origin(origin)
  whole = _partitioning.whole_groups(x, axis)
  sample = _mvue24(whole, key, axis, tuple(origin))
  return sample if whole is x else _partitioning.like(sample, x)


@traced_once('axis')
def _mvue24(x: Array, key: Array, axis: int, origin: tuple[Array | int, Array | int, Array | int]) -> Array:
  # Coordinates: the grouped axis is the last but one, columns the last, everything before them one batch axis.
  if x.ndim == 1:
    return _mvue24(x[:, None], key, -2, origin)[:, 0]
  moved = jnp.moveaxis(x, axis, -2)
  batched = moved.reshape(math.prod(moved.shape[:-2]), *moved.shape[-2:])
  entries = split_groups(batched.astype(jnp.float32), -2)
  uniforms = group_uniforms(seed_words(key), entries[0].shape, origin=origin)
  values = _sample([jnp.abs(e) * _DOWN for e in entries], uniforms)
  return jnp.moveaxis(_finish(values, entries, x.dtype).reshape(moved.shape), -2, axis)


def _sample(a: list[Array], u: Array) -> list[Array]:
  """Systematic sampling with inclusion probabilities min(1, 2 a / S).

  On a line of length S where entry i owns an interval of length a_i, two points half of S apart are dropped: each
  kept entry gets the value S / 2. An entry that owns more than half is always kept, as it is, and one point picks
  among the other three, whose sum becomes the value. No division and no product is added to anything, so that no
  compiler can round it in another way.
  """
  total = ((a[0] + a[1]) + a[2]) + a[3]
  half = total * 0.5
  dominant = [x > half for x in a]
  any_dominant = dominant[0] | dominant[1] | dominant[2] | dominant[3]
  rest = [jnp.where(d, 0.0, x) for d, x in zip(dominant, a, strict=True)]
  rest_total = ((rest[0] + rest[1]) + rest[2]) + rest[3]
  point = u * jnp.where(any_dominant, rest_total, half)
  value = jnp.where(any_dominant, rest_total, half)

  kept, end = [], jnp.zeros_like(total)
  for own, entry, certain in zip(rest, a, dominant, strict=True):
    start, end = end, end + own
    first = (start <= point) & (point < end)
    second = (start - half <= point) & (point < end - half) & jnp.logical_not(any_dominant)
    kept.append(jnp.where(certain, entry, jnp.where(first | second, value, 0.0)))
  return kept


def _finish(values: list[Array], entries: list[Array], dtype: jnp.dtype) -> Array:
  """Signs, range and dtype; a group with a NaN or an infinity shows it as NaN in its first two entries."""
  largest = jnp.float32(jnp.finfo(dtype).max)
  finite = jnp.isfinite(entries[0]) & jnp.isfinite(entries[1]) & jnp.isfinite(entries[2]) & jnp.isfinite(entries[3])
  out = []
  for i, (value, entry) in enumerate(zip(values, entries, strict=True)):
    signed = jnp.where(value > 0, jnp.sign(entry) * jnp.minimum(value * _UP, largest), 0.0)
    out.append(jnp.where(finite, signed, jnp.nan if i < 2 else 0.0).astype(dtype))
  return join_groups(out, -2)
