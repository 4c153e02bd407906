"""Runs the jaxpr of a function, and hands every matmul that reads a matched weight to somebody else.

All other equations run as they are. Views of weights are followed through calls, loops and branches; what a loop
carries, branches return or a function with a derivative of its own takes is told to `Reader.lost`, so that nothing is
dense unseen.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, Protocol

import jax
from jax import Array
import jax.numpy as jnp

from sparse24_jax.binding import _jax
from sparse24_jax.binding.blocks import Apart, ELEMENTWISE, find_block, roots_of, row_of
from sparse24_jax.binding.values import Altered, Elementwise, ENTRY_BY_ENTRY, harmless, Matmul, Value
from sparse24_jax.binding.view import factor_along, follow, View


class Reader(Protocol):
  """Who carries out the matmuls of matched weights: one that takes notes, or one that makes them sparse."""

  def matmul(self, found: Matmul) -> Array:
    """The result of one matmul."""
    ...

  def ragged(self, found: Matmul) -> Array:
    """The result of one `ragged_dot_general`."""
    ...

  def block(self, activation: str, maps: Mapping[str, Matmul]) -> Array | None:
    """The result of a block of the maps 'up', 'down' and perhaps 'gate'; None leaves them by themselves."""
    ...

  def apart(self, maps: Sequence[Matmul], reason: str) -> None:
    """Why matmuls are in no block."""
    ...

  def lost(self, mark: View | Altered, by: str, source: str) -> None:
    """A weight went where nothing follows it."""
    ...


@dataclasses.dataclass
class Keys:
  """One random key a matmul: the same one each time that the same function is traced."""

  key: Array | None
  count: int = 0

  def next(self) -> Array | None:
    self.count += 1
    return None if self.key is None else jax.random.fold_in(self.key, self.count)

  def inside(self, key: Array | None) -> 'Keys':
    """For a part of the function that is given the key as an argument."""
    return Keys(key, self.count)


def run(jaxpr: Any, constants: Sequence[Any], values: Sequence[Value], keys: Keys, reader: Reader) -> list[Value]:
  """The results of a jaxpr whose arguments may be weights."""
  known: dict[Any, Value] = dict(zip(jaxpr.constvars, map(Value, constants), strict=True))
  known.update(zip(jaxpr.invars, values, strict=True))
  interpreter = _Interpreter(keys, reader)

  def read(atom: Any) -> Value:
    return Value(atom.val) if _jax.is_literal(atom) else known[atom]

  for equation in jaxpr.eqns:
    out = interpreter.equation(equation, [read(atom) for atom in equation.invars])
    for variable, value in zip(equation.outvars, out, strict=True):
      if not _jax.is_drop(variable):
        known[variable] = value
  return [read(atom) for atom in jaxpr.outvars]


@dataclasses.dataclass(frozen=True)
class _Interpreter:
  keys: Keys
  reader: Reader

  def equation(self, equation: Any, values: list[Value]) -> list[Value]:
    name = _jax.name_of(equation)
    concerned = any(value.mark is not None or value.waits for value in values)
    if not concerned:
      out = [Value(array) for array in _jax.rebind(equation, [value.array for value in values])]
      if len(out) == 1 and values:
        out[0].row = row_of(equation, values[0])
        if name == 'broadcast_in_dim':
          out[0].repeated = values[0].array, equation.params['broadcast_dimensions']
      return _with_norms(out, values)
    if name in _INSIDE:
      if name in ('jit', 'custom_jvp_call'):
        return _INSIDE[name](self, equation, values)
      if ended := roots_of(values):
        self.reader.apart(ended, f'{name} at {_jax.source_of(equation)} reads its result')
      for value in values:
        _ = value.array  # what was put off outside is made outside
      read = frozenset(value.mark.path for value in values if value.mark is not None)
      return _with_norms(_INSIDE[name](self, equation, values), values, read)
    if name in ('dot_general', 'ragged_dot_general'):
      return self._matmul(equation, values, name)
    if name in ELEMENTWISE and any(value.waits for value in values) and not any(value.mark for value in values):
      return [_put_off(equation, values)]
    if name == 'transpose' and values[0].waits and isinstance(values[0].made_by, Matmul):
      turned = values[0].made_by.turned(equation)
      if turned is not None:
        return [Value(made_by=_with_block(turned))]
    if ended := roots_of(values):
      self.reader.apart(ended, f'{name} at {_jax.source_of(equation)} reads its result')
    return self._plain(equation, values, name)

  def _matmul(self, equation: Any, values: list[Value], name: str) -> list[Value]:
    marked = [side for side, value in enumerate(values[:2]) if value.view is not None]
    for value in values:
      if isinstance(value.mark, Altered):
        self.reader.lost(value.mark, name, _jax.source_of(equation))
    if not marked:
      return self._rebound(equation, values)
    if len(marked) > 1:
      for side in marked:
        self.reader.lost(values[side].mark, f'{name} with another weight', _jax.source_of(equation))
      return self._rebound(equation, values)
    found = Matmul(equation, marked[0], values, self.keys.next(), self.reader)
    if name == 'ragged_dot_general':
      return [Value(self.reader.ragged(found))]
    return [Value(made_by=_with_block(found))]

  def _plain(self, equation: Any, values: list[Value], name: str) -> list[Value]:
    """An equation that runs as it is; what it makes of a weight may still be a view of it."""
    arrays = [value.array for value in values]
    out = [Value(array) for array in _jax.rebind(equation, arrays)]
    marks = [value.mark for value in values]
    if not any(marks):
      return _with_norms(out, values)
    views = follow(equation, arrays, [mark if isinstance(mark, View) else None for mark in marks])
    if views is not None:
      for value, view in zip(out, views, strict=True):
        value.mark, value.state = view, values[0].state
      if values[0].unscaled is not None:
        for value, array in zip(out, _jax.rebind(equation, [values[0].unscaled, *arrays[1:]]), strict=True):
          value.unscaled = array
      return out
    if (weight := _scaled(equation, name, values)) is not None:
      out[0].mark, out[0].state, out[0].unscaled = weight.mark, weight.state, weight.unscaled
      return out
    mark = next(mark for mark in marks if mark is not None)
    source = _jax.source_of(equation)
    mixed = any(value.mark is None and value.array.ndim for value in values)
    if name in ENTRY_BY_ENTRY:
      altered = mark if isinstance(mark, Altered) else Altered(mark.path, name, source)
      for value in out:
        value.mark = altered._replace(mixed=altered.mixed or mixed)
    elif not harmless(name) or (isinstance(mark, Altered) and mark.mixed):
      # A norm reads the weight alone. What reads it with something else may be a matmul by another name.
      self.reader.lost(mark, name, source)
    return _with_norms(out, values, frozenset((mark.path,)))

  def _rebound(self, equation: Any, values: Sequence[Value]) -> list[Value]:
    return _with_norms([Value(array) for array in _jax.rebind(equation, [v.array for v in values])], values)

  def inside(self, jaxpr: Any, values: Sequence[Value], keys: Keys, equation: Any) -> list[Any]:
    """The arrays that a jaxpr makes; a weight that it returns is followed no further."""
    opened, constants = _jax.open_jaxpr(jaxpr)
    out = run(opened, constants, values, keys, self.reader)
    self.lose(out, f'what a {_jax.name_of(equation)} returns', _jax.source_of(equation))
    return [value.array for value in out]

  def lose(self, values: Sequence[Value], by: str, source: str) -> None:
    for value in values:
      if value.mark is not None:
        self.reader.lost(value.mark, by, source)


def _with_norms(out: list[Value], values: Sequence[Value], read: frozenset[str] = frozenset()) -> list[Value]:
  """The results of an equation, with the weights that went into its arguments by norms, and those that it `read`."""
  norms = read.union(*(value.norms for value in values if value.norms))
  if norms:
    for value in out:
      value.norms |= norms
  return out


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
    # What the weight itself tells would be told by the sparse one: weight normalisation, say.
    if other.mark is not None or view.path in other.norms:
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


def _with_block(found: Matmul) -> Matmul:
  block = find_block(found)
  if isinstance(block, Apart):
    found.matmuls.apart(block.maps, block.reason)
  else:
    found.block = block
  return found


def _put_off(equation: Any, values: list[Value]) -> Value:
  """An elementwise equation on what waits for its block; the bias of a matmul is kept with it."""
  made = Elementwise(equation, values)
  if equation.primitive.name == 'convert_element_type' and _rounds(equation, values[0]):
    return Value(made_by=_with_block(dataclasses.replace(values[0].made_by, rounded=True)))
  if equation.primitive.name == 'add' and len(values) == 2:
    for value, other in (values, reversed(values)):
      found = value.made_by
      if value.waits and isinstance(found, Matmul) and found.bias is None and other.row is not None:
        return Value(made_by=dataclasses.replace(found, bias=other.row, added=made))
  return Value(made_by=made)


def _rounds(equation: Any, value: Value) -> bool:
  """Whether a cast makes of a product in float32 what an op of 16 bits gives, whose sums are float32 in any case."""
  found, dtype = value.made_by, equation.outvars[0].aval.dtype
  if not value.waits or not isinstance(found, Matmul) or found.bias is not None or found.dtype == dtype:
    return False
  return found.operands == dtype and jnp.promote_types(found.dtype, dtype) == found.dtype


def _carried(values: Sequence[Value]) -> list[Any]:
  """What of views goes into a call beside their arrays."""
  return [(value.state, value.unscaled) if value.view is not None else (None, None) for value in values]


def _marked(values: Sequence[Value], arrays: Sequence[Any], carried: Sequence[Any]) -> list[Value]:
  """The values on the other side of a call: the same marks, other arrays."""
  return [
    Value(a, v.mark, state, unscaled, norms=v.norms)
    for v, a, (state, unscaled) in zip(values, arrays, carried, strict=True)
  ]


def _jit(self: _Interpreter, equation: Any, values: list[Value]) -> list[Value]:
  params = equation.params
  jaxpr, constants = _jax.open_jaxpr(params.get('jaxpr') or params['call_jaxpr'])
  values = [_constrained(v, s) for v, s in zip(values, params.get('in_shardings') or [None] * len(values), strict=True)]
  # Inlined: a call has nothing that its caller cannot have, but for a division of its arguments and results.
  with _jax.under(equation):
    out = run(jaxpr, constants, values, self.keys, self.reader)
  return [_constrained(v, s) for v, s in zip(out, params.get('out_shardings') or [None] * len(out), strict=True)]


def _constrained(value: Value, sharding: Any) -> Value:
  if not isinstance(sharding, jax.sharding.Sharding):
    return value
  array, unscaled = (
    None if a is None else jax.lax.with_sharding_constraint(a, sharding) for a in (value.array, value.unscaled)
  )
  return Value(array, value.mark, value.state, unscaled, norms=value.norms)


def _checkpoint(self: _Interpreter, equation: Any, values: list[Value]) -> list[Value]:
  params, used = equation.params, []
  opened, constants = _jax.open_jaxpr(params['jaxpr'])
  # What it hands back as it came is what it was: nnx.remat returns the variables of a module with the result.
  handed_back = [next((v for a, v in zip(opened.invars, values, strict=True) if a is o), None) for o in opened.outvars]

  # The keys are those that the same function has without a checkpoint, and so are the samples.
  def body(carried: list[Any], key: Array | None, *arrays: Any) -> list[Any]:
    keys = self.keys.inside(key)
    out = run(opened, constants, _marked(values, arrays, carried), keys, self.reader)
    changed = [value for value, same in zip(out, handed_back, strict=True) if same is None]
    self.lose(changed, 'what a checkpoint returns', _jax.source_of(equation))
    used.append(keys.count)
    return [value.array for value in out]

  with _jax.under(equation):
    body = jax.checkpoint(body, prevent_cse=params['prevent_cse'], policy=params['policy'])
    out = body(_carried(values), self.keys.key, *(value.array for value in values))
  self.keys.count = used[-1]
  return [Value(a) if same is None else dataclasses.replace(same) for same, a in zip(handed_back, out, strict=True)]


def _scan(self: _Interpreter, equation: Any, values: list[Value]) -> list[Value]:
  params, source = equation.params, _jax.source_of(equation)
  constants, carried, scanned = _jax.scan_parts(params, values)
  body, body_constants = _jax.open_jaxpr(params['jaxpr'])
  n = len(constants)
  # What every iteration hands on as it came is a constant by another name.
  handed_on = [body.outvars[i] is body.invars[n + i] for i in range(len(carried))]
  self.lose([v for v, same in zip(carried, handed_on, strict=True) if not same], 'the carry of a scan', source)
  inner, states = [], []
  for value in scanned:
    view = None if value.view is None else value.view.inside_loop()
    if value.mark is not None and view is None:
      self.reader.lost(value.mark, 'a scan over a part of an axis', source)
    inner.append(view)
    states.append(None if view is None else _along(value, view))

  def step(carry: list[Any], x: tuple) -> tuple[list[Any], list[Any]]:
    key, arrays, unscaled, states = x
    kept = [
      Value(a, v.mark, v.state, v.unscaled, norms=v.norms) if same else Value(a, norms=v.norms)
      for a, v, same in zip(carry, carried, handed_on, strict=True)
    ]
    slices = [
      Value(
        a, view, outer.state if view is not None and view.taken == outer.mark.taken else state,
        None if view is None else u, norms=outer.norms,
      )
      for a, view, state, u, outer in zip(arrays, inner, states, unscaled, scanned, strict=True)
    ]  # fmt: skip
    out = run(body, body_constants, [*constants, *kept, *slices], Keys(key), self.reader)
    same = (*handed_on, *(False for _ in out[len(carry) :]))
    self.lose([v for v, handed in zip(out, same, strict=True) if not handed], 'what a scan returns', source)
    out = [value.array for value in out]
    return out[: len(carry)], out[len(carry) :]

  key = self.keys.next()
  keys = None if key is None else jax.random.split(key, params['length'])
  with _jax.under(equation):
    carry, ys = jax.lax.scan(
      step, [value.array for value in carried],
      (keys, [value.array for value in scanned], [value.unscaled for value in scanned], states),
      length=params['length'], reverse=params['reverse'], unroll=params['unroll'],
    )  # fmt: skip
  out = [Value(a) for a in (*carry, *ys)]
  for i, same in enumerate(handed_on):
    if same:
      out[i].mark, out[i].state, out[i].unscaled = carried[i].mark, carried[i].state, carried[i].unscaled
  return out


def _along(value: Value, inner: View) -> Any:
  """The states of a weight with the axis in front that a scan takes; None where it takes none of the weight."""
  outer = value.view
  if outer is None or inner.taken == outer.taken or value.state is None:
    return None
  return value.state.to_front(inner.taken[-1])


def _while(self: _Interpreter, equation: Any, values: list[Value]) -> list[Value]:
  params = equation.params
  n, m = params['cond_nconsts'], params['body_nconsts']
  for_test, for_body, carried = values[:n], values[n : n + m], values[n + m :]
  self.lose(for_test, 'the test of a while loop', _jax.source_of(equation))
  self.lose(carried, 'the carry of a while loop', _jax.source_of(equation))
  key = self.keys.next()

  def test(carry: list[Any]) -> Any:
    return self.inside(params['cond_jaxpr'], [*map(_unmarked, for_test), *map(Value, carry)], Keys(None), equation)[0]

  def body(carry: list[Any]) -> list[Any]:
    return self.inside(params['body_jaxpr'], [*for_body, *map(Value, carry)], Keys(key), equation)

  with _jax.under(equation):
    return [Value(a) for a in jax.lax.while_loop(test, body, [value.array for value in carried])]


def _unmarked(value: Value) -> Value:
  return Value(value.array)


def _cond(self: _Interpreter, equation: Any, values: list[Value]) -> list[Value]:
  index, *operands = values
  key = self.keys.next()

  def branch(jaxpr: Any) -> Callable[..., list[Any]]:
    return lambda carried, key, arrays: self.inside(jaxpr, _marked(operands, arrays, carried), Keys(key), equation)

  with _jax.under(equation):
    branches = [branch(jaxpr) for jaxpr in equation.params['branches']]
    out = jax.lax.switch(index.array, branches, _carried(operands), key, [value.array for value in operands])
  return [Value(a) for a in out]


def _custom(self: _Interpreter, equation: Any, values: list[Value]) -> list[Value]:
  """A function with a derivative of its own: an activation may be put off; a weight must not enter it."""
  name = equation.primitive.name
  if not any(value.mark for value in values) and len(equation.outvars) == 1 and name == 'custom_jvp_call':
    return [_put_off(equation, values)]
  what = f'{name}, whose derivative is its own (of sparse24_jax.dot: give sparsify the recipe without its rule)'
  self.lose(values, what, _jax.source_of(equation))
  return self._rebound(equation, values)


def _shard_map(self: _Interpreter, equation: Any, values: list[Value]) -> list[Value]:
  what = 'a shard_map, in which sparse24_jax.dot makes it sparse (then give sparsify the recipe without its rule)'
  self.lose(values, what, _jax.source_of(equation))
  return self._rebound(equation, values)


_INSIDE: Mapping[str, Callable[[_Interpreter, Any, list[Value]], list[Value]]] = {
  'jit': _jit,
  'checkpoint': _checkpoint,
  'scan': _scan,
  'while': _while,
  'cond': _cond,
  'custom_jvp_call': _custom,
  'custom_vjp_call': _custom,
  'shard_map': _shard_map,
}
