"""What can be wrong with a checkpoint: of another run, damaged, or not to be read now."""

from collections.abc import Collection, Mapping
import re
from typing import Any


class CheckpointError(RuntimeError):
  """A checkpoint cannot be written, read, or used by this run; the message says what to do."""


class UnreadableError(CheckpointError):
  """One checkpoint cannot be read; another may be."""


class NotFiniteError(CheckpointError):
  """What should be saved holds NaN or infinities; nothing was written."""


class DifferentRunError(CheckpointError):
  """A checkpoint belongs to a run with other settings.

  Attributes:
    fields: names of those that may not differ.
  """

  def __init__(self, message: str, fields: Collection[str]):
    super().__init__(message)
    self.fields = fields


class RemovedError(CheckpointError):
  """A checkpoint went away while it was read, because the run that owns it has newer ones."""


def differing(found: Any, wanted: Any, prefix: str = '') -> dict[str, tuple[Any, Any]]:
  """The fields in which two JSON-like values differ, with both values.

  >>> differing({'recipe': {'name': 'ste'}}, {'recipe': {'name': 'dense'}})
  {'recipe.name': ('ste', 'dense')}
  """
  lists = [v for v in (found, wanted) if isinstance(v, list) and all(isinstance(entry, Mapping) for entry in v)]
  if len(lists) == 2 and len(found) == len(wanted):  # such as rules
    found, wanted = (dict(enumerate(entries)) for entries in lists)
  if isinstance(found, Mapping) and isinstance(wanted, Mapping):
    fields = {}
    for key in sorted({*found, *wanted}):
      fields |= differing(found.get(key), wanted.get(key), f'{prefix}.{key}' if prefix else str(key))
    return fields
  return {} if found == wanted else {prefix: (found, wanted)}


def differences(found: Any, wanted: Any) -> list[str]:
  """Describes each field in which two JSON-like values differ, one line a field.

  >>> differences({'recipe': {'name': 'ste'}}, {'recipe': {'name': 'dense'}})
  ["recipe.name: 'ste' in the checkpoint, 'dense' in this run"]
  """
  fields = differing(found, wanted).items()
  return [f'{name}: {old!r} in the checkpoint, {new!r} in this run' for name, (old, new) in fields]


# What a file that is cut, changed or not there makes Orbax and its parsers raise, and TensorStore say of it.
_DAMAGE = (
  LookupError, TypeError, AttributeError, RecursionError, FileNotFoundError, IsADirectoryError, NotADirectoryError,
)  # fmt: skip
_STATUS = re.compile(r'([A-Z]+(?:_[A-Z]+)*): ')
_DAMAGED = ('DATA_LOSS', 'OUT_OF_RANGE', 'NOT_FOUND', 'INVALID_ARGUMENT', 'FAILED_PRECONDITION')

# What Orbax says of a checkpoint with other fields than this program's state.
_OTHER_TREE = 'structures do not match'


def is_damage(error: BaseException | None) -> bool:
  """Whether an error of reading says that the content is bad, not that memory, permission or disk are missing.

  >>> is_damage(KeyError('shape')), is_damage(ValueError('DATA_LOSS: CRC-32C checksum verification failed'))
  (True, True)
  >>> is_damage(PermissionError()), is_damage(ValueError('UNKNOWN: Error reading file [OS error 5: EIO]'))
  (False, False)
  """
  while type(error) is Exception:  # Orbax', around an array that TensorStore cannot read
    error = error.__cause__ or error.__context__
  if isinstance(error, ValueError):  # those of JSON and Unicode, and TensorStore's without a status, are of content
    if _OTHER_TREE in str(error):  # It may be of another version of this program.
      return False
    status = _STATUS.match(str(error))
    return status is None or status[1] in _DAMAGED
  return isinstance(error, _DAMAGE)


def first_line(error: BaseException) -> str:
  """What an error says, shortly."""
  text = str(error).strip().splitlines()
  return f'{type(error).__name__}: {text[0][:300] if text else ""}'
