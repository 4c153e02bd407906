"""What a sparsified nnx model holds beside the plain one: its weights' states, and fingerprints of those weights.

Whoever trains the model is to bring the states of the optimizer in. Where nobody does, in a trainer that owns its step,
masks must not stay those of the first weights. So beside the state of a weight stands its fingerprint, and a forward
with other weights chooses the mask anew, from what it is given.

States that were brought in once must be brought in again whenever the weights change. A packed weight belongs to the
step in which it was packed, and only the optimizer knows masks that wait for their refresh, or links that move. So with
other weights a forward raises an error. Under `jit`, which cannot raise, its result is NaN, as are floating-point
numbers that it writes into the model, a cache say; integers are the least of their dtype. In the step that brings the
states in, tracing shows that the forward gets the very arrays that the fingerprints are of, and nothing is compared at
run time.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
import dataclasses
import functools
import logging
from typing import Any, NamedTuple

from flax import nnx
import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import _partitioning
from pallas_kernels._dispatch import log_once
from sparse24_jax.binding import origin
from sparse24_jax.binding.state import NNX_STATES, WeightState
from sparse24_jax.fingerprint import counts_of
from sparse24_jax.packing import PackedWeight
from sparse24_jax.projection import is_searched, Projection
from sparse24_jax.recipe import Recipe
from sparse24_jax.rules import leaves_by_path, listed, match_rules

RNG = 'mvue'
ATTRIBUTE = NNX_STATES.partition('/')[0]
_BRING_IN = 'nnx.update(model, sparse_variables(nnx.state(model, nnx.Param), opt_state, recipe))'


class SparseVariable(nnx.Variable):
  """Holds the projection state of one weight, or the weight's fingerprint: brought in by `nnx.update` after a step.

  >>> from flax import nnx
  >>> import jax, sparse24_jax as s24
  >>> model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)))
  >>> model = s24.sparsify(model, s24.recipes.ste('.*/kernel'))
  >>> {path: state.shape for path, state in model.sparse24.states.items()}
  {'layers/0/kernel': (8, 16)}
  """


class FingerprintVariable(SparseVariable):
  """Holds the sums of a fingerprint, an array as others are, and as metadata what they are of."""

  def __init__(self, value: Any, **metadata: Any):
    if isinstance(value, dict):
      ((metadata['made_of'], value),) = value.items()
    super().__init__(value, **metadata)

  def fingerprint(self) -> origin.Fingerprint:
    return {self.get_metadata('made_of'): self.get_value()}


class DensePhase(nnx.Module):
  """What the model of a dense phase has in the place of `Sparse`, and what `sparse_variables` gives for it.

  It holds no variables: no state is read, and nothing is sampled. With a `recipe` some layers are in FP8.

  `nnx.update` sets an item of this where it is brought in: here it is there already, and `Sparse` refuses it. So both
  kinds of model see, as they are traced, that they are given what belongs to the other phase.
  """

  MARK = 'phase'

  def __init__(self, recipe: Recipe | None = None):
    self.phase, self.recipe = 'dense', recipe

  def items(self) -> tuple[tuple[str, str], ...]:
    """Items like those of an `nnx.State`."""
    return ((self.MARK, self.phase),)

  def draw(self) -> None:
    """No key, as `Sparse.draw` where none is needed."""

  def states_of(self, params: Any) -> tuple[dict[str, Any], None]:
    """No states, and nothing to find out about them, as `Sparse.states_of`."""
    return {}, None

  def __setattr__(self, name: str, value: Any) -> None:
    if name in ('states', 'made_of'):
      raise ValueError(
        "phase: nnx.update brought sparse states, sparse_variables(..., phase='sparse'), into a model that is not"
        " sparsified in this phase, 'dense', and would stay dense: give sparse_variables the phase of the model, or"
        " make the model of the sparse phase, model = sparsify(model, recipe, phase='sparse', rngs=...)"
      )
    super().__setattr__(name, value)


class Sparse(nnx.Module):
  """What a sparsified model has beside its own attributes.

  Attributes:
    recipe: whose rules its matmuls follow.
    states: `SparseVariable` of each weight that is projected, by its path.
    made_of: fingerprints of the weights that these are the states of, by path, each with what it is of.
    brought_in: whether they are those of an optimizer, a bool.
    fits: whether that one's state serves the recipe, a bool.
    policies: numbers of the policies that the states were made for.
    rngs: streams with one named `'mvue'`, or None.
  """

  def __init__(
    self, recipe: Recipe, states: Mapping[str, Any], made_of: Mapping[str, origin.Fingerprint], brought_in: Any,
    fits: Any, policies: Array, rngs: nnx.Rngs | None,
  ):  # fmt: skip
    # The optimizer alone reads the decay, which may be an array: no part of a graph that is hashed.
    self.recipe = dataclasses.replace(recipe, masked_decay=0.0)
    self.states = nnx.Dict({path: SparseVariable(state) for path, state in states.items()})
    self.made_of = nnx.Dict({path: FingerprintVariable(of) for path, of in made_of.items()})
    self.brought_in = SparseVariable(jnp.asarray(brought_in))
    self.fits = SparseVariable(origin.known(fits))
    self.policies = SparseVariable(policies)
    self.rngs = rngs

  def __setattr__(self, name: str, value: Any) -> None:
    if name == DensePhase.MARK:
      raise ValueError(
        f'phase: nnx.update brought the variables of a dense phase, sparse_variables(..., phase={value!r}), into a'
        " model that is sparsified for phase 'sparse', and would stay sparse: make the model of that phase,"
        f' model = sparsify(model, recipe, phase={value!r}), and train that one'
      )
    super().__setattr__(name, value)

  def read(self) -> dict[str, Any]:
    """The states, by path."""
    # `nnx.capture` puts what it captures among the entries.
    return {path: state.get_value() for path, state in self.states.items() if isinstance(state, nnx.Variable)}

  def read_fingerprints(self) -> dict[str, origin.Fingerprint]:
    """The fingerprints of the weights that the states were made of, by path."""
    return {path: of.fingerprint() for path, of in self.made_of.items() if isinstance(of, nnx.Variable)}

  def states_of(self, params: Any) -> tuple[dict[str, Any], Array | None]:
    """The states as the forward of these parameters reads them, and where that is not known yet, whether it may.

    Raises:
      ValueError: states were brought in of weights that the model does not have, or had, or of an optimizer state that
        does not serve the recipe.
    """
    weights, states = dict(leaves_by_path(params)), self.read()
    known = {path: origin.known_of(of) for path, of in self.read_fingerprints().items()}
    if foreign := [path for path in states if path not in weights]:
      raise ValueError(
        f'{listed(foreign)}: nnx.update brought in states of weights that the model does not have; it has'
        f' {listed(path for path in states if path in weights) or "none"} that are sparse. Give'
        ' sparse_variables the parameters of this model, nnx.state(model, nnx.Param)'
      )
    rules = match_rules(params, self.recipe)
    policies = {path: policy for path, rule in rules.items() if (policy := rule.policy).projection is not None}
    made = {origin.NNX_FITS: self.fits.get_value(), origin.NNX_POLICIES: self.policies.get_value()}
    fits = _all(origin.served(made, policies))
    mine = [path for path, of in known.items() if path in rules and not origin.is_of(of.sums, weights[path])]
    projections = {path: p for path in mine if (p := rules[path].policy.projection)}
    shards = {path for path in projections if not known[path].is_of(weights[path])}
    packed, of_optimizer, chosen = _where_changed(projections, weights, states, shards, self.recipe)
    if not (of_optimizer or chosen):
      return states, fits
    # In the order of the weights: that of a set is another in each process, whose program JAX's cache would not know.
    used = [path for path in projections if path in {*of_optimizer, *chosen}]
    given = {path: jax.lax.stop_gradient(weights[path]) for path in used}
    cut = [path for path in projections if path in shards]
    own = {path: counts_of(weights[path], projections[path].layout_of(weights[path]).stacked) for path in cut}
    known |= {path: known[path]._replace(counts=counts) for path, counts in own.items()}
    changed = origin.changed(given, {path: known[path] for path in given})
    brought = self.brought_in.get_value()
    refused = {path: changed[path] & (path in packed or brought) for path in used if path in of_optimizer}
    wrong = _any(refused.values())
    stale = _any(jnp.logical_and(changed[path], jnp.logical_not(refused.get(path, False))) for path in chosen)

    def anew(kept: dict[str, Any]) -> dict[str, Any]:
      found = {path: _refreshed(projections[path], given[path], kept[path]) for path in chosen}
      return {path: jax.tree.map(functools.partial(jnp.where, changed[path]), found[path], kept[path]) for path in kept}

    kept = {path: _divided(projections[path], given[path], states[path]) for path in chosen}
    if isinstance(wrong, jax.core.Tracer) or isinstance(stale, jax.core.Tracer):
      states |= jax.lax.cond(stale, anew, lambda kept: kept, kept) if kept else {}
      return states, _all([*([jnp.logical_not(wrong)] if refused else []), *([] if fits is None else [fits])])
    if wrong:
      raise ValueError(
        f'{listed(path for path, found in refused.items() if found)}: the states that nnx.update brought in are of'
        f' other weights, those of a step before say, and only the optimizer knows the present ones: {_BRING_IN}'
      )
    if not stale:
      return states, fits
    log_once(
      f'{listed(path for path in chosen if changed[path])}: the masks that the model holds are those of other'
      f' weights, so they are chosen from the weights as they are: bring in those of the optimizer, {_BRING_IN}',
      'sparse24_jax', logging.WARNING,
    )  # fmt: skip
    return states | anew(kept), fits

  def draw(self) -> Array | None:
    """A key for MVUE, which advances the stream; None where none is needed or none is there."""
    if self.rngs is None or all(rule.policy.weight_grad == 'dense' for rule in self.recipe.rules):
      return None
    return self.rngs[RNG]()


def fingerprints(sparse: Mapping[str, tuple[Projection, Array]]) -> dict[str, origin.Fingerprint]:
  """Fingerprints of weights, by path."""
  return origin.fingerprints({path: (w, p.layout_of(w).stacked) for path, (p, w) in sparse.items()})


def dense_state() -> nnx.State:
  """What `nnx.update(model, ...)` takes in a dense phase, in which there are no states."""
  return nnx.State({ATTRIBUTE: DensePhase()})


def sparse_state(
  states: Mapping[str, Any], made_of: Mapping[str, origin.Fingerprint], *, brought_in: bool, fits: Array,
  policies: Array,
) -> nnx.State:  # fmt: skip
  """What `nnx.update(model, ...)` takes to bring the states into a sparsified model."""
  folder = tuple(NNX_STATES.strip('/').split('/'))
  flat: dict[tuple[str, ...], Any] = {(*folder, path): SparseVariable(state) for path, state in states.items()}
  flat |= {(ATTRIBUTE, 'made_of', path): FingerprintVariable(of) for path, of in made_of.items()}
  flat[ATTRIBUTE, 'brought_in'] = SparseVariable(jnp.asarray(brought_in))
  flat[ATTRIBUTE, 'fits'] = SparseVariable(fits)
  flat[ATTRIBUTE, 'policies'] = SparseVariable(policies)
  return nnx.from_flat_state(flat)


class _WhereChanged(NamedTuple):
  """What a forward does where weights are others than those that their states are of.

  Attributes:
    packed: refuses it, since a packed weight is that of one step.
    of_optimizer: these too, and, if an optimizer's states were brought in, those whose masks only that one knows.
    chosen: else chooses masks anew.
  """

  packed: Set[str]
  of_optimizer: Set[str]
  chosen: Sequence[str]


def _where_changed(
  projections: Mapping[str, Projection], weights: Mapping[str, Array], states: Mapping[str, Any], shards: Set[str],
  recipe: Recipe,
) -> _WhereChanged:  # fmt: skip
  packed = {path for path in projections if _is_packed(states[path])}
  kinds = {path: (weights[path].shape, jnp.result_type(weights[path])) for path in projections}
  searched = {path for path, p in projections.items() if is_searched(p, *kinds[path])} - packed
  moving = {path for path, p in projections.items() if p.update is not None} - packed
  waiting = searched if recipe.refresh_every > 1 else set[str]()
  # Of a shard nothing is known: what only the optimizer knows is used as it is, and other masks are chosen anew.
  chosen = [path for path in projections if path in searched - (shards & (waiting | moving))]
  return _WhereChanged(packed - shards, (packed | moving | waiting) - shards, chosen)


def _all(flags: Sequence[Array]) -> Array | None:
  return functools.reduce(jnp.logical_and, flags) if flags else None


def _any(flags: Iterable[Any]) -> Any:
  return functools.reduce(jnp.logical_or, flags, jnp.zeros((), bool))


def _is_packed(state: Any) -> bool:
  return isinstance(state.value if isinstance(state, WeightState) else state, PackedWeight)


def _refreshed(projection: Projection, w: Array, state: Any) -> Any:
  """The state that a refresh finds in a weight; `w` as it is stored, the state by its matrices."""
  matrix, layout = projection.matrix or projection, projection.layout_of(w)
  return WeightState.mapped(functools.partial(matrix.refresh, layout.matrix(w)), state)


def _divided(projection: Projection, w: Array, state: Any) -> Any:
  """A state divided as its weight is, which may have been divided after the mask was chosen."""
  matrix = projection.layout_of(w).matrix(w)
  return WeightState.mapped(lambda s: _partitioning.like(s, matrix) if s.shape == matrix.shape else s, state)
