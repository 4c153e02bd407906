"""The recipes and their names: `register`, above the function of each, fills `KNOWN`, of which all lists are made."""

from collections.abc import Callable, Mapping
import dataclasses
import difflib
import functools
import inspect
import logging
import re
from typing import Any

from pallas_kernels._dispatch import log_once
from sparse24_jax.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Known:
  """A recipe, or a variant of one, that programs know by a name.

  Attributes:
    make: the function that users call.
    settings: arguments besides paths: of a variant, what makes it one; of all, values for what the function needs.
    spec: of its module, another one after a reload; None in a script or a notebook.
  """

  make: Callable[..., Recipe]
  settings: Mapping[str, Any]
  spec: Any = None

  @property
  def paths(self) -> tuple[str, ...]:
    """The arguments that are patterns of weights, which are those that stand by their place."""
    parameters = inspect.signature(self.make).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

  @property
  def is_sparse(self) -> bool:
    """Whether it makes anything sparse, at any time."""
    return self.example(*self.paths).fraction_of('sparse') > 0

  def example(self, *paths: str) -> Recipe:
    """The recipe of the weights that these patterns match."""
    return self.make(*paths, **self.settings)


KNOWN: dict[str, Known] = {}


def register[**P](
  needs: Mapping[str, Any] | None = None, **variants: Mapping[str, Any]
) -> Callable[[Callable[P, Recipe]], Callable[P, Recipe]]:
  """Makes a recipe known by the name of its function.

  A recipe that comes again, by a reload or as a cell or script runs again, replaces what it was, with all its names. In
  a cell or script a changed one, which may be another of that name, logs a warning.

  Args:
    needs: for each argument without a default, paths apart, a value with which command lines and tests make the recipe.
      Neither the weights that it takes nor the time of a step may depend on it.
    **variants: by further names, the arguments that make them.

  Raises:
    ValueError: a name is that of another module's recipe or stands twice in a module, an argument that stands by its
      place is no `str`, so no pattern of weights, or the arguments are not those of the function.
  """

  def decorate(make: Callable[P, Recipe]) -> Callable[P, Recipe]:
    named = _named(make)
    spec = inspect.unwrap(make).__globals__.get('__spec__')
    known = {
      name: Known(named, {**(needs or {}), **settings}, spec)
      for name, settings in {make.__name__: {}, **variants}.items()
    }
    for name, of in known.items():
      _check(name, of)
    for replaced in {KNOWN[name].make for name in known if name in KNOWN}:
      if spec is None and inspect.unwrap(replaced).__code__ != inspect.unwrap(make).__code__:
        message = f'recipe {make.__name__!r} replaces {_where(replaced)}: give one another name if both are meant'
        log_once(message, 'sparse24_jax', logging.WARNING)
      for name in [name for name, of in KNOWN.items() if of.make is replaced]:
        del KNOWN[name]
    KNOWN.update(known)
    return named

  return decorate


def _check(name: str, known: Known) -> None:
  signature = inspect.signature(known.make, eval_str=True)
  if other := [path for path in known.paths if signature.parameters[path].annotation not in (str, str | None)]:
    raise ValueError(f'recipe {name!r}: {other[0]} stands by its place and is no pattern, a str: put it behind *')
  try:
    signature.bind(*known.paths, **known.settings)
  except TypeError as error:
    raise ValueError(f'recipe {name!r}: {error}; register(dict(...)) gives what it needs a value') from error
  taken = KNOWN.get(name)
  if taken is not None and _differ(taken, known):
    raise ValueError(f'recipe {name!r} is taken, by {_where(taken.make)}: give this one another name')


def _where(make: Callable[..., Recipe]) -> str:
  make = inspect.unwrap(make)
  return f'{make.__module__}.{make.__qualname__}, line {make.__code__.co_firstlineno}'


def _differ(taken: Known, known: Known) -> bool:
  """Whether these are two recipes, and not one that comes again, or changed, as its module, script or cell does."""
  a, b = inspect.unwrap(taken.make), inspect.unwrap(known.make)
  if known.spec is not None and taken.spec is known.spec:  # one pass through a module
    return a.__code__ != b.__code__  # which also compares the line
  return (a.__module__, a.__qualname__) != (b.__module__, b.__qualname__)


def _named[**P, R](make: Callable[P, R]) -> Callable[P, R]:
  """The function, with errors that say which argument was meant, and of one that is missing what the docstring does.

  >>> import sparse24_jax as s24
  >>> s24.recipes.transposable_srste('.*', mask_decay=1e-4)
  Traceback (most recent call last):
  TypeError: transposable_srste() has no argument 'mask_decay'; did you mean 'masked_decay'? It takes path, ...
  >>> s24.recipes.set_('.*')
  Traceback (most recent call last):
  TypeError: set_() needs density: kept share of all the weights together
  """
  known = inspect.signature(make).parameters
  required = [name for name, p in known.items() if p.default is p.empty]

  @functools.wraps(make)
  def call(*args: P.args, **kwargs: P.kwargs) -> R:
    for name in kwargs:
      if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        meant = f'; did you mean {close[0]!r}?' if close else '.'
        raise TypeError(f'{make.__name__}() has no argument {name!r}{meant} It takes {", ".join(known)}')
    if missing := [name for name in required if name not in (*list(known)[: len(args)], *kwargs)]:
      said = (f'{name}{_said(make.__doc__ or "", name)}' for name in missing)
      raise TypeError(f'{make.__name__}() needs {"; and ".join(said)}')
    return make(*args, **kwargs)

  return call


def _said(doc: str, name: str) -> str:
  """What a docstring says of an argument, ': ' before it; '' if it does not."""
  found = re.search(rf'^  {name}: (.*(?:\n    .*)*)', inspect.cleandoc(doc), re.MULTILINE)
  return f': {" ".join(found[1].split()).rstrip(".")}' if found else ''
