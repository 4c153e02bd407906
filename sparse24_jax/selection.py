"""Which entries of a matrix to keep: the largest, by counting, or random ones, by seed and coordinates.

Nothing is sorted, and a number depends on where its entry is in the whole array: a sharded one moves a few scalars.
"""

import functools
import math
import zlib

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from pallas_kernels._program import traced_once


@traced_once()
def keep_largest(score: Array, count: Array | int, among: Array) -> Array:
  """The `count` largest scores of each matrix, among those allowed; ties go to the lower index (row by row).

  By a search on the bits of the score, two at a time, which takes sums over the matrix and nothing else.

  Args:
    score: `[..., rows, columns]`; uint32, or floats of which the magnitude counts and a NaN is zero.
    count: int32, a scalar or `[..., 1, 1]`; below zero is zero.
    among: bool, shape of `score`. If it holds fewer than `count`, all of it is kept.

  Returns:
    bool, shape of `score`.

  >>> import jax.numpy as jnp
  >>> keep_largest(jnp.array([[3.0, 1.0, 3.0, 2.0]]), 2, jnp.array([[True, True, False, True]])).tolist()
  [[True, False, False, True]]
  """
  bits = above_zero(score, among)
  least = _largest_threshold(bits, count, 32)
  sure = bits > least
  tied = (bits == least) & among
  missing = count - count_kept(sure)
  rows, columns = score.shape[-2:]
  order = jnp.uint32(rows * columns) - _positions(rows, columns)
  first = jnp.where(tied, order.reshape((1,) * (score.ndim - 2) + order.shape), jnp.uint32(0))
  # Ties that all fit, or that nobody has, need no order; that is the rule, so the second search is seldom made.
  contested = jnp.any(missing < count_kept(tied))
  return sure | (tied & (first >= _largest_threshold(first, missing, (rows * columns).bit_length(), contested)))


def _largest_threshold(bits: Array, count: Array | int, width: int, wanted: Array | bool = True) -> Array:
  """The largest t, uint32 `[..., 1, 1]`, with at least `count` entries of `bits` at t or above; 0 if not wanted.

  Numbers have `width` bits. One pass over memory counts for all three values of two bits, and so finds both bits.
  """
  digits = (width + 1) // 2

  def narrow(i: Array, t: Array) -> Array:
    shift = jnp.uint32(2) * (jnp.uint32(digits - 1) - jnp.asarray(i, jnp.uint32))
    enough = [count_kept(bits >= (t | (jnp.uint32(value) << shift))) >= count for value in (1, 2, 3)]
    return t | (functools.reduce(jnp.add, [e.astype(jnp.uint32) for e in enough]) << shift)

  made = jnp.where(wanted, digits, 0).astype(jnp.int32)
  zero = jnp.zeros_like(count_kept(bits), jnp.uint32)  # divided as what the loop makes of it, where types say how
  return jax.lax.fori_loop(0, made, narrow, zero)


def word_of(path: str) -> np.uint32:
  """A number for the path of a weight."""
  return np.uint32(zlib.crc32(path.encode()))


def draw(seed: int, step: Array, word: Array | np.uint32, shape: tuple[int, ...]) -> Array:
  """Uniform uint32 of shape `[..., rows, columns]` from seed, step, word and position; the same for every sharding.

  A counter-based hash, each word mixed in with full avalanche: it only has to shuffle links, and compiles in a
  hundredth of the time of a cryptographic generator, which counts with one draw a weight.
  """
  return _drawn(np.uint32(seed % 2**32), jnp.asarray(step), word, shape)


@traced_once('shape')
def _drawn(seed: np.uint32, step: Array, word: Array | np.uint32, shape: tuple[int, ...]) -> Array:
  # The barrier: at the start of a run the step is a constant, and XLA would fold whole masks while it compiles.
  step = jax.lax.optimization_barrier(step).astype(jnp.uint32)
  key = _mix(jnp.asarray(seed))
  for mixed_in in (step, word):
    key = _mix(key ^ (mixed_in + jnp.uint32(0x9E3779B9)))
  layers = math.prod(shape[:-2])
  key = _mix(key ^ jax.lax.iota(jnp.uint32, layers)).reshape(*shape[:-2], 1, 1)
  position = _positions(*shape[-2:])
  return _mix(_mix(position.reshape((1,) * (len(shape) - 2) + position.shape) ^ key) + key)


def _mix(x: Array) -> Array:
  """A bijection of uint32 in which each bit of the input flips each of the output's about half of the time.

  Shifts and multipliers are those of `lowbias32`, which C. Wellons found by search and gave to the public domain.
  """
  x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
  return x ^ (x >> jnp.uint32(16))


def _positions(rows: int, columns: int) -> Array:
  """Index of each entry, row by row, uint32 [rows, columns]."""
  row, column = (jax.lax.broadcasted_iota(jnp.uint32, (rows, columns), axis) for axis in range(2))
  return row * jnp.uint32(columns) + column


def count_kept(mask: Array) -> Array:
  """How many each matrix keeps, int32 `[..., 1, 1]`."""
  return jnp.sum(mask, axis=(-2, -1), keepdims=True, dtype=jnp.int32)


def above_zero(score: Array, among: Array) -> Array:
  """uint32 of 1 or more in the order of the scores where allowed, 0 elsewhere."""
  if score.dtype != jnp.uint32:  # floats of zero or more are in the order of their bits
    magnitude = jnp.where(jnp.isnan(score), 0.0, jnp.abs(score.astype(jnp.float32)))
    score = jax.lax.bitcast_convert_type(magnitude, jnp.uint32)
  return jnp.where(among, jnp.minimum(score, jnp.uint32(2**32 - 2)) + jnp.uint32(1), jnp.uint32(0))
