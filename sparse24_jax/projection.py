"""What a projection is: how a dense weight becomes the sparse one that the forward uses.

A `Projection` is a bundle of pure functions in the manner of an Optax transformation. It owns no storage: its state,
one array a weight, lives in the optimizer state, changes only there, and is handed to the forward read-only. Those that
the library offers are in `projections`; this file knows no kernel.
"""

from collections.abc import Callable
import dataclasses
import functools
import inspect
from typing import Any, NamedTuple

import jax
from jax import Array

from pallas_kernels._program import one_program
from sparse24_jax.layout import Layout


@dataclasses.dataclass(frozen=True)
class Masked:
  """The weight where the state, a mask, is True: at most `n`, one or two, in each group of four along axis -2."""

  n: int = 2


@dataclasses.dataclass(frozen=True)
class TransposableMasked:
  """Like `Masked`, but along both axes of each 4x4 block."""


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
    refresh: `(w, state) -> state`, called by the optimizer every `refresh_every` steps with the new weight. If it
      returns the very state that it is given, there is nothing to search, and no step waits for one.
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
    layout: how the weight is stored, if not as `[..., in, out]`; see `stored_as`, which makes such projections.
    matrix: the projection of the matrix `[..., in, out]` then.

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
  layout: Layout | None = None
  matrix: Any = None  # a Projection; of itself a named tuple cannot say so in a way that pdoc reads

  def __repr__(self) -> str:
    return f'<{self.name}{"" if self.layout is None else f", {self.layout.describe()}"}>'

  @property
  def label(self) -> str:
    """The name for a table: without the settings by which links come and go."""
    label = getattr((self.matrix or self).update, 'label', None)
    return f'dynamic_sparse {label}' if label else self.name

  def layout_of(self, w: Any) -> Layout:
    """The roles of the axes of a weight under this projection."""
    return self.layout or Layout.standard(w.ndim)

  def __reduce__(self) -> tuple[Callable[..., Any], tuple]:
    # The functions inside have no names that pickle could look up: the call is repeated, which finds the same object.
    return _CALLS.get(self) or (Projection, tuple(self))


@functools.lru_cache(maxsize=1024)  # a search takes a while to trace, and a loop asks at every step
def abstract_state(projection: Projection, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
  """Shape and dtype of the state of such a weight, without a search where it is a mask."""
  if isinstance((projection.matrix or projection).form, Masked | TransposableMasked):
    return jax.ShapeDtypeStruct(shape, bool)
  return jax.eval_shape(projection.init, jax.ShapeDtypeStruct(shape, dtype))


@functools.lru_cache(maxsize=1024)
def is_searched(projection: Projection, shape: tuple[int, ...], dtype: Any) -> bool:
  """Whether the state of such a weight is to be chosen anew: not if `refresh` returns the state that it is given.

  >>> import sparse24_jax as s24
  >>> [is_searched(p, (8, 4), 'float32') for p in (s24.magnitude(), s24.soft_threshold_projection())]
  [True, False]
  """
  if projection.update is not None:
    return True
  if projection.layout is not None:
    return is_searched(projection.matrix, projection.layout.matrix_shape(shape), dtype)
  kept = False

  def refresh(w: Array) -> None:
    nonlocal kept
    state = projection.init(w)
    kept = projection.refresh(w, state) is state

  jax.eval_shape(refresh, jax.ShapeDtypeStruct(shape, dtype))
  return not kept


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def straight_through(projection: Projection, w: Array, state: Any) -> Array:
  """`projection.apply`, whose derivative is that of the dense weight as it stands: the identity, of any order."""
  return projection.apply(w, state)


@straight_through.defjvp
def _as_it_stands(projection, primals, tangents):
  return straight_through(projection, *primals), tangents[0]


_CALLS: dict[Projection, tuple[Callable[..., Any], tuple]] = {}


def remembered(make: Callable[..., Projection]) -> Callable[..., Projection]:
  """`functools.cache` for what makes projections, by which they can be pickled as well.

  Calls that ask for the same make one object: an argument at its default, by its name or in its place is the same.
  """
  signature = inspect.signature(make)

  @functools.cache
  def cached(*args: Any, **kwargs: Any) -> Projection:
    projection = make(*args, **kwargs)
    _CALLS[projection] = (functools.partial(remembering, *args, **kwargs), ())
    return projection

  @functools.wraps(make)
  def remembering(*args: Any, **kwargs: Any) -> Projection:
    try:
      bound = signature.bind(*args, **kwargs)
    except TypeError as error:
      raise TypeError(f'{make.__name__}: {error}') from None
    for name, value in bound.arguments.items():  # to a cache True is 1
      if isinstance(value, bool) and not isinstance(signature.parameters[name].default, bool):
        raise ValueError(f'{name}={value} is no number')
    bound.apply_defaults()
    return cached(*bound.args, **bound.kwargs)

  return remembering


@remembered
def stored_as(projection: Projection, layout: Layout) -> Projection:
  """`projection` for weights that are stored in another layout than `[stacked..., in, out]`.

  Its functions take and return arrays as they are stored. A state that is no mask, a scale a matrix say, stays as it
  is.

  >>> import jax, sparse24_jax as s24
  >>> from sparse24_jax.layout import Layout
  >>> w = jax.random.normal(jax.random.key(0), (6, 8))  # [out, in]
  >>> transposed = stored_as(s24.magnitude(), Layout(stacked=(), contracted=(1,), outputs=(0,)))
  >>> transposed.init(w).sum(axis=1).tolist()
  [4, 4, 4, 4, 4, 4]
  """
  if layout.is_standard:
    return projection

  def store(value: Array, w: Array) -> Array:
    return layout.stored(value, w.shape) if value.shape == layout.matrix_shape(w.shape) else value

  def load(state: Array, w: Array) -> Array:
    return layout.matrix(state) if state.shape == w.shape else state

  def of_weight(f: Callable[..., Array]) -> Callable[..., Array]:
    return one_program()(lambda w, *state: store(f(layout.matrix(w), *(load(s, w) for s in state)), w))

  def update(w: Array, gradient: Array | None, state: Array, context: Any) -> Any:
    assert projection.update is not None
    gradient = None if gradient is None else layout.matrix(gradient)
    found = projection.update(layout.matrix(w), gradient, load(state, w), context)
    return found._replace(state=store(found.state, w), reset=store(found.reset, w))

  return projection._replace(
    init=of_weight(projection.init),
    apply=of_weight(projection.apply),
    refresh=of_weight(projection.refresh),
    mask=of_weight(projection.mask),
    update=None if projection.update is None else update,
    form=None,
    layout=layout,
    matrix=projection,
  )
