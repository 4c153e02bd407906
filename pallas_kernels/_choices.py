"""What a field may be, looked at where a value is made."""

import dataclasses
import numbers
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


def check_whole(name: str, value: Any, least: int) -> None:
  """ValueError unless `value` is a whole number, Python's or NumPy's, and no bool, of at least `least`.

  >>> check_whole('steps', 1.5, 1)
  Traceback (most recent call last):
  ValueError: steps=1.5 must be a whole number, 1 or more
  """
  if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
    raise ValueError(f'{name}={value!r} must be a whole number, {least} or more')
