"""How views of weights are followed into calls, loops and branches, and out of them again."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from sparse24_jax.binding import _jax
from sparse24_jax.binding.keys import Keys
from sparse24_jax.binding.values import Reader, Value
from sparse24_jax.binding.view import View


@dataclasses.dataclass(frozen=True)
class Interpreter:
  """What runs the jaxpr inside.

  Attributes:
    keys: of the matmuls.
    reader: who carries out the matmuls of weights.
    run_by: `interpreter.run`: (jaxpr, constants, values, keys, reader) -> values, of which some may be weights.
  """

  keys: Keys
  reader: Reader
  run_by: Callable[..., list[Value]]

  def run(self, jaxpr: Any, constants: Sequence[Any], values: Sequence[Value], keys: Keys) -> list[Value]:
    return self.run_by(jaxpr, constants, values, keys, self.reader)

  def inside(self, jaxpr: Any, values: Sequence[Value], keys: Keys, equation: Any) -> list[Any]:
    """The arrays that a jaxpr makes; a weight that it returns is followed no further."""
    opened, constants = _jax.open_jaxpr(jaxpr)
    out = self.run(opened, constants, values, keys)
    self.lose(out, f'what a {_jax.name_of(equation)} returns', _jax.source_of(equation))
    return [value.array for value in out]

  def lose(self, values: Sequence[Value], by: str, source: str) -> None:
    """Tells the reader of the weights among some values that nothing follows them."""
    for value in values:
      if value.mark is not None:
        self.reader.lost(value.mark, by, source)


def _carried(values: Sequence[Value]) -> list[Any]:
  """What goes into a call beside the arrays: the state and the unscaled weight of each view."""
  return [(value.state, value.unscaled) if value.view is not None else (None, None) for value in values]


def _marked(values: Sequence[Value], arrays: Sequence[Any], carried: Sequence[Any]) -> list[Value]:
  """The values on the other side of a call: the same marks, other arrays."""
  return [Value(a, v.mark, *held) for v, a, held in zip(values, arrays, carried, strict=True)]


def inlined(self: Interpreter, equation: Any, values: list[Value]) -> list[Value]:
  params = equation.params
  jaxpr, constants = _jax.open_jaxpr(params.get('jaxpr') or params['call_jaxpr'])
  values = [_constrained(v, s) for v, s in zip(values, params.get('in_shardings') or [None] * len(values), strict=True)]
  # Inlined: a call has nothing that its caller cannot have, but for a division of its arguments and results.
  with _jax.under(equation):
    out = self.run(jaxpr, constants, values, self.keys)
  return [_constrained(v, s) for v, s in zip(out, params.get('out_shardings') or [None] * len(out), strict=True)]


def _constrained(value: Value, sharding: Any) -> Value:
  if not isinstance(sharding, jax.sharding.Sharding):
    return value
  array, unscaled = (
    None if a is None else jax.lax.with_sharding_constraint(a, sharding) for a in (value.array, value.unscaled)
  )
  return Value(array, value.mark, value.state, unscaled)


def checkpoint(self: Interpreter, equation: Any, values: list[Value]) -> list[Value]:
  params, used = equation.params, []
  opened, constants = _jax.open_jaxpr(params['jaxpr'])
  # What it hands back as it came is what it was: nnx.remat returns the variables of a module with the result.
  handed_back = [next((v for a, v in zip(opened.invars, values, strict=True) if a is o), None) for o in opened.outvars]

  # The keys are those that the same function has without a checkpoint, and so are the samples.
  def body(carried: list[Any], key: Array | None, *arrays: Any) -> list[Any]:
    keys = self.keys.inside(key)
    out = self.run(opened, constants, _marked(values, arrays, carried), keys)
    changed = [value for value, same in zip(out, handed_back, strict=True) if same is None]
    self.lose(changed, 'what a checkpoint returns', _jax.source_of(equation))
    used.append(keys.count)
    return [value.array for value in out]

  with _jax.under(equation):
    body = jax.checkpoint(body, prevent_cse=params['prevent_cse'], policy=params['policy'])
    out = body(_carried(values), self.keys.key, *(value.array for value in values))
  self.keys.count = used[-1]
  return [Value(a) if same is None else dataclasses.replace(same) for same, a in zip(handed_back, out, strict=True)]


def scan(self: Interpreter, equation: Any, values: list[Value]) -> list[Value]:
  params, source = equation.params, _jax.source_of(equation)
  constants, carried, scanned = _jax.scan_parts(params, values)
  body, body_constants = _jax.open_jaxpr(params['jaxpr'])
  n = len(constants)
  # What every iteration hands on as it came is a constant by another name.
  handed_on = [body.outvars[i] is body.invars[n + i] for i in range(len(carried))]
  self.lose([v for v, same in zip(carried, handed_on, strict=True) if not same], 'the carry of a scan', source)
  inner, states, came = [], [], []
  for value in scanned:
    if value.mark is not None and value.view is None:
      self.reader.lost(value.mark, 'a scan', source)
    inner.append(None if value.view is None else value.view.inside_loop())
    states.append(None if inner[-1] is None else _along(value, inner[-1]))
  # Some layers of a stack, or groups of them, are looked up by their numbers, as their states are.
  counted = any(value.view is not None and view is None for value, view in zip(scanned, inner, strict=True))

  def step(carry: list[Any], x: tuple) -> tuple[list[Any], list[Any]]:
    key, arrays, unscaled, states, i = x
    kept = [
      Value(a, v.mark, v.state, v.unscaled) if same else Value(a)
      for a, v, same in zip(carry, carried, handed_on, strict=True)
    ]
    views = [outer.view.entry(i) if view is None and outer.view else view
             for view, outer in zip(inner, scanned, strict=True)]  # fmt: skip
    slices = [
      Value(
        a, view, outer.state if view is not None and view.taken == outer.mark.taken else state,
        None if view is None else u,
      )
      for a, view, state, u, outer in zip(arrays, views, states, unscaled, scanned, strict=True)
    ]  # fmt: skip
    out = self.run(body, body_constants, [*constants, *kept, *slices], Keys(key))
    # nnx.scan returns the variables of its modules, stacked as they came.
    ys = out[len(carry) :]
    came[:] = [next((j for j, s in enumerate(slices) if v.mark and v.array is s.array), None) for v in ys]
    same = (*handed_on, *(j is not None for j in came))
    self.lose([v for v, handed in zip(out, same, strict=True) if not handed], 'what a scan returns', source)
    out = [value.array for value in out]
    return out[: len(carry)], out[len(carry) :]

  key = self.keys.next()
  keys = None if key is None else jax.random.split(key, params['length'])
  with _jax.under(equation):
    carry, ys = jax.lax.scan(
      step, [value.array for value in carried],
      (
        keys, [value.array for value in scanned], [value.unscaled for value in scanned], states,
        jnp.arange(params['length']) if counted else None,
      ),
      length=params['length'], reverse=params['reverse'], unroll=params['unroll'],
    )  # fmt: skip
  out = [Value(a) for a in carry]
  out += [Value(a) if j is None else dataclasses.replace(scanned[j]) for j, a in zip(came, ys, strict=True)]
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


def while_loop(self: Interpreter, equation: Any, values: list[Value]) -> list[Value]:
  params = equation.params
  n, m = params['cond_nconsts'], params['body_nconsts']
  for_test, for_body, carried = values[:n], values[n : n + m], values[n + m :]
  self.lose(for_test, 'the test of a while loop', _jax.source_of(equation))
  self.lose(carried, 'the carry of a while loop', _jax.source_of(equation))
  key = self.keys.next()

  def test(carry: list[Any]) -> Any:
    unmarked = [Value(value.array) for value in for_test]
    return self.inside(params['cond_jaxpr'], [*unmarked, *map(Value, carry)], Keys(None), equation)[0]

  def body(carry: list[Any]) -> list[Any]:
    return self.inside(params['body_jaxpr'], [*for_body, *map(Value, carry)], Keys(key), equation)

  with _jax.under(equation):
    return [Value(a) for a in jax.lax.while_loop(test, body, [value.array for value in carried])]


def cond(self: Interpreter, equation: Any, values: list[Value]) -> list[Value]:
  index, *operands = values
  key = self.keys.next()

  def branch(jaxpr: Any) -> Callable[..., list[Any]]:
    return lambda carried, key, arrays: self.inside(jaxpr, _marked(operands, arrays, carried), Keys(key), equation)

  with _jax.under(equation):
    branches = [branch(jaxpr) for jaxpr in equation.params['branches']]
    out = jax.lax.switch(index.array, branches, _carried(operands), key, [value.array for value in operands])
  return [Value(a) for a in out]
