"""Knows a weight again by sums of some of its entries: for its state, or for what was packed of it."""

from collections.abc import Iterable, Sequence
import math
from typing import Any
import zlib

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

# Our choice: the most entries read of a weight, the fewest that are enough, and the fewest of a stacked matrix.
_ENTRIES, _FEW, _OF_EACH = 1024, 256, 4


def first_of_all_kinds(paths: Iterable[str], most: int) -> list[str]:
  """Some weights, of all kinds and depths."""
  return sorted(paths, key=lambda path: zlib.crc32(path.encode()))[:most]


def fingerprint(w: Array, counts: Sequence[int]) -> Array:
  """Two weighted sums of some entries of a weight, float32 `[2]`: by them `was_changed` knows the weight again."""
  weighted = _weighted(entries(w, counts))
  return jnp.sum(weighted, axis=range(1, weighted.ndim))


def was_changed(w: Array, counts: Sequence[int], known: Array) -> Array:
  """Whether a weight differs from the one whose fingerprint is `known`, made of `counts` entries along each axis.

  A cast to bfloat16 is no change, so that a layer may cast its weights. Nor is a difference in the last bit, since XLA
  may round a weight differently in each place that computes it. So one sum is over the entries rounded to bfloat16 and
  one over the exact entries, and both must differ by more than the rounding of sums.
  """
  weighted = _weighted(entries(w, counts))
  axes = range(1, weighted.ndim)
  found, sizes = jnp.sum(weighted, axis=axes), jnp.sum(jnp.abs(weighted), axis=axes)
  return jnp.all(jnp.abs(found - known) > sizes * 8 * float(jnp.finfo(jnp.float32).eps))


def _weighted(sampled: Array) -> Array:
  """The entries as bfloat16 has them and as they are, float32 `[2, ...]`, each times another number."""
  own, bfloat16 = jnp.finfo(sampled.dtype), jnp.finfo(jnp.bfloat16)
  stored = jax.lax.reduce_precision(sampled.astype(jnp.float32), own.nexp, own.nmant)
  rounded = jax.lax.reduce_precision(stored, bfloat16.nexp, bfloat16.nmant)
  # Both signs: a sum of positive weights would be large, and so would its rounding error.
  by = factors(sampled.shape) * np.random.default_rng(1).choice(np.float32([-1, 1]), sampled.shape)
  return jnp.stack([rounded * by, stored * by])


def factors(shape: tuple[int, ...]) -> np.ndarray:
  """The factors that entries are multiplied by before they are added.

  A plain sum would not do: what a softmax or a layer norm hands back sums to zero over its features, and so does each
  step of SGD on the weight in front of it.
  """
  return np.random.default_rng(0).uniform(0.5, 1.5, shape).astype(np.float32)


def sample(w: Array, stacked: Sequence[int]) -> Array:
  """Entries equally far apart: shards slice their own, while looking entries up would gather the weight.

  No stacked axis is left out, since a single expert or layer may be what changes. Which entries these are does not
  depend on the mesh, so that a state may move to another one.
  """
  return entries(w, counts_of(w, stacked))


def counts_of(w: Array, stacked: Sequence[int]) -> tuple[int, ...]:
  """How many entries `sample` reads along each axis."""
  return tuple(_counts(w.shape, stacked))


def entries(w: Array, counts: Sequence[int]) -> Array:
  """Entries of a weight, `counts` of them along each axis and equally far apart."""
  strides = [n // k for n, k in zip(w.shape, counts, strict=True)]
  # As far as the weight goes, where that gives as many.
  ends = [n if n % k == 0 else s * k for n, k, s in zip(w.shape, counts, strides, strict=True)]

  def some(w: Array) -> Array:
    return jax.lax.slice(w, (0,) * w.ndim, ends, strides)

  if all(k % shards == 0 for k, shards in zip(counts, _shards(w), strict=True)):
    return some(w)
  # A mesh that divides a weight into other than so many parts: the compiler finds out who has which entry.
  of_all: Any = jax.sharding.auto_axes(some, out_sharding=jax.NamedSharding(jax.typeof(w).sharding.mesh, jax.P()))
  return of_all(w)


def _shards(w: Array) -> list[int]:
  """The number of parts into which each axis is divided, as far as types say so."""
  sharding = jax.typeof(w).sharding
  if not (sharding.mesh.shape and sharding.mesh.are_all_axes_explicit):
    return [1] * w.ndim
  return [n // m for n, m in zip(w.shape, sharding.shard_shape(w.shape), strict=True)]


def _counts(shape: Sequence[int], stacked: Sequence[int]) -> list[int]:
  """How many entries to read along each axis: all along one that is stacked.

  Powers of two that divide an axis, since by those most meshes split it. Where these give too few, powers of two that
  leave its last entries out.

  >>> _counts((4096, 11008), ()), _counts((6, 64, 64), (0,)), _counts((4099, 4099), ())
  ([32, 32], [6, 8, 16], [32, 32])
  """
  if math.prod(shape) <= _ENTRIES:
    return list(shape)
  counts = [n if axis in stacked else 1 for axis, n in enumerate(shape)]
  entries = max(_ENTRIES, _OF_EACH * math.prod(shape[axis] for axis in stacked))
  few = max(_FEW, entries // _OF_EACH + 1)
  for even in (True, False):
    enough = entries if even or math.prod(counts) < few else 0
    while 2 * math.prod(counts) <= enough:
      free = [
        i for i, (n, k) in enumerate(zip(shape, counts, strict=True))
        if n % (2 * k) == 0 or (not even and 2 * k <= n)
      ]
      if not free:
        break
      counts[min(free, key=lambda i: (counts[i], -i))] *= 2
  return counts
