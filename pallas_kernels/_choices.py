"""Choices that a type names, looked at where a value is made."""

import dataclasses
from typing import Any, get_args, get_origin, get_type_hints, Literal


def check_choices(data: Any) -> None:
  """ValueError if a field of a dataclass has another value than its `Literal`, or `Literal | None`, names.

  >>> @dataclasses.dataclass
  ... class Way:
  ...   to: Literal['left', 'right'] | None = None
  >>> check_choices(Way('up'))
  Traceback (most recent call last):
  ValueError: to='up': known are [None, 'left', 'right']
  """
  types = get_type_hints(type(data))
  for field in dataclasses.fields(data):
    type_ = types[field.name]
    hints = (type_,) if get_origin(type_) is Literal else get_args(type_)
    known = [choice for hint in hints if get_origin(hint) is Literal for choice in get_args(hint)]
    known = [None, *known] if known and type(None) in hints else known
    value = getattr(data, field.name)
    if known and value not in known:
      raise ValueError(f'{field.name}={value!r}: known are {known}')
