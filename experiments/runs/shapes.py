"""What the files of a run must be like, looked at where they are read: a folder may be damaged, or from elsewhere.

A shape is a type, types joined by `|`, a range of integers, a list of the one shape that all entries have, a tuple of
the shapes of a list of as many, or a dictionary of the fields that must be there and of those that may, whose names
end in `?`. Others are left as they are.
"""

from collections.abc import Mapping
import math
from pathlib import Path
import types
from typing import Any

from experiments.runs.progress import SPENT_ON

type Shape = type | types.UnionType | range | list[Any] | tuple[Any, ...] | Mapping[str, Any]

# More steps than a run has; reports make arrays of as many.
COUNT = range(1, 10**8)
_SPENT = dict.fromkeys(SPENT_ON, float)

CONFIG: Shape = {
  'name': str, 'label': str, 'seed': int, 'steps': COUNT, 'task': str, 'vocab_multiple': COUNT, 'init_from': str,
  'method': str,
  'model': {'size': str},
  'data': {'corpus': str, 'tokenizer': str, 'batch_size': COUNT, 'seq_len': COUNT},
  'recipe': {'name': str, 'kwargs': dict, 'flip_rate': str, 'dense_from': str, 'implementation': str},
}  # fmt: skip
ENVIRONMENT: Shape = {'device': str, 'python': str, 'versions': dict, 'command': str, 'commit': str | None}
SUMMARY: Shape = {'validation_loss': float, 'seconds': float, 'spent': _SPENT}
# By the kind of a record, beside its step.
RECORDS: Mapping[str, Shape] = {
  'train': {
    'loss': float, 'grad_norm': float, 'learning_rate': float, 'phase': str, 'flip_rate': int | float | None,
    'flip_rates': dict,
  },
  'validation': {'loss': float, 'phase': str},
  'timing': {'seconds': float, 'tokens_per_s': float, 'spent': _SPENT},
}  # fmt: skip
# A step that is not logged yet, `StepMetrics`; its numbers may be NaN or infinite where bad steps are skipped.
_STEP = (int | float, int | float, int | float, int | float, [int | float], bool)
# The metadata of a checkpoint, beside what `Checkpoints` reads itself.
META: Shape = {
  'data_state': dict, 'spent': _SPENT, 'phase': str, 'window': [_STEP], 'latest_losses': [float],
  'skipped_in_a_row': int, 'rolled_back': int,
}  # fmt: skip

_WORDS = {
  str: 'text', float: 'a number', int: 'an integer', bool: 'true or false', dict: 'an object', list: 'a list',
  type(None): 'null',
}  # fmt: skip


def require(what: str | Path, value: Any, shape: Shape, field: str = '') -> None:
  """Raises ValueError unless a JSON value has a shape; names what holds it, and the field.

  >>> require('config.json', {'model': {'size': 3}}, {'model': {'size': str}})
  Traceback (most recent call last):
  ValueError: config.json: model.size is 3, and must be text: it is damaged, or of another version of this program
  """
  if isinstance(shape, list):
    require(what, value, list, field)
    for i, entry in enumerate(value):
      require(what, entry, shape[0], f'{field}[{i}]')
  elif isinstance(shape, tuple):
    require(what, value, list, field)
    if len(value) != len(shape):
      raise ValueError(
        f'{what}: {field} has {len(value)} entries, and must have {len(shape)}: it is damaged, or of another version of'
        ' this program'
      )
    for i, (entry, inner) in enumerate(zip(value, shape, strict=True)):
      require(what, entry, inner, f'{field}[{i}]')
  elif isinstance(shape, Mapping):
    require(what, value, dict, field)
    for name, inner in shape.items():
      key = name.removesuffix('?')
      if key in value:
        require(what, value[key], inner, f'{field}.{key}' if field else key)
      elif key == name:
        raise ValueError(
          f'{what}: {field or "it"} has no {key!r}: it is damaged, or of another version of this program'
        )
  elif not _is_a(value, shape):
    raise ValueError(
      f'{what}: {field or "it"} is {_short(value)}, and must be {_named(shape)}: it is damaged, or of another version'
      ' of this program'
    )


def _is_a(value: Any, shape: type | types.UnionType | range) -> bool:
  if isinstance(shape, range):
    return _is_a(value, int) and value in shape
  if shape is bool or isinstance(value, bool):  # which Python takes for an integer
    return shape is bool and isinstance(value, bool)
  if shape is float:  # JSON writes 1.0 as it likes, and its NaN is none of ours
    return isinstance(value, int | float) and math.isfinite(value)
  return isinstance(value, shape)


def _named(shape: type | types.UnionType | range) -> str:
  if isinstance(shape, range):
    return f'an integer from {shape.start} to {shape.stop - 1}'
  return ' or '.join(_WORDS[kind] for kind in (shape.__args__ if isinstance(shape, types.UnionType) else (shape,)))


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 60 else f'{text[:57]}...'
