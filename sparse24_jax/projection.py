"""What a projection is: how a dense weight becomes the sparse one that the forward uses.

A `Projection` is a bundle of pure functions in the manner of an Optax transformation. It owns no storage: its state,
one array a weight, lives in the optimizer state, changes only there, and is handed to the forward read-only. Those that
the library offers are in `projections`; this file knows no kernel.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

from jax import Array


@dataclasses.dataclass(frozen=True)
class Masked:
  """The weight where the state, a mask, is True: at most two in each group of four along axis -2."""


@dataclasses.dataclass(frozen=True)
class TransposableMasked:
  """As `Masked`, along both axes of each 4x4 block."""


@dataclasses.dataclass(frozen=True)
class SoftThreshold:
  """beta S(w) along `axis`; the state is beta."""

  axis: int = -2


Form = Masked | TransposableMasked | SoftThreshold


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
    update: for masks that change by gradients, in place of `refresh` in sparse phases: `(w, dense gradient, state,
      context) -> (state, reset)`, see `topology.Context` and `topology.Evolved`, called at the start of a run with None
      for the gradient, and then as often as `refresh`. With it, weights outside the mask are held at zero and not
      trained, and where `reset` is True the inner optimizer's moments start at zero. None for all others.
    form: what `apply` does, where sparse matmuls can read the outcome: `Masked`, `TransposableMasked` or
      `SoftThreshold`. None leaves the weight to dense matmuls.
    clusters: how many clusters of neurons the state names beside what the weight needs, see `clusters.clustered`.

  >>> import jax.numpy as jnp, sparse24_jax as s24
  >>> half = s24.Projection(  # keeps the first two of four
  ...   'first two', init=lambda w: jnp.arange(w.shape[-2])[:, None] % 4 < 2 * jnp.ones(w.shape, int),
  ...   apply=lambda w, mask: jnp.where(mask, w, 0.0), refresh=lambda w, mask: mask, mask=lambda w, mask: mask)
  >>> w = jnp.ones((4, 1))
  >>> s24.dot(jnp.ones((1, 4)), w, half.init(w), policy=s24.DotPolicy(half)).item()
  2.0
  """

  name: str
  init: Callable[[Array], Array]
  apply: Callable[[Array, Array], Array]
  refresh: Callable[[Array, Array], Array]
  mask: Callable[[Array, Array], Array]
  transposable: bool = False
  divisor: tuple[int, int] = (4, 1)
  update: Callable[..., Any] | None = None
  form: Form | None = None
  clusters: int = 0

  def __reduce__(self) -> tuple[Callable[..., Any], tuple]:
    # The functions inside have no names that pickle could look up: the call is repeated, which finds the same object.
    return _CALLS.get(self) or (Projection, tuple(self))


_CALLS: dict[Projection, tuple[Callable[..., Any], tuple]] = {}


def remembered(make: Callable[..., Projection]) -> Callable[..., Projection]:
  """`functools.cache` for what makes projections, by which they can be pickled as well."""

  @functools.cache
  def cached(*args: Any, **kwargs: Any) -> Projection:
    projection = make(*args, **kwargs)
    _CALLS[projection] = (functools.partial(remembering, *args, **kwargs), ())
    return projection

  remembering = functools.wraps(make)(cached)
  return remembering
