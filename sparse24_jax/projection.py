"""Projections: how a dense weight becomes the sparse one that the forward uses.

A `Projection` is a bundle of pure functions in the manner of an Optax transformation. It owns no storage: its state,
one array a weight, lives in the optimizer state, changes only there, and is handed to the forward read-only.
"""

from collections.abc import Callable
import functools
from typing import Literal, NamedTuple

from jax import Array
import jax.numpy as jnp

from pallas_kernels.prune.reference import magnitude_mask, soft_threshold, soft_threshold_scale
from pallas_kernels.transposable_mask.reference import transposable_mask, two_approximation_mask


class Projection(NamedTuple):
  """Four pure functions of one weight `w`, `[..., in, out]`, grouped along axis -2.

  Attributes:
    name: tells projections apart in logs and checkpoints; includes the settings.
    init: `w -> state`, one array: a bool mask of the shape of `w`, or a scale a matrix, say. One array and no
      more, so that the states form a tree like the parameters, which Optax, nnx and Orbax all know how to handle.
    apply: `(w, state) -> w~`, the weight that the forward uses: shape and dtype of `w`, 2:4 along axis -2.
    refresh: `(w, state) -> state`, called by the optimizer every `refresh_every` steps with the new weight.
    mask: `(w, state) -> bool`, shape of `w`: what masked decay and the flip rate take as kept.
    transposable: whether `apply` is 2:4 along axis -1 as well, so that the input gradient can be a sparse matmul.
    divisor: what the lengths of axes -2 and -1 must be multiples of; a shard must hold whole groups of that size.
  """

  name: str
  init: Callable[[Array], Array]
  apply: Callable[[Array, Array], Array]
  refresh: Callable[[Array, Array], Array]
  mask: Callable[[Array, Array], Array]
  transposable: bool = False
  divisor: tuple[int, int] = (4, 1)


@functools.cache
def magnitude(*, n: int = 2, m: int = 4) -> Projection:
  """Keeps the `n` largest magnitudes in each group of `m` along the input axis.

  >>> import jax.numpy as jnp, sparse24_jax as s24
  >>> projection = s24.magnitude()
  >>> w = jnp.array([[1.0], [-3.0], [2.0], [0.5]])
  >>> projection.apply(w, projection.init(w))[:, 0].tolist()
  [0.0, -3.0, 2.0, 0.0]
  """
  if not 0 < n <= m:
    raise ValueError(f'n={n} of m={m}: n must be from 1 to m')
  return _masked(f'magnitude {n}:{m}', lambda w: magnitude_mask(w, n=n, m=m), divisor=(m, 1))


@functools.cache
def transposable(*, method: Literal['exact', 'two_approx'] = 'exact') -> Projection:
  """Keeps two of four along rows and columns of each 4x4 block: one mask for the forward and the input gradient.

  >>> import jax, sparse24_jax as s24
  >>> w = jax.random.normal(jax.random.key(0), (8, 8))
  >>> projection = s24.transposable()
  >>> int((projection.apply(w, projection.init(w)) != 0).sum())
  32
  """
  searches = {'exact': transposable_mask, 'two_approx': two_approximation_mask}
  if method not in searches:
    raise ValueError(f'method={method!r}: known are {sorted(searches)}')
  return _masked(f'transposable {method}', searches[method], divisor=(4, 4))


def _masked(name: str, search: Callable[[Array], Array], *, divisor: tuple[int, int]) -> Projection:
  return Projection(
    name=name,
    init=search,
    # A NaN is pruned from every mask, and would be hidden as a zero: it passes.
    apply=lambda w, mask: jnp.where(mask | jnp.isnan(w), w, jnp.zeros((), w.dtype)),
    refresh=lambda w, mask: search(w),
    mask=lambda w, mask: mask,
    transposable=divisor == (4, 4),
    divisor=divisor,
  )


@functools.cache
def soft_threshold_projection() -> Projection:
  """beta S(w): the soft threshold of the weight as it is now, times the scale frozen at initialisation, its state.

  Its mask is where S(w) is not zero: at most, and almost always, two of four.

  >>> import jax, sparse24_jax as s24
  >>> w = jax.random.normal(jax.random.key(0), (64, 64))
  >>> projection = s24.soft_threshold_projection()
  >>> scale = projection.init(w)
  >>> scale.shape, int((projection.apply(w, scale) != 0).sum())
  ((), 2048)
  """
  return Projection(
    name='soft_threshold',
    init=soft_threshold_scale,
    apply=_scaled_soft_threshold,
    refresh=lambda w, scale: scale,
    mask=lambda w, scale: soft_threshold(w) != 0,
  )


def _scaled_soft_threshold(w: Array, scale: Array) -> Array:
  return (soft_threshold(w).astype(jnp.float32) * jnp.expand_dims(scale, (-2, -1))).astype(w.dtype)
