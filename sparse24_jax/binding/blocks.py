"""Finds feed-forward blocks: a matmul, its bias, an activation, perhaps a gate, and the matmul that reads the result.

What follows a matmul entry by entry is put off (`binding.values`). When it reaches the next matmul of a weight, its
text, primitives and numbers without names, is compared with what each known activation traces to.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.activations import ACTIVATIONS
from sparse24_jax.binding import _jax
from sparse24_jax.binding.values import Matmul, Value

ELEMENTWISE = frozenset((
  'add', 'sub', 'mul', 'div', 'neg', 'max', 'min', 'tanh', 'logistic', 'erf', 'erfc', 'exp', 'pow', 'integer_pow',
  'square', 'convert_element_type', 'copy', 'name', 'custom_jvp_call', 'select_n', 'gt', 'ge', 'lt', 'le',
))  # fmt: skip


class Block(NamedTuple):
  """The maps into the hidden layer, 'up' and perhaps 'gate', and the activation between them and the map out of it."""

  activation: str
  maps: Mapping[str, Matmul]


def find_block(down: Matmul) -> Block | None:
  """The block that ends with a matmul, or None."""
  h = down.other
  if not h.waits or isinstance(h.made_by, Matmul):
    return None
  roots: list[Matmul] = []
  text = _text_of(h, roots, {})
  if text is None or not 1 <= len(roots) <= 2:
    return None
  z = roots[0].equation.outvars[0].aval
  out = down.equation.invars[1 - down.side].aval
  x = roots[0].other
  alike = all(
    root.other.array is x.array and root.equation.outvars[0].aval.shape == z.shape == out.shape for root in roots
  )
  if any(found.view.factors for found in (*roots, down)):
    return None
  if not alike or {out.dtype, down.dtype, *(root.dtype for root in roots)} != {x.array.dtype}:
    return None
  found = _activations(jnp.dtype(out.dtype).name).get(text)
  if found is None or len(found[1]) != len(roots):
    return None
  activation, roles = found
  return Block(activation, dict(zip(roles, roots, strict=True)))


_REPEATS = ('broadcast_in_dim', 'reshape')


def row_of(equation: Any, value: Value) -> Any:
  """The vector along the last axis that the result of an equation repeats, if it is one."""
  (out,) = (v.aval for v in equation.outvars)
  shape = getattr(out, 'shape', ())
  if len(shape) < 1 or not hasattr(value.held, 'ndim') or equation.primitive.name not in _REPEATS:
    return None
  row = value.held if value.held.ndim == 1 else value.row
  if row is None or row.shape != shape[-1:] or row.shape == (1,):
    return None
  name, params = equation.primitive.name, equation.params
  if name == 'broadcast_in_dim':
    return row if params['broadcast_dimensions'][-1:] == (len(shape) - 1,) else None
  return row if name == 'reshape' and out.size == row.size else None


# Longer ones are no activation.
_LONGEST = 1000


def _text_of(value: Value, roots: list[Matmul], known: dict[int, str | None]) -> str | None:
  """What makes a value of the matmuls at its root, in one form for all names; None if something else goes in."""
  if id(value) not in known:
    text = _new_text(value, roots, known)
    known[id(value)] = None if text is None or len(text) > _LONGEST else text
  return known[id(value)]


def _new_text(value: Value, roots: list[Matmul], known: dict[int, str | None]) -> str | None:
  made = value.made_by
  if not value.waits or made is None:
    # A number is a literal of the jaxpr; an array is nothing that an activation has.
    array = value.held
    return _number(array) if isinstance(array, np.ndarray | np.generic | int | float) and np.ndim(array) == 0 else None
  if isinstance(made, Matmul):
    # A bias makes another object of the same matmul.
    if made not in roots:
      roots.append(made)
    return f'z{roots.index(made)}'
  arguments = [_text_of(argument, roots, known) for argument in made.arguments]
  return None if None in arguments else _equation_text(made.equation, arguments)


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
  if name in ('copy', 'name') or (name == 'broadcast_in_dim' and _is_number(arguments[0])):
    return arguments[0]
  if name == 'square':
    name, params = 'integer_pow', {'y': 2}
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

  values = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
  jaxpr = jax.make_jaxpr(lambda z, dz: jax.jvp(function, z, dz)[1])(values, values)
  names = [f'd{i}' for i in range(2 * len(values))]
  return _jaxpr_text(jaxpr, names, derivatives=False)


def _jaxpr_text(jaxpr: Any, arguments: Sequence[str], *, derivatives: bool = True) -> str:
  opened, constants = _jax.open_jaxpr(jaxpr)
  known = dict(zip(opened.invars, arguments, strict=True))
  known.update((v, _number(c) if np.ndim(c) == 0 else '?') for v, c in zip(opened.constvars, constants, strict=True))

  def read(atom: Any) -> str:
    return _number(atom.val) if _jax.is_literal(atom) else known[atom]

  for equation in opened.eqns:
    given = [read(atom) for atom in equation.invars]
    one = len(equation.outvars) == 1
    text = _equation_text(equation, given, derivatives=derivatives) if one else '?'
    known.update(dict.fromkeys(equation.outvars, text))
  return read(opened.outvars[0])


@functools.cache
def _activations(dtype: str) -> Mapping[str, tuple[str, tuple[str, ...]]]:
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
