"""Flax nnx: a model with its matched weights sparse, by the trace of what its methods compute.

The copy that `sparsify` makes has the tree of the plain model and, in one attribute, the states of its sparse weights.
A call runs the plain model as a pure function of its parameters, and puts back what it changed.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import inspect
from typing import Any

from flax import nnx
import jax
from jax import Array

from sparse24_jax.binding.state import NNX_STATES, WeightState
from sparse24_jax.binding.states import weight_states
from sparse24_jax.binding.tracing import is_array
from sparse24_jax.binding.transform import run_sparse
from sparse24_jax.integration.nnx_functions import as_function
from sparse24_jax.linear_layer import projection_state
from sparse24_jax.recipe import PhaseName, Recipe
from sparse24_jax.rules import leaves_by_path, match_rules, rule_for

RNG = 'mvue'
ATTRIBUTE = NNX_STATES.partition('/')[0]
_PLAIN = 'sparse24_plain'  # of a class made here: the one in whose place it stands


class SparseVariable(nnx.Variable):
  """Holds the projection state of one weight: read by the forward, written by `nnx.update` after a step.

  >>> from flax import nnx
  >>> import jax, sparse24_jax as s24
  >>> model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)))
  >>> model = s24.sparsify(model, s24.recipes.ste('.*/kernel'))
  >>> [state.shape for state in jax.tree.leaves(nnx.state(model, s24.SparseVariable))]
  [(8, 16)]
  """


class Sparse(nnx.Module):
  """What a sparsified model has beside its own attributes.

  Attributes:
    recipe: whose rules its matmuls follow.
    states: `SparseVariable` of each weight that is projected, by its path.
    rngs: streams with one named `'mvue'`, or None.
  """

  def __init__(self, recipe: Recipe, states: Mapping[str, Any], rngs: nnx.Rngs | None):
    # The optimizer alone reads the decay, which may be an array: no part of a graph that is hashed.
    self.recipe = dataclasses.replace(recipe, masked_decay=0.0)
    self.states = nnx.Dict({path: SparseVariable(state) for path, state in states.items()})
    self.rngs = rngs

  def read(self) -> dict[str, Any]:
    """The states, by path."""
    return {path: self.states[path].get_value() for path in self.states}

  def draw(self) -> Array | None:
    """A key for MVUE, which advances the stream; None where none is needed or none is there."""
    if self.rngs is None or all(rule.policy.weight_grad == 'dense' for rule in self.recipe.rules):
      return None
    return self.rngs[RNG]()


def sparsify(model: nnx.Module, recipe: Recipe, *, phase: PhaseName, rngs: nnx.Rngs | None) -> nnx.Module:
  """A copy of `model` whose calls are sparse, or the plain model for a dense phase."""
  inner = ['/'.join(map(str, path)) for path, module in nnx.iter_modules(model) if path and hasattr(module, ATTRIBUTE)]
  if inner:
    raise ValueError(
      f'{inner} of the model are sparsified by themselves, and would be dense in it: sparsify the model alone, with the'
      ' rules of all parts in one recipe'
    )
  model = nnx.clone(model)
  known = _states_for(recipe, getattr(model, ATTRIBUTE)) if hasattr(model, ATTRIBUTE) else {}
  _restore(model)
  params = nnx.state(model, nnx.Param)
  rules, weights = match_rules(params, recipe), dict(leaves_by_path(params))
  if phase == 'dense':
    return model
  abstract = [path for path in rules if isinstance(weights[path], jax.ShapeDtypeStruct)]
  if abstract:
    raise ValueError(f'{abstract[0]}: the model is abstract; sparsify it inside nnx.eval_shape')
  states, new = {}, {}
  for path, rule in rules.items():
    if path in known:
      states[path] = known[path]
    elif (projection := rule.policy.projection) is not None:
      new[path] = (rule.policy, weights[path], projection.init(weights[path]))
  states |= weight_states(recipe, new, pack=False)
  for module in _parts(model, rules):
    object.__setattr__(module, '__class__', _part(type(module)))
  setattr(model, ATTRIBUTE, Sparse(recipe, {path: states[path] for path in rules if path in states}, _streams(rngs)))
  object.__setattr__(model, '__class__', _whole(getattr(type(model), _PLAIN, type(model))))
  return model


def sparse_state(states: Mapping[str, Any]) -> nnx.State:
  """What `nnx.update(model, ...)` takes to bring the states into a sparsified model."""
  folder = tuple(NNX_STATES.strip('/').split('/'))
  return nnx.from_flat_state({(*folder, path): SparseVariable(state) for path, state in states.items()})


def _run(model: nnx.Module, method: str, args: tuple, kwargs: dict) -> Any:
  """A method of the plain model, with sparse matmuls."""

  def function(plain: nnx.Module, *args: Any, **kwargs: Any) -> Any:
    return getattr(plain, method)(*args, **kwargs)

  sparse = getattr(model, ATTRIBUTE)
  key, states = sparse.draw(), sparse.read()
  call = as_function(model, function, args, kwargs, prepare=_restore)
  return call.finish(
    run_sparse(sparse.recipe, call.function, call.params, states, key, *call.rest, *args, **kwargs)
  )


def _states_for(recipe: Recipe, sparse: Sparse) -> dict[str, Any]:
  """What a model has already of the states of a recipe: a scale is frozen, a mask waits for its refresh."""

  def projection(recipe: Recipe, path: str) -> Any:
    rule = rule_for(path, recipe)
    return rule and rule.policy.projection

  def unpacked(state: Any) -> Any:  # a packed weight is that of one step
    if isinstance(state, WeightState):
      return dataclasses.replace(state, value=projection_state(state.value))
    return projection_state(state)

  same = {path: s for path, s in sparse.read().items() if projection(recipe, path) == projection(sparse.recipe, path)}
  return {path: unpacked(state) for path, state in same.items()}


def _parts(model: nnx.Module, paths: Mapping[str, Any]) -> list[nnx.Module]:
  """The modules below the model that hold a matched weight, or have one that does below them; no containers."""

  def variables(module: nnx.Module) -> set[int]:
    return {id(leaf) for leaf in jax.tree.leaves(module, is_leaf=_is_variable) if _is_variable(leaf)}

  flat = {'/'.join(map(str, path)): variable for path, variable in nnx.iter_graph(model) if _is_variable(variable)}
  matched = {id(flat[path]) for path in paths}
  below = [module for _, module in nnx.iter_modules(model) if module is not model]
  return [m for m in below if not isinstance(m, nnx.List | nnx.Dict) and variables(m) & matched]


def _is_variable(node: Any) -> bool:
  return isinstance(node, nnx.Variable)


def _restore(model: nnx.Module) -> None:
  """Takes out all that `sparsify` put in."""
  for _, module in nnx.iter_modules(model):
    if plain := getattr(type(module), _PLAIN, None):
      object.__setattr__(module, '__class__', plain)
  if hasattr(model, ATTRIBUTE):
    delattr(model, ATTRIBUTE)


@functools.cache
def _whole(plain: type) -> type:
  """The class of a sparsified model: its calls, and its methods that are given arrays, run sparse."""

  def through(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self, *args, **kwargs):
      return _run(self, name, args, kwargs) if _computes(name, args, kwargs) else method(self, *args, **kwargs)

    return run

  return _subclass(plain, through, _whole)


@functools.cache
def _part(plain: type) -> type:
  """The class of a part of a sparsified model: called by itself it would be dense, and says so."""

  def refused(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self, *args, **kwargs):
      if not _computes(name, args, kwargs):
        return method(self, *args, **kwargs)
      raise ValueError(
        f'{plain.__name__}.{name} of a sparsified model was called from outside the model, where its weights would be'
        ' dense: call the model, or a method of it that calls this part; or sparsify the part by itself'
      )

    return run

  return _subclass(plain, refused, _part)


def _computes(name: str, args: tuple, kwargs: dict) -> bool:
  """Whether a method is given something to compute with: an array, or numbers in a list."""
  given = [*args, *kwargs.values()]
  numbers = any(isinstance(arg, list | tuple) and jax.tree.leaves(arg) for arg in given)
  return name == '__call__' or numbers or any(map(is_array, jax.tree.leaves(given)))


def _subclass(plain: type, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]], make: Any) -> type:
  """A class with the name of the plain one and its methods wrapped; what it constructs is plain."""
  own = [c for c in plain.__mro__ if c not in nnx.Module.__mro__]
  names = sorted({name for c in own for name in vars(c) if name == '__call__' or not name.startswith('__')})
  found = {name: inspect.getattr_static(plain, name) for name in names}
  wrapped = {name: wrap(name, method) for name, method in found.items() if _is_method(method)}
  makers = {name: staticmethod(getattr(plain, name)) for name, f in found.items() if isinstance(f, classmethod)}

  def reduce(self: nnx.Module, protocol: Any) -> tuple:
    _, (_, *args), *rest = super(sparse, self).__reduce_ex__(protocol)  # pickle finds the plain class by its name
    return _empty, (make, plain, *args), *rest

  more = {_PLAIN: plain, '__module__': plain.__module__, '__reduce_ex__': reduce}
  sparse = type(plain)(plain.__name__, (plain,), {**wrapped, **makers, **more})
  return sparse


def _empty(make: Callable[[type], Any], plain: type, *args: Any) -> nnx.Module:
  """A module to be filled, of the class that `make` makes of the plain one."""
  sparse = make(plain)
  return sparse.__new__(sparse, *args)


def _is_method(found: Any) -> bool:
  """A function, or what a decorator such as `nnx.jit` makes of one."""
  return callable(found) and hasattr(type(found), '__get__') and not isinstance(found, staticmethod | classmethod)


def _streams(rngs: nnx.Rngs | None) -> nnx.Rngs | None:
  """Streams of the model's own."""
  if rngs is None:
    return None
  if not isinstance(rngs, nnx.Rngs):
    raise ValueError(f'rngs must be streams, nnx.Rngs({RNG}=seed), found {type(rngs).__name__}')
  if RNG not in rngs:
    raise ValueError(f'rngs has streams {list(rngs)}, none named {RNG!r}: pass nnx.Rngs({RNG}=seed)')
  return rngs.fork()
