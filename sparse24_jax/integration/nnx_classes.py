"""The classes that a sparsified nnx model has in place of its own: other methods, the same name, pickled alike."""

from collections.abc import Callable
import inspect
from typing import Any

from flax import nnx
import jax

from sparse24_jax.rules import is_array

_PLAIN = 'sparse24_plain'  # of a class made here: the one in whose place it stands


def subclass(plain: type, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]], make: Any) -> type:
  """A class with the name of the plain one and its methods wrapped; what it constructs is plain.

  Args:
    plain: a class of nnx modules.
    wrap: of the name of a method and the method, what stands in its place.
    make: `make(plain)` gives this class again, for pickle.
  """
  own = [c for c in plain.__mro__ if c not in nnx.Module.__mro__]
  names = sorted({name for c in own for name in vars(c) if name == '__call__' or not name.startswith('__')})
  found = {name: inspect.getattr_static(plain, name) for name in names}
  wrapped = {name: wrap(name, method) for name, method in found.items() if _is_method(method)}
  makers = {name: staticmethod(getattr(plain, name)) for name, f in found.items() if isinstance(f, classmethod)}

  def reduce(self: nnx.Module, protocol: Any) -> tuple:
    _, (_, *args), *rest = super(sparse, self).__reduce_ex__(protocol)  # pickle finds the plain class by its name
    return _empty, (make, plain, *args), *rest

  more = {_PLAIN: plain, '__module__': plain.__module__, '__reduce_ex__': reduce}
  settings = {} if getattr(plain, '_pytree__is_pytree', True) else {'pytree': False}  # not handed down by Flax
  try:
    sparse = type(plain)(plain.__name__, (plain,), {**wrapped, **makers, **more}, **settings)
  except TypeError as error:
    raise ValueError(
      f'{plain.__name__}: its __init_subclass__ or metaclass refuses a subclass made without arguments ({error}), which'
      ' a sparsified model needs: sparsify a function of the model, sparsify(loss_fn, bind(recipe, loss_fn, model, x))'
    ) from error
  return sparse


def plain_class(made: type) -> type | None:
  """The class in whose place one that was made here stands; None of any other."""
  return getattr(made, _PLAIN, None)


def computes(name: str, args: tuple, kwargs: dict) -> bool:
  """Whether a method is given something to compute with: an array, or numbers in a list."""
  given = [*args, *kwargs.values()]
  numbers = any(isinstance(arg, list | tuple) and jax.tree.leaves(arg) for arg in given)
  return name == '__call__' or numbers or any(map(is_array, jax.tree.leaves(given)))


def _empty(make: Callable[[type], Any], plain: type, *args: Any) -> nnx.Module:
  """A module to be filled, of the class that `make` makes of the plain one."""
  sparse = make(plain)
  return sparse.__new__(sparse, *args)


def _is_method(found: Any) -> bool:
  """A function, or what a decorator such as `nnx.jit` makes of one."""
  return callable(found) and hasattr(type(found), '__get__') and not isinstance(found, staticmethod | classmethod)
