"""Minimum-variance unbiased 2:4 pruning (MVUE), exact and as the papers sample it."""

import math

from jax import Array
import jax.numpy as jnp

from pallas_kernels.formats import check_floating, check_groups, join_groups, split_groups
from pallas_kernels.mvue.philox import group_uniforms, seed_words

# Sums of four stay finite in float32 when the magnitudes are scaled by a quarter; a power of two rounds nothing.
_DOWN, _UP = 0.25, 4.0


def mvue24(
  x: Array,
  key: Array,
  *,
  axis: int = -1,
  method: str = 'exact',
  origin: tuple[Array | int, Array | int, Array | int] = (0, 0, 0),
) -> Array:
  """An unbiased 2:4 sample of `x` along `axis`; see `sparse24_jax.mvue24`."""
  axis = check_groups(x, axis, name='x')
  check_floating(x, 'x')
  if len(origin) != 3:
    raise ValueError(f'origin={origin} must be (batch, group, column)')
  samplers = {'exact': _exact, 'approximate': _approximate}
  if method not in samplers:
    raise ValueError(f'method={method!r}: known are {sorted(samplers)}')
  # Coordinates: the grouped axis is the last but one, columns the last, everything before them one batch axis.
  if x.ndim == 1:
    return mvue24(x[:, None], key, axis=-2, method=method, origin=origin)[:, 0]
  moved = jnp.moveaxis(x, axis, -2)
  batched = moved.reshape(math.prod(moved.shape[:-2]), *moved.shape[-2:])
  entries = split_groups(batched.astype(jnp.float32), -2)
  seed = seed_words(key)
  uniforms = [group_uniforms(seed, entries[0].shape, stream=s, origin=origin) for s in range(1 + (method != 'exact'))]
  values = samplers[method]([jnp.abs(e) * _DOWN for e in entries], *uniforms)
  return jnp.moveaxis(_finish(values, entries, x.dtype).reshape(moved.shape), -2, axis)


def _exact(a: list[Array], u: Array) -> list[Array]:
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


def _approximate(a: list[Array], u: Array, v: Array) -> list[Array]:
  """The papers' sampler: a first index with a / S, a second among the rest with a / (S - a_first)."""
  total = ((a[0] + a[1]) + a[2]) + a[3]
  safe_total = jnp.where(total > 0, total, 1.0)
  others = [sum(a[j] for j in range(4) if j != i) for i in range(4)]
  # With one non-zero entry left out nothing is left to draw: that term counts for nothing.
  share_of_others = [
    jnp.where(other > 0, x / jnp.where(other > 0, other, 1.0), 0.0) for x, other in zip(a, others, strict=True)
  ]
  inclusion = []
  for i in range(4):
    second = sum(share for j, share in enumerate(share_of_others) if j != i)
    inclusion.append(a[i] / safe_total * (1.0 + second))
  first = _pick(a, u * total)
  remaining = [jnp.where(f, 0.0, x) for f, x in zip(first, a, strict=True)]
  second = _pick(remaining, v * (((remaining[0] + remaining[1]) + remaining[2]) + remaining[3]))
  return [
    jnp.where(f | s, x / jnp.where(p > 0, p, 1.0), 0.0)
    for f, s, x, p in zip(first, second, a, inclusion, strict=True)
  ]


def _pick(a: list[Array], point: Array) -> list[Array]:
  """Which interval of lengths `a` laid end to end holds `point`."""
  picked, end = [], jnp.zeros_like(point)
  for length in a:
    start, end = end, end + length
    picked.append((start <= point) & (point < end))
  return picked


def _finish(values: list[Array], entries: list[Array], dtype: jnp.dtype) -> Array:
  """Signs, range and dtype; a group with a NaN or an infinity shows it as NaN in its first two entries."""
  largest = jnp.float32(jnp.finfo(dtype).max)
  finite = jnp.isfinite(entries[0]) & jnp.isfinite(entries[1]) & jnp.isfinite(entries[2]) & jnp.isfinite(entries[3])
  out = []
  for i, (value, entry) in enumerate(zip(values, entries, strict=True)):
    signed = jnp.where(value > 0, jnp.sign(entry) * jnp.minimum(value * _UP, largest), 0.0)
    out.append(jnp.where(finite, signed, jnp.nan if i < 2 else 0.0).astype(dtype))
  return join_groups(out, -2)
