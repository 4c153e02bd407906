"""Which factors in a program may be gates, of zeros and ones, which let a value through as it is or not at all."""

from collections.abc import Callable
import functools
from typing import Any

import numpy as np

from sparse24_jax.binding import _jax

# What hands on the entries of its operand.
ARRANGING = frozenset((
  *_jax.MOVES, 'broadcast_in_dim', 'convert_element_type', 'expand_dims', 'name', 'reduce_precision', 'reshape',
  'squeeze', 'transpose',
))  # fmt: skip
# Of zeros and ones these may make some again, of other numbers none but by chance.
_ARITHMETIC = frozenset((
  'mul', 'div', 'add', 'sub', 'neg', 'pow', 'integer_pow', 'square', 'sqrt', 'rsqrt', 'exp', 'exp2', 'cos', 'sin',
  'log', 'tanh', 'logistic',
))  # fmt: skip


def gates(jaxpr: Any, outside: Callable[[Any], bool] = lambda atom: True) -> Callable[[Any], bool]:
  """Whether a factor of a jaxpr may be a gate. What is not known may be one: an argument, say, or what has a limit.

  Args:
    jaxpr: whose equations the factor is made by.
    outside: whether one of its arguments may be a gate.
  """

  @functools.cache
  def equations() -> dict[Any, Any]:
    return {out: equation for equation in jaxpr.eqns for out in equation.outvars}

  @functools.cache
  def made(variable: Any) -> bool:
    equation = equations().get(variable)
    if equation is None:
      return outside(variable)
    name, operands = _jax.name_of(equation), equation.invars
    if name in ARRANGING:
      return may_be_gate(operands[0])
    if name == 'select_n':
      return any(map(may_be_gate, operands[1:]))
    if name in _ARITHMETIC:
      return all(map(may_be_gate, operands))
    if name == 'jit':
      inner, _ = _jax.open_jaxpr(equation.params['jaxpr'])
      given = dict(zip(inner.invars, operands, strict=True))
      inside = gates(inner, lambda v: may_be_gate(given[v]) if v in given else True)
      return inside(inner.outvars[equation.outvars.index(variable)])
    return True

  def may_be_gate(atom: Any) -> bool:
    if _jax.is_literal(atom):
      return bool(np.isin(np.asarray(atom.val, np.float64), (0, 1)).all())
    return made(atom)

  return may_be_gate
