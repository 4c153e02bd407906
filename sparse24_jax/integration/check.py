"""`check`: what a recipe makes of a model, a line a weight, before anything is trained."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import logging
import textwrap
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from sparse24_jax.binding.bound import Bound, BoundWeight, find_weights, Use
from sparse24_jax.binding.states import weight_states
from sparse24_jax.binding.tracing import as_callable, functional, order_is_told, params_come_third, trace
from sparse24_jax.binding.transform import sparse_function
from sparse24_jax.density import DensitySchedule
from sparse24_jax.integration.check_optimizer import asked_of_clips, GIVE_BOUND, notes_of_clips, problems_of
from sparse24_jax.integration.functional import require_zeros
from sparse24_jax.optim import first_states, projections_of, try_chain, unboxed
from sparse24_jax.policy import DotPolicy
from sparse24_jax.projection import Projection
from sparse24_jax.recipe import Recipe
from sparse24_jax.rules import check_groups, idle_alternatives, keep_dense, leaves_by_path, listed, match_rules
from sparse24_jax.weight_errors import WeightError

# `binding.blocks.find_block` in words.
_BLOCKS = (
  'block -: a layer by itself. Two matmuls form one fused op if they are x @ w, with or without bias, nothing but gelu,'
  ' silu, relu or squared relu is between them, with or without a gate, and they share a dtype and a policy. Here:'
)


_SHARES = 'zeros: share of the entries that are pruned; gradient: share of the pruned entries that a gradient reaches'
_HELD = 'pruned entries are held at zero until a link grows there, whatever gradient reaches them; zeros are those of'
_UNPACKED = 'not packed once in an optimizer step for all micro-batches, where kernels run. Here:'
_ROUNDED = (
  'parameters of 16 bits: most updates are smaller than what they round to, and are lost. Keep parameters in float32'
  ' and compute in 16 bits.'
)
_ENDS = 'no other matched weight reads its result'


@dataclasses.dataclass(frozen=True)
class CheckedWeight:
  """One matched weight.

  Attributes:
    path: in the parameters.
    shape: as it is stored.
    weight: what the trace found; None if it cannot be sparse.
    problem: why not, and what to do; None if it can.
    pruned: share of the projected weight that is zero; None where only shapes were given. If a `DensitySchedule` moves
      it, at the step of the lowest density.
    reached: share of the pruned entries whose gradient is not zero; None, too, where nothing is pruned.
    dtype: as it is stored.
    leave_dense: whether to leave it dense is what the problem says to do.

  >>> import jax, jax.numpy as jnp, sparse24_jax as s24
  >>> params = {'w': jax.random.normal(jax.random.key(0), (16, 8))}
  >>> (w,) = s24.check(s24.recipes.ste('w'), lambda p, x: x @ p['w'], params, jnp.ones((4, 16))).weights
  >>> w.path, w.problem, w.pruned, w.reached
  ('w', None, 0.5, 1.0)
  """

  path: str
  shape: tuple[int, ...]
  weight: BoundWeight | None
  problem: str | None
  pruned: float | None = None
  reached: float | None = None
  dtype: Any = None
  leave_dense: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class Checked:
  """The outcome of `check`; as text a table.

  Attributes:
    weights: those that rules match, in the order of the tree.
    dense: paths of the other arrays with two or more axes but biases and scales: no rule matches them, or one that
      leaves them dense.
    notes: what may be wrong: alternatives in the pattern of a rule that match no weight, as a mistyped one does;
      sums over a weight that meet what matmuls make, and weights of which a matmul makes a dense matrix; a clip that
      seems to act on masked decay, or in front of links that come and go.
    unbound: paths of the weights whose axes only a bound recipe knows, where this one is not.

  >>> import jax.numpy as jnp, sparse24_jax as s24
  >>> params = {'w': jnp.ones((16, 8)), 'table': jnp.ones((5, 16))}
  >>> checked = s24.check(s24.recipes.ste('.*'), lambda p, i: p['table'][i] @ p['w'], params, jnp.zeros(4, int))
  >>> checked.ok, [w.path for w in checked.weights if w.problem]
  (False, ['table'])
  """

  weights: tuple[CheckedWeight, ...]
  dense: tuple[str, ...]
  notes: tuple[str, ...] = ()
  unbound: tuple[str, ...] = ()

  @property
  def ok(self) -> bool:
    """Whether every matched weight can be sparse, none is `unbound`, and all are trained."""
    return not self.unbound and all(w.problem is None for w in self.weights)

  def __repr__(self) -> str:
    return self.text()

  def text(self, width: int | None = None) -> str:
    """The table, and sentences below it: a line each, or broken to a width, with what continues one indented."""
    head = ('weight', 'shape', 'axes', 'policy', 'matmuls', 'tokens', 'block', 'zeros', 'gradient')
    rows = [head, *(_row(w, w.weight) for w in self.weights if w.weight is not None)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    table = ['  '.join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines = list(dict.fromkeys(f'PROBLEM  {w.problem}' for w in self.weights if w.problem is not None))
    if any(w.pruned is not None for w in self.weights):
      lines += [_SHARES, *(f'{_HELD} {when}. Here: {listed(paths)}' for when, paths in _held(self.weights).items())]
    if apart := _apart(self.weights):
      lines += [_BLOCKS, *(f'  {listed(paths)}: {reason}' for reason, paths in apart.items())]
    if unpacked := _unpacked(self.weights):
      lines += [_UNPACKED, *(f'  {listed(paths)}: {reason}' for reason, paths in unpacked.items())]
    if rounded := [w.path for w in self.weights if w.dtype is not None and w.dtype.itemsize < 4]:
      lines += [f'{_ROUNDED} Here: {listed(rounded)}']
    lines += self.notes
    if self.unbound:
      lines.append(f'not stored as [stacked..., in, out]: {listed(self.unbound)}. {GIVE_BOUND}')
    lines.append(f'stay dense: {listed(self.dense) or "no other weight"}; arrays with one axis always do')
    return '\n'.join([*table, *(lines if width is None else (_wrapped(line, width) for line in lines))])


@params_come_third
def check(
  recipe: Recipe, f: Callable[..., Any], params: Any, *args: Any, optimizer: Any = None, **kwargs: Any
) -> Checked:
  """Says of each weight that a recipe matches what the model does with it.

  With arrays it also makes the masks, and looks whether the projected weight has the zeros that it must have and
  whether a gradient reaches what is pruned. With shapes it only traces.

  Args:
    recipe: as for `bind`.
    f: a function of parameters and other arguments, a loss say, or a linen module, for its `apply`.
    params: arrays, or `jax.ShapeDtypeStruct`, or an nnx model.
    *args: an example of the other arguments, likewise.
    optimizer: the whole chain, with `sparse_training` of this recipe in it, to see whether masks are chosen from the
      weights that the chain leaves. It finds what changes updates behind the wrapper, weights that are pruned but
      never updated (`optax.set_to_zero`), a weight that its recipe leaves dense, and a recipe that takes a weight's
      axes for others than the model reads. A note tells of a clip in front of links that come and go, which belongs
      inside, and of masked decay that is clipped with the gradient, where it belongs in front; there optimizers with
      one factor for all updates (DoG, DoWG, mechanize) look the same. Such a clip goes unseen where updates have
      one size whatever the gradient (lion, signs), where it acts on one group of weights, and in a model of one
      parameter. The parameters must be arrays; the chain updates random numbers of their shapes, at steps 0, 10, 100,
      1000 and 10000, so that late changes of a schedule show. Changes below about a millionth of a weight, or below
      the rounding of a bfloat16 one, go unseen.
    **kwargs: as `args`.

  Returns:
    A table as text, with `.ok`, which is False too where a weight is not stored as `[stacked..., in, out]` and the
    recipe is not bound.

  Raises:
    ValueError: the recipe is not a Recipe, a rule matches nothing, or the optimizer has another recipe. What is wrong
      with a weight is in the table.

  >>> import jax, jax.numpy as jnp, sparse24_jax as s24
  >>> up, down, x = (jax.random.normal(jax.random.key(i), (16, 32)) for i in range(3))  # down is [out, in]
  >>> f = lambda p, x: jax.nn.silu(x @ p['up']) @ p['down'].T
  >>> checked = s24.check(s24.recipes.ste('.*'), f, {'up': up, 'down': down}, x.T)
  >>> print(checked)
  weight  shape    axes         policy         matmuls  tokens  block      zeros  gradient
  down    16 x 32  in 1, out 0  magnitude 2:4  1        32      silu down  50%    100%
  up      16 x 32  in 0, out 1  magnitude 2:4  1        32      silu up    50%    100%
  zeros: share of the entries that are pruned; gradient: share of the pruned entries that a gradient reaches
  not stored as [stacked..., in, out]: down. Give sparse_training and all else what bind(recipe, f, params, ...) gives
  stay dense: no other weight; arrays with one axis always do
  >>> checked.ok
  False
  """
  is_bound = isinstance(recipe, Bound)
  recipe, f = recipe.unbound() if isinstance(recipe, Bound) else recipe, as_callable(f)
  model = functional(params, f, args, kwargs)
  f, params, args = model.function, model.params, (*model.rest, *args)
  with order_is_told('check', recipe, params, args):
    traced = trace(f, (params, *args), kwargs)
    found = find_weights(recipe, params, traced)
  leaves = dict(leaves_by_path(params))
  others = (path for path, leaf in leaves.items() if len(leaf.shape) > 1 and path not in found)
  dense = tuple(path for path in others if path.rpartition('/')[2] not in ('bias', 'scale'))
  weights = {path: _checked(path, leaves[path], weight) for path, weight in found.items()}
  concrete = all(isinstance(leaf, jax.Array | np.ndarray) for leaf in traced.leaves)
  while concrete and (fine := [w.weight for w in weights.values() if w.weight is not None and w.problem is None]):
    others = keep_dense(params, recipe, [path for path, w in weights.items() if w.problem is not None])
    try:
      weights = _measured(weights, Bound.of(others, fine), f, params, args, kwargs)
      break
    except WeightError as error:
      refused = [path for path in error.paths if path in weights]
      if not refused or any(weights[path].problem for path in refused):
        raise
      weights |= {path: _with_problem(weights[path], error) for path in refused}
  notes = [f'WARNING  {said}' for said in idle_alternatives(params, recipe)]
  notes += (f'WARNING  {said}' for w in found.values() if isinstance(w, BoundWeight) for said in w.notes)
  read = {path: w for path, w in found.items() if isinstance(w, BoundWeight) and w.rule.policy.projection}
  unbound: list[str] = []
  if optimizer is None:
    unbound = [path for path, w in read.items() if not (is_bound or w.layout.is_standard)]
  else:  # what counts is whether its recipe is bound
    tried = try_chain(optimizer, params, **asked_of_clips(recipe, read))
    for path, problem in problems_of(tried, read).items():
      if path not in weights:
        raise ValueError(f'{path}: optimizer makes it sparse, recipe does not: give both the same recipe')
      weights[path] = dataclasses.replace(weights[path], problem=weights[path].problem or problem)
    for said in notes_of_clips(tried):  # nothing else tells of them, and whoever asks for `ok` sees no note
      logging.getLogger('sparse24_jax').warning('%s', said)
      notes.append(f'WARNING  {said}')
  return Checked(tuple(weights.values()), dense, tuple(notes), tuple(unbound))


def _checked(path: str, leaf: Any, found: BoundWeight | WeightError) -> CheckedWeight:
  checked = CheckedWeight(path, tuple(leaf.shape), None, None, dtype=np.dtype(leaf.dtype))
  if isinstance(found, WeightError):
    return _with_problem(checked, found)
  checked = dataclasses.replace(checked, weight=found)
  try:
    check_groups(path, leaf, found.rule.policy.projection, found.layout)
  except ValueError as error:
    return _with_problem(checked, error)
  return checked


def _with_problem(checked: CheckedWeight, error: ValueError) -> CheckedWeight:
  leave_dense = isinstance(error, WeightError) and error.leave_dense
  return dataclasses.replace(checked, problem=str(error), leave_dense=leave_dense)


def _measured(
  weights: Mapping[str, CheckedWeight], bound: Bound, f: Callable[..., Any], params: Any, args: tuple, kwargs: Any
) -> dict[str, CheckedWeight]:
  """Adds the share of zeros, and the share of pruned entries that a gradient reaches."""
  params = jax.tree.map(_started, params)
  rules, leaves = match_rules(params, bound), dict(leaves_by_path(params))
  first = leaves_by_path(first_states(projections_of(params, bound), unboxed(params), _shown_step))
  sparse = {path: (rules[path].policy, leaves[path], state) for path, state in first}
  states = weight_states(bound, sparse, None)
  function = sparse_function(f, bound, phase='sparse')

  def loss(params: Any) -> Array:
    copied_args, copied_kwargs = jax.tree.map(lambda a: a, (args, kwargs))  # of what a call may change
    out = function(params, states, jax.random.key(0), *copied_args, **copied_kwargs)
    floats = [y for y in jax.tree.leaves(out) if jnp.issubdtype(jnp.result_type(y), jnp.floating)]
    # Any direction will do; that of a sum is flat where the model ends with a softmax.
    directions = (jax.random.normal(jax.random.key(i), jnp.shape(y)) for i, y in enumerate(floats))
    sums = [jnp.sum(y.astype(jnp.float32) * d) for y, d in zip(floats, directions, strict=True)]
    return jnp.sum(jnp.stack(sums))

  grads = dict(leaves_by_path(jax.jit(jax.grad(loss, allow_int=True))(params)))  # a table of bytes, say
  found = dict(weights)
  for weight in bound.weights:
    path, form = weight.path, weight.rule.policy.projection and weight.rule.policy.projection.form
    if path not in sparse:
      continue
    policy, w, state = sparse[path]
    assert policy.projection is not None
    projected = policy.projection.apply(w, state)
    pruned = projected == 0
    try:
      require_zeros(form, weight.layout.matrix(projected), weight.layout)
    except ValueError as error:
      found[path] = dataclasses.replace(found[path], problem=f'{path}: the projected weight is not 2:4: {error}')
    reached = float(jnp.sum(pruned & (grads[path] != 0)) / pruned.sum()) if pruned.any() else None
    problem, trained = found[path].problem, bool((grads[path] != 0).any())
    if reached == 0 and not (trained and policy.projection.update):
      problem = problem or (
        f'{path}: no gradient reaches its pruned entries, which then never come back'
        if trained
        else f'{path}: no gradient reaches it at all: it is frozen (stop_gradient), and its zeros stay where they are,'
        f' or what the function returns does not depend on it, with these arguments at least: give such as in training'
      )
    found[path] = dataclasses.replace(found[path], problem=problem, pruned=float(pruned.mean()), reached=reached)
  return found


def _density(projection: Projection) -> Any:
  """The density of links that come and go, a number or a function of the step; None for other masks."""
  return getattr((projection.matrix or projection).update, 'density', None)


def _shown_step(projection: Projection) -> int:
  """The step whose zeros are shown: that of the lowest density, where a schedule tells it."""
  density = _density(projection)
  return int(jnp.argmin(density(jnp.arange(density.total_steps)))) if isinstance(density, DensitySchedule) else 0


def _held(weights: Sequence[CheckedWeight]) -> dict[str, list[str]]:
  """When weights whose links come and go have the zeros that are shown, and which."""
  found: dict[str, list[str]] = {}
  for path, weight in ((w.path, w.weight) for w in weights if w.weight is not None and w.pruned is not None):
    projection = weight.rule.policy.projection
    if projection is not None and projection.update is not None:
      step, density = _shown_step(projection), _density(projection)
      lowest = ', where the density is lowest' if isinstance(density, DensitySchedule) else ''
      when = f'step {step}{lowest}' if callable(density) else 'all steps'
      found.setdefault(when, []).append(path)
  return found


def _started(leaf: Any) -> Any:
  """The leaf, or small numbers if all of it is zero: a layer or gate that starts so lets no gradient by at first."""
  if not jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.any(leaf):
    return leaf
  return (0.02 * jax.random.normal(jax.random.key(0), leaf.shape)).astype(leaf.dtype)


def _apart(weights: Sequence[CheckedWeight]) -> dict[str, list[str]]:
  """Why weights stand in no block, and which."""
  found: dict[str, list[str]] = {}
  for weight in [w.weight for w in weights if w.weight is not None]:
    for reason in dict.fromkeys(use.apart or _ENDS for use in weight.uses if not use.block):
      found.setdefault(reason, []).append(weight.path)
  return found


def _unpacked(weights: Sequence[CheckedWeight]) -> dict[str, list[str]]:
  """Why weights are not packed in front of the step, and which."""
  found: dict[str, list[str]] = {}
  for weight in [w.weight for w in weights if w.weight is not None]:
    projection = weight.rule.policy.projection
    if projection is not None and projection.form is not None:
      for reason in dict.fromkeys(filter(None, (use.unpacked for use in weight.uses))):
        found.setdefault(reason, []).append(weight.path)
  return found


def _policy(policy: DotPolicy) -> str:
  parts = policy.projection.label if policy.projection else 'none', policy.precision, policy.weight_grad
  return ', '.join(part for part in parts if part not in ('default', 'dense'))


def _wrapped(line: str, width: int) -> str:
  indent = len('PROBLEM  ') if line.startswith(('PROBLEM', 'WARNING')) else len(line) - len(line.lstrip()) + 2
  return textwrap.fill(line, width, subsequent_indent=' ' * indent, break_long_words=False, break_on_hyphens=False)


def _tokens(use: Use) -> str:
  """Rows of a matmul; the groups of a ragged one have as many as a run makes of them."""
  return f'{use.tokens:.2f} on average' if use.kind == 'ragged_dot_general' else str(use.tokens)


def _row(checked: CheckedWeight, weight: BoundWeight) -> tuple[str, ...]:
  blocks = dict.fromkeys(f'{use.block} {use.role}' for use in weight.uses if use.block)
  shares = ('-' if share is None else f'{share:.0%}' for share in (checked.pruned, checked.reached))
  return (
    weight.path, ' x '.join(map(str, weight.shape)), weight.layout.describe(),
    _policy(weight.rule.policy),
    str(len(weight.uses)), ', '.join(dict.fromkeys(map(_tokens, weight.uses))),
    ', '.join(blocks) or '-', *shares,
  )  # fmt: skip
