"""Errors that say which weights they are about."""

from collections.abc import Iterator
import contextlib
import contextvars


class WeightError(ValueError):
  """An error about weights, which its message begins with.

  Attributes:
    paths: of the weights.
    leave_dense: whether the message offers to leave them dense.
  """

  def __init__(self, message: str, *paths: str, leave_dense: bool = False):
    super().__init__(message)
    self.paths, self.leave_dense = paths, leave_dense


_named: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar('named', default=())


@contextlib.contextmanager
def errors_name(*paths: str) -> Iterator[None]:
  """A ValueError from inside names these weights, and so may one that comes later, see `weights_named`."""
  before = _named.set(paths)
  try:
    yield
  except WeightError:
    raise
  except ValueError as error:
    raise WeightError(f'{", ".join(paths)}: {error}', *paths) from error
  finally:
    _named.reset(before)


def weights_named() -> tuple[str, ...]:
  """Those of `errors_name`: an op that is traced there may fail later, where a loop or a remat is transformed."""
  return _named.get()
