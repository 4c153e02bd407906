"""`check_step`: whether a whole step, as it will run, makes the weights sparse whose masks its optimizer keeps."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
import dataclasses
import logging
import re
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._dispatch import log_once
from sparse24_jax.binding.flow import follow_weights, Found, Marks, Named, Read
from sparse24_jax.binding.state import NNX_STATES
from sparse24_jax.binding.tracing import is_array, trace
from sparse24_jax.optim import GRADIENTS, sparse_states, SparseTrainingState, WEIGHTS
from sparse24_jax.optim._state import states_of
from sparse24_jax.rules import leaves_by_path

_ADVICE = (
  'A step of a dense phase is not to be checked. In a sparse one apply what sparsify returned, with'
  ' sparse_variables(params, opt_state, recipe) of this step, or the weights of project. If the step does so, its mask'
  ' is not computed from the optimizer state of this step (sparse_variables was called outside the step, or without it)'
)

_OF_OPTIMIZER = re.compile(r'(^|/)(projections|flip_rate/per_weight|left)/')  # in the state of sparse_training
_FINGERPRINT = re.compile(r'(^|/)made[ _]of/')  # of the weights that variables were made of


@dataclasses.dataclass(frozen=True)
class CheckedStep:
  """The outcome of `check_step`; as text a line a weight.

  Attributes:
    weights: path of each weight that has a mask (or a scale) to the lines of the program whose matmuls read it, sparse,
      on the way to its gradient.
    brought: path of each weight whose mask the step does not take from the state of its optimizer, to the argument that
      brings it. Right where the loop makes it anew for every step, as variables or in an nnx model; else it gets stale.

  >>> import sparse24_jax as s24
  >>> print(s24.CheckedStep({'mlp/up': ('model.py:12 (mlp)',)}))
  mlp/up: sparse at model.py:12 (mlp)
  """

  weights: Mapping[str, tuple[str, ...]]
  brought: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __str__(self) -> str:
    lines = [f'{path}: sparse at {", ".join(lines)}' for path, lines in self.weights.items()]
    return '\n'.join([*lines, *_notes(self.brought)])


def check_step(step: Callable[..., Any], *args: Any, **kwargs: Any) -> CheckedStep:
  """Raises an error unless a training step makes sparse what its optimizer keeps masks for. One line before a loop.

  A step that applies the plain model, without `sparsify` or `project`, trains dense while the optimizer goes on
  pruning: nothing in the run shows it. So the whole step is traced, backward pass and optimizer included. Every weight
  that the update of `sparse_training` is given is followed to the matmuls that read it, and these to the gradients of
  that update. What does not reach them does not count: a metric, an evaluation of an average of the weights. Nothing is
  computed or donated; shapes are enough.

  Args:
    step: what the loop calls in a sparse phase, with `jax.jit` or without. It computes a loss, its gradient and the
      update.
    *args: its arguments, arrays or `jax.ShapeDtypeStruct`: among them, at any depth, the parameters and the state of
      the optimizer, in a `TrainState` say. What is no array, a function in an Equinox module say, is passed on.
    **kwargs: likewise.

  Returns:
    For each weight the lines whose matmuls read it.

  Raises:
    ValueError: the gradient comes through a matmul that reads a weight as it is, with the line (that of a penalty on
      the product of a weight, too), or through none that reads it sparse; or the step makes no update; or there is no
      state of `sparse_training` among the arguments, or no parameters for it.

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
  if not states_of((args, kwargs), SparseTrainingState):
    raise ValueError(
      'the arguments hold 0 states of sparse_training, expected one: wrap the optimizer,'
      ' tx = sparse_training(optax.adamw(...), recipe), and give its state, tx.init(params), among the arguments of the'
      ' step: check_step sees no state that the step takes from elsewhere'
    )
  masks = sparse_states((args, kwargs))

  def arrays_of(_: Any, args: Any, kwargs: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(step(*args, **kwargs)) if is_array(leaf)]

  traced = trace(arrays_of, ({}, args, kwargs), {})
  arrays = [(path, leaf) for path, leaf in leaves_by_path((args, kwargs)) if is_array(leaf)]
  moments = _folders_of_moments([path for path, _ in arrays], masks)
  places = [None if f'/{path}'.startswith(moments) else _place(path, leaf, masks) for path, leaf in arrays]
  held = {place for place in places if place and place[0] is not None}
  folders = [folder for folder in dict.fromkeys(f for f, _ in held) if all((folder, path) in held for path in masks)]
  if not folders:
    raise ValueError(
      f'the arguments hold a state of sparse_training for {", ".join(masks)}, and no parameters with these paths: give'
      ' check_step what the loop gives the step'
    )
  found = follow_weights(traced.jaxpr, [_marks(place, folders) for place in places])
  if WEIGHTS not in found.named:
    raise ValueError(
      'the step makes no update of sparse_training, so that nothing shows which weights it trains: give check_step the'
      ' whole step, with its gradient and tx.update(gradients, opt_state, params)'
    )
  trained = {path: {key for key in found.named[WEIGHTS].weights if key[1] == path} for path in masks}
  reads = {path: _reads(path, keys, found) for path, keys in trained.items()}
  problems: dict[str, list[str]] = {}
  for path, keys in trained.items():
    if problem := _problem(keys, reads[path]):
      problems.setdefault(problem, []).append(path)
  if problems:
    advice = [_ADVICE] if any(trained[path] for paths in problems.values() for path in paths) else []
    raise ValueError('\n'.join([*(f'{", ".join(paths)}: {text}' for text, paths in problems.items()), *advice]))
  brought = _brought(traced.jaxpr, arrays, places, folders, trained)
  for note in _notes(brought):
    log_once(note, 'sparse24_jax', logging.WARNING)
  return CheckedStep({path: tuple(read.line for read in reads[path]) for path in masks}, brought)


def _brought(
  jaxpr: Any, arrays: Sequence[tuple[str, Any]], places: Sequence[Any], folders: Iterable[str],
  trained: Mapping[str, Set[Any]],
) -> dict[str, str]:
  """Of weights that are not sparse by what the optimizer keeps alone, the argument that has a state of theirs."""
  others: dict[str, str] = {}
  own = list(places)
  for i, ((path, _), place) in enumerate(zip(arrays, places, strict=True)):
    if place and place[0] is None and not _OF_OPTIMIZER.search(path):
      own[i] = None
      if not _FINGERPRINT.search(path):
        others.setdefault(place[1], path)
  if not others:
    return {}
  found = follow_weights(jaxpr, [_marks(place, folders) for place in own])
  stale = [path for path, keys in trained.items() if path in others and _problem(keys, _reads(path, keys, found))]
  return {path: others[path] for path in stale}


def _notes(brought: Mapping[str, str]) -> list[str]:
  """What to look at where masks are brought, once for models of nnx and once for variables."""
  nnx = {path for path, argument in brought.items() if NNX_STATES in f'{argument}/'}
  ways = {
    'call nnx.update(model, sparse_variables(nnx.state(model, nnx.Param), optimizer.opt_state, recipe)) in the step,'
    ' before the model': nnx,
    'call sparse_variables(params, opt_state, recipe) in the step': brought.keys() - nnx,
  }
  return [
    f'{", ".join(sorted(paths))}: the mask comes with the argument {brought[min(paths)]}, not from the optimizer state'
    f' that this step is given, so that it is stale unless the loop makes it anew for every step: {way}'
    for way, paths in ways.items() if paths
  ]  # fmt: skip


def _reads(path: str, trained: Set[Any], found: Found) -> list[Read]:
  """The matmuls of a weight on the way to the gradients."""
  gradients = found.named.get(GRADIENTS, Named())
  reads = [read for read in gradients.reads if read.key in trained]
  if reads or trained & gradients.touched:
    return reads
  # Of one matmul and a linear loss, the gradient does not depend on the weight.
  if reads := [read for read in found.reads if read.key in trained]:
    return reads
  # A weight that nothing is computed from has a copy that is, in fewer bits say.
  return [read for read in gradients.reads if read.key[1] == path]


def _problem(trained: Set[Any], reads: Iterable[Read]) -> str | None:
  """What is wrong with a weight, in words that others share whose matmuls are in the same lines."""
  if not trained:
    return (
      'the update of sparse_training is given a weight that is no argument of the step, or a sum of one with something'
      ' else: give it the parameters as the step has them'
    )
  dense, sparse = (', '.join(read.line for read in reads if read.sparse is kind) for kind in (False, True))
  if dense and sparse:
    return (
      f'the step reads it dense at {dense}, and sparse at {sparse}, and the gradient comes through both, while its'
      ' optimizer keeps a mask for it. If the first is meant, as a penalty on a product of the weight may be, check the'
      ' step without it'
    )
  if dense:
    return f'the step reads it dense at {dense}, while its optimizer keeps a mask for it'
  if not sparse:
    return (
      'no matmul of the step reads it under its mask on the way to the gradient: the loss does not look at it, changes'
      ' it first, or takes a mask that is not computed from the arguments of this step'
    )
  return None


def _folders_of_moments(paths: Iterable[str], masks: Iterable[str]) -> tuple[str, ...]:
  """Of the optimizer inside; wrappers around `sparse_training` may call what they hold `inner_state`, too."""
  ends = tuple(f'/projections/{name}' for name in masks)
  states = {f'/{path}'.removesuffix(end) for path in paths for end in ends if f'/{path}'.endswith(end)}
  return tuple(f'{state}/inner_state/' for state in states)


def _place(path: str, leaf: Any, masks: Mapping[str, Any]) -> tuple[str | None, str] | None:
  """(folder, path) of an array that may be a weight, (None, path) of what may be a state of one; None of others."""
  for name, state in masks.items():
    folder, found, rest = f'/{path}/'.rpartition(f'/{name}/')
    if not found:
      continue
    masked = jnp.issubdtype(state.dtype, jnp.bool_)
    fits = leaf.shape == state.shape if masked else leaf.ndim >= state.ndim + 2
    return (folder, name) if fits and not rest and jnp.issubdtype(leaf.dtype, jnp.floating) else (None, name)
  return None


def _marks(place: tuple[str | None, str] | None, folders: Iterable[str]) -> Marks:
  if place is None:
    return Marks()
  folder, path = place
  if folder is None:
    return Marks(states=frozenset((each, path) for each in folders))
  return Marks(dense=frozenset((place,) if folder in folders else ()))
