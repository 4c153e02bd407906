"""From one optimizer state to the next, where a run changes something on purpose."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse24_jax.optim import _identity, _left
from sparse24_jax.optim._state import states_of
from sparse24_jax.optim._training_state import map_weights, SparseTrainingState
from sparse24_jax.optim._weights import unboxed
from sparse24_jax.rules import leaves_by_path, map_by_path


def carry_over(new: Any, old: Any) -> Any:
  """A new optimizer state that goes on where an old one was, for weights or a recipe that are others from here on.

  `new` is `tx.init(params)`. What it would lose comes from `old`: the state of the inner optimizer, the count of steps,
  and mask, scale or links of each weight that was sparse before, by the same projection. So a run goes on with other
  layers sparse, with weights that were set between two steps (averaged over replicas, clipped, swapped for their
  average), or sparse after a dense start, where `old` is the state of a dense run with the same inner optimizer. Of a
  plain one, without `sparse_training`, steps count from zero. The next step may be one of any phase.

  A mask is of the weights that `old` was of, until the next refresh; where weights are others altogether, of another
  run say, take `new` by itself. A state that was refused, as of a step that was given weights of another step, stays
  refused. Outside of `jit` there are two sets of moments in memory, as `tx.init` makes one.

  Args:
    new: of the recipe from here on, and the parameters as they are now; any chain with `sparse_training` in it. Where
      `old` is the `opt_state` of an `nnx.Optimizer`, that of another one: `nnx.Optimizer(model, tx, wrt=nnx.Param)`.
    old: the state so far, of the same chain, or of one that has the inner optimizer in the place of `sparse_training`.

  Returns:
    A state of the structure of `new`.

  Raises:
    ValueError: `new` holds no state of `sparse_training`, or has made steps already (arguments swapped?); or `old` is
      one of another chain, inner optimizer or model.

  >>> import jax, optax, sparse24_jax as s24
  >>> params = {'mlp': {'kernel': jax.random.normal(jax.random.key(0), (8, 8))}}
  >>> tx = optax.chain(optax.clip(1.0), s24.sparse_training(optax.adam(1e-3), s24.recipes.s_ste('mlp/.*')))
  >>> _, state = tx.update(params, tx.init(params), params)
  >>> params = jax.tree.map(lambda w: w.clip(-1.0, 1.0), params)  # set between two steps
  >>> state = s24.carry_over(tx.init(params), state)
  >>> int(state[1].count)
  1
  """
  found = states_of(new, SparseTrainingState)
  counts = [unboxed(state.count) for state in found]
  if not found or any(_identity.is_known(count, wait=True) and np.any(count) for count in counts):
    what = 'has made steps already' if found else 'holds no state of sparse_training'
    without = '' if found else '. To go on without sparse_training, take the inner_state of its state'
    raise ValueError(f'new {what}: it is tx.init(params), and the state so far comes second{without}')

  def is_one(node: Any) -> bool:
    return isinstance(node, SparseTrainingState)

  around, structure = jax.tree.flatten(new, is_leaf=is_one)
  try:
    before = structure.flatten_up_to(old)
  except ValueError:
    raise ValueError(f'{_NO_SUCH_STATE}, whose states are nested in another way') from None
  pairs = zip(around, before, strict=True)
  carried = [_carried(made, was) if is_one(made) else _same('', made, was) for made, was in pairs]
  return jax.tree.unflatten(structure, carried)


_NO_SUCH_STATE = (
  'old is no state of the optimizer that made new, nor of one that has the inner optimizer in the place of'
  ' sparse_training'
)


def _same(where: str, new: Any, old: Any) -> Any:
  """The old state; ValueError if it is of another optimizer, or of other parameters."""
  if jax.tree.structure(new) != jax.tree.structure(old):
    if jax.tree.structure(unboxed(new)) == jax.tree.structure(unboxed(old)):
      raise ValueError(
        'old holds its arrays in other variables of Flax than new: of an nnx.Optimizer new is not tx.init(params), but'
        ' nnx.Optimizer(model, tx, wrt=nnx.Param).opt_state'
      )
    raise ValueError(f'{_NO_SUCH_STATE}: its inner state is of another kind')
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True):
    kinds = [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in (a, b)]
    if kinds[0] != kinds[1]:
      texts = [f'{dtype} of shape {shape}' for shape, dtype in kinds]
      name = f'{where}{jax.tree_util.keystr(path)}' or 'a state around it'
      raise ValueError(f'{_NO_SUCH_STATE}: at {name} new has {texts[0]}, and old {texts[1]}')
  return old


def _carried(new: SparseTrainingState, old: Any) -> SparseTrainingState:
  if not isinstance(old, SparseTrainingState):  # a dense start
    return new._replace(inner_state=_same('inner_state', new.inner_state, old))
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
  same = kept == before.keys() == {path for path, _ in states}
  overall = unboxed((old if same else new).flip_rate.overall)
  state = map_weights(unboxed, new)
  state = state._replace(
    projections=map_by_path(lambda path, s: before[path] if path in kept else s, state.projections),
    flip_rate=state.flip_rate._replace(
      overall=overall,
      per_weight=map_by_path(lambda path, rate: rates[path] if path in kept else rate, state.flip_rate.per_weight),
    ),
    count=unboxed(old.count), inner_state=_same('inner_state', new.inner_state, old.inner_state),
    left=_left.still_refused(unboxed(state.left), unboxed(old.left)),
    identity=unboxed(state.identity)._replace(made_by=_damaged_unless(told, unboxed(state.identity.made_by))),
  )  # fmt: skip
  return jax.tree.unflatten(jax.tree.structure(new), jax.tree.leaves(state))


def _damaged_unless(told: bool | jax.Array, made_by: jax.Array) -> jax.Array:
  """What no recipe's states are made by where, under `jit`, the old state is not what it says."""
  return made_by if told is True else jnp.where(told, made_by, jnp.zeros((), made_by.dtype))
