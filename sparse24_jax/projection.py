"""Projections: how a dense weight becomes the sparse one that the forward uses.

A `Projection` is a bundle of pure functions in the manner of an Optax transformation. It owns no storage: its state,
one pytree a weight, lives in the optimizer state, changes only there, and is handed to the forward read-only.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from sparse24_jax.masks import magnitude_mask, transposable_mask
from sparse24_jax.soft_threshold import soft_threshold, soft_threshold_scale

Array = jax.Array


class Projection(NamedTuple):
  """Four pure functions of one weight `w`, `[..., in, out]`, grouped along axis -2.

  Attributes:
    name: tells projections apart in logs and checkpoints; includes the settings.
    init: `w -> state`.
    apply: `(w, state) -> w~`, the weight that the forward uses: shape and dtype of `w`, 2:4 along axis -2.
    refresh: `(w, state) -> state`, called by the optimizer every `refresh_every` steps with the new weight.
    mask: `(w, state) -> bool`, shape of `w`: what masked decay and the flip rate take as kept.
    transposable: whether `apply` is 2:4 along axis -1 as well, so that the input gradient can be a sparse matmul.
    divisor: what the lengths of axes -2 and -1 must be multiples of; a shard must hold whole groups of that size.
  """

  name: str
  init: Callable[[Array], Any]
  apply: Callable[[Array, Any], Array]
  refresh: Callable[[Array, Any], Any]
  mask: Callable[[Array, Any], Array]
  transposable: bool = False
  divisor: tuple[int, int] = (4, 1)


class MaskState(NamedTuple):
  """State of projections that hold a mask between refreshes."""

  mask: Array  # bool, shape of the weight


class ScaleState(NamedTuple):
  """State of the soft threshold: its scale, frozen at initialisation."""

  scale: Array  # float32, one a matrix: w.shape[:-2]


def magnitude(*, n: int = 2, m: int = 4) -> Projection:
  """Keeps the `n` largest magnitudes in each group of `m` along the input axis.

  >>> import jax.numpy as jnp, sparse24_jax as s24
  >>> projection = s24.magnitude()
  >>> w = jnp.array([[1.0], [-3.0], [2.0], [0.5]])
  >>> projection.apply(w, projection.init(w))[:, 0].tolist()
  [0.0, -3.0, 2.0, 0.0]
  """
  return _masked(f'magnitude {n}:{m}', lambda w: magnitude_mask(w, n=n, m=m), divisor=(m, 1))


def transposable(*, method: Literal['exact', 'two_approx'] = 'exact') -> Projection:
  """Keeps two of four along rows and columns of each 4x4 block: one mask for the forward and the input gradient.

  >>> import jax, sparse24_jax as s24
  >>> w = jax.random.normal(jax.random.key(0), (8, 8))
  >>> projection = s24.transposable()
  >>> int((projection.apply(w, projection.init(w)) != 0).sum())
  32
  """
  return _masked(f'transposable {method}', lambda w: transposable_mask(w, method=method), divisor=(4, 4))


def _masked(name: str, search: Callable[[Array], Array], *, divisor: tuple[int, int]) -> Projection:
  return Projection(
    name=name,
    init=lambda w: MaskState(search(w)),
    apply=lambda w, state: jnp.where(state.mask, w, jnp.zeros((), w.dtype)),
    refresh=lambda w, state: MaskState(search(w)),
    mask=lambda w, state: state.mask,
    transposable=divisor == (4, 4),
    divisor=divisor,
  )


def soft_threshold_projection() -> Projection:
  """beta S(w): the soft threshold of the weight as it is now, times the scale frozen at initialisation.

  Its mask is where S(w) is not zero: at most, and almost always, two of four.

  >>> import jax, sparse24_jax as s24
  >>> w = jax.random.normal(jax.random.key(0), (64, 64))
  >>> projection = s24.soft_threshold_projection()
  >>> state = projection.init(w)
  >>> state.scale.shape, int((projection.apply(w, state) != 0).sum())
  ((), 2048)
  """
  return Projection(
    name='soft_threshold',
    init=lambda w: ScaleState(soft_threshold_scale(w)),
    apply=_scaled_soft_threshold,
    refresh=lambda w, state: state,
    mask=lambda w, state: soft_threshold(w) != 0,
  )


def _scaled_soft_threshold(w: Array, state: ScaleState) -> Array:
  scale = jnp.expand_dims(state.scale, (-2, -1))
  return (soft_threshold(w).astype(jnp.float32) * scale).astype(w.dtype)
