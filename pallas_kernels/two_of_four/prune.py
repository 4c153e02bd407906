"""N:M magnitude masks and the soft threshold of S-STE, along one axis."""

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels._program import traced_once
from pallas_kernels.formats import check_floating, check_groups, join_groups, split_groups


def magnitudes(x: Array) -> Array:
  """|x| for ranking: NaN ranks below everything, as -1."""
  return jnp.where(jnp.isnan(x), -jnp.ones((), x.dtype), jnp.abs(x))


def ranks(x: Array) -> Array:
  """Integers in the order of |x|, NaN below everything: the bits, whose order does not hang on how subnormals compare.

  XLA on a CPU compares subnormal numbers as zeros, and its |x| in bfloat16 makes zeros of them; a GPU does neither. A
  mask must not depend on that, so nothing here is arithmetic on floats.
  """
  integer = jnp.dtype(f'int{8 * x.dtype.itemsize}')
  bits = jax.lax.bitcast_convert_type(x, integer) & jnp.array(jnp.iinfo(integer).max, integer)
  infinity = jax.lax.bitcast_convert_type(jnp.array(jnp.inf, x.dtype), integer)
  return jnp.where(bits > infinity, -jnp.ones((), integer), bits)


@traced_once('n', 'm', 'axis')
def magnitude_mask(w: Array, *, n: int = 2, m: int = 4, axis: int = -2) -> Array:
  """Keeps the `n` largest magnitudes of each `m`; see `sparse24_jax.magnitude_mask`."""
  if not 0 < n <= m:
    raise ValueError(f'n={n} of m={m}: n must be from 1 to m')
  axis = check_groups(w, axis, m)
  check_floating(w, 'w')
  a = split_groups(ranks(w), axis, m)
  # An entry is beaten by the strictly larger and by equals at a lower index. Comparing all pairs is m(m-1)/2 fused
  # operations; a sort would be a hundred times slower on a GPU.
  beaten_by = [jnp.zeros(a[0].shape, jnp.int8) for _ in range(m)]
  for i in range(m):
    for j in range(i + 1, m):
      later_wins = a[j] > a[i]
      beaten_by[i] = beaten_by[i] + later_wins.astype(jnp.int8)
      beaten_by[j] = beaten_by[j] + jnp.logical_not(later_wins).astype(jnp.int8)
  return join_groups([(b < n) & (x >= 0) for b, x in zip(beaten_by, a, strict=True)], axis)


@traced_once('axis')
def soft_threshold(w: Array, *, axis: int = -2) -> Array:
  """sign(w) max(|w| - t, 0), t the second smallest magnitude of a group; see `sparse24_jax.soft_threshold`."""
  axis = check_groups(w, axis)
  check_floating(w, 'w')
  a, b, c, d = split_groups(jnp.abs(w), axis)
  # Second smallest of four: of the two pairwise minima the larger, unless a pairwise maximum is smaller still.
  t = jnp.minimum(
    jnp.maximum(jnp.minimum(a, b), jnp.minimum(c, d)), jnp.minimum(jnp.maximum(a, b), jnp.maximum(c, d))
  )
  nan = jnp.isnan(a) | jnp.isnan(b) | jnp.isnan(c) | jnp.isnan(d)
  zero, poison = jnp.zeros((), t.dtype), float('nan')  # as an array it sets off jax_debug_nans

  def shrink(i: int, x: Array) -> Array:
    # Selecting before subtracting keeps inf - inf out; a NaN stays visible without breaking the pattern.
    size = jnp.abs(x)
    soft = jnp.sign(x) * jnp.where(size > t, size - t, zero)
    return jnp.where(nan, poison if i < 2 else zero, soft)

  return join_groups([shrink(i, x) for i, x in enumerate(split_groups(w, axis))], axis)


# That of Gaussian numbers, an integral. A weight that starts at zero and is trained has about this one soon.
SCALE_OF_GAUSSIAN = 1.4837


@traced_once('axis')
def soft_threshold_scale(w: Array, *, axis: int = -2) -> Array:
  """<w, S(w)> / ||S(w)||^2 in float32, one a matrix; see `sparse24_jax.soft_threshold_scale`."""
  check_groups(w, axis)
  check_floating(w, 'w')
  matrix = tuple(range(-min(w.ndim, 2), 0))
  wide = w.astype(jnp.float32)
  # The scale does not depend on the size of w; dividing by the largest entry keeps the sums of squares in range. XLA on
  # a CPU multiplies by the inverse, which must not be subnormal: so far powers of two bring the entry near one.
  largest = jnp.max(jnp.abs(wide), axis=matrix, keepdims=True)
  near = jnp.where(largest > 1, jnp.float32(2.0**-64), jnp.float32(2.0**64))
  wide = (wide * near) / jnp.where(largest > 0, largest * near, 1.0)
  soft = soft_threshold(wide, axis=axis)
  norm = jnp.sum(soft * soft, axis=matrix)
  return jnp.where(norm > 0, jnp.sum(wide * soft, axis=matrix) / jnp.where(norm > 0, norm, 1.0), SCALE_OF_GAUSSIAN)
