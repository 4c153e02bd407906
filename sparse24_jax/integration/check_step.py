"""`check_step`: whether a whole step reads weights as its optimizer expects: sparse or dense, in FP8 or not."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import dataclasses
import functools
import inspect
import logging
from typing import Any, NamedTuple

import jax

from pallas_kernels._dispatch import log_once
from sparse24_jax.binding.flow import Read, UNSURE, Weight
from sparse24_jax.binding.state import NNX_STATES
from sparse24_jax.binding.tracing import trace, Traced
from sparse24_jax.integration.nnx_functions import sharing_as
from sparse24_jax.integration.step_weights import (
  Argument,
  arguments_of,
  follow_updates,
  has_dense_update,
  is_ours,
  ReadBy,
  trained_by_each,
  Updates,
)
from sparse24_jax.optim import sparse_states
from sparse24_jax.recipe import PhaseName, PHASES
from sparse24_jax.rules import is_array, listed

_ADVICE = (
  'Apply what sparsify returned, with sparse_variables(params, opt_state, recipe) of this step, or the weights of'
  ' project. If the step does so, its mask is not computed from the optimizer state of this step (sparse_variables was'
  ' called outside the step, without it, or with that of another optimizer)'
)
_ALTERED = (
  'the update of sparse_training is multiplied by something before it is added to the weight, so that its masks are'
  ' chosen from weights that are not trained: put what changes updates, a learning rate say, inside,'
  ' sparse_training(optax.chain(optimizer, what_changes_updates), recipe)'
)

_LOST = (
  'the step returns the state of sparse_training as it was given, not the one that its update made, so that the mask is'
  ' never chosen anew: return the second result of tx.update(gradients, opt_state, params)'
)
_UNREAD = 'no matmul of the step reads it, and its gradient is not computed from it'

_PHASE = (
  "give sparsify, sparse_variables and project the phase of the optimizer, phase='dense'; an nnx model has to be"
  " sparsified again, model = sparsify(model, recipe, phase='dense')"
)
_IN_FP8: Mapping[PhaseName, str] = {
  'sparse': 'apply what sparsify returned for the recipe of the optimizer: project and other recipes have no FP8',
  'dense': (
    "in the dense end of a recipe in FP8 apply sparsify(model, recipe, phase='dense') with the optimizer's recipe, not"
    ' the plain model'
  ),
}

_DENSE = "phase 'dense': the step trains dense, and no mask is laid over a weight on the way to its gradient"


@dataclasses.dataclass(frozen=True)
class CheckedStep:
  """The outcome of `check_step`; as text a line a weight.

  Attributes:
    weights: path of each weight that has a mask (or a scale) to the lines of the program whose matmuls read it, sparse
      or, in a dense phase, dense, on the way to its gradient. There is none if the loss does not look at the weight.
    brought: path of each weight whose mask the step does not take from the state of its optimizer, to the argument that
      brings it. Right where the loop makes it anew for every step, as variables or in an nnx model; else it gets stale.
    phase: `'dense'` if all updates are of a dense phase.
    fp8: paths of the weights that all of these matmuls read in FP8, in hardware or simulated.

  >>> import sparse24_jax as s24
  >>> print(s24.CheckedStep({'mlp/up': ('model.py:12 (mlp)',)}))
  mlp/up: sparse at model.py:12 (mlp)
  """

  weights: Mapping[str, tuple[str, ...]]
  brought: Mapping[str, str] = dataclasses.field(default_factory=dict)
  phase: PhaseName = 'sparse'
  fp8: frozenset[str] = frozenset()

  def __str__(self) -> str:
    how = {path: f'{self.phase}, fp8' if path in self.fp8 else self.phase for path in self.weights}
    lines = [f'{path}: {how[path]} at {", ".join(lines)}' for path, lines in self.weights.items() if lines]
    return '\n'.join([*([_DENSE] if self.phase == 'dense' else []), *lines, *_notes(self)])


def check_step(step: Callable[..., Any], *args: Any, **kwargs: Any) -> CheckedStep:
  """Raises an error unless a step reads weights as the phase and recipe of its optimizer say. One line before a loop.

  A step that applies the plain model, without `sparsify` or `project`, trains dense while the optimizer goes on
  pruning: nothing in the run shows it. So the whole step is traced, backward pass and optimizer included. Every weight
  that the update of `sparse_training` is given is followed to the matmuls that read it, and these to the gradients of
  that update; of several steps in one program, a loop of Python say, every update. What does not reach them does not
  count: a metric, an evaluation of an average of the weights. A weight behind `stop_gradient` passes if gradients of
  others come through its matmul; `check` finds it. Variables that are made once, before a Python loop of steps, are an
  error in its second one; before a scan of steps they pass, and the run has NaN. Nothing is computed or donated; shapes
  are enough.

  A step may have several optimizers with their own parameters, as one of an actor and a critic. Each is checked by the
  gradient that its own update is given, by the masks of its own state, and weights are then called by their arguments.

  A weight that no matmul of the step reads, under a mask or not, and that no gradient is computed from, is a warning
  that names it: a loss of one of several tasks does not look at the heads of the others. If that holds for all weights
  that an update is given, it is an error.

  In a dense phase no matmul on this way may read a weight under a mask. In both, a weight whose rule has
  `precision='fp8'` is read in FP8, in hardware or simulated.

  An update that is multiplied behind `sparse_training`, by a learning rate or an `optax.ema` say, before it is added to
  the weight, is an error too. This check does not see a factor that is an argument of the step or is bounded, as in
  clipping, terms added to the update, or an outer optimizer that keeps weights of its own. `check(..., optimizer=tx)`
  tries the chain and finds these.

  Args:
    step: what the loop calls in one phase, with `jax.jit` or without. It computes a loss, its gradient and the update.
    *args: its arguments, arrays or `jax.ShapeDtypeStruct`: among them, at any depth, the parameters and the state of
      each optimizer, in a `TrainState` say. What is no array, a function in an Equinox module say, is passed on.
    **kwargs: likewise.

  Returns:
    For each weight the lines whose matmuls read it. Of a step of a dense phase `phase` says so, and so does a warning.

  Raises:
    ValueError: the gradient comes through a matmul that reads a weight as it is, with the line (that of a penalty on
      a matmul of a weight, too), or through none that reads it sparse, or by the mask of an update before; or no weight
      of an update is read; or its update is multiplied behind `sparse_training`; or it is read sparse in a dense phase,
      or not in the FP8 of its rule; or the step makes no update; or there is no state of `sparse_training` among the
      arguments, or no parameters for it, or it keeps no masks in a sparse phase: only activations are sparse, or layers
      in FP8.

  >>> import jax, jax.numpy as jnp, optax, sparse24_jax as s24
  >>> params, recipe, x = {'w': jnp.ones((8, 4))}, s24.recipes.ste('w'), jnp.ones((2, 8))
  >>> tx, dense_loss = s24.sparse_training(optax.sgd(0.1), recipe), lambda p, x: ((x @ p['w']) ** 2).sum()
  >>> sparse_loss = s24.sparsify(dense_loss, recipe)
  >>> def step(params, opt_state, x, *, loss=sparse_loss):
  ...   variables = (s24.sparse_variables(params, opt_state, recipe), None) if loss is sparse_loss else ()
  ...   updates, opt_state = tx.update(jax.grad(loss)(params, *variables, x), opt_state, params)
  ...   return optax.apply_updates(params, updates), opt_state
  >>> list(s24.check_step(step, params, tx.init(params), x).weights)
  ['w']
  >>> s24.check_step(lambda *args: step(*args, loss=dense_loss), params, tx.init(params), x)
  Traceback (most recent call last):
  ValueError: w: the step reads it dense at ...
  """
  masks = _masks_among((args, kwargs))
  traced, returns = _traced(step, args, kwargs)
  if not all(masks):
    if not has_dense_update(traced.jaxpr):
      raise ValueError(
        'this recipe keeps no masks, so that check_step cannot see whether the step is sparse: use check(recipe, f,'
        ' params, ...). A step of a dense phase passes if it has its update, tx.update(gradients, opt_state, params)'
      )
    if not any(masks):
      return _told_dense(CheckedStep({}, phase='dense'))
  given = arguments_of((args, kwargs), masks)
  follow = functools.partial(follow_updates, traced.jaxpr, folders=_folders(traced.jaxpr, given, masks))
  phases = PHASES if has_dense_update(traced.jaxpr) else ('sparse',)
  by_phase: dict[PhaseName, Updates] = {
    phase: updates for phase in phases if (updates := follow(given, phase=phase))
  }
  if not by_phase:
    raise ValueError(
      'the step makes no update of sparse_training, so that nothing shows which weights it trains: give check_step the'
      ' whole step, with its gradient and tx.update(gradients, opt_state, params)'
    )

  def shown(folder: str, path: str) -> str:
    return _named(step, f'{folder}/{path}'[1:]) if folder else path

  _require_right(by_phase, shown)
  phase: PhaseName = 'sparse' if 'sparse' in by_phase else 'dense'
  updates = by_phase[phase]
  reads = {shown(*weight): [read for update in of for read in update.reads] for weight, of in updates.items()}
  lines = {path: tuple(dict.fromkeys(read.line for read in each)) for path, each in reads.items()}
  fp8 = frozenset(path for path, each in reads.items() if each and all(read.precision == 'fp8' for read in each))
  if phase == 'dense':
    return _told_dense(CheckedStep(lines, phase=phase, fp8=fp8))
  _require_trained(updates, shown, returns=bool(returns))
  brought = {shown(*weight): _named(step, name) for weight, name in _brought(follow, given).items()}
  checked = CheckedStep(lines, brought, fp8=fp8)
  for note in _notes(checked):
    log_once(note, 'sparse24_jax', logging.WARNING)
  return checked


def _masks_among(tree: Any) -> list[dict[str, Any]]:
  """The masks of each state of `sparse_training` among the arguments, by path; ValueError if there is none."""
  states = [node for node in jax.tree.leaves(tree, is_leaf=is_ours) if is_ours(node)]
  if not states:
    raise ValueError(
      'the arguments hold 0 states of sparse_training, expected one: wrap the optimizer,'
      ' tx = sparse_training(optax.adamw(...), recipe), and give its state, tx.init(params), among the arguments of the'
      ' step: check_step sees no state that the step takes from elsewhere'
    )
  return [sparse_states(state) for state in states]


def _traced(step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Traced, list[Any]]:
  """The step, and the states of `sparse_training` that it returns."""
  returns: list[Any] = []

  def arrays_of(_: Any, *given: Any) -> list[Any]:
    traced_args, traced_kwargs = sharing_as(given, (args, kwargs))
    out = step(*traced_args, **traced_kwargs)
    returns.extend(filter(is_ours, jax.tree.leaves(out, is_leaf=is_ours)))
    # A new mask among other results, as a metric, is not kept.
    kept = [state.projections for state in returns] or out
    return [leaf for leaf in jax.tree.leaves(kept) if is_array(leaf)]

  with jax.check_tracer_leaks(False):  # `returns` outlives the trace, and nothing computes with it
    return trace(arrays_of, ({}, args, kwargs), {}), returns


def _folders(
  jaxpr: Any, given: Sequence[Argument], masks: Sequence[Mapping[str, Any]]
) -> Sequence[Collection[str]]:
  """Where among the arguments the parameters of each optimizer are; ValueError if there are none for one."""
  held = {argument.weight for argument in given if argument.weight}
  every = dict.fromkeys(weight.folder for weight in held)
  folders = [[f for f in every if all(Weight(f, path) in held for path in of_one)] for of_one in masks]
  if not all(folders):
    raise ValueError(
      f'the arguments hold a state of sparse_training for {listed(masks[folders.index([])])}, and no parameters with'
      ' these paths: give check_step what the loop gives the step, or, where that takes the parameters in parts, a'
      " function of all of them, check_step(lambda params, *rest: step(params['base'], params['lora'], *rest), params,"
      ' ...)'
    )
  return trained_by_each(jaxpr, given, folders) if len(masks) > 1 else folders


def _require_right(by_phase: Mapping[PhaseName, Updates], shown: Callable[..., str]) -> None:
  """ValueError for weights that the step does not read as the phase of an update and their rule say."""
  problems: dict[_Problem, list[str]] = {}
  for phase, updates in by_phase.items():
    for weight, of in updates.items():
      if problem := _first_problem(of, phase):
        problems.setdefault(problem, []).append(shown(*weight))
  if problems:
    advice = dict.fromkeys(problem.advice for problem in problems if problem.advice)
    raise ValueError('\n'.join([*(f'{listed(paths)}: {problem.text}' for problem, paths in problems.items()), *advice]))


def _require_trained(updates: Updates, shown: Callable[..., str], *, returns: bool) -> None:
  """ValueError for weights that a sparse step, which may return its states, does not train as their masks expect."""
  some = {folder for (folder, _), of in updates.items() if not all(update.unread for update in of)}
  if unread := [shown(*weight) for weight in updates if weight[0] not in some]:
    raise ValueError(
      f'{listed(unread)}: {_UNREAD}. This holds for all weights with a mask that the update is given: compute its'
      ' gradients from the parameters that the step is given'
    )
  if altered := [shown(*weight) for weight, of in updates.items() if any(update.altered for update in of)]:
    raise ValueError(f'{listed(altered)}: {_ALTERED}')
  if returns and (lost := [shown(*weight) for weight, of in updates.items() if not any(u.returned for u in of)]):
    raise ValueError(f'{listed(lost)}: {_LOST}')


def _told_dense(checked: CheckedStep) -> CheckedStep:
  log_once(f'check_step: {checked}', 'sparse24_jax', logging.WARNING)
  return checked


def _brought(follow: Callable[..., Any], given: Sequence[Argument]) -> dict[tuple[str, str], str]:
  """For each weight whose mask is not from the optimizer state alone, the path of an argument that holds one."""
  others: dict[str, str] = {}
  for argument in given:
    if argument.state_of and argument.optimizer is None:
      others.setdefault(argument.state_of, argument.path)
  if not others:
    return {}
  updates = follow([a if a.optimizer is not None or a.weight else Argument(a.path) for a in given])
  return {weight: others[weight[1]] for weight, of in updates.items() if weight[1] in others and _first_problem(of)}


def _named(step: Callable[..., Any], path: str) -> str:
  """An array's path in (args, kwargs), as whoever wrote the call knows it: the argument, then the path in that."""
  kind, argument, *rest = path.split('/')
  if kind == '0':
    try:
      parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):  # one without a signature
      parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    argument += f' ({positional[int(argument)]})' if int(argument) < len(positional) else ''
  return f'argument {argument} at {"/".join(rest)}' if rest else f'argument {argument}'


def _notes(checked: CheckedStep) -> list[str]:
  """What to look at: weights that are not read, and masks that are brought, for models of nnx and for variables."""
  brought, unread = checked.brought, [path for path, lines in checked.weights.items() if not lines]
  unread = unread if checked.phase == 'sparse' else []
  nnx = {path for path, argument in brought.items() if NNX_STATES in f'{argument}/'}
  ways = {
    'call nnx.update(model, sparse_variables(nnx.state(model, nnx.Param), optimizer.opt_state, recipe)) in the step,'
    ' before the model': nnx,
    'call sparse_variables(params, opt_state, recipe) in the step': brought.keys() - nnx,
  }
  notes = [f'{listed(unread)}: {_UNREAD}: right if its loss is of another task'] if unread else []
  return notes + [
    f'{listed(sorted(paths))}: the mask comes with {brought[min(paths)]}, not from the optimizer state'
    f' that this step is given, so that it is stale unless the loop makes it anew for every step: {way}'
    for way, paths in ways.items() if paths
  ]  # fmt: skip


class _Problem(NamedTuple):
  """What is wrong with a weight, in words that others share whose matmuls are in the same lines, and what to do."""

  text: str
  advice: str = _ADVICE


def _first_problem(updates: Sequence[ReadBy], phase: PhaseName = 'sparse') -> _Problem | None:
  """What is wrong with a weight in the first update in which something is."""
  for i, update in enumerate(updates):
    found = _masked(update) if phase == 'dense' else _unmasked(update)
    if problem := found or _otherwise_precise(update, phase):
      many = len(updates) > 1
      return problem._replace(text=f'in update {i + 1} of {len(updates)}, {problem.text}') if many else problem
  return None


def _lines(reads: Iterable[Read]) -> str:
  return ', '.join(dict.fromkeys(read.line for read in reads))


def _masked(of: ReadBy) -> _Problem | None:
  if sparse := _lines(read for read in of.reads if read.sparse):
    return _Problem(f"the step updates in phase 'dense', and reads it sparse at {sparse}", _PHASE)
  return None


def _otherwise_precise(of: ReadBy, phase: PhaseName) -> _Problem | None:
  if of.asked == 'fp8' and (wide := _lines(read for read in of.reads if read.precision != 'fp8')):
    text = f"its rule has it in FP8, and the step reads it {phase}, but not in FP8, at {wide}"
    return _Problem(text, _IN_FP8[phase])
  return None


def _unmasked(of: ReadBy) -> _Problem | None:
  if not of.trained:
    return _Problem(
      'the update of sparse_training is given a weight that is no argument of the step, or a sum of one with something'
      ' else: give it the parameters as the step has them',
      advice='',
    )
  dense, sparse = (_lines(read for read in of.reads if read.sparse is kind) for kind in (False, True))
  if dense and sparse:
    return _Problem(
      f'the step reads it dense at {dense}, and sparse at {sparse}, and the gradient is computed from both, while its'
      ' optimizer keeps a mask for it. If the first is meant, as a penalty on a matmul of the weight may be, or targets'
      ' and rollouts of the dense model behind stop_gradient, check the step without it'
    )
  if dense:
    return _Problem(f'the step reads it dense at {dense}, while its optimizer keeps a mask for it')
  if not sparse and not of.unread:
    return _Problem(
      'no matmul of the step reads it under its mask on the way to the gradient: the loss does not look at it, changes'
      ' it first, or takes a mask that is not computed from the arguments of this step'
    )
  # Of a copy nothing is known, nor of a state that comes with another argument.
  of_updates = {read.weight.update for read in of.reads if read.weight.name in {weight.name for weight in of.trained}}
  if of_updates and of_updates.isdisjoint({UNSURE, *(weight.update for weight in of.trained)}):
    return _Problem(
      f'at {sparse} the step reads it under the mask of an update before: call sparse_variables in front of each'
      ' forward, with the parameters and the optimizer state that the update before returned'
    )
  return None
