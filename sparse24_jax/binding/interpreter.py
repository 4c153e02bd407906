"""Runs the jaxpr of a function, and hands every matmul that reads a matched weight to somebody else.

All other equations run as they are. Views of weights are followed through calls, loops and branches; what a loop
carries, branches return or a function with a derivative of its own takes is told to `Reader.lost`, so that nothing is
dense unseen.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import jax.numpy as jnp

from sparse24_jax.binding import _jax, calls, shards
from sparse24_jax.binding.activations import ELEMENTWISE
from sparse24_jax.binding.altered import Altered, asks_if_a_number, ENTRY_BY_ENTRY, harmless
from sparse24_jax.binding.blocks import Apart, find_block, roots_of
from sparse24_jax.binding.keys import Keys
from sparse24_jax.binding.numbers import number_in, number_of, row_of
from sparse24_jax.binding.values import Elementwise, Matmul, Part, Reader, Value
from sparse24_jax.binding.view import factor_along, follow, View


def run(jaxpr: Any, constants: Sequence[Any], values: Sequence[Value], keys: Keys, reader: Reader) -> list[Value]:
  """The results of a jaxpr whose arguments may be weights."""
  known: dict[Any, Value] = dict(zip(jaxpr.constvars, map(Value, constants), strict=True))
  known.update(zip(jaxpr.invars, values, strict=True))
  interpreter = _Interpreter(keys, reader, run)

  def read(atom: Any) -> Value:
    return Value(atom.val) if _jax.is_literal(atom) else known[atom]

  for equation in jaxpr.eqns:
    out = interpreter.equation(equation, [read(atom) for atom in equation.invars])
    for variable, value in zip(equation.outvars, out, strict=True):
      if not _jax.is_drop(variable):
        known[variable] = value
  return [read(atom) for atom in jaxpr.outvars]


class _Interpreter(calls.Interpreter):

  def equation(self, equation: Any, values: list[Value]) -> list[Value]:
    name = _jax.name_of(equation)
    concerned = any(value.mark is not None or value.waits for value in values)
    if not concerned:
      out = [Value(array) for array in _jax.rebind(equation, [value.array for value in values])]
      if len(out) == 1 and values:
        out[0].row = row_of(equation, values[0])
        if (number := number_of(equation, values)) is not None:
          out[0].repeated = number, ()
        elif name == 'broadcast_in_dim':
          number = number_in(values[0])
          out[0].repeated = values[0].array if number is None else number, equation.params['broadcast_dimensions']
        elif name in ('pvary', 'pcast') and not jnp.ndim(values[0].array):
          out[0].repeated = values[0].array, ()
      return out
    if name in _INSIDE:
      if name in ('jit', 'custom_jvp_call'):
        return _INSIDE[name](self, equation, values)
      if ended := roots_of(values):
        self.reader.apart(ended, f'{name} at {_jax.source_of(equation)} reads its result')
      for value in values:
        _ = value.array  # what was put off outside is made outside
      return _INSIDE[name](self, equation, values)
    if name in ('dot_general', 'ragged_dot_general'):
      return self._matmul(equation, values, name)
    if values[0].waits and (parts := Part.of(equation, values[0])):
      return parts
    if name in ELEMENTWISE and any(value.waits for value in values) and not any(value.mark for value in values):
      return [_put_off(equation, values)]
    if ended := roots_of(values):
      self.reader.apart(ended, f'{name} at {_jax.source_of(equation)} reads its result{_INSTEAD.get(name, "")}')
    return self._plain(equation, values, name)

  def _matmul(self, equation: Any, values: list[Value], name: str) -> list[Value]:
    marked = [side for side, value in enumerate(values[:2]) if value.view is not None]
    if len({value.mark and value.mark.path for value in values}) == 1:
      # Of a weight with itself it is a sum over that weight, as for a penalty.
      return self._rebound(equation, values)
    for value in values:
      if isinstance(value.mark, Altered):
        self._lost(value.mark, name, equation, values)
    if not marked or _sums_all(equation, values[marked[0]]):
      return self._rebound(equation, values)
    if len(marked) > 1:
      for side in marked:
        self._lost(values[side].mark, f'{name} with another weight', equation, values)
      return self._rebound(equation, values)
    found = Matmul(equation, marked[0], values, self.keys.next(), self.reader)
    if name == 'ragged_dot_general':
      return [Value(self.reader.ragged(found))]
    return [_with_block(found.as_value())]

  def _plain(self, equation: Any, values: list[Value], name: str) -> list[Value]:
    """An equation that runs as it is; what it makes of a weight may still be a view of it."""
    arrays = [value.array for value in values]
    out = [Value(array) for array in _jax.rebind(equation, arrays)]
    marks = [value.mark for value in values]
    if not any(marks) or asks_if_a_number(equation):
      return out
    if name in _EACH_AS_IT_IS:
      for one, value in zip(out, values, strict=True):
        one.mark, one.state = value.mark, value.state
      if any(value.unscaled is not None for value in values):
        stored = _jax.rebind(equation, [value.stored for value in values])
        for one, value, unscaled in zip(out, values, stored, strict=True):
          one.unscaled = None if value.unscaled is None else unscaled
      return out
    views = follow(equation, arrays, [mark if isinstance(mark, View) else None for mark in marks])
    if views is not None:
      for value, view in zip(out, views, strict=True):
        value.mark, value.state = view, values[0].state
        if value.state is not None and values[0].view is not None and view.divided != values[0].view.divided:
          value.state = shards.gathered_state(equation, values[0], view, self.reader.layout_of(view.path))
      if values[0].unscaled is not None:
        for value, array in zip(out, _jax.rebind(equation, [values[0].unscaled, *arrays[1:]]), strict=True):
          value.unscaled = array
      return out
    if (weight := _scaled(equation, name, values)) is not None:
      out[0].mark, out[0].state, out[0].unscaled = weight.mark, weight.state, weight.unscaled
      return out
    mark = next(mark for mark in marks if mark is not None)
    if name in ENTRY_BY_ENTRY:
      for value in out:
        value.mark = mark if isinstance(mark, Altered) else Altered(mark.path, name, _jax.source_of(equation))
    elif not harmless(name):
      for each in {mark.path: mark for mark in marks if mark is not None}.values():
        self._lost(each, name, equation, values)
    return out

  def _lost(self, mark: Any, by: str, equation: Any, values: Sequence[Value]) -> None:
    at = id(equation), tuple(value.mark is not None for value in values)
    self.reader.lost(mark, by, _jax.source_of(equation), at)

  def _rebound(self, equation: Any, values: Sequence[Value]) -> list[Value]:
    return [Value(array) for array in _jax.rebind(equation, [v.array for v in values])]


def _sums_all(equation: Any, value: Value) -> bool:
  """Whether a matmul is one sum over two axes of a weight or more, as in `jnp.vdot(w, anchor)`."""
  runs = [run for runs in value.view.axes for run in runs] if value.view else []
  return not equation.outvars[0].aval.ndim and len({run.axis for run in runs}) > 1


def _scaled(equation: Any, name: str, values: Sequence[Value]) -> Value | None:
  """The weight with a factor, where an equation multiplies it by a number or an array along some of its axes."""
  side = next(i for i, value in enumerate(values) if value.mark is not None)
  weight, view = values[side], values[side].view
  if view is None or name not in ('mul', 'div', 'neg') or (name == 'div' and side):
    return None
  if equation.outvars[0].aval.shape != view.value_shape:
    return None  # the weight is repeated
  if name == 'neg':
    factor = factor_along(view, jnp.float32(-1), ())
  else:
    other = values[1 - side]
    if other.mark is not None:
      return None
    array, places = other.repeated or (other.array, tuple(range(jnp.ndim(other.array))))
    kept = [i for i, size in enumerate(jnp.shape(array)) if size > 1]
    if len(kept) == len(view.axes) > 0:
      return None  # a number for each entry
    array = jnp.reshape(array, [array.shape[i] for i in kept] if kept else ())
    if name == 'div':
      array = 1 / array.astype(jnp.promote_types(array.dtype, jnp.float32))
    factor = factor_along(view, array, [places[i] for i in kept])
  if factor is None:
    return None
  unscaled = jnp.asarray(weight.stored, equation.outvars[0].aval.dtype)
  return Value(None, dataclasses.replace(view, factors=(*view.factors, factor)), weight.state, unscaled)


def _with_block(value: Value) -> Value:
  """The result of a matmul, perhaps in another order, that knows the block that it ends."""
  found = _matmul_of(value)
  block = find_block(found)
  if isinstance(block, Apart):
    found.matmuls.apart(block.maps, block.reason)
  else:
    found.block = block
  return value


def _put_off(equation: Any, values: list[Value]) -> Value:
  """An elementwise equation on what waits for its block; the bias of a matmul is kept with it."""
  name, orders = equation.primitive.name, [_whole_order(value) for value in values]
  if name == 'convert_element_type' and orders[0] is not None and _rounds(equation, values[0]):
    rounded = dataclasses.replace(_matmul_of(values[0]), rounded=True)
    return Part.in_order(_with_block(Value(made_by=rounded)), orders[0])
  if name == 'add' and len(values) == 2:
    for side, order in enumerate(orders):
      row = values[1 - side].row
      if order and row and order[row.axis] == len(order) - 1 and _matmul_of(values[side]).bias is None:
        return _with_bias(equation, values, side, row.array, order)
  return Value(made_by=Elementwise(equation, values))


def _whole_order(value: Value) -> tuple[int, ...] | None:
  """The order in which a value has the axes of a matmul, of which it is all; None of another value, and of a name."""
  match value.made_by if value.waits else None:
    case Matmul() as found:
      return tuple(range(len(found.result.axes)))
    case Part(told=False) as part:
      return part.order
  return None


def _matmul_of(value: Value) -> Matmul:
  """The matmul that a value is all of, or a part."""
  found = value.made_by.whole if isinstance(value.made_by, Part) else value.made_by
  assert isinstance(found, Matmul)
  return found


def _with_bias(equation: Any, values: Sequence[Value], side: int, bias: Any, order: tuple[int, ...]) -> Value:
  """A matmul with its bias, added in its own order of axes: a model may transpose the result first, as `vmap` does."""
  made = values[side].made_by
  whole = made.root if isinstance(made, Part) else values[side]
  with _jax.under(equation):
    other = Value(jnp.transpose(values[1 - side].array, [order.index(axis) for axis in range(len(order))]))
  added = Elementwise(equation, [other, whole] if side else [whole, other])
  found = dataclasses.replace(_matmul_of(whole), bias=bias, added=added)
  return Part.in_order(Value(made_by=found), order)


def _rounds(equation: Any, value: Value) -> bool:
  """Whether a cast makes of a matmul what an op of 16 bits gives, whose sums are float32."""
  found, dtype = _matmul_of(value), equation.outvars[0].aval.dtype
  if found.bias is not None or found.dtype == dtype or found.operands != dtype:
    return False
  return jnp.promote_types(found.dtype, dtype) == found.dtype


def _custom(self: _Interpreter, equation: Any, values: list[Value]) -> list[Value]:
  """A function with a derivative of its own: an activation may be put off; a weight must not enter it."""
  name = equation.primitive.name
  if not any(value.mark for value in values) and len(equation.outvars) == 1 and name == 'custom_jvp_call':
    return [_put_off(equation, values)]
  what = (
    f'{name}, whose derivative is its own (of a library: take another of its forms, or the plain function at'
    ' sparse24_jax.project(params, opt_state, recipe), at dense speed; of yours, where sparse24_jax.dot reads the'
    ' weight: give bind and sparsify recipe.with_dense of its path, and sparse_training and sparse_variables the whole'
    ' recipe)'
  )
  self.lose(values, what, _jax.source_of(equation))
  return self._rebound(equation, values)


# What to do about what ends a block.
_INSTEAD = {
  'transpose': (
    ' (between the matmuls of a block only the result of the first may be transposed, and not what is made of it: swap'
    ' the axes in front of the block and behind it; jax.vmap over another axis than the first transposes, too)'
  ),
}
# Whole trees of parameters go through these.
_EACH_AS_IT_IS = frozenset(('device_put', 'optimization_barrier'))
_INSIDE: Mapping[str, Callable[[_Interpreter, Any, list[Value]], list[Value]]] = {
  'jit': calls.inlined,
  'checkpoint': calls.checkpoint,
  'scan': calls.scan,
  'while': calls.while_loop,
  'cond': calls.cond,
  'custom_jvp_call': _custom,
  'custom_vjp_call': _custom,
  'shard_map': shards.shard_map,
}
