"""The part of `sparse_training` where links come and go by dense gradients."""

from collections.abc import Callable, Hashable, Mapping, Sequence
import functools
import itertools
import operator
import re
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import optax

from sparse24_jax.optim._search import rounded_once, when_due
from sparse24_jax.optim._weights import Absent, contexts, flip_rates, flips, is_leaf, map_sparse, wider
from sparse24_jax.projection import Projection
from sparse24_jax.recipe import Recipe
from sparse24_jax.rules import map_by_path
from sparse24_jax.selection import word_of
from sparse24_jax.topology import Context, Evolved, Topology

# Ours. The host waits in each loop, so there are few. Each holds updates of its weights, and the weights after them.
_LOOPS = 8


def evolving(projection: Projection | Absent) -> bool:
  """Whether a weight's links change by gradients."""
  return isinstance(projection, Projection) and projection.update is not None


def on_links(
  projections: Any, params: Any, states: Any, updates: Any, elsewhere: Callable[[Array, Array], Array]
) -> Any:
  """The updates of existing links, and `elsewhere(w, u)` where there is none; of other weights as they are."""
  return jax.tree.map(
    functools.partial(_on_links, elsewhere=elsewhere), projections, params, states, updates, is_leaf=is_leaf
  )


def zero(w: Array, u: Array) -> Array:
  """0, for gradients of what is no link.

  The barrier hides it: XLA would share one array of zeros between the links' gradients and the start of a backward scan
  that adds weight gradients up, and keep that array, as large as all gradients, until the end.
  """
  return jax.lax.optimization_barrier(jnp.zeros((), jnp.result_type(u)))


def minus(w: Array, u: Array) -> Array:
  """-w, so that what is no link becomes zero: exactly, where the updates have fewer bits than the weights."""
  return -w.astype(wider(u, w))


def _on_links(
  p: Projection | Absent, w: Array, state: Any, u: Array, *, elsewhere: Callable[[Array, Array], Array]
) -> Array:
  if not evolving(p):
    return u
  other = elsewhere(w, u)
  return jnp.where(p.mask(w, state), u.astype(other.dtype), other)


class _Weight(NamedTuple):
  """One sparse weight, and what its change depends on."""

  projection: Any
  w: Array
  gradient: Array
  context: Context


class _Carried(NamedTuple):
  """What changes of a weight.

  Attributes:
    update: for the weight.
    state: of its projection.
    rate: float32, share of entries whose mask changed, for each matrix.
    flips: float32, number of them; NaN if the weight is not finite.
    moments: those of the inner optimizer's arrays that are like the weight.
  """

  update: Array
  state: Array
  rate: Array
  flips: Array
  moments: tuple[Array, ...]


def evolve(
  recipe: Recipe, inner: optax.GradientTransformation, projections: Any, params: Any, gradients: Any, updates: Any,
  state: Any, *, missed: Array, rests: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
  """Updates and state of a step, where some projection changes by dense `gradients`.

  Weights are searched a few at a time: updates, weights after the step and what a search needs are then there for a
  few of them only, not for all at once.

  Args:
    recipe: as in `sparse_training`.
    inner: the inner optimizer.
    projections: tree like `params`.
    params: before the step.
    gradients: dense; if one of them is not finite anywhere, no link changes.
    updates: of the inner optimizer for existing links, and what makes the weight zero elsewhere.
    state: `SparseTrainingState` with the number of this step, the inner optimizer's new state, and all else as it was.
    missed: whether masks are of other weights, those that were replaced, and are to be chosen anew; links stay.
    rests: whether it is known that no link changes in this step.
  """
  if rests:
    if recipe.flip_rate == 'step':
      overall, per_weight = _rates_of_step(projections, params, updates, state.projections, state.projections)
      state = state._replace(flip_rate=state.flip_rate._replace(overall=overall, per_weight=per_weight))
    return updates, state
  kinds, structure = jax.tree.flatten(projections, is_leaf=is_leaf)
  spread = (params, gradients, contexts(projections, params, state.count))
  weights = [_Weight(*each) for each in zip(kinds, *map(structure.flatten_up_to, spread), strict=True)]
  inner_leaves, inner_structure = jax.tree.flatten(state.inner_state)
  new_updates, states, rates = map(
    structure.flatten_up_to, (updates, state.projections, state.flip_rate.per_weight)
  )
  sparse = [i for i, p in enumerate(kinds) if isinstance(p, Projection)]
  moments = _moments(inner, state.inner_state)
  places = {i: moments.get((weights[i].context.path, weights[i].w.shape), []) for i in sparse}
  due = state.count % recipe.refresh_every == 0
  # An inner optimizer that skips a step whose gradients are not finite must not find its links moved.
  due = _when(due, recipe.refresh_every, lambda _: _all_finite(gradients), jnp.zeros((), jnp.bool_))
  counts: list[Array] = []
  moving: dict[Hashable, dict[int, int]] = {}
  for i in filter(lambda i: evolving(kinds[i]), sparse):
    moving.setdefault(_kind(weights[i], states[i]), {})[i] = weights[i].w.size
  masked = {i: weights[i].w.size for i in sparse if not evolving(kinds[i])}
  neighbours = functools.reduce(operator.or_, moving.values(), {})  # those of one kind
  groups = [(due, group) for group in _groups(neighbours)] + [(due | missed, group) for group in _groups(masked)]
  for now, chosen in groups:
    none = jnp.zeros((), jnp.float32)
    kept = [
      _Carried(new_updates[i], states[i], rates[i], none, tuple(inner_leaves[at] for at in places[i])) for i in chosen
    ]
    found = _when(now, recipe.refresh_every, functools.partial(_change, [weights[i] for i in chosen]), kept)
    for i, new in zip(chosen, found, strict=True):
      new_updates[i], states[i], rates[i] = new.update, new.state, new.rate
      counts.append(new.flips)
      for at, moment in zip(places[i], new.moments, strict=True):
        inner_leaves[at] = moment
  overall = jnp.sum(jnp.stack(counts)) / float(sum(weights[i].w.size for i in sparse))
  updates, projection_states, per_weight = map(structure.unflatten, (new_updates, states, rates))
  overall = jnp.where(due, overall, state.flip_rate.overall)
  if recipe.flip_rate == 'step':
    overall, per_weight = _rates_of_step(projections, params, updates, state.projections, projection_states)
  return updates, state._replace(
    projections=projection_states,
    flip_rate=state.flip_rate._replace(overall=overall, per_weight=per_weight),
    inner_state=inner_structure.unflatten(inner_leaves),
  )


def _change(weights: Sequence[_Weight], carried: Sequence[_Carried]) -> list[_Carried]:
  stepped = [rounded_once(weight.w, own.update) for weight, own in zip(weights, carried, strict=True)]
  if not evolving(weights[0].projection):
    return [_changed(*each, None) for each in zip(weights, carried, stepped, strict=True)]
  changes = [_Change(weight, new, own.state) for weight, new, own in zip(weights, stepped, carried, strict=True)]
  kinds = itertools.groupby(changes, key=lambda change: _kind(change.weight, change.state))
  evolved = itertools.chain.from_iterable(_evolved(list(alike)) for _, alike in kinds)
  return [_changed(*each) for each in zip(weights, carried, stepped, evolved, strict=True)]


class _Change(NamedTuple):
  """A weight, its value after the step, and the links that it had."""

  weight: _Weight
  stepped: Array
  state: Array


def _kind(weight: _Weight, state: Array) -> Hashable:
  """The same for weights whose links one program changes in turn."""
  p, w, gradient, context = weight
  if type((p.matrix or p).update) is not Topology:  # another might ask for the path
    return context.path
  # By name, as layers are divided alike on a mesh that types say nothing of, and q and o may not be.
  return p, *map(jax.typeof, (w, gradient, state)), re.sub(r'\d+', '', context.path)


def _evolved(alike: Sequence[_Change]) -> list[Evolved]:
  """How the links change of weights of one kind."""
  (p, _, gradient, context), stepped, state = alike[0]
  if len(alike) == 1:
    return [p.update(stepped, gradient, state, context)]
  # One body for all: of an unrolled model XLA would compile the searches of each weight by themselves.
  arrays = [(stepped, weight.gradient, state) for weight, stepped, state in alike]
  words = np.stack([word_of(weight.context.path) for weight, *_ in alike])

  def change(which: tuple[Array, Array]) -> Evolved:
    i, word = which
    stepped, gradient, state = jax.lax.switch(i, [lambda own=own: own for own in arrays])
    return p.update(stepped, gradient, state, context._replace(word=word))

  numbers = jnp.arange(len(alike))
  found = jax.lax.map(change, (numbers, words))
  # Hidden from XLA, so that what reads the outcome of one weight is the same program for each.
  numbers = jax.lax.optimization_barrier(numbers)
  return [
    jax.tree.map(functools.partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False), found) for i in numbers
  ]


def _changed(weight: _Weight, carried: _Carried, stepped: Array, evolved: Evolved | None) -> _Carried:
  p, w = weight.projection, weight.w
  moments = carried.moments
  if evolved is None:
    state = p.refresh(stepped, carried.state)
  else:
    state, reset = evolved
    # Links are never dropped for being NaN: that would hide it as a zero.
    finite = jnp.all(jnp.isfinite(stepped))
    state, reset = jnp.where(finite, state, carried.state), reset & finite
    moments = tuple(jnp.where(reset, jnp.zeros((), moment.dtype), moment) for moment in moments)
  flipped = flips(p.mask(w, carried.state), p.mask(stepped, state), stepped)
  rate = jnp.mean(p.layout_of(w).matrix(flipped), axis=(-2, -1))
  return _Carried(
    _on_links(p, w, state, carried.update, elsewhere=minus), state, rate, jnp.sum(flipped), moments
  )


def _all_finite(tree: Any) -> Array:
  return functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)])


def _when(due: Array, every: int, change: Callable[[Any], Any], kept: Any) -> Any:
  """`change(kept)` where it is due, else what is kept."""
  if every == 1:
    return jax.tree.map(functools.partial(jnp.where, due), change(kept), kept)
  return when_due(due, change, kept)


def _groups(sizes: Mapping[int, int]) -> list[list[int]]:
  """Neighbours together: as many as are no larger than the largest of all, or than a share of one in `_LOOPS`.

  >>> _groups({0: 3, 1: 1, 2: 1, 5: 2, 6: 3})
  [[0], [1, 2], [5], [6]]
  """
  room = max(*sizes.values(), sum(sizes.values()) / _LOOPS) if sizes else 0
  groups: list[list[int]] = []
  for i, size in sizes.items():
    if not groups or sum(sizes[j] for j in groups[-1]) + size > room:
      groups.append([])
    groups[-1].append(i)
  return groups


def _moments(inner: optax.GradientTransformation, inner_state: Any) -> dict[Any, list[int]]:
  """The leaves of `inner_state` in trees like the parameters, by the path of the weight there and by their shape."""

  # By path: of an optimizer for a part of the parameters, a whole subtree of the others is one `MaskedNode`.
  def paths(like_params: Any) -> Any:
    return map_by_path(lambda path, _: path, like_params)

  try:
    named = optax.tree_map_params(inner, paths, inner_state, is_leaf=lambda _: True)
  except ValueError as error:  # of optax.flatten, say
    raise ValueError(
      'links that come and go reset moments, but those of the inner optimizer are in no tree like the parameters'
    ) from error
  found: dict[Any, list[int]] = {}
  for at, (path, leaf) in enumerate(zip(jax.tree.leaves(named), jax.tree.leaves(inner_state), strict=True)):
    if isinstance(path, str):
      found.setdefault((path, getattr(leaf, 'shape', None)), []).append(at)
  return found


def _rates_of_step(
  projections: Any, params: Any, updates: Any, states: Any, new_states: Any
) -> tuple[Array, Any]:
  """Compares what a search would choose before and after the step, whatever mask is in use; of links, those in use."""

  def search(p: Projection, w: Array, s: Array) -> Array:
    return p.mask(w, s if p.update else p.refresh(w, s))

  new_weights = rounded_once(params, updates)
  old, new = map_sparse(search, projections, params, states), map_sparse(search, projections, new_weights, new_states)
  return flip_rates(projections, old, new, new_weights)
