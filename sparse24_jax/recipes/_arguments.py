"""The error of a recipe for an argument that it does not have."""

from collections.abc import Callable
import difflib
import functools
import inspect


def named[**P, R](make: Callable[P, R]) -> Callable[P, R]:
  """The function, with an error that says which argument was meant, as Python has it of attributes alone.

  >>> import sparse24_jax as s24
  >>> s24.recipes.transposable_srste('.*', mask_decay=1e-4)
  Traceback (most recent call last):
  TypeError: transposable_srste() has no argument 'mask_decay'; did you mean 'masked_decay'? It takes path, ...
  """
  known = inspect.signature(make).parameters

  @functools.wraps(make)
  def call(*args: P.args, **kwargs: P.kwargs) -> R:
    for name in kwargs:
      if name not in known and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        meant = f'; did you mean {close[0]!r}?' if close else '.'
        raise TypeError(f'{make.__name__}() has no argument {name!r}{meant} It takes {", ".join(known)}')
    return make(*args, **kwargs)

  call.__module__ = 'sparse24_jax.recipes'  # where pickle finds it, beside modules of the same names
  return call
