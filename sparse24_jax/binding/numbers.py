"""What is known of numbers and rows while a model is traced."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from sparse24_jax.binding.values import Row, Value

# What gives the same number in NumPy as in XLA.
_EXACT = {'sqrt': np.sqrt, 'add': np.add, 'sub': np.subtract, 'mul': np.multiply, 'div': np.divide, 'neg': np.negative}


def number_in(value: Value) -> Any:
  """The number that is known of a value while it is traced: of a scalar, or of an array that repeats one; or None."""
  array = value.held if value.repeated is None else value.repeated[0]
  return array if isinstance(array, np.ndarray | np.generic | int | float) and np.ndim(array) == 0 else None


def number_of(equation: Any, values: Sequence[Value]) -> Any:
  """The number that an equation makes of numbers, `jnp.sqrt(2)` say, or None."""
  numbers, (out,) = [number_in(value) for value in values], (v.aval for v in equation.outvars)
  if getattr(out, 'shape', None) != () or any(number is None for number in numbers):
    return None
  if not jnp.issubdtype(out.dtype, jnp.floating):
    return None
  name, numbers = equation.primitive.name, [np.asarray(number, out.dtype) for number in numbers]
  if name == 'convert_element_type':
    return numbers[0]
  return _EXACT[name](*numbers) if name in _EXACT else None


_REPEATS = ('broadcast_in_dim', 'reshape')


def row_of(equation: Any, value: Value) -> Row | None:
  """The vector along one axis that the result of an equation repeats, if it is one."""
  (out,) = (v.aval for v in equation.outvars)
  name, shape = equation.primitive.name, getattr(out, 'shape', ())
  if not shape or not hasattr(value.held, 'ndim') or name not in _REPEATS:
    return None
  row = Row(value.held, 0) if value.held.ndim == 1 else value.row
  if row is None or row.array.size == 1 or row.array.size not in shape:
    return None
  if name == 'reshape':
    return row._replace(axis=shape.index(row.array.size)) if out.size == row.array.size else None
  axis = equation.params['broadcast_dimensions'][row.axis]
  return row._replace(axis=int(axis))
