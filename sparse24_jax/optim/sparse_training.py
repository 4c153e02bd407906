"""`sparse_training`: one wrapper around an optimizer that owns everything sparse about a run."""

import logging
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import optax

from pallas_kernels import _dispatch
from sparse24_jax.metrics import flip_rate
from sparse24_jax.optim._state import find_state, states_of
from sparse24_jax.optim.masked_decay import add_decay
from sparse24_jax.optim.step_adam import StepAdamState
from sparse24_jax.projection import Projection
from sparse24_jax.recipe import PhaseName, Recipe, resolve_phase
from sparse24_jax.rules import match_rules, path_string
from sparse24_jax.topology import Context, Evolved


class FlipRate(NamedTuple):
  """Shares of weights whose mask changed at the last refresh (or step).

  Attributes:
    overall: float32 scalar, over all sparse weights together; 0 before the first comparison.
    per_weight: float32, shape `w.shape[:-2]` for a weight `w`: a scalar, or a rate a scanned layer. From
      `get_flip_rate` a dictionary by path; inside the optimizer state a tree like the parameters.
  """

  overall: Array
  per_weight: Any


class SparseTrainingState(NamedTuple):
  """State of `sparse_training`.

  Attributes:
    count: int32 scalar, optimizer steps done.
    projections: tree like the parameters, the projection's state at each sparse weight, `optax.MaskedNode()`
      elsewhere.
    flip_rate: of the last comparison.
    inner_state: of the inner optimizer.
  """

  count: Array
  projections: Any
  flip_rate: FlipRate
  inner_state: Any


def sparse_training(
  inner: optax.GradientTransformation,
  recipe: Recipe,
  *,
  phase: PhaseName | None = None,
  learning_rate: optax.ScalarOrSchedule | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Wraps `inner` with the recipe's masks, masked decay and flip rates.

  At each update, in this order: lambda (1 - M) W is added to the gradient in float32 (sparse phase, decay on
  gradients), `inner` updates, the decay is taken from the weight (decay on weights), and every `refresh_every` steps
  the masks are chosen anew from the updated weights. With a projection that has an `update` (`dynamic_sparse`), the
  inner optimizer sees the gradients of existing links only, the others are held at zero, and every `refresh_every`
  steps the topology changes by the weights and the dense gradients of that step, which is a step like any other. Clip
  *before* this wrapper, so that the decay is not clipped: `optax.chain(optax.clip_by_global_norm(1.0),
  sparse_training(optax.adamw(lr), recipe))`. Nothing that changes updates may come after it, since the masks are
  chosen from the weights as this wrapper leaves them; nor an optimizer around it that keeps weights of its own, as
  `optax.contrib.schedule_free` does. It counts calls of its own update, so `optax.MultiSteps` around
  it counts optimizer steps.

  A search is a loop of one pass or none, so that a step without one copies nothing: `update` has no reverse-mode
  derivative unless `refresh_every` is 1.

  The state has one structure in all phases: build an optimizer for each phase and carry the state through. Masks go
  on being chosen and compared in dense phases, where nothing reads them.

  Args:
    inner: the optimizer, learning rate and weight decay included.
    recipe: what is sparse and how.
    phase: `'sparse'` or `'dense'`, a Python value: a step compiled for a phase contains nothing of the other. None is
      the recipe's first.
    learning_rate: the inner optimizer's; only for decay on weights, which it multiplies.

  Returns:
    A gradient transformation. `init` raises ValueError when the recipe does not fit the parameters.

  Raises:
    ValueError: unknown phase, or decay on weights without a learning rate.

  Source: Hu et al., arXiv 2404.01847, equation 10 and section 4.

  >>> import jax, jax.numpy as jnp, optax, sparse24_jax as s24
  >>> params = {'mlp': {'kernel': jax.random.normal(jax.random.key(0), (8, 8))}}
  >>> recipe = s24.recipes.transposable_srste('mlp/.*', masked_decay=1e-4)
  >>> tx = optax.chain(optax.clip_by_global_norm(1.0), s24.sparse_training(optax.adamw(1e-3), recipe))
  >>> state = tx.init(params)
  >>> updates, state = tx.update(params, state, params)
  >>> int(state[1].count), float(state[1].projections['mlp']['kernel'].mean())
  (1, 0.5)
  """
  phase = resolve_phase(recipe, phase)
  has_decay = not isinstance(recipe.masked_decay, float | int) or recipe.masked_decay > 0
  if has_decay and recipe.decay_on == 'weights' and learning_rate is None:
    raise ValueError(
      f'recipe {recipe.name!r} decays weights, times the learning rate: give sparse_training(..., learning_rate=...)'
    )
  inner = optax.with_extra_args_support(inner)

  def init(params: Any) -> SparseTrainingState:
    projections = _projections(params, recipe)
    contexts = _contexts(projections, params, jnp.zeros((), jnp.int32))
    states = _map(_start, projections, params, contexts)
    rates = _map(lambda p, w: jnp.zeros(w.shape[:-2], jnp.float32), projections, params)
    none_yet = FlipRate(jnp.zeros((), jnp.float32), rates)
    inner_state = inner.init(params)
    if recipe.name == 'step' and not states_of(inner_state, StepAdamState):
      message = "recipe 'step' without step_adam inside: no second moment is held, which leaves a dense start and STE"
      _dispatch.log_once(message, 'sparse24_jax', logging.WARNING)
    return SparseTrainingState(jnp.zeros((), jnp.int32), states, none_yet, inner_state)

  def update(updates: Any, state: SparseTrainingState, params: Any = None, **extra: Any):
    if params is None:
      raise ValueError('sparse_training needs the parameters: call update(updates, state, params)')
    projections = _projections(params, recipe)
    decays = has_decay and phase == 'sparse'
    if decays:
      decay = recipe.masked_decay(state.count) if callable(recipe.masked_decay) else recipe.masked_decay
      masks = _map(lambda p, w, s: p.mask(w, s), projections, params, state.projections)
    if decays and recipe.decay_on == 'gradients':
      updates = add_decay(updates, params, masks, decay)
    evolves = phase == 'sparse' and any(map(_evolving, jax.tree.leaves(projections, is_leaf=_is_leaf)))
    if evolves:
      gradients, updates = updates, _on_links(projections, params, state.projections, updates, jnp.zeros_like)
    updates, inner_state = inner.update(updates, state.inner_state, params, **extra)
    if decays and recipe.decay_on == 'weights':
      rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
      updates = add_decay(updates, params, masks, -rate * decay)

    count = optax.safe_increment(state.count)
    if evolves:
      updates = _on_links(projections, params, state.projections, updates, jnp.negative)
      state = state._replace(inner_state=inner_state)
      return _evolve(recipe, inner, projections, count, params, gradients, updates, state)
    states, rates = _refresh(recipe, projections, count, params, updates, state)
    return updates, SparseTrainingState(count, states, rates, inner_state)

  return optax.GradientTransformationExtraArgs(init, update)


def get_flip_rate(opt_state: Any) -> FlipRate:
  """The flip rates in an optimizer state, however deep it is wrapped; `per_weight` by path. Works inside jit.

  Raises:
    ValueError: the state holds no `SparseTrainingState`, or several.

  Source: Hu et al., arXiv 2404.01847, definition 4.1.

  >>> import jax, optax, sparse24_jax as s24
  >>> params = {'mlp': {'kernel': jax.random.normal(jax.random.key(0), (8, 8))}}
  >>> tx = s24.sparse_training(optax.sgd(0.5), s24.recipes.ste('mlp/.*'))
  >>> _, state = tx.update(params, tx.init(params), params)
  >>> s24.get_flip_rate(state).per_weight
  {'mlp/kernel': Array(0., dtype=float32)}
  """
  rate = find_state(opt_state, SparseTrainingState, 'sparse_training').flip_rate
  leaves = jax.tree_util.tree_flatten_with_path(rate.per_weight)[0]
  return FlipRate(rate.overall, {path_string(key_path): leaf for key_path, leaf in leaves})


def sparse_states(opt_state: Any) -> dict[str, Array]:
  """The projection states in an optimizer state, by the path of their weight."""
  projections = find_state(opt_state, SparseTrainingState, 'sparse_training').projections
  leaves = jax.tree_util.tree_flatten_with_path(projections)[0]
  return {path_string(key_path): leaf for key_path, leaf in leaves}


class _Absent(NamedTuple):
  """Stands for no projection; a leaf for `_map`."""


def _projections(params: Any, recipe: Recipe) -> Any:
  """Tree like `params` with a `Projection` at each sparse weight and `_Absent` elsewhere."""
  rules = match_rules(params, recipe)

  def of(key_path: tuple, leaf: Any) -> Projection | _Absent:
    del leaf
    rule = rules.get(path_string(key_path))
    return (rule and rule.policy.projection) or _Absent()

  return jax.tree_util.tree_map_with_path(of, params)


def _map(f: Any, projections: Any, *rest: Any) -> Any:
  """f(projection, ...) at each sparse weight, `optax.MaskedNode()` elsewhere."""
  return jax.tree.map(
    lambda p, *r: optax.MaskedNode() if isinstance(p, _Absent) else f(p, *r),
    projections,
    *rest,
    is_leaf=_is_leaf,
  )


def _is_leaf(node: Any) -> bool:
  return isinstance(node, Projection | _Absent)


def _refresh(
  recipe: Recipe, projections: Any, count: Array, params: Any, updates: Any, state: SparseTrainingState
) -> tuple[Any, FlipRate]:
  """Projection states and flip rates after the step that made `count`."""
  # The barrier makes their rounding one: XLA may compute a sum in two places, in one as a fused multiply-add, and an
  # entry then differs from the threshold that it is itself. Outside of the loop, this is the sum that
  # `optax.apply_updates` makes in the caller's step. Inside, it would have XLA keep the updates and a copy of the old
  # weights for a search that is seldom made.
  new_weights = jax.lax.optimization_barrier(optax.apply_updates(params, updates))

  def search(states: Any) -> tuple[Any, FlipRate]:
    new_states = _map(lambda p, w, s: p.refresh(w, s), projections, new_weights, states)
    old = _map(lambda p, w, s: p.mask(w, s), projections, params, states)
    new = _map(lambda p, w, s: p.mask(w, s), projections, new_weights, new_states)
    return new_states, _flip_rate(old, new)

  due = count % recipe.refresh_every == 0
  if recipe.flip_rate == 'refresh':
    if recipe.refresh_every == 1:
      return search(state.projections)
    kept = (state.projections, state.flip_rate)
    # One pass or none: what a loop carries is changed in place, while `lax.cond` copies what it leaves as it is.
    return jax.lax.fori_loop(0, due.astype(jnp.int32), lambda _, carried: search(carried[0]), kept)

  # Per step: what a search would choose before and after this step, whatever the mask in use.
  old = _map(lambda p, w, s: p.mask(w, p.refresh(w, s)), projections, params, state.projections)
  states = _map(lambda p, w, s: p.refresh(w, s), projections, new_weights, state.projections)
  new = _map(lambda p, w, s: p.mask(w, s), projections, new_weights, states)
  if recipe.refresh_every > 1:
    states = jax.tree.map(lambda a, b: jnp.where(due, a, b), states, state.projections)
  return states, _flip_rate(old, new)


def _flip_rate(old: Any, new: Any) -> FlipRate:
  rates = jax.tree.map(lambda a, b: jnp.mean(a != b, axis=(-2, -1), dtype=jnp.float32), old, new)
  overall = flip_rate(old, new) if jax.tree.leaves(new) else jnp.zeros((), jnp.float32)
  return FlipRate(overall, rates)


def _evolving(projection: Projection | _Absent) -> bool:
  return isinstance(projection, Projection) and projection.update is not None


def _contexts(projections: Any, params: Any, step: Array) -> Any:
  """Tree like `params`, a `Context` at each leaf."""
  leaves = jax.tree_util.tree_flatten_with_path(projections, is_leaf=_is_leaf)[0]
  shapes: dict[Any, dict[str, tuple[int, ...]]] = {}
  for (key_path, projection), w in zip(leaves, jax.tree.leaves(params), strict=True):
    shapes.setdefault(projection, {})[path_string(key_path)] = w.shape
  return jax.tree_util.tree_map_with_path(
    lambda key_path, p: Context(step, path_string(key_path), shapes[p]), projections, is_leaf=_is_leaf
  )


def _start(projection: Projection, w: Array, context: Context) -> Array:
  state = projection.init(w)
  return state if projection.update is None else projection.update(w, None, state, context).state


def _on_links(projections: Any, params: Any, states: Any, updates: Any, elsewhere: Any) -> Any:
  """The updates of existing links, and `elsewhere(w)` where there is none; of other weights as they are."""

  def one(p: Projection | _Absent, w: Array, state: Any, u: Array) -> Array:
    return jnp.where(p.mask(w, state), u, elsewhere(w).astype(u.dtype)) if _evolving(p) else u

  return jax.tree.map(one, projections, params, states, updates, is_leaf=_is_leaf)


def _evolve(
  recipe: Recipe,
  inner: optax.GradientTransformation,
  projections: Any,
  count: Array,
  params: Any,
  gradients: Any,
  updates: Any,
  state: SparseTrainingState,
) -> tuple[Any, SparseTrainingState]:
  """Updates and state after the step that made `count`, where some projection changes by dense `gradients`."""
  contexts = _contexts(projections, params, count)

  def one(p: Projection, w: Array, g: Array, s: Array, context: Context) -> Evolved:
    return Evolved(p.refresh(w, s), jnp.zeros_like(w, jnp.bool_)) if p.update is None else p.update(w, g, s, context)

  def change(carried: Any) -> tuple[Any, Any, FlipRate, Any]:
    updates, states, _, inner_state = carried
    new_weights = jax.lax.optimization_barrier(optax.apply_updates(params, updates))
    evolved = _map(one, projections, new_weights, gradients, states, contexts)
    new_states, resets = (_map(lambda p, e, i=i: e[i], projections, evolved) for i in range(2))
    old = _map(lambda p, w, s: p.mask(w, s), projections, params, states)
    new = _map(lambda p, w, s: p.mask(w, s), projections, new_weights, new_states)
    new_updates = _on_links(projections, params, new_states, updates, jnp.negative)
    return new_updates, new_states, _flip_rate(old, new), _reset(inner, inner_state, resets)

  kept = (updates, state.projections, state.flip_rate, state.inner_state)
  due = count % recipe.refresh_every == 0
  # A loop of one pass or none, as in `_refresh`: a conditional would copy the moments in every step.
  new_updates, states, rates, inner_state = (
    change(kept)
    if recipe.refresh_every == 1
    else jax.lax.fori_loop(0, due.astype(jnp.int32), lambda _, carried: change(carried), kept)
  )
  if recipe.flip_rate == 'step':

    def search(p: Projection, w: Array, s: Array) -> Array:
      return p.mask(w, s if p.update else p.refresh(w, s))

    new_weights = jax.lax.optimization_barrier(optax.apply_updates(params, new_updates))
    old = _map(search, projections, params, state.projections)
    rates = _flip_rate(old, _map(search, projections, new_weights, states))
  return new_updates, SparseTrainingState(count, states, rates, inner_state)


def _reset(inner: optax.GradientTransformation, inner_state: Any, resets: Any) -> Any:
  """Zeros in every tree like the parameters inside `inner_state`, where `resets` says so.

  What has not the shape of its weight, a factored moment say, stays as it is.
  """

  # By path: of an optimizer for a part of the parameters, a whole subtree of the others is one `MaskedNode`.
  by_path = {path_string(key_path): reset for key_path, reset in jax.tree_util.tree_flatten_with_path(resets)[0]}

  def one(key_path: tuple, leaf: Any) -> Any:
    reset = by_path.get(path_string(key_path))
    if reset is None or getattr(leaf, 'shape', None) != reset.shape:
      return leaf
    return jnp.where(reset, jnp.zeros((), leaf.dtype), leaf)

  def tree(like_params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(one, like_params)

  return optax.tree_map_params(inner, tree, inner_state, is_leaf=lambda _: True)
