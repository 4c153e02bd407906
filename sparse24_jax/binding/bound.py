"""`bind`: a recipe that knows the model, from one trace of it."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import dataclasses
import logging
import math
import re
from typing import Any

import jax.numpy as jnp

from pallas_kernels._dispatch import log_once
from sparse24_jax.asked import Asked, PLAIN
from sparse24_jax.binding.blocks import by_itself
from sparse24_jax.binding.notes import Notes, take_notes
from sparse24_jax.binding.reading import Reading
from sparse24_jax.binding.shards import cut_by_shards
from sparse24_jax.binding.tracing import (
  as_callable,
  functional,
  order_is_told,
  params_come_third,
  sizes_are_known,
  trace,
  Traced,
)
from sparse24_jax.binding.values import Matmul
from sparse24_jax.layout import Layout, Layouts
from sparse24_jax.policy import repr_of
from sparse24_jax.projection import TransposableMasked
from sparse24_jax.recipe import Recipe, Rule
from sparse24_jax.rules import leaves_by_path, leaving_dense, listed, match_rules, matched_rules
from sparse24_jax.weight_errors import WeightError

# A backward pass reads each weight transposed.
_OWN_GRADIENT = (
  '. If f contains its own gradient, as jax.value_and_grad(f) does, give the loss or the forward instead. A loss that'
  ' holds a gradient takes the weights of s24.project(params, opt_state, recipe), with the recipe of its forward'
)


@dataclasses.dataclass(frozen=True)
class Use:
  """One matmul of a model that reads a matched weight.

  Attributes:
    tokens: rows that it multiplies, of each stacked matrix; in a loop those of one pass, in a ragged matmul
      the mean over its groups, a float.
    whole: whether it reads all of the matrix. A part, the queries of a fused projection say, is not packed.
    kind: the primitive, 'dot_general' or 'ragged_dot_general'.
    block: the activation of the feed-forward block in which it stands, or None.
    role: 'up', 'gate' or 'down' of that block, 'gate_up' or 'up_gate' of a weight that holds both, or None.
    source: the line of the model.
    dtype: of its operands.
    asked: precision and dtype of the result, where they are not the plain ones.
    apart: why it stands in no block; None if it stands in one, or if its result is what the function returns.
    divided: whether it reads a shard, inside a `shard_map` that divides the weight. Tokens are those of a shard.
    together: role and path of each weight of that block.
    turned: whether it reads the matrix transposed, beside others that do not.
  """

  tokens: float
  whole: bool
  kind: str
  block: str | None
  role: str | None
  source: str
  dtype: str = 'float32'
  asked: Asked = PLAIN
  apart: str | None = None
  divided: bool = False
  together: tuple[tuple[str, str], ...] = ()
  turned: bool = False

  @property
  def packs(self) -> bool:
    """Whether it could read a packed weight."""
    return self.unpacked is None

  @property
  def unpacked(self) -> str | None:
    """Why it cannot, or None."""
    if self.kind != 'dot_general':
      return 'a ragged matmul reads it, for which there is no kernel'
    if unfit := self.asked.unfit(self.dtype):
      return f'no kernel gives what its matmul asks for, {unfit}'
    if self.turned:
      return 'its matmuls read it in both directions, for which each call packs'
    if self.divided:
      return 'a shard_map divides it: each call packs its shards'
    return None if self.whole else 'its matmuls read parts of it, which each call packs'


@dataclasses.dataclass(frozen=True)
class BoundWeight:
  """What the trace found of one matched weight.

  Attributes:
    path: in the parameters.
    shape: as it is stored.
    dtype: as it is stored.
    rule: the first that matches.
    layout: which of its axes are contracted, which are outputs, which are stacked.
    uses: the matmuls that read it.
    notes: what may be wrong with it.

  >>> import jax.numpy as jnp, sparse24_jax as s24
  >>> bound = s24.bind(s24.recipes.ste('w'), lambda p, x: x @ p['w'].T, {'w': jnp.ones((8, 16))}, jnp.ones((4, 16)))
  >>> bound['w'].layout.describe(), bound['w'].uses[0].tokens, bound['w'].packs
  ('in 1, out 0', 4, True)
  """

  path: str
  shape: tuple[int, ...]
  dtype: Any
  rule: Rule
  layout: Layout
  uses: tuple[Use, ...]
  notes: tuple[str, ...] = ()

  @property
  def packs(self) -> bool:
    """Whether a packed weight serves all of its matmuls."""
    return all(use.packs for use in self.uses)

  def serves(self, read: Layout) -> bool:
    """Whether its mask is one for a matmul that reads it so."""
    return read == self.layout or (read == self.layout.turned and any(use.turned for use in self.uses))


@dataclasses.dataclass(frozen=True)
class Bound(Recipe):
  """A recipe and what one trace of the model says of its weights. It takes the place of the recipe everywhere.

  Attributes:
    weights: those whose rule is not plain dense, in the order of the tree.

  >>> import jax.numpy as jnp, sparse24_jax as s24
  >>> bound = s24.bind(s24.recipes.ste('w'), lambda p, x: x @ p['w'].T, {'w': jnp.ones((8, 16))}, jnp.ones((4, 16)))
  >>> bound.name, bound.describe()['layouts']
  ('ste', {'w': 'in 1, out 0'})
  """

  weights: tuple[BoundWeight, ...] = ()

  def __repr__(self) -> str:
    return repr_of(self, weights=f'({len(self.weights)} weights, see check)')

  def __getitem__(self, path: str) -> BoundWeight:
    """The weight of a path."""
    for weight in self.weights:
      if weight.path == path:
        return weight
    raise KeyError(path)

  def with_dense(self, *paths: str) -> 'Bound':
    dense = super().with_dense(*paths)
    kept = (weight for weight in self.weights if not any(re.fullmatch(path, weight.path) for path in paths))
    return dataclasses.replace(self, rules=dense.rules, weights=tuple(kept))

  def with_exact_gradients(self, *paths: str) -> 'Bound':
    listed_paths = ', '.join(map(repr, paths))
    raise ValueError(
      'which matmuls are a block was found for the gradients as they were: change the recipe that bind was given, and'
      f' bind that: bind(recipe_before_bind.with_exact_gradients({listed_paths}), f, params, ...)'
    )

  def without(self, paths: Collection[str], rules: tuple[Rule, ...]) -> 'Bound':
    weights = tuple(weight for weight in self.weights if weight.path not in paths)
    return dataclasses.replace(self, rules=rules, weights=weights)

  def in_dense_phase(self) -> 'Bound | None':
    dense = super().in_dense_phase()
    weights = (dataclasses.replace(weight, rule=weight.rule.in_dense_phase()) for weight in self.weights)
    return dense and Bound.of(dense, (weight for weight in weights if not weight.rule.is_plain))

  @property
  def layouts(self) -> Layouts:
    odd = (weight for weight in self.weights if weight.rule.policy.projection and not weight.layout.is_standard)
    of = tuple((weight.path, weight.layout.describe()) for weight in odd)
    return dataclasses.replace(super().layouts, of=of)

  def layouts_of(self, weights: Mapping[str, Any]) -> Mapping[str, Layout]:
    known = {weight.path: weight for weight in self.weights}
    for path, weight in known.items():
      if path not in weights:
        raise ValueError(f'{path}: the recipe was bound to a model that has this weight, and these parameters do not')
      shape = tuple(weights[path].shape)
      if shape != weight.shape:
        raise ValueError(
          f'{path} has shape {shape}, and had {weight.shape} where the recipe was bound: bind it to this model'
        )
    return {path: weight.layout for path, weight in known.items()}

  def asked_of(self, path: str) -> Asked:
    asked = [use.asked for weight in self.weights if weight.path == path for use in weight.uses]
    return next((one for one in asked if one != PLAIN), PLAIN)

  @property
  def blocks(self) -> tuple[Mapping[str, str], ...]:
    of = {weight.path: {use.together for use in weight.uses} for weight in self.weights}
    found = dict.fromkeys(together for uses in of.values() for together in uses if together)
    return tuple(dict(together) for together in found if all(of.get(path) == {together} for _, path in together))

  @classmethod
  def of(cls, recipe: Recipe, weights: Iterable[BoundWeight]) -> 'Bound':
    """The recipe with what is known of its weights."""
    fields = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(Recipe)}
    return cls(**fields, weights=tuple(weights))

  def unbound(self) -> Recipe:
    """The recipe by itself."""
    return Recipe(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Recipe)})

  def describe(self) -> dict[str, Any]:
    return {**super().describe(), 'layouts': {w.path: w.layout.describe() for w in self.weights}}


@params_come_third
def bind(recipe: Recipe, f: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Bound:
  """Finds what a model does with the weights that a recipe matches, by tracing it once.

  Each matched weight is followed through casts, transposes, reshapes, slices, scans, checkpoints and calls to the
  matmuls that contract it. Nothing is computed: shapes and dtypes are enough.

  Args:
    recipe: its rules say which weights, by path. A rule with a plain `DotPolicy()` names those that stay dense.
    f: any JAX function of parameters and other arguments, a loss say; what it returns does not matter. Or a linen
      module, for its `apply`.
    params: its first argument: arrays, or `jax.ShapeDtypeStruct`, or an nnx model, whose parameters are meant.
    *args: an example of its other arguments, likewise.
    **kwargs: likewise; what is no array is passed on as it is.

  Returns:
    A recipe for `sparse_training`, `sparsify`, `sparse_variables`, `project` and all else, by which they know each
    weight's axes.

  Raises:
    ValueError: a matched weight that no matmul contracts, that several contract along different axes (but for a weight
      and its transpose under `transposable`, whose masks serve both), or that goes where it cannot be followed: by
      path, with the line of the model and what to do.

  >>> import jax, jax.numpy as jnp, sparse24_jax as s24
  >>> params = {'query': jnp.ones((32, 4, 8)), 'head': jnp.ones((10, 32))}
  >>> f = lambda p, x: jnp.einsum('bd,dhk->bhk', x, p['query']).reshape(-1, 32) @ p['head'].T
  >>> bound = s24.bind(s24.recipes.ste('.*'), f, params, jnp.ones((2, 32)))
  >>> {weight.path: weight.layout.describe() for weight in bound.weights}
  {'head': 'in 1, out 0', 'query': 'in 0, out 1 2'}
  """
  if isinstance(recipe, Bound):
    recipe = recipe.unbound()
  model = functional(params, as_callable(f), args, kwargs)
  params = model.params
  with order_is_told('bind', recipe, params, args):
    bound = bind_traced(recipe, params, trace(model.function, (params, *model.rest, *args), kwargs))
  match_rules(params, bound)  # whole groups along the axes that were found
  return bound


def require_axes(caller: str, params: Any, paths: Iterable[str], recipe: Recipe) -> None:
  """ValueError for weights of which nothing tells what their matmuls sum over: a bound recipe, or a kernel's layer."""
  if isinstance(recipe, Bound):
    return
  shapes = {path: tuple(getattr(leaf, 'shape', ())) for path, leaf in leaves_by_path(params)}

  def is_known(path: str) -> bool:
    folder, slash, name = path.rpartition('/')
    # A bias is as long as the outputs, which tells some kernels that are [out, in].
    bias = shapes.get(f'{folder}{slash}bias', shapes[path])
    return name == 'kernel' and len(shapes[path]) == 2 and bias[-1:] == shapes[path][-1:]

  if unknown := [f'{path} {shapes[path]}' for path in paths if not is_known(path)]:
    raise ValueError(
      f'{listed(unknown)}: {caller} does not see along which axes matmuls sum over these. A recipe by itself knows'
      f' it of kernels with two axes, which Flax layers store as [in, out]: give {caller} the recipe that'
      ' sparse24_jax.bind(recipe, f, params, *example) returns, where f may be a linen module and shapes are enough.'
      ' Make the optimizer state with that recipe, too: one that the recipe by itself made serves it only for weights'
      ' that the model reads as [stacked..., in, out]'
    )


def tracked(params: Any, recipe: Recipe) -> dict[str, Rule]:
  """The matched weights whose matmuls are not plain ones."""
  return {path: rule for path, rule in matched_rules(params, recipe).items() if not rule.is_plain}


def bind_traced(recipe: Recipe, params: Any, traced: Traced, *, all_read: bool = True) -> Bound:
  """`bind` of what is traced already; without `all_read`, weights that the function never looks at are left out."""
  found = find_weights(recipe, params, traced, all_read=all_read)
  if problems := [str(problem) for problem in found.values() if isinstance(problem, WeightError)]:
    raise ValueError('\n'.join(problems))
  weights = [weight for weight in found.values() if isinstance(weight, BoundWeight)]
  for note in (note for weight in weights for note in weight.notes):
    log_once(note, 'sparse24_jax', logging.WARNING)
  return Bound.of(recipe, weights)


def find_weights(
  recipe: Recipe, params: Any, traced: Traced, *, all_read: bool = True
) -> dict[str, BoundWeight | WeightError]:
  """What the trace says of each matched weight, by path, or what is wrong with it."""
  rules = tracked(params, recipe)
  with sizes_are_known(traced):
    notes, weights = take_notes(traced, rules), dict(leaves_by_path(params))
  if not all_read:
    rules = {path: rule for path, rule in rules.items() if path in notes.readings or path in notes.problems}
  return {path: _bound(path, weights[path], rule, notes) for path, rule in rules.items()}


def _bound(path: str, leaf: Any, rule: Rule, notes: Notes) -> BoundWeight | WeightError:
  """The weight, or what is wrong with it."""

  def refused(why: str, instead: str = '') -> WeightError:
    text = f'{path} of shape {leaf.shape}: {why}: leave it dense, {leaving_dense(path)}{instead}'
    return WeightError(text, path, leave_dense=True)

  if not jnp.issubdtype(leaf.dtype, jnp.floating):
    return refused(f'it is {leaf.dtype}, and no floating-point numbers that train')
  if problems := notes.problems.get(path):
    return refused(f'{"; ".join(problems)}. Nothing follows a weight there')
  # As stored, if one reads it so.
  readings = sorted(notes.readings.get(path, []), key=lambda each: each[1].layout.order)
  if not readings:
    unread = 'a rule matches it, and no matmul of the function contracts it'
    if notes.readings or notes.problems:
      return refused(unread)
    # Where it reads none of them, to leave them dense is no help.
    closed = 'nor any other such weight: does the function close over other parameters than those that it is given?'
    return WeightError(f'{path} of shape {leaf.shape}: {unread}: {closed}', path)
  if problem := _in_different_ways(readings, rule):
    return refused(*problem)
  for found, reading in readings:
    problem = cut_by_shards(found.view, reading, rule) or _straddles(found, reading, rule)
    if problem := problem or found.asked.unfit_for(rule.policy.precision):
      return refused(f'{problem} at {found.source}')
    if problem := _unlike_ragged(path, found, rule):
      return refused(*problem)
  layout = readings[0][1].layout
  uses = tuple(_use(found, reading, notes, turned=reading.layout != layout) for found, reading in readings)
  if rule.activation is not None and any(use.block is None for use in uses):
    reasons = dict.fromkeys(use.apart for use in uses if use.apart)
    return WeightError(f'{by_itself(path, uses[0].source)}{"".join(f": {reason}" for reason in reasons)}', path)
  return BoundWeight(path, tuple(leaf.shape), leaf.dtype, rule, layout, uses, tuple(notes.others.get(path, ())))


def _in_different_ways(readings: Sequence[tuple[Matmul, Reading]], rule: Rule) -> tuple[str, str] | None:
  """What is wrong with a weight of which one mask does not serve all matmuls, and what to do but leave it dense."""
  first, layout = readings[0][0], readings[0][1].layout
  turns = rule.policy.projection is not None and isinstance(rule.policy.projection.form, TransposableMasked)
  for found, reading in readings[1:]:
    backward = found.backward or first.backward
    if reading.layout != layout and not (turns and reading.layout == layout.turned and not backward):
      turn = ', or give its rule masks that serve both, s24.transposable()' if reading.layout == layout.turned else ''
      ways = f'{layout.describe()} at {first.source} and {reading.layout.describe()} at {found.source}'
      return (
        f'its matmuls read it in different ways, {ways}; one mask serves one of them',
        _OWN_GRADIENT if backward else turn,
      )
  return None


def _use(found: Matmul, reading: Reading, notes: Notes, *, turned: bool) -> Use:
  block, role, together = notes.blocks.get((found.view.path, id(found.origin)), (None, None, ()))
  kind, source = found.equation.primitive.name, found.source
  dtype = jnp.dtype(found.operands).name
  apart = None if block else notes.reasons.get((found.view.path, id(found.origin)))
  if kind == 'ragged_dot_general':
    apart = 'a ragged matmul multiplies the projected weight as it does the dense one: no kernel has groups of rows'
  divided = bool(found.view.divided)
  return Use(
    reading.tokens, reading.whole, kind, block, role, source, dtype, found.asked, apart, divided, together, turned
  )


def _straddles(found: Matmul, reading: Reading, rule: Rule) -> str | None:
  """What is wrong with a part of a weight whose ends cut groups."""
  if reading.whole or rule.policy.projection is None:
    return None
  view, roles = found.view, (reading.layout.contracted, reading.layout.outputs)
  for axes, divisor in zip(roles, rule.policy.projection.divisor, strict=True):
    for i, axis in enumerate(axes):
      size = math.prod(run.size for run in reading.runs if run.axis == axis)
      if divisor == 1 or size == view.shape[axis]:
        continue
      # Whole groups in front of it, in it and, of an inner axis, in each row of the axes around it.
      inner, start = math.prod(view.shape[a] for a in axes[i + 1 :]), view.offsets[axis]
      row = inner * view.shape[axis] if i else 0
      is_known = isinstance(start, int)
      first = start if is_known else view.multiples[axis]
      if not any(n % divisor for n in (first * inner, size * inner, row)):
        continue
      if is_known:
        return f'a part of axis {axis}, {size} entries from {start}, cuts groups of {divisor}'
      return (
        f'a part of axis {axis}, {size} entries from where only a run tells, may cut groups of {divisor} (split the'
        f' axis by a reshape into parts of a multiple of {divisor} entries, and take a part by its number, or scan over'
        ' them)'
      )
  return None


def _unlike_ragged(path: str, found: Matmul, rule: Rule) -> tuple[str, str] | None:
  """What a rule asks for that a ragged matmul has not, and what to do but leave the weight dense."""
  policy, served = rule.policy, {}
  if found.equation.primitive.name != 'ragged_dot_general':
    return None
  if policy.precision != 'default':
    served['precision'] = 'default'
  if policy.implementation in ('sparse', 'cusparselt'):
    served['implementation'] = None
  if not served:
    return None
  has_not = ', '.join(f'{name}={getattr(policy, name)!r}' for name in served)
  instead = ', '.join(f'{name}={value!r}' for name, value in served.items())
  kept = f'Rule({re.escape(path)!r}, dataclasses.replace(rule.policy, {instead}))'
  return (
    f'a ragged matmul, which has no {has_not}, at {found.source}',
    f', or keep it sparse by {kept} in front of its rule' if policy.projection else '',
  )
