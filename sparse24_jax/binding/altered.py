"""Weights that are changed before their matmul, or that something else than a matmul reads."""

from typing import Any, NamedTuple


class Altered(NamedTuple):
  """A value made of a weight, entry by entry, that is no view of it any more: `w * scale`, say.

  Attributes:
    path: of the weight.
    by: the primitive that made it.
    source: the line of the model.
  """

  path: str
  by: str
  source: str


# Primitives whose result has an entry for each entry of the weight.
ENTRY_BY_ENTRY = frozenset((
  'abs', 'add', 'add_any', 'and', 'cbrt', 'ceil', 'clamp', 'convert_element_type', 'copy', 'cos', 'div', 'eq', 'erf',
  'erfc', 'exp', 'exp2', 'expm1', 'floor', 'ge', 'gt', 'integer_pow', 'is_finite', 'le', 'log', 'log1p', 'logistic',
  'lt', 'max', 'min', 'mul', 'name', 'ne', 'neg', 'not', 'or', 'pow', 'reduce_precision', 'rem', 'round', 'rsqrt',
  'select_n', 'sign', 'sin', 'sqrt', 'square', 'sub', 'tan', 'tanh', 'xor',
))  # fmt: skip


def asks_if_a_number(equation: Any) -> bool:
  """Whether an equation asks of entries whether they are numbers, or finite: the same of a weight and the projected."""
  name = equation.primitive.name
  return name == 'is_finite' or (name == 'ne' and equation.invars[0] is equation.invars[1])


def harmless(by: str) -> bool:
  """Whether a primitive may read a weight besides the matmuls that are sparse: a norm, say. `beside` tells."""
  return by.startswith(('reduce', 'arg'))
