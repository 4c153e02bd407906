"""From one optimizer state to the next, where a run changes something on purpose."""

from typing import Any

import jax
import jax.numpy as jnp

from sparse24_jax.optim import _identity, _left
from sparse24_jax.optim._state import states_of
from sparse24_jax.optim._training_state import map_weights, NOT_COMPARED, SparseTrainingState
from sparse24_jax.optim._weights import unboxed
from sparse24_jax.rules import leaves_by_path, map_by_path


def carry_over(new: Any, old: Any) -> Any:
  """A new optimizer state that goes on where an old one was, for weights or a recipe that are others from here on.

  `new` is `tx.init(params)`. What it would lose comes from `old`: the state of the inner optimizer, the count of steps,
  and mask, scale or links of each weight that was sparse before, by the same projection. So a run goes on with other
  layers sparse, with weights that were set between two steps (averaged over replicas, clipped, swapped for their
  average), or sparse after a dense start, where `old` is the state of a dense run with the same inner optimizer, and
  steps count from zero.

  A mask is of the weights that `old` was of, until the next refresh; where weights are others altogether, of another
  run say, take `new` by itself. A state that was refused, as of a step that was given weights of another step, stays
  refused.

  Args:
    new: of the recipe from here on, and the parameters as they are now; any chain with `sparse_training` in it.
    old: the state so far, of the same chain, or of one that has the inner optimizer in the place of `sparse_training`.

  Returns:
    A state of the structure of `new`.

  Raises:
    ValueError: `new` holds no state of `sparse_training`, or `old` is one of another chain or inner optimizer.

  >>> import jax, optax, sparse24_jax as s24
  >>> params = {'mlp': {'kernel': jax.random.normal(jax.random.key(0), (8, 8))}}
  >>> tx = optax.chain(optax.clip(1.0), s24.sparse_training(optax.adam(1e-3), s24.recipes.s_ste('mlp/.*')))
  >>> _, state = tx.update(params, tx.init(params), params)
  >>> params = jax.tree.map(lambda w: w.clip(-1.0, 1.0), params)  # set between two steps
  >>> state = s24.carry_over(tx.init(params), state)
  >>> int(state[1].count)
  1
  """
  if not states_of(new, SparseTrainingState):
    raise ValueError('new holds no state of sparse_training: it is tx.init(params), and old comes second')

  def one(made: Any, before: Any) -> Any:
    if not isinstance(made, SparseTrainingState):
      return before
    return _carried(made, before) if isinstance(before, SparseTrainingState) else _after_dense(made, before)

  try:
    return jax.tree.map(one, new, old, is_leaf=lambda node: isinstance(node, SparseTrainingState))
  except ValueError as error:
    raise ValueError(
      'old is no state of the optimizer that made new, nor of one that has the inner optimizer in the place of'
      f' sparse_training: {error}'
    ) from error


def _after_dense(new: SparseTrainingState, old: Any) -> SparseTrainingState:
  return new._replace(inner_state=_inner(new.inner_state, old))


def _inner(new: Any, old: Any) -> Any:
  """The old one; ValueError if it is of another optimizer, or of other parameters."""
  shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(state)] for state in (new, old)]
  if jax.tree.structure(new) != jax.tree.structure(old) or shapes[0] != shapes[1]:
    raise ValueError(f'its inner state is {jax.tree.structure(old)}, and that of new {jax.tree.structure(new)}')
  return old


def _carried(new: SparseTrainingState, old: SparseTrainingState) -> SparseTrainingState:
  before = dict(leaves_by_path(unboxed(old.projections)))
  # A state that was read into the tree of another recipe would say here that its masks are of that one's kind.
  told = _identity.require_made_by(unboxed(old.identity), old.layouts, list(before))
  rates = dict(leaves_by_path(unboxed(old.flip_rate.per_weight)))
  states = leaves_by_path(unboxed(new.projections))
  kept = {
    path for path, state in states
    if path in before and old.layouts.describe(path) == new.layouts.describe(path)
    and (state.shape, state.dtype) == (before[path].shape, before[path].dtype)
  }  # fmt: skip
  # What is compared of all weights together is of these.
  overall = unboxed(old.flip_rate.overall) if kept == before.keys() == {path for path, _ in states} else NOT_COMPARED
  state = map_weights(unboxed, new)
  state = state._replace(
    projections=map_by_path(lambda path, s: before[path] if path in kept else s, state.projections),
    flip_rate=state.flip_rate._replace(
      overall=jnp.asarray(overall, jnp.float32),
      per_weight=map_by_path(lambda path, rate: rates[path] if path in kept else rate, state.flip_rate.per_weight),
    ),
    count=unboxed(old.count), inner_state=_inner(new.inner_state, old.inner_state),
    left=_left.still_refused(unboxed(state.left), unboxed(old.left)),
    identity=_identity.Identity(
      _damaged_unless(told, unboxed(state.identity.made_by)), unboxed(old.identity.phase)
    ),
  )  # fmt: skip
  return jax.tree.unflatten(jax.tree.structure(new), jax.tree.leaves(state))


def _damaged_unless(told: bool | jax.Array, made_by: jax.Array) -> jax.Array:
  """What no recipe's states are made by where, under `jit`, the old state is not what it says."""
  return made_by if told is True else jnp.where(told, made_by, jnp.zeros((), made_by.dtype))
