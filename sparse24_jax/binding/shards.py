"""How views of weights are followed into `shard_map`, where a weight is a shard, and through `all_gather`.

Masks and scales are those of the whole weight. They are divided as the weight is, by the same mesh axes, and gathered
where it is: inside, a view and its state are of one shard.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sparse24_jax.binding import _jax
from sparse24_jax.binding.calls import Interpreter
from sparse24_jax.binding.keys import Keys
from sparse24_jax.binding.reading import Reading
from sparse24_jax.binding.state import WeightState
from sparse24_jax.binding.values import Value
from sparse24_jax.binding.view import View
from sparse24_jax.layout import Layout
from sparse24_jax.linear_layer import projection_state
from sparse24_jax.recipe import Rule
from sparse24_jax.rules import leaving_dense
from sparse24_jax.weight_errors import WeightError


def shard_map(self: Interpreter, equation: Any, values: list[Value]) -> list[Value]:
  """What is inside sees its shards of weights, of their states and of the rest."""
  mapped, source = _jax.shard_map_parts(equation.params), _jax.source_of(equation)
  sizes = dict(mapped.mesh.shape)
  inner: list[View | None] = []
  states: list[Any] = []
  specs: list[Any] = []
  for value, spec in zip(values, mapped.in_specs, strict=True):
    view = None if value.view is None else _shard_of(value.view, spec, sizes, mapped.axis_names)
    if isinstance(view, str):
      self.reader.lost(value.mark, f'a shard_map whose in_specs say {spec}, {view},', source)
      view = None
    inner.append(view)
    layout = None if view is None or value.state is None else self.reader.layout_of(view.path)
    state, state_spec = (None, None) if layout is None else _divided_state(value, view, layout, mapped)
    states.append(state)
    specs.append(state_spec)

  def body(key: Array | None, states: list[Any], unscaled: list[Any], arrays: list[Any]) -> list[Any]:
    inside = [
      Value(
        a, value.mark if view is None else view, None if view is None else _local_state(state, view, self),
        u,
      )
      for a, u, state, view, value in zip(arrays, unscaled, states, inner, values, strict=True)
    ]  # fmt: skip
    return self.inside(mapped.jaxpr, inside, Keys(key), equation)

  none = PartitionSpec()
  in_specs = (none, specs, [None if v.unscaled is None else s for v, s in zip(values, mapped.in_specs, strict=True)])
  with _jax.under(equation):
    mapped_body = jax.shard_map(
      body, mesh=mapped.mesh, in_specs=(*in_specs, list(mapped.in_specs)), out_specs=list(mapped.out_specs),
      axis_names=mapped.axis_names, check_vma=mapped.check_vma,
    )  # fmt: skip
    out = mapped_body(
      self.keys.next(), states, [value.unscaled for value in values], [value.array for value in values]
    )
  return [Value(array) for array in out]


def _shard_of(view: View, spec: Any, sizes: Any, axis_names: Any) -> View | str:
  """What a shard holds of the weight, or what is in the way."""
  axes, shape, divided = list(view.axes), list(view.shape), dict(view.divided)
  for place, entry in enumerate(spec):
    names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    n = math.prod(sizes[name] for name in names)
    if not names or (n == 1 and not axes[place]):
      continue
    first, *rest = axes[place]
    if first.size != shape[first.axis] or first.stride != 1 or first.size % n:
      return 'which divide a part of an axis of the weight: store the parts of that axis as axes of their own'
    shape[first.axis] = first.size // n
    # A shard of length one is still a part of an axis that has a role.
    axes[place] = (first._replace(size=shape[first.axis]), *rest)
    divided[first.axis] = (*divided.get(first.axis, ()), *names)
  if any(axis in divided for factor in view.factors for axis in factor.axes):
    return 'after it was multiplied by an array along the axis that they divide'
  manual = (*view.manual, *(name for name in axis_names if name not in view.manual))
  return dataclasses.replace(
    view, axes=tuple(axes), shape=tuple(shape), divided=tuple(sorted(divided.items())), manual=manual
  )


def _divided_state(value: Value, inner: View, layout: Layout, mapped: Any) -> tuple[WeightState, Any]:
  """The state of a weight with its axes as they are stored, and how it is divided; as it is if nothing divides it."""
  state, outer = value.state, value.view
  assert outer is not None
  new = {axis: names[len(dict(outer.divided).get(axis, ())) :] for axis, names in inner.divided}
  if not any(new.values()):
    return state, jax.tree.map(lambda _: PartitionSpec(), state)
  stored, axes = _stored(state, outer, layout)
  spec = PartitionSpec(*(new.get(axis) or None for axis in axes))
  if AxisType.Explicit in mapped.mesh.axis_types:
    stored = jax.sharding.reshard(stored, NamedSharding(mapped.mesh, spec))
  return WeightState(stored, state.stacked), WeightState(spec, state.stacked)


def _local_state(state: WeightState | None, view: View, self: Interpreter) -> WeightState | None:
  if state is None or not view.divided:
    return state
  return _as_matrices(state.value, state.stacked, view, self.reader.layout_of(view.path))


def _stored(state: WeightState, view: View, layout: Layout) -> tuple[Array, tuple[int, ...]]:
  """One array, and which axes of the weight it has: of a mask all that no loop took, of a scale the stacked ones."""
  value = projection_state(state.value)
  if value.ndim == len(state.stacked):  # a number a matrix
    return value, state.stacked
  kept, rest = _without(layout, view.taken)
  shape = tuple(view.shape[axis] for axis in kept)
  if value.shape != rest.matrix_shape(shape):
    raise WeightError(
      f'{view.path}: its state of shape {value.shape} is neither a mask nor a number for each matrix, and cannot be'
      f' divided as a shard_map divides the weight: leave it dense, {leaving_dense(view.path)}',
      view.path, leave_dense=True,
    )  # fmt: skip
  return rest.stored(value, shape), kept


def _as_matrices(stored: Array, stacked: tuple[int, ...], view: View, layout: Layout) -> WeightState:
  """The inverse of `_stored`."""
  if stored.ndim == len(stacked):
    return WeightState(stored, stacked)
  return WeightState(_without(layout, view.taken)[1].matrix(stored), stacked)


def _without(layout: Layout, taken: Sequence[int]) -> tuple[tuple[int, ...], Layout]:
  """The axes that are left, and their roles by their places among them."""
  kept = tuple(axis for axis in range(len(layout.order)) if axis not in taken)

  def places(axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(kept.index(axis) for axis in axes if axis in kept)

  return kept, Layout(places(layout.stacked), places(layout.contracted), places(layout.outputs))


def gathered_state(equation: Any, value: Value, view: View, layout: Layout) -> WeightState:
  """The state of a weight behind an `all_gather` of its shards: gathered along the same axis."""
  assert value.view is not None
  (axis,) = (a for a, names in value.view.divided if names != dict(view.divided).get(a, ()))
  stored, axes = _stored(value.state, value.view, layout)
  if axis not in axes:  # a number for all of the matrix
    return value.state
  params = equation.params | {'all_gather_dimension': axes.index(axis), 'tiled': True}
  (stored,) = _jax.rebind(equation.replace(params=params), [stored])
  return _as_matrices(stored, value.state.stacked, view, layout)


def cut_by_shards(view: View, reading: Reading, rule: Rule) -> str | None:
  """What is wrong with shards whose ends cut groups."""
  if rule.policy.projection is None:
    return None
  divided, roles = dict(view.divided), (reading.layout.contracted, reading.layout.outputs)
  for axes, divisor in zip(roles, rule.policy.projection.divisor, strict=True):
    last = next((i for i in reversed(range(len(axes))) if divided.get(axes[i])), None)
    if last is None:
      continue
    size = math.prod(view.shape[axis] for axis in axes[last:])
    if size % divisor:
      spec = PartitionSpec(*(divided.get(axis) for axis in range(len(view.shape))))
      return (
        f'a shard_map divides it by {spec}, which cuts groups of {divisor} along axis {axes[last]}: a shard has {size}'
        ' of them. Divide another axis, or gather the weight in front of the matmul (jax.lax.all_gather)'
      )
  return None
