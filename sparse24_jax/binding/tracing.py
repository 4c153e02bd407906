"""A function of parameters as a jaxpr whose arguments are known by their paths."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import inspect
from typing import Any, cast

import jax
from jax import Array

from sparse24_jax.binding import _jax
from sparse24_jax.binding.values import Value
from sparse24_jax.binding.view import View
from sparse24_jax.recipe import Recipe, require_recipe
from sparse24_jax.rules import is_array, leaves_by_path, matched_rules, require_arrays
from sparse24_jax.sizes import is_symbolic, symbolic

# What functions call their parameters.
_PARAMETERS = ('params', 'parameters', 'weights')


@dataclasses.dataclass(frozen=True)
class Functional:
  """A call `f(model, *args)` as a pure function of parameters.

  Attributes:
    function: `(params, *rest, *args)`, whose result `finish` takes.
    params: a tree of arrays.
    rest: what else the model holds.
    finish: puts back what the call changed of the model and its other arguments; returns what `f` does.
  """

  function: Callable[..., Any]
  params: Any
  rest: tuple[Any, ...] = ()
  finish: Callable[[Any], Any] = lambda out: out


def params_come_third[F: Callable[..., Any]](g: F) -> F:
  """For a `g(recipe, f, params, *args)`: ValueError where one of these is missing, or stands in another's place."""
  names, order = ('recipe', 'f', 'params'), f'{g.__name__}(recipe, f, params, *args)'

  @functools.wraps(g)
  def checked(*args: Any, **kwargs: Any) -> Any:
    if len(args) > 2 and 'params' in kwargs:
      raise ValueError(
        f'params is given by name, and another argument stands in its place: {order}. f'
        ' must take the parameters first; wrap it: lambda p, *a: f(*a, params=p)'
      )
    given = dict(zip(names, args, strict=False)) | kwargs
    if 'recipe' in given:
      require_recipe(given['recipe'], order)
    if missing := [name for name in names if name not in given]:
      raise ValueError(f'{" and ".join(missing)} not given: {order}, with an example of what f takes')
    return g(*args, **kwargs)

  return cast(F, checked)


@contextlib.contextmanager
def order_is_told(caller: str, recipe: Recipe, params: Any, args: Collection[Any]) -> Iterator[None]:
  """An error from inside says so if what the rules match is no part of `params`, but of an argument behind it."""
  try:
    yield
  except Exception as error:  # of the function, whatever it does with arguments that it does not expect
    if not _holds_weights(recipe, params) and any(_holds_weights(recipe, other) for other in args):
      raise ValueError(
        f'the weights that recipe {recipe.name!r} matches are not in params, but in an argument behind it: arguments in'
        f' another order? It is {caller}(recipe, f, params, *args), and f takes the parameters first; if it does not,'
        f' wrap it, as lambda p, x: f(x, p). What it raised: {type(error).__name__}: {error}'
      ) from error
    raise


def _holds_weights(recipe: Recipe, tree: Any) -> bool:
  """Whether rules match weights in a tree, which an array by itself is not."""
  try:
    return not is_array(tree) and bool(matched_rules(tree, recipe))
  except ValueError:
    return False


@functools.singledispatch
def as_callable(f: Any) -> Callable[..., Any]:
  """A function of parameters, of what was given for one; a library with models to be applied registers how."""
  refuse_what_holds_a_module('f', f)
  if not callable(f):
    raise ValueError(f'f must be a function of parameters or a linen module, found {type(f).__name__}')
  return f


def refuse_what_holds_a_module(name: str, model: Any) -> None:
  """ValueError for an object around a module and its parameters, as the Flax models of `transformers` are."""
  module = getattr(model, 'module', None)
  if hasattr(model, 'params') and as_callable.dispatch(type(module)) is not as_callable.dispatch(object):
    raise ValueError(
      f'{name} is a {type(model).__name__}, which holds a module and its parameters: give its module, {name}.module,'
      f' and where parameters are wanted, {name}.params. A loss calls'
      f" {name}.module.apply({{'params': params}}, ...)"
    )


@functools.singledispatch
def functional(model: Any, f: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Functional:
  """A tree of arrays is its own parameters.

  A library registers its models, if these hold their state, and `object`, if arguments of any call may hold some.
  """
  return Functional(f, model)


@dataclasses.dataclass(frozen=True)
class Traced:
  """A jaxpr, and what its arguments and results are.

  Attributes:
    jaxpr: its equations.
    constants: arrays that the function brings along.
    leaves: the arrays among the arguments, those of the parameters first.
    paths: of the parameters, in that order.
    structure: of what the function returns.
  """

  jaxpr: Any
  constants: Sequence[Any]
  leaves: list[Any]
  paths: list[str]
  structure: Any

  def marks(self, paths: Iterable[str]) -> dict[str, View]:
    """Views of whole parameters."""
    shapes = dict(zip(self.paths, self.leaves, strict=False))
    return {path: View.whole(path, shapes[path].shape) for path in paths}

  def values(self, arrays: Sequence[Array], marks: Mapping[str, View], states: Mapping[str, Any]) -> list[Value]:
    """The arguments, with the parameters that are marked."""
    values = [Value(array) for array in arrays]
    for value, path in zip(values, self.paths, strict=False):
      value.mark, value.state = marks.get(path), states.get(path)
    return values


def trace(f: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traced:
  """Traces `f(*args, **kwargs)`; the first argument is the parameters, and what is no array is passed on as it is."""
  flat, structure = jax.tree.flatten((args, dict(kwargs)))
  require_arrays(args[0])
  dynamic = [i for i, leaf in enumerate(flat) if is_array(leaf)]
  paths = [path for path, _ in leaves_by_path(args[0])]
  out_structure = []

  def flat_f(leaves: Sequence[Any]) -> list[Any]:
    filled = list(flat)
    for i, leaf in zip(dynamic, leaves, strict=True):
      filled[i] = leaf
    args, kwargs = jax.tree.unflatten(structure, filled)
    try:
      out = f(*args, **kwargs)
    except jax.errors.JAXTypeError as error:
      error.add_note(
        'sparse24_jax traces what it makes sparse, as jax.jit does: Python\'s if, int and float on values of arrays'
        ' belong around the call, or into jnp.where and jax.lax.cond'
      )
      raise
    except (AttributeError, TypeError) as error:
      if name := _takes_parameters_later(f, args, kwargs, error):
        raise ValueError(f'f must take the parameters first; wrap it: lambda p, *a: f(*a, {name}=p)') from error
      raise
    for path, leaf in jax.tree_util.tree_leaves_with_path(out):
      if not (is_array(leaf) or isinstance(leaf, int | float | complex)):
        raise ValueError(
          f'the result holds a {type(leaf).__name__} at {jax.tree_util.keystr(path) or "its root"}: what is made sparse'
          ' is traced, as by jax.jit, and returns arrays; make that around the call'
        )
    out, tree = jax.tree.flatten(out)
    out_structure.append(tree)
    return out

  leaves = [flat[i] for i in dynamic]
  closed = jax.make_jaxpr(flat_f)(leaves)
  jaxpr, constants = _jax.open_jaxpr(closed)
  return Traced(jaxpr, constants, leaves, paths, out_structure[-1])


@contextlib.contextmanager
def sizes_are_known(traced: Traced) -> Iterator[None]:
  """ValueError where it matters that a dimension of an argument is symbolic, as in `jax.export`."""
  try:
    yield
  except jax.errors.InconclusiveDimensionOperation as error:
    found = next((leaf for leaf in traced.leaves if is_symbolic(leaf)), None)
    if found is None:
      raise
    raise ValueError(symbolic('an argument', found)) from error


def _takes_parameters_later(
  f: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception
) -> str | None:
  """The name by which a function that failed takes the parameters, if its first argument is something else.

  Its signature tells where one of the names of parameters comes later and is given none, or an array for the tree; by
  itself, an error tells where the tree that is given first was read as an array.
  """
  if not args or is_array(args[0]):
    return None
  try:
    signature = inspect.signature(f)
  except (TypeError, ValueError):  # one without a signature
    return None
  try:
    given = signature.bind_partial(*args, **kwargs).arguments
  except TypeError:  # more than it takes
    given = {}
  names = list(signature.parameters)
  if not names or names[0] in _PARAMETERS:
    return None
  for name in names[1:]:
    parameter = signature.parameters[name]
    absent = name not in given and (parameter.default is None or parameter.default is parameter.empty)
    if name in _PARAMETERS and (absent or is_array(given.get(name))):
      return name
  read = isinstance(error, AttributeError) and error.obj is args[0] and hasattr(jax.Array, error.name or '')
  return 'params' if read else None
