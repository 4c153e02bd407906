"""The part of `sparse_training` where masks are chosen anew and compared with those before, in steps that are due."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import optax

from sparse24_jax.optim._training_state import FlipRate, SparseTrainingState
from sparse24_jax.optim._weights import flip_rates, map_sparse
from sparse24_jax.projection import Projection
from sparse24_jax.recipe import Recipe


def compared_before(recipe: Recipe, projections: Any, due: Array, params: Any, states: Any) -> Any:
  """Masks before a step, to compare with those after it; `MaskedNode` where the state is one."""

  def of(p: Projection, w: Array, s: Array) -> Any:
    if recipe.flip_rate == 'step':  # what a search would choose, whatever the mask in use
      return p.mask(w, p.refresh(w, s))
    mask = p.mask(w, s)
    return optax.MaskedNode() if mask is s else mask

  def search() -> Any:
    return map_sparse(of, projections, params, states)

  if recipe.flip_rate == 'step' or recipe.refresh_every == 1:
    return search()
  none_yet = map_sparse(_none_yet, projections, params, jax.eval_shape(search))
  return when_due(due, lambda _: search(), none_yet) if jax.tree.leaves(none_yet) else none_yet


def _none_yet(p: Projection, w: Array, mask: Any) -> Any:
  """A mask to begin with, sharded as its weight; nothing where none is to come."""
  return mask if isinstance(mask, optax.MaskedNode) else jnp.zeros_like(w, dtype=mask.dtype)


def when_due(due: Array, change: Callable[[Any], Any], kept: Any) -> Any:
  """`change(kept)` in steps that refresh masks, else what is kept."""
  # One pass or none: what a loop carries is changed in place, while `lax.cond` copies what it leaves as it is.
  return jax.lax.fori_loop(0, due.astype(jnp.int32), lambda _, carried: change(carried), kept)


def rounded_once(params: Any, updates: Any) -> Any:
  """The weights after a step."""
  # The barrier makes their rounding one: XLA may compute a sum in two places, in one as a fused multiply-add, and an
  # entry then differs from the threshold that it is itself. Outside of the loop of a search, this is the sum that
  # `optax.apply_updates` makes in the caller's step. Inside, it would have XLA keep the updates and a copy of the old
  # weights for a search that is seldom made.
  return jax.lax.optimization_barrier(optax.apply_updates(params, updates))


def refreshed(
  recipe: Recipe, projections: Any, due: Array, compared: Any, new_weights: Any, state: SparseTrainingState
) -> tuple[Any, FlipRate]:
  """Projection states and flip rates after a step."""

  def search(states: Any) -> tuple[Any, FlipRate]:
    new_states = map_sparse(lambda p, w, s: p.refresh(w, s), projections, new_weights, states)
    new = map_sparse(lambda p, w, s: p.mask(w, s), projections, new_weights, new_states)
    old = map_sparse(lambda p, s, m: s if isinstance(m, optax.MaskedNode) else m, projections, states, compared)
    return new_states, FlipRate(*flip_rates(projections, old, new, new_weights))

  if recipe.refresh_every == 1:
    return search(state.projections)
  if recipe.flip_rate == 'refresh':
    return when_due(due, lambda kept: search(kept[0]), (state.projections, state.flip_rate))
  states, rates = search(state.projections)
  return jax.tree.map(lambda a, b: jnp.where(due, a, b), states, state.projections), rates
