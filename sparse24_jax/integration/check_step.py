"""`check_step`: whether a whole step, as it will run, makes the weights sparse whose masks its optimizer keeps."""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
from typing import Any

import jax.numpy as jnp

from sparse24_jax.binding.flow import follow_weights, Found, Marks
from sparse24_jax.binding.tracing import is_array, trace
from sparse24_jax.optim import sparse_states
from sparse24_jax.rules import leaves_by_path


@dataclasses.dataclass(frozen=True)
class CheckedStep:
  """The outcome of `check_step`; as text a line a weight.

  Attributes:
    weights: path of each weight that has a mask (or a scale) to the lines of the program whose matmuls read it, sparse.

  >>> import sparse24_jax as s24
  >>> print(s24.CheckedStep({'mlp/up': ('model.py:12 (mlp)',)}))
  mlp/up: sparse at model.py:12 (mlp)
  """

  weights: Mapping[str, tuple[str, ...]]

  def __str__(self) -> str:
    return '\n'.join(f'{path}: sparse at {", ".join(lines)}' for path, lines in self.weights.items())


def check_step(step: Callable[..., Any], *args: Any, **kwargs: Any) -> CheckedStep:
  """Raises an error unless a training step makes sparse what its optimizer keeps masks for. One line before a loop.

  A step that applies the plain model, without `sparsify` or `project`, trains dense while the optimizer goes on
  pruning: nothing in the run shows it. So the whole step is traced, backward pass and optimizer included, and every
  weight of the optimizer's `sparse_training` state is followed to the matmuls that read it. Nothing is computed or
  donated; shapes are enough.

  Args:
    step: what the loop calls in a sparse phase, with `jax.jit` or without. It computes a loss, its gradient and the
      update.
    *args: its arguments, arrays or `jax.ShapeDtypeStruct`: among them, at any depth, the parameters and the state of
      the optimizer, in a `TrainState` say.
    **kwargs: likewise.

  Returns:
    For each weight the lines whose matmuls read it.

  Raises:
    ValueError: a weight is read as it is by some matmul, with the line, or by none; or there is no state of
      `sparse_training` among the arguments, or no parameters for it.

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
  masks = sparse_states((args, kwargs))
  traced = trace(lambda _, args, kwargs: step(*args, **kwargs), ({}, args, kwargs), {})
  arrays = [(path, leaf) for path, leaf in leaves_by_path((args, kwargs)) if is_array(leaf)]
  places = [_place(path, leaf, masks) for path, leaf in arrays]
  held = {place for place in places if place and place[0] is not None}
  folders = [folder for folder in dict.fromkeys(f for f, _ in held) if all((folder, path) in held for path in masks)]
  if not folders:
    raise ValueError(
      f'the arguments hold a state of sparse_training for {", ".join(masks)}, and no parameters with these paths: give'
      ' check_step what the loop gives the step'
    )
  found = follow_weights(traced.jaxpr, [_marks(place, folders) for place in places])
  problems = {folder: _problems(folder, masks, found) for folder in folders}
  # Averages have the paths of the parameters, too, and are read by no matmul or by a dense teacher.
  best = min(folders, key=lambda folder: (len(problems[folder]), -sum(key[0] == folder for key in found.dense)))
  if problems[best]:
    raise ValueError('\n'.join(problems[best]))
  return CheckedStep({path: tuple(found.sparse[best, path]) for path in masks})


def _problems(folder: str, masks: Iterable[str], found: Found) -> list[str]:
  each = (_problem(path, found.dense.get((folder, path)), found.sparse.get((folder, path))) for path in masks)
  return [text for text in each if text]


def _problem(path: str, dense: list[str] | None, sparse: list[str] | None) -> str | None:
  ways = (
    'apply what sparsify returned, with the sparse_variables of this step, or the weights of project. A step of a dense'
    ' phase is not to be checked'
  )
  if dense:
    also = f', and sparse at {", ".join(sparse)}' if sparse else ''
    where = f'{", ".join(dense)}{also}'
    return f'{path}: the step reads it dense at {where}, while its optimizer keeps a mask for it: {ways}'
  if not sparse:
    return (
      f'{path}: no matmul of the step reads it under its mask: the loss does not look at it, changes it first, or takes'
      f' a mask that is no argument of the step: {ways}'
    )
  return None


def _place(path: str, leaf: Any, masks: Mapping[str, Any]) -> tuple[str | None, str] | None:
  """(folder, path) of an array that may be a weight, (None, path) of what may be a state of one; None of others."""
  if '/inner_state/' in f'/{path}':  # moments
    return None
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
