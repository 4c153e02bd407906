"""Flax nnx: a model with its matched weights sparse, by the trace of what its methods compute.

The copy that `sparsify` makes has the tree of the plain model and, in one attribute, the states of its sparse weights.
A call runs the plain model as a pure function of its parameters, and puts back what it changed.
"""

from collections.abc import Callable, Collection
import functools
import logging
from typing import Any

from flax import nnx
import jax

from pallas_kernels._dispatch import log_once
from sparse24_jax.binding.bound import tracked
from sparse24_jax.binding.origin import numbers_of, spoiled
from sparse24_jax.binding.state import WeightState
from sparse24_jax.binding.states import weight_states
from sparse24_jax.binding.transform import run_sparse
from sparse24_jax.integration.nnx_classes import computes, plain_class, subclass
from sparse24_jax.integration.nnx_functions import as_function, is_variable
from sparse24_jax.integration.nnx_states import (
  ATTRIBUTE,
  DensePhase,
  fingerprints,
  RNG,
  Sparse,
)
from sparse24_jax.linear_layer import projection_state
from sparse24_jax.recipe import PhaseName, Recipe
from sparse24_jax.rules import leaves_by_path, listed, match_rules, rule_for


def sparsify(model: nnx.Module, recipe: Recipe, *, phase: PhaseName, rngs: nnx.Rngs | None) -> nnx.Module:
  """A copy of `model` whose calls are sparse; for a dense phase the plain model, or one with layers in FP8."""
  inner = ['/'.join(map(str, path)) for path, module in nnx.iter_modules(model) if path and _is_altered(module)]
  if inner:
    raise ValueError(
      f'{inner} of the model are sparsified by themselves, and would be plain in it: sparsify the model alone, with the'
      ' rules of all parts in one recipe'
    )
  model = nnx.clone(model)
  held = _states_in(model)
  known, made_of = (_states_for(recipe, held), held.read_fingerprints()) if held else ({}, {})
  brought_in, fits = (held.brought_in.get_value(), held.fits.get_value()) if held and known else (False, True)
  _restore(model)
  params = nnx.state(model, nnx.Param)
  rules, weights = match_rules(params, recipe), dict(leaves_by_path(params))
  if phase == 'dense':
    dense = recipe.in_dense_phase()
    setattr(model, ATTRIBUTE, DensePhase(dense))
    return model if dense is None else _altered(model, tracked(params, dense))
  abstract = [path for path in rules if isinstance(weights[path], jax.ShapeDtypeStruct)]
  if abstract:
    raise ValueError(f'{abstract[0]}: the model is abstract; sparsify it inside nnx.eval_shape')
  states, new = {}, {}
  for path, rule in rules.items():
    if path in known:
      states[path] = known[path]
    elif (projection := rule.policy.projection) is not None:
      new[path] = (rule.policy, weights[path], projection.init(weights[path]))
  if moving := [path for path, (policy, _, _) in new.items() if policy.projection.update is not None]:
    log_once(
      f'{listed(moving)}: which links they have is known to sparse_training alone. Until nnx.update(model,'
      ' sparse_variables(nnx.state(model, nnx.Param), opt_state, recipe)) brings them in, all entries count: with'
      ' another optimizer these weights train dense', 'sparse24_jax', logging.WARNING,
    )  # fmt: skip
  states |= weight_states(recipe, new, pack=False)
  states = {path: states[path] for path in rules if path in states}
  made_of = {path: of for path, of in made_of.items() if path in known}
  made_of |= fingerprints({path: (policy.projection, w) for path, (policy, w, _) in new.items()})
  policies = numbers_of(rules[path].policy for path in states)
  setattr(model, ATTRIBUTE, Sparse(recipe, states, made_of, brought_in, fits, policies, _streams(rngs)))
  return _altered(model, rules)


def _altered(model: nnx.Module, paths: Collection[str]) -> nnx.Module:
  """The model, with classes whose calls follow the recipe that it holds, for the weights at `paths`."""
  for module in _parts(model, paths):
    object.__setattr__(module, '__class__', _part(type(module)))
  object.__setattr__(model, '__class__', _whole(type(model)))
  return model


def _is_altered(model: nnx.Module) -> bool:
  """Whether a model was sparsified by itself, and does not run as the plain one."""
  return getattr(getattr(model, ATTRIBUTE, None), 'recipe', None) is not None


def _run(model: nnx.Module, method: str, args: tuple, kwargs: dict) -> Any:
  """A method of the plain model, with sparse matmuls."""

  def function(plain: nnx.Module, *args: Any, **kwargs: Any) -> Any:
    return getattr(plain, method)(*args, **kwargs)

  sparse = getattr(model, ATTRIBUTE)
  key, call = sparse.draw(), as_function(model, function, args, kwargs, prepare=_restore)
  states, fine = sparse.states_of(call.params)
  found = run_sparse(sparse.recipe, call.function, call.params, states, key, *call.rest, *args, **kwargs)
  return call.finish(found if fine is None else spoiled(found, fine))


def _states_in(model: nnx.Module) -> Sparse | None:
  """What a model has beside its own attributes if it is sparsified by itself."""
  held = getattr(model, ATTRIBUTE, None)
  return held if isinstance(held, Sparse) else None


def _states_for(recipe: Recipe, sparse: Sparse) -> dict[str, Any]:
  """The states of a recipe that a model has already, to be kept: a scale is frozen, a mask waits for its refresh."""

  def projection(recipe: Recipe, path: str) -> Any:
    rule = rule_for(path, recipe)
    return rule and rule.policy.projection

  same = {path: s for path, s in sparse.read().items() if projection(recipe, path) == projection(sparse.recipe, path)}
  # A packed weight is that of one step.
  return {path: WeightState.mapped(projection_state, state) for path, state in same.items()}


def _parts(model: nnx.Module, paths: Collection[str]) -> list[nnx.Module]:
  """The modules below the model that hold a matched weight, or have one that does below them; no containers."""

  def variables(module: nnx.Module) -> set[int]:
    return {id(leaf) for leaf in jax.tree.leaves(module, is_leaf=is_variable) if is_variable(leaf)}

  flat = {'/'.join(map(str, path)): variable for path, variable in nnx.iter_graph(model) if is_variable(variable)}
  matched = {id(flat[path]) for path in paths}
  below = [module for _, module in nnx.iter_modules(model) if module is not model]
  return [m for m in below if not isinstance(m, nnx.List | nnx.Dict) and variables(m) & matched]


def _restore(model: nnx.Module) -> None:
  """Takes out all that `sparsify` put in."""
  for _, module in nnx.iter_modules(model):
    if plain := plain_class(type(module)):
      object.__setattr__(module, '__class__', plain)
  if hasattr(model, ATTRIBUTE):
    delattr(model, ATTRIBUTE)


@functools.cache
def _whole(plain: type) -> type:
  """The class of a sparsified model: its calls, and its methods that are given arrays, run sparse."""

  def through(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self, *args, **kwargs):
      return _run(self, name, args, kwargs) if computes(name, args, kwargs) else method(self, *args, **kwargs)

    return run

  return subclass(plain, through, _whole)


@functools.cache
def _part(plain: type) -> type:
  """The class of a part of a sparsified model: called by itself it would be dense, and says so."""

  def refused(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self, *args, **kwargs):
      if not computes(name, args, kwargs):
        return method(self, *args, **kwargs)
      raise ValueError(
        f'{plain.__name__}.{name} of a sparsified model was called from outside the model, where no rule would hold for'
        ' its weights: call the model, or a method of it that calls this part; or sparsify the part by itself'
      )

    return run

  return subclass(plain, refused, _part)


def _streams(rngs: nnx.Rngs | None) -> nnx.Rngs | None:
  """Streams of the model's own."""
  if rngs is None:
    return None
  if not isinstance(rngs, nnx.Rngs):
    raise ValueError(f'rngs must be streams, nnx.Rngs({RNG}=seed), found {type(rngs).__name__}')
  if RNG not in rngs:
    raise ValueError(f'rngs has streams {list(rngs)}, none named {RNG!r}: pass nnx.Rngs({RNG}=seed)')
  return rngs.fork()
