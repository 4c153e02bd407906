"""Tells activations by their text: the primitives and numbers between two matmuls, without names.

It is compared with what each known activation traces to, as the library computes it and as models write it.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._varying import vary_over, varying_of
from pallas_kernels.activations import ACTIVATIONS
from sparse24_jax.binding import _jax
from sparse24_jax.binding.numbers import number_in
from sparse24_jax.binding.values import Columns, Matmul, Part, Value
from sparse24_jax.binding.view import View

ELEMENTWISE = frozenset((
  'add', 'sub', 'mul', 'div', 'neg', 'max', 'min', 'tanh', 'logistic', 'erf', 'erfc', 'exp', 'pow', 'integer_pow',
  'square', 'convert_element_type', 'copy', 'name', 'custom_jvp_call', 'select_n', 'gt', 'ge', 'lt', 'le',
  'pvary', 'pcast', 'sharding_constraint',
))  # fmt: skip
_SAME = ('copy', 'name', 'pvary', 'pcast')


class Root(NamedTuple):
  """A matmul that a hidden layer is made of, or a part of what it gives."""

  found: Matmul
  part: Part | None = None

  @property
  def view(self) -> View:
    return self.part.view if self.part else self.found.result

  @property
  def columns(self) -> Columns | None:
    return self.part.columns if self.part else None

  @property
  def whole(self) -> bool:
    """Whether it has all columns."""
    return self.part is None or self.part.order is not None or self.columns == Columns(0, self.found.size, 1)

  @property
  def shape(self) -> tuple[int, ...]:
    return self.view.value_shape


# Longer ones are no activation.
_LONGEST = 1000


def text_of(value: Value) -> tuple[str | None, list[Root]]:
  """What makes a value of the matmuls at its root, in one form for all names, and these; no text if more goes in."""
  roots: list[Root] = []
  return _text_of(value, roots, {}), roots


def _text_of(value: Value, roots: list[Root], known: dict[int, str | None]) -> str | None:
  if id(value) not in known:
    text = _new_text(value, roots, known)
    known[id(value)] = None if text is None or len(text) > _LONGEST else text
  return known[id(value)]


def _new_text(value: Value, roots: list[Root], known: dict[int, str | None]) -> str | None:
  made = value.made_by
  if not value.waits or made is None:
    # A number is a literal of the jaxpr; an array is nothing that an activation has.
    number = number_in(value)
    return None if number is None else _number(number)
  if isinstance(made, Matmul):
    # A bias makes another object of the same matmul.
    return _root_text(Root(made), roots)
  if isinstance(made, Part):
    return _root_text(Root(made.whole, made), roots)
  arguments = [_text_of(argument, roots, known) for argument in made.arguments]
  if made.equation.primitive.name == 'sharding_constraint':
    return arguments[0]  # `_sharding` looks at it; one inside of another equation is no part of an activation
  return None if None in arguments else _equation_text(made.equation, arguments)


def _root_text(root: Root, roots: list[Root]) -> str:
  same = next((i for i, known in enumerate(roots) if known.found is root.found and known.view == root.view), None)
  if same is None:
    roots.append(root)
  return f'z{len(roots) - 1 if same is None else same}'


def _is_number(text: str) -> bool:
  try:
    float(text)
  except ValueError:
    return False
  return True


def _number(value: Any) -> str:
  return f'{float(value):.5g}'


def _equation_text(equation: Any, arguments: Sequence[str], *, derivatives: bool = True) -> str:
  name, params = _jax.name_of(equation), equation.params
  inner = params.get('call_jaxpr') or params.get('jaxpr')
  if inner is not None:
    text = _jaxpr_text(inner, arguments, derivatives=derivatives)
    # A derivative of its own is a part of what an activation is.
    return f'{text}|{_derivative_text(equation)}|' if name == 'custom_jvp_call' and derivatives else text
  if name in _SAME or (name == 'broadcast_in_dim' and _is_number(arguments[0])):
    return arguments[0]
  if name == 'square':
    name, params = 'integer_pow', {'y': 2}
  if name == 'pow' and arguments[1] in ('2', '3'):
    name, params, arguments = 'integer_pow', {'y': int(arguments[1])}, arguments[:1]
  if name == 'convert_element_type':
    # Of a number, or to the same dtype, it changes nothing.
    aval, dtype = equation.invars[0].aval, jnp.dtype(str(params['new_dtype']))
    return arguments[0] if aval.ndim == 0 or aval.dtype == dtype else f'{dtype.name}({arguments[0]})'
  if name == 'integer_pow':
    name = f'pow{params["y"]}'
    if params['y'] == 2:
      name, arguments = 'mul', (arguments[0], arguments[0])
  return f'{name}({",".join(arguments)})'


def _derivative_text(equation: Any) -> str:
  """What a function of entries with a derivative of its own does to a tangent."""

  def function(*arrays: Any) -> Any:
    return _jax.rebind(equation, arrays)[0]

  def tangent(*given: Any) -> Any:
    axes = [varying_of(v.aval) for v in equation.invars]
    return jax.jvp(function, *(list(map(vary_over, arrays, axes)) for arrays in given))[1]

  # On a mesh of explicit axes the function was traced for arrays of these shardings.
  values = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=v.aval.sharding) for v in equation.invars]
  jaxpr = jax.make_jaxpr(tangent)(values, values)
  names = [f'd{i}' for i in range(2 * len(values))]
  return _jaxpr_text(jaxpr, names, derivatives=False)


def _jaxpr_text(jaxpr: Any, arguments: Sequence[str], *, derivatives: bool = True) -> str:
  """Of a function of entries. Under `vmap` a derivative may transpose what it is given, and its result back."""
  opened, constants = _jax.open_jaxpr(jaxpr)
  known = dict(zip(opened.invars, arguments, strict=True))
  known.update((v, _number(c) if np.ndim(c) == 0 else '?') for v, c in zip(opened.constvars, constants, strict=True))
  orders: dict[Any, tuple[int, ...]] = {}

  def read(atom: Any) -> str:
    return _number(atom.val) if _jax.is_literal(atom) else known[atom]

  def order_of(atom: Any) -> tuple[int, ...] | None:
    """In which order it has the axes of the arguments; None of a number."""
    return None if atom.aval.ndim == 0 or _is_number(read(atom)) else orders.get(atom, tuple(range(atom.aval.ndim)))

  for equation in opened.eqns:
    given = [read(atom) for atom in equation.invars]
    found = {order for atom in equation.invars if (order := order_of(atom)) is not None}
    one = len(equation.outvars) == 1 and len(found) <= 1
    if one and equation.primitive.name == 'transpose':
      text, found = given[0], {tuple(order[i] for i in equation.params['permutation']) for order in found}
    else:
      text = _equation_text(equation, given, derivatives=derivatives) if one else '?'
    known.update(dict.fromkeys(equation.outvars, text))
    orders.update((variable, order) for variable in equation.outvars for order in found)
  (out, *_) = opened.outvars
  return read(out) if order_of(out) in (None, tuple(range(out.aval.ndim))) else '?'


@functools.cache
def activations(dtype: str) -> Mapping[str, tuple[str, tuple[str, ...]]]:
  """Text to activation and the roles of the matmuls in the order in which the text names them."""
  found: dict[str, tuple[str, tuple[str, ...]]] = {}
  z = jax.ShapeDtypeStruct((8,), dtype)
  # As the library computes them, and as models write them.
  forms = ((name, form) for name, known in ACTIVATIONS.items() for form in (known.function, *known.written))
  for name, activation in forms:
    def widened(z, activation=activation):
      return activation(z.astype(jnp.float32)).astype(dtype)

    for form in (activation, widened):
      jaxpr = jax.make_jaxpr(form)(z)
      plain = _jaxpr_text(jaxpr, ('z0',))
      found.setdefault(plain, (name, ('up',)))
      found.setdefault(f'mul({plain},z1)', (name, ('gate', 'up')))
      found.setdefault(f'mul(z0,{_jaxpr_text(jaxpr, ("z1",))})', (name, ('up', 'gate')))
  return found
