"""The state of `sparse_training`, and what is read from it wherever it lies in an optimizer state."""

from collections.abc import Callable, Collection
import itertools
import logging
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _dispatch
from sparse24_jax.layout import Layouts, NEW_STATE
from sparse24_jax.optim import _identity, _left
from sparse24_jax.optim._state import find_state, states_of
from sparse24_jax.optim._weights import unboxed
from sparse24_jax.projection import SoftThreshold
from sparse24_jax.recipe import PhaseName, Recipe
from sparse24_jax.rules import leaves_by_path, listed, matched_rules, VARIABLES

# A rate in the state before the first comparison. Not NaN: whoever looks for bad numbers looks at the state.
NOT_COMPARED = -1.0


class FlipRate(NamedTuple):
  """Shares of weights whose mask changed at the last refresh (or step).

  NaN before the first comparison, at step `refresh_every` of the recipe: a run of fewer steps measures nothing.
  NaN where a weight holds a NaN or an infinity: no mask is chosen from a NaN. Where one is, the group of four (or the
  4x4 block, or the weight, if its links come and go) keeps the mask that it has. So look at the rates, or log them.
  NaN over all also when a step that was to choose masks was told not to (`refresh=False` of `sparse_training`).

  Attributes:
    overall: float32 scalar, over all sparse weights together.
    per_weight: float32, of the shape of a weight's stacked axes: a scalar, or a rate a scanned layer. From
      `get_flip_rate` a dictionary by path; inside the optimizer state a tree like the parameters.

  >>> import jax.numpy as jnp, optax, sparse24_jax as s24
  >>> w = {'kernel': jnp.array([[1.0], [-3.0], [2.0], [0.5]])}
  >>> tx = s24.sparse_training(optax.sgd(1.0), s24.recipes.ste('kernel'))
  >>> _, state = tx.update({'kernel': jnp.array([[-4.0], [0.0], [0.0], [0.0]])}, tx.init(w), w)  # 1 becomes 5
  >>> rates = s24.get_flip_rate(state)  # 5 is kept now, and 2 is not
  >>> print(rates)
  0.5 (kernel 0.5)
  >>> float(rates.overall)  # waits for the step
  0.5
  """

  overall: Array
  per_weight: Any

  def __str__(self) -> str:
    rates = leaves_by_path(self.per_weight)
    if not all(_identity.is_known(rate, wait=True) for rate in (self.overall, *(rate for _, rate in rates))):
      return repr(self)  # under jit, say
    overall, *each = (np.array2string(np.asarray(rate), precision=4) for rate in (self.overall, *(r for _, r in rates)))
    return f'{overall} ({", ".join(f"{path} {rate}" for (path, _), rate in zip(rates, each, strict=True))})'


class SparseTrainingState(NamedTuple):
  """State of `sparse_training`.

  Attributes:
    count: int32 scalar, optimizer steps done.
    projections: tree like the parameters, the projection's state at each sparse weight, `optax.MaskedNode()`
      elsewhere. A mask is in the box that Flax puts around its weight, if any, and so sharded alike; a scale is
      not in a box that says how its array is sharded.
    flip_rate: of the last comparison; -1 before the first one, for which `get_flip_rate` returns NaN.
    inner_state: of the inner optimizer.
    layouts: of the weights that are not stored as `[stacked..., in, out]`, as the recipe was bound, and the projections
      that made the states; no array. A state that is restored has those of the tree it was restored into.
    left: of a few weights, by which it is seen that the next step is given what the last one left.
    identity: what made the states, and the phase of the last step.

  Its trees like the parameters hold arrays of other shapes, too: scales, flip rates, and nothing where no rule matches.
  A function that gives each array the sharding of its parameter asks for the shape:

  >>> import jax, optax, sparse24_jax as s24
  >>> from jax.sharding import PartitionSpec
  >>> params = {'mlp': {'kernel': jax.numpy.ones((8, 8))}, 'head': {'kernel': jax.numpy.ones((8, 4))}}
  >>> specs = {'mlp': {'kernel': PartitionSpec(None, 'data')}, 'head': {'kernel': PartitionSpec('data')}}
  >>> def spec_of(leaf, w, spec):
  ...   if isinstance(leaf, optax.MaskedNode):
  ...     return leaf
  ...   return spec if leaf.shape == w.shape else PartitionSpec()
  >>> tx = s24.sparse_training(optax.adam(1e-3), s24.recipes.s_ste('mlp/.*'))
  >>> found = optax.tree_map_params(
  ...   tx, spec_of, tx.init(params), params, specs, transform_non_params=lambda leaf: PartitionSpec(),
  ...   is_leaf=lambda node: isinstance(node, optax.MaskedNode))
  >>> tuple(found.projections['mlp']['kernel']), tuple(found.inner_state[0].mu['mlp']['kernel'])
  ((), (None, 'data'))

  >>> import jax.numpy as jnp, optax, sparse24_jax as s24
  >>> w = {'kernel': jnp.array([[1.0], [-3.0], [2.0], [0.5]])}
  >>> state = s24.sparse_training(optax.sgd(1.0), s24.recipes.ste('kernel')).init(w)
  >>> int(state.count), state.projections['kernel'][:, 0].tolist()
  (0, [False, True, True, False])
  """

  count: Array
  projections: Any
  flip_rate: FlipRate
  inner_state: Any
  layouts: Layouts
  left: _left.Left
  identity: _identity.Identity


def get_flip_rate(opt_state: Any) -> FlipRate:
  """The flip rates in `opt_state`, however deep their state is wrapped; `per_weight` by path. Works inside jit.

  They are measured at every `refresh_every`-th step of the recipe (`Recipe.flip_rate`), and are NaN before the first of
  these. If the state holds shapes, as `jax.eval_shape` of `init` makes it, so do they.

  Raises:
    ValueError: the state holds no `SparseTrainingState`, or several; or, outside of jit, it shows that the masks are
      those of other weights than the ones that are trained (see `sparse_training`).

  Source: Hu et al., arXiv 2404.01847, definition 4.1.

  >>> import jax, optax, sparse24_jax as s24
  >>> params = {'mlp': {'kernel': jax.random.normal(jax.random.key(0), (8, 8))}}
  >>> tx = s24.sparse_training(optax.sgd(0.5), s24.recipes.ste('mlp/.*'))
  >>> _, state = tx.update(params, tx.init(params), params)
  >>> s24.get_flip_rate(state).per_weight
  {'mlp/kernel': Array(0., dtype=float32)}
  >>> float(s24.get_flip_rate(tx.init(params)).overall)
  nan
  """
  state = find_state(opt_state, SparseTrainingState, 'sparse_training')
  _left.check_left(state._replace(left=unboxed(state.left)))
  per_weight = leaves_by_path(state.flip_rate.per_weight)
  rates = [unboxed(state.flip_rate.overall), *(rate for _, rate in per_weight)]
  if not any(isinstance(rate, jax.ShapeDtypeStruct) for rate in rates):
    with jax.debug_nans(False):  # these are meant
      rates = _shown(rates)
  overall, *each = rates
  return FlipRate(overall, {path: rate for (path, _), rate in zip(per_weight, each, strict=True)})


@jax.jit
def _shown(rates: list[Array]) -> list[Array]:
  """Rates of a state, NaN where nothing was compared."""
  return [jnp.where(rate == NOT_COMPARED, jnp.nan, rate) for rate in rates]


def holds_state(tree: Any) -> bool:
  """Whether a state of `sparse_training` is anywhere in a tree."""
  return bool(states_of(tree, SparseTrainingState))


def sparse_states(opt_state: Any) -> dict[str, Array]:
  """The projection states in an optimizer state, by the path of their weight; ValueError as for `get_flip_rate`."""
  state = find_state(opt_state, SparseTrainingState, 'sparse_training')
  # A training loop asks here, which is not to wait for its last step.
  _left.check_left(state._replace(left=unboxed(state.left)), wait=False)
  return dict(leaves_by_path(state.projections))


def warn_of_other_weights(params: Any, opt_state: Any, *, wait: bool = False, reads: bool = True) -> None:
  """Warns, outside of jit, if these are not the parameters that the last step of the optimizer left.

  Once for each place in a program: where an average is evaluated it is meant, and elsewhere it may not be. Nothing is
  said of a step that is still running, unless this may `wait` for it. `reads` is whether the caller reads the masks.
  """
  state = find_state(opt_state, SparseTrainingState, 'sparse_training')
  if found := _left.unserved(state._replace(left=unboxed(state.left)), unboxed(params), wait=wait):
    states = dict(leaves_by_path(state.projections))
    masks = any(jnp.issubdtype(states[path].dtype, jnp.bool_) for path in found)
    what, without = ('masks', ', or give opt_state=None, which chooses masks from them') if masks else ('scales', '')
    may = f', which may have the {what} of that step' if reads else ''
    _dispatch.log_once(
      f'{listed(found)}: params are not the weights of the last step of opt_state. That is right for an average of'
      f' weights (EMA) and for perturbed ones (SAM){may}. Otherwise give both of the same step; for weights that'
      f' were loaded or set, make the state of them, tx.init(params){without}',
      'sparse24_jax', logging.WARNING, _dispatch.lines_of_calls(),
    )  # fmt: skip


def begins_projected(params: Any, opt_state: Any, recipe: Recipe) -> bool:
  """Whether a dense step begins a dense end with weights of `project`; warns, outside of jit, if it has others.

  So does that of a recipe with a soft threshold or sparse activations, as far as it is known what step was the last.
  Masks alone leave the choice: FST begins with raw weights.
  """
  state = find_state(opt_state, SparseTrainingState, 'sparse_training')
  names = [phase.name for phase in recipe.phases]
  if ('sparse', 'dense') not in itertools.pairwise(names) or not _identity.was_sparse(unboxed(state.identity)):
    return False
  given = unboxed(params)
  others = [
    path for path, rule in matched_rules(given, recipe).items()
    if rule.activation or ((p := rule.policy.projection) and isinstance((p.matrix or p).form, SoftThreshold))
  ]  # fmt: skip
  if others and _left.unchanged(state._replace(left=unboxed(state.left)), given):
    _dispatch.log_once(
      f"{listed(others)}: the sparse steps computed with other weights than params, and the loss of a dense end that"
      " begins with these may jump. Begin it with params = project(params, opt_state, recipe, phase='sparse')",
      'sparse24_jax', logging.WARNING, _dispatch.lines_of_calls(),
    )  # fmt: skip
  return bool(others)


def warn_of_forgotten_updates(params: Any, state: SparseTrainingState) -> None:
  """Warns once, outside of jit, if the second update is not given what the first one left.

  The second one alone is looked at: who forgets to apply updates does so from the start, and only that one waits.
  """
  count = state.count
  if jnp.ndim(count) or not _identity.is_known(count, wait=True) or int(count) != 1:
    return
  if found := _left.changed(state, params, wait=True):
    _dispatch.log_once(
      f'{listed(found)}: the second update is given other weights than the first one left. Apply what update returns,'
      ' params = optax.apply_updates(params, updates), and give the next update these',
      'sparse24_jax', logging.WARNING,
    )  # fmt: skip


def require_made_for(recipe: Recipe, opt_state: Any, *, phase: PhaseName | None = None) -> bool | Array:
  """Whether the masks of `sparse_training` serve a recipe, and may be read for a phase; None is any.

  Raises:
    ValueError: it is known that they do not.
  """
  state = find_state(opt_state, SparseTrainingState, 'sparse_training')
  return require_same_recipe(recipe, state, phase) & _left.serves(unboxed(state.left))


def require_same_weights(recipe: Recipe, wanted: Collection[str], opt_state: Any) -> None:
  """ValueError unless a state has masks of the `wanted` weights, which the recipe makes sparse, and of no others."""
  state = find_state(opt_state, SparseTrainingState, 'sparse_training')
  held = [path for path, _ in leaves_by_path(state.projections)]
  if set(held) == set(wanted):
    return
  absent, more = ([path for path in one if path not in other] for one, other in ((wanted, held), (held, wanted)))
  if more and set(held) == {f'{VARIABLES}{path}' for path in wanted}:
    hint = "it was made of a whole dictionary of variables, and these are its parameters: tx.init(variables['params'])"
  elif more and {f'{VARIABLES}{path}' for path in held} == set(wanted):
    hint = "params is a whole dictionary of variables: give variables['params'], as tx.init was"
  elif absent:
    hint = (
      'it was made with another recipe, or for another part of the variables, as by optax.masked or multi_transform'
      f' around sparse_training, which go inside. To make more weights sparse from here on, make {NEW_STATE}'
    )
  else:
    hint = (
      f'this recipe leaves {listed(more)} dense. Go on with the recipe of the run; or, to train these dense from here'
      f' on, make {NEW_STATE}'
    )
  raise ValueError(
    f'recipe {recipe.name!r} makes {listed(sorted(wanted)) or "nothing"} sparse, the optimizer state holds states for'
    f' {listed(sorted(held)) or "nothing"}: {hint}'
  )


def require_same_recipe(recipe: Recipe, state: SparseTrainingState, phase: PhaseName | None = None) -> bool | Array:
  """Whether a state is one of a recipe and may be read for a phase, as above, of whichever weights its masks are."""
  paths = [path for path, _ in leaves_by_path(state.projections)]
  state.layouts.require(recipe.layouts, paths)
  return _identity.require(unboxed(state.identity), recipe, paths, phase)


def wait_until_known(opt_state: Any) -> None:
  """Waits until the arrays that `require_made_for` reads are computed."""
  for state in states_of(opt_state, SparseTrainingState):
    jax.block_until_ready((state.identity, state.left))


def note_read(opt_state: Any, phase: PhaseName) -> None:
  """Notes for which phase a step that is traced reads the masks of a state."""
  for state in states_of(opt_state, SparseTrainingState):
    _identity.note_read(state.count, phase)


def map_weights(f: Callable[[Any], Any], state: SparseTrainingState) -> SparseTrainingState:
  """The state with `f` of its trees like the parameters."""
  rates = state.flip_rate._replace(per_weight=f(state.flip_rate.per_weight))
  return state._replace(projections=f(state.projections), flip_rate=rates)


def told_to_rest(state: SparseTrainingState, due: Array) -> SparseTrainingState:
  """The state after a step that was told to choose no masks, though it may have been due to."""
  overall = jnp.where(due, jnp.float32(jnp.nan), state.flip_rate.overall)
  left = _left.without_masks(state.left, due)
  return state._replace(flip_rate=state.flip_rate._replace(overall=overall), left=left)
