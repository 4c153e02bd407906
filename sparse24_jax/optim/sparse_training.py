"""`sparse_training`: one wrapper around an optimizer that owns everything sparse about a run."""

from collections.abc import Collection, Iterator
import contextlib
import functools
import logging
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import optax

from pallas_kernels import _dispatch
from sparse24_jax.optim import _identity, _left
from sparse24_jax.optim._evolve import evolve, evolving, minus, on_links, zero
from sparse24_jax.optim._named import DENSE_UPDATE, named, named_one
from sparse24_jax.optim._search import compared_before, refreshed, rounded_once
from sparse24_jax.optim._state import require_optimizer, states_of
from sparse24_jax.optim._training_state import (
  FlipRate,
  map_weights,
  NOT_COMPARED,
  require_same_recipe,
  require_same_weights,
  SparseTrainingState,
  told_to_rest,
  warn_of_forgotten_updates,
)
from sparse24_jax.optim._weights import boxed, first_states, is_leaf, map_sparse, projections_of, some_searched, unboxed
from sparse24_jax.optim.masked_decay import add_decay
from sparse24_jax.optim.step_adam import inside_of, StepAdamState
from sparse24_jax.projection import Projection
from sparse24_jax.recipe import PhaseName, Recipe, resolve_phase, unnamed_phase
from sparse24_jax.rules import (
  leaves_by_path,
  log_matches,
  map_by_path,
  matched_rules,
  require_arrays,
  require_gradients,
)


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
  steps the topology changes by the weights and the dense gradients of that step, which is a step like any other; it
  rests where one of these is not finite. Clip
  *before* this wrapper, so that the decay is not clipped: `optax.chain(optax.clip_by_global_norm(1.0),
  sparse_training(optax.adamw(lr), recipe))`; but inside it for `mixed_sparsity`, `rigl`, `set_` and `static`, whose
  gradients are dense in front of it. Nothing that changes updates may come after it, since the masks are
  chosen from the weights as this wrapper leaves them; nor an optimizer around it that keeps weights of its own or
  blends states, as `optax.contrib.schedule_free`, `optax.lookahead` and `optax.contrib.sam` do.

  If it happens anyway, an error usually follows. The state keeps sums of some entries of up to eight weights as it left
  them. When two steps in a row are given other weights, `get_flip_rate` raises the error, and so do `sparse_variables`
  and `project` outside of jit. Changes of other weights are not seen, nor those below the rounding of bfloat16
  parameters. Code that sets weights after every step, as nGPT normalises them, causes the same error, and where it
  makes other weights of them altogether the forward is NaN: put it inside, as a change of the updates. If the
  weights are replaced by ones that differ by a tenth of their size, say restored without their state, the next sparse
  step leaves a state that later forwards refuse (with NaN under jit); `get_flip_rate` says why. A state that was once
  refused stays so: make another by `init`. Weights that were replaced before the first step, or by ones that differ
  less, train for one step with the masks of others; then masks are chosen anew, but links that come and go stay. Where
  that step may choose none, by `refresh=False`, other weights altogether are refused, those that came to a dense step
  by the next sparse one. Better call `init` with the weights that you train.

  It counts calls of its own update: `optax.MultiSteps` goes around it, so that it counts optimizer steps, and is
  refused inside. `optax.multi_transform`, `partition` and `masked` by which weights have different optimizers go
  inside, as it has to see all sparse weights. Inside `jax.shard_map` parameters have to be whole on every device. Decay
  on weights acts on all sparse weights, and links come and go in all, those that `inner` leaves as they are included.
  To freeze a weight there, leave it dense (`recipe.with_dense`) and have `inner` set its updates to zero, by
  `optax.multi_transform` or `masked` with `optax.set_to_zero`; elsewhere that alone freezes a sparse one. Frozen around
  this wrapper a sparse weight is an error, as above.

  To go on from a dense run with its moments, or with other weights or another recipe than so far: `carry_over`.

  A search is a loop of one pass or none, so that a step without one copies nothing: `update` has no reverse-mode
  derivative unless `refresh_every` is 1. The host waits for the GPU before that loop, in every step. A host that counts
  optimizer steps can skip the wait in most of them: `update(..., refresh=False)`, a Python value, which a chain passes,
  makes a program without a search. Pass it in the steps for which `refresh_at` returns False. In a step that is due to
  search it makes the flip rate NaN, and the state one that is refused. Where no projection searches, as soft
  thresholds do not, every step may have `refresh=False`, which leaves flip rates as they were last measured. Flip rates
  compare with masks from before the step: where the state is not the mask (soft thresholds, and `flip_rate='step'`),
  these are held while `inner` updates, a byte an entry.

  A decayed update has the wider dtype of gradient and parameter, and so has that of a weight whose links come and go.
  `optax.apply_if_finite`, `optax.conditionally_mask` and `optax.conditionally_transform` around this wrapper want the
  dtype of the gradients, as they do around Adam: cast gradients to the parameters' dtype first.

  The state has one structure in all phases: build an optimizer for each phase and carry the state through. Masks go
  on being chosen and compared in dense phases, where nothing reads them.

  Args:
    inner: the optimizer, learning rate and weight decay included.
    recipe: what is sparse and how.
    phase: `'sparse'` or `'dense'`, a Python value: a step compiled for a phase contains nothing of the other. Model,
      variables and `project` take the same (`phase_at`). None is the recipe's first, which one that begins dense, to be
      sparse later, must say; of one that ends dense, as FST does, the first update then logs a warning, once.
    learning_rate: the inner optimizer's; only for decay on weights, which it multiplies.

  Returns:
    A gradient transformation. `init` raises ValueError when the recipe does not fit the parameters, and logs to
    `sparse24_jax`, level INFO, which weights the rules match.

  Raises:
    ValueError: unknown phase, none in a recipe that begins dense, decay on weights without a learning rate, or no
      optimizer; of `init`, `optax.MultiSteps` inside; of both functions, parameters with a leaf that is no array.

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
  named_by_caller, phase = phase, resolve_phase(recipe, phase)
  throughout = None if named_by_caller else unnamed_phase(recipe)
  require_optimizer('inner', inner, 'optax.adamw(1e-3)')
  if recipe.decays and recipe.decay_on == 'weights' and learning_rate is None:
    raise ValueError(
      f'recipe {recipe.name!r} decays weights, times the learning rate: give sparse_training(..., learning_rate=...)'
    )
  inner = optax.with_extra_args_support(inner)

  def init(params: Any) -> SparseTrainingState:
    return _start(inner, recipe, params)

  def update(
    updates: Any, state: SparseTrainingState, params: Any = None, *, refresh: bool | None = None, **extra: Any
  ):
    if params is None:
      raise ValueError('sparse_training needs the parameters: call update(updates, state, params)')
    require_arrays(params, or_numbers=True)
    if not isinstance(refresh, bool | None):
      raise ValueError(f'refresh must be True, False or None, a Python value (see refresh_at), found {refresh!r}')
    rests = refresh is False and recipe.refresh_every > 1
    searches = not rests or recipe.flip_rate == 'step'
    if throughout:  # here, as the first phase may go without its name where an optimizer only makes a state
      _dispatch.log_once(throughout, 'sparse24_jax', logging.WARNING)
    _identity.require_read(state.count, phase)
    # The inner optimizer is given what the caller has; here all arrays are as they are.
    given, boxes = params, jax.tree.structure(updates)
    step = _Step(unboxed(params), unboxed(updates), map_weights(unboxed, state))
    require_gradients(step.params, step.updates)
    warn_of_forgotten_updates(step.params, step.state)
    with _parts_are_named(step.params):
      projections = projections_of(step.params, recipe)
      in_fp8 = {path for path, rule in matched_rules(step.params, recipe).items() if rule.policy.precision != 'default'}
    sparse = [path for path, p in leaves_by_path(projections, is_leaf=is_leaf) if isinstance(p, Projection)]
    require_same_weights(recipe, sparse, step.state)
    fits = require_same_recipe(recipe, step.state)
    params, updates, state = _named_step(step, phase, projections, in_fp8)
    sampled = _left.samples(projections, params)
    # Of weights that are loaded before the first step, masks are chosen anew after it, if it may choose any.
    searched = some_searched(projections, params)
    unmasked = rests and searched
    unmended = unmasked | _left.scaled(projections)
    refused = (state.count > 0) | unmended if phase == 'sparse' else False
    left = _left.given(state.left, sampled, refused, unmended, sparse=phase == 'sparse')
    decays = recipe.decays and phase == 'sparse'
    if decays:
      decay = recipe.masked_decay(state.count) if callable(recipe.masked_decay) else recipe.masked_decay
      masks = map_sparse(lambda p, w, s: p.mask(w, s), projections, params, state.projections)
    if decays and recipe.decay_on == 'gradients':
      updates = add_decay(updates, params, masks, decay)
    evolves = phase == 'sparse' and any(map(evolving, jax.tree.leaves(projections, is_leaf=is_leaf)))
    if evolves:
      gradients, updates = updates, on_links(projections, params, state.projections, updates, zero)
    count = optax.safe_increment(state.count)
    # Weights that were loaded or set have the masks of others, which are not to stay until a refresh.
    missed = jnp.any((left.missed >= 1) | (_left.kept(state.left) & ~unmended)) & searched
    due = (count % recipe.refresh_every == 0) | missed
    # Read before the inner optimizer overwrites the weights, or XLA copies them.
    left, sampled, inner_state = jax.lax.optimization_barrier((left, sampled, state.inner_state))
    if searches and not evolves:
      compared = compared_before(recipe, projections, due, params, state.projections)
      if jax.tree.leaves(compared):
        # The inner optimizer waits for them: else XLA keeps a copy of the weights from which to search them later.
        compared, inner_state = jax.lax.optimization_barrier((compared, inner_state))
    updates = jax.tree.unflatten(boxes, jax.tree.leaves(updates))
    with inside_of(phase if recipe.freezes_second_moment else None):
      updates, inner_state = inner.update(updates, inner_state, given, **extra)
    boxes, updates = jax.tree.structure(updates), unboxed(updates)
    if decays and recipe.decay_on == 'weights':
      rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
      updates = add_decay(updates, params, masks, -rate * decay)
    if fits is not True:  # under jit, where a state of another recipe raises nothing
      updates = _unless_other(fits, projections, updates)

    if evolves:
      updates = on_links(projections, params, state.projections, updates, minus)
      state = state._replace(count=count, inner_state=inner_state)
      updates, state = evolve(recipe, inner, projections, params, gradients, updates, state, missed=missed, rests=rests)
      sampled = rounded_once(sampled, _left.samples(projections, updates))
    else:
      new_weights = rounded_once(params, updates)
      states, rates = state.projections, state.flip_rate
      if searches:
        states, rates = refreshed(recipe, projections, due, compared, new_weights, state)
      state = state._replace(count=count, projections=states, flip_rate=rates, inner_state=inner_state)
      # Of the sum, not of updates: those XLA makes again, from a copy of the weights before the step.
      sampled = _left.samples(projections, new_weights)
    state = state._replace(left=left._replace(sums=_left.sums(sampled)))
    state = state._replace(identity=_identity.after_step(state.identity, phase))
    if unmasked:
      state = told_to_rest(state, count % recipe.refresh_every == 0)
    state = state._replace(projections=named('states', projections, state.projections, params))
    updates = jax.tree.unflatten(boxes, jax.tree.leaves(named('updates', projections, updates, params)))
    return updates, map_weights(functools.partial(boxed, given), state)

  return optax.GradientTransformationExtraArgs(init, update)


def _start(inner: optax.GradientTransformation, recipe: Recipe, params: Any) -> SparseTrainingState:
  """The state before the first step."""
  require_arrays(params, or_numbers=True)
  inner_state, given = inner.init(params), params
  if states_of(inner_state, SparseTrainingState):
    raise ValueError('inner holds sparse_training already; one recipe takes several rules')
  if states_of(inner_state, optax.MultiStepsState):
    raise ValueError(
      'inner holds optax.MultiSteps, by which each micro-batch would count as a step, with decay, refreshes and'
      ' phases of its own: put it outside, optax.MultiSteps(sparse_training(optimizer, recipe), every_k_schedule)'
    )
  params = unboxed(params)
  with _parts_are_named(params):
    projections = projections_of(params, recipe)
  log_matches(params, recipe, whole=not _left_out(params)[0])
  states = first_states(projections, params)
  rates = map_sparse(_no_rate, projections, params)
  none_yet = FlipRate(jnp.float32(NOT_COMPARED), rates)
  if recipe.freezes_second_moment and not states_of(inner_state, StepAdamState):
    message = (
      f'recipe {recipe.name!r} without step_adam inside: no second moment is held, which leaves a dense start and STE'
    )
    _dispatch.log_once(message, 'sparse24_jax', logging.WARNING)
  left = _left.at_start(_left.samples(projections, params))
  identity = _identity.at_start(recipe.layouts, [path for path, _ in leaves_by_path(states)])
  count = jnp.zeros((), jnp.int32)
  state = SparseTrainingState(count, states, none_yet, inner_state, recipe.layouts, left, identity)
  return map_weights(functools.partial(boxed, given), state)


class _Step(NamedTuple):
  """What an update is given, its arrays in no boxes."""

  params: Any
  updates: Any
  state: SparseTrainingState


def _named_step(step: _Step, phase: PhaseName, projections: Any, in_fp8: Collection[str]) -> _Step:
  """The same arrays under names in a traced program, by which `check_step` follows them."""
  params, updates, state = step
  state = state._replace(projections=named('given states', projections, state.projections, params, phase))
  params = named('weights', projections, params, params, phase)
  params = map_by_path(lambda path, w: named_one('fp8', path, w) if path in in_fp8 else w, params)
  updates = named('gradients', projections, updates, params, phase)
  if phase == 'dense' and isinstance(state.count, jax.core.Tracer):
    state = state._replace(count=checkpoint_name(state.count, DENSE_UPDATE))
  return _Step(params, updates, state)


@contextlib.contextmanager
def _parts_are_named(params: Any) -> Iterator[None]:
  """Says so where parameters that do not fit are a part of those of a model."""
  try:
    yield
  except ValueError as error:
    absent, entries = _left_out(params)
    if absent:
      raise ValueError(
        f'{error}. {absent} of the {entries} entries of these parameters are left out, as optax.multi_transform,'
        ' partition and masked around sparse_training do; it takes all of them, with those inside:'
        ' sparse_training(optax.multi_transform(...), recipe)'
      ) from error
    raise


def _left_out(params: Any) -> tuple[int, int]:
  """How many entries of a tree are left out, because others train them, and how many it has."""
  nodes = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
  return sum(isinstance(node, optax.MaskedNode) for node in nodes), len(nodes)


def _unless_other(fits: bool | Array, projections: Any, updates: Any) -> Any:
  """The updates, of sparse weights NaN if their state does not serve the recipe."""
  return jax.tree.map(
    lambda p, u: jnp.where(fits, u, jnp.nan) if isinstance(p, Projection) else u, projections, updates, is_leaf=is_leaf
  )


def _no_rate(p: Projection, w: Array) -> Array:
  # Divided as a rate will be, where types say how stacked axes are: only the type of what is computed here counts.
  return jnp.full_like(jnp.max(p.layout_of(w).matrix(w), axis=(-2, -1)), NOT_COMPARED, jnp.float32)
