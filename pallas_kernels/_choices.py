"""Choices that a type names, looked at where a value is made."""

import dataclasses
from typing import Any, get_args, get_origin, Literal


def check_choices(data: Any) -> None:
  """ValueError if a field of a dataclass has another value than its `Literal`, or `Literal | None`, names.

  >>> @dataclasses.dataclass
  ... class Way:
  ...   to: Literal['left', 'right'] | None = None
  >>> check_choices(Way('up'))
  Traceback (most recent call last):
  ValueError: to='up': known are [None, 'left', 'right']
  """
  for field in dataclasses.fields(data):
    hints = (field.type,) if get_origin(field.type) is Literal else get_args(field.type)
    known = [choice for hint in hints if get_origin(hint) is Literal for choice in get_args(hint)]
    known = [None, *known] if known and type(None) in hints else known
    value = getattr(data, field.name)
    if known and value not in known:
      raise ValueError(f'{field.name}={value!r}: known are {known}')
