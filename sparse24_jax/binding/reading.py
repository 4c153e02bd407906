"""How one matmul reads a weight, and its operands as the library's op takes them."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from sparse24_jax.binding.values import Matmul
from sparse24_jax.binding.view import Run, View
from sparse24_jax.layout import Layout


class UnreadableError(ValueError):
  """A matmul that reads a weight in a way that no layout says."""


@dataclasses.dataclass(frozen=True)
class Reading:
  """The axes of one `dot_general` or `ragged_dot_general`, by what they are of the weight.

  Attributes:
    layout: of the weight, as this matmul sees it.
    batch: stacked axes of the weight that the matmul runs over at once, in its own order.
    whole: whether the matmul reads all of `in` and `out`.
    tokens: rows of the other operand, for each entry of `batch`; where groups share them, their mean.
    runs: of the weight, [batch..., in..., out...].
    axes: number of runs that are batch, in and out.
    in_order: whether the outputs of the matmul are in the order in which the weight stores them.
  """

  layout: Layout
  batch: tuple[int, ...]
  whole: bool
  tokens: float
  runs: tuple[Run, ...]
  axes: tuple[int, int, int]
  in_order: bool

  @property
  def columns(self) -> int:
    """The number of columns of the matrix."""
    return math.prod(run.size for run in self.runs[sum(self.axes[:2]) :])


def read(found: Matmul) -> Reading:
  """How a matmul reads its weight; `UnreadableError` says what is in the way."""
  view, side = found.view, found.side
  contract, batch, groups = _dimensions(found)
  contracted, batched = contract[side], (*batch[side], *groups)
  free = [i for i in range(len(view.axes)) if i not in contracted and i not in batched]
  by_role: dict[str, list[Run]] = {
    'stacked': [run for i in batched for run in view.axes[i]],
    'contracted': [run for i in contracted for run in view.axes[i]],
    'outputs': [run for i in free for run in view.axes[i]],
  }
  roles: dict[int, set[str]] = {axis: set() for axis in range(len(view.shape))}
  for role, runs in by_role.items():
    for run in runs:
      roles[run.axis].add(role)
  for axis, held in roles.items():
    if len(held) > 1:
      raise UnreadableError(f'axis {axis} of length {view.shape[axis]} is in part {" and in part ".join(sorted(held))}')
  chosen = {axis: held.pop() if held else 'stacked' for axis, held in roles.items()}

  def axes_of(role: str) -> tuple[int, ...]:
    return tuple(axis for axis, name in chosen.items() if name == role)

  if not by_role['outputs']:
    raise UnreadableError('it is contracted over all of its axes: a layer of one output, or a product with a vector')
  if not by_role['contracted']:
    raise UnreadableError('none of its axes is contracted: a product with numbers')
  sizes = {}
  for axis, name in chosen.items():
    mine = sorted((run for run in by_role[name] if run.axis == axis), key=lambda run: -run.stride)
    stride = 1
    for run in reversed(mine):
      if run.stride != stride and name != 'stacked':
        raise UnreadableError(f'of axis {axis} it takes entries that are not neighbours')
      stride *= run.size
    sizes[axis] = math.prod(run.size for run in mine)
  _check_factors(view, chosen, sizes, by_role['stacked'])
  inside = [axis for axis, name in chosen.items() if name != 'stacked']
  other = found.equation.invars[1 - side].aval.shape
  used = set(contract[1 - side]) | set(batch[1 - side])
  rows = math.prod(size for i, size in enumerate(other) if i not in used)
  return Reading(
    layout=Layout(axes_of('stacked'), axes_of('contracted'), axes_of('outputs')),
    batch=tuple(run.axis for run in by_role['stacked']),
    whole=all(sizes[axis] == view.shape[axis] for axis in inside),
    tokens=rows / math.prod(view.value_shape[i] for i in groups) if groups else rows,
    runs=(*by_role['stacked'], *_in_order(by_role['contracted']), *_in_order(by_role['outputs'])),
    axes=(len(by_role['stacked']), len(by_role['contracted']), len(by_role['outputs'])),
    in_order=_in_order(by_role['outputs']) == by_role['outputs'],
  )


def _check_factors(view: View, chosen: Mapping[int, str], sizes: Mapping[int, int], batch: Sequence[Run]) -> None:
  """`UnreadableError` unless each factor can be one of the activations or of the result."""
  for factor in view.factors:
    for axis in factor.axes:
      taken = chosen[axis] == 'stacked' and [run.axis for run in batch].count(axis) != 1
      if taken or sizes[axis] != view.shape[axis]:
        raise UnreadableError(f'it was multiplied by an array along axis {axis}, of which it takes a part')
    if {'contracted', 'outputs'} <= {chosen[axis] for axis in factor.axes}:
      raise UnreadableError('it was multiplied by an array along its inputs and its outputs at once')


def scaled(array: Array, found: Matmul, reading: Reading, *, inputs: bool) -> Array:
  """Activations `[batch..., rows..., in]`, or results `[..., out]`, times the factors of the weight along these axes.

  Factors along its outputs, and numbers, belong to the result: the mask and what is packed are of the weight without.
  """
  layout, batch = reading.layout, len(reading.batch)
  inside = layout.contracted if inputs else layout.outputs
  # As far as the matmul reads them: along its own axes a factor is whole, `_check_factors`.
  sizes = [math.prod(run.size for run in reading.runs[batch:] if run.axis == axis) for axis in inside]
  for factor in found.view.factors:
    if inputs != any(axis in layout.contracted for axis in factor.axes):
      continue
    axes = (*reading.batch, *inside)
    order = [factor.axes.index(axis) for axis in axes if axis in factor.axes]
    f = factor.array.transpose(order).reshape([found.view.shape[a] if a in factor.axes else 1 for a in axes])
    lead = f.shape[:batch]
    f = jnp.broadcast_to(f, (*lead, *sizes)).reshape(*lead, *(1,) * (array.ndim - batch - 1), -1)
    array = (array.astype(jnp.float32) * f.astype(jnp.float32)).astype(array.dtype)
  return array


def _dimensions(found: Matmul) -> tuple[Any, Any, tuple[int, ...]]:
  """Contracted and batch axes of both operands, and the axes of the weight that a ragged matmul has groups for."""
  params = found.equation.params
  if 'dimension_numbers' in params:
    return *params['dimension_numbers'], ()
  ragged = params['ragged_dot_dimension_numbers']
  if found.side == 0:
    raise UnreadableError('it is the ragged operand, whose rows are in groups; the second one is read')
  if not ragged.rhs_group_dimensions:
    raise UnreadableError('the ragged axis is contracted or a batch axis: it has no matrix for each group')
  return *ragged.dot_dimension_numbers, tuple(ragged.rhs_group_dimensions)


def _in_order(runs: Sequence[Run]) -> list[Run]:
  """The runs, in the order in which the weight stores them."""
  return sorted(runs, key=lambda run: (run.axis, -run.stride))


def weight_matrix(found: Matmul, reading: Reading) -> Array:
  """The weight of a matmul as `[batch..., in, out]`, without its factors."""
  runs = [run for axis in found.view.axes for run in axis]
  batch, contracted, _ = reading.axes
  w = found.weight.stored.reshape([run.size for run in runs])
  w = jnp.transpose(w, _order(runs, reading.runs))
  return w.reshape(*w.shape[:batch], math.prod(w.shape[batch : batch + contracted]), -1)


def weight_as_read(w: Array, found: Matmul, reading: Reading) -> Array:
  """The inverse of `weight_matrix`: the operand of the matmul as the model gives it."""
  runs = [run for axis in found.view.axes for run in axis]
  w = jnp.transpose(w.reshape([run.size for run in reading.runs]), _order(reading.runs, runs))
  return w.reshape(found.view.value_shape)


def rows(found: Matmul, reading: Reading) -> Array:
  """The other operand as `[batch..., rows..., in]`."""
  side, view = found.side, found.view
  contract, batch = found.equation.params['dimension_numbers']
  x = found.other.array
  free = [i for i in range(x.ndim) if i not in contract[1 - side] and i not in batch[1 - side]]
  x = jnp.transpose(x, (*batch[1 - side], *free, *contract[1 - side]))
  lead = x.shape[: len(batch[0]) + len(free)]
  runs = [run for i in contract[side] for run in view.axes[i]]
  if len(runs) != 1:
    contracted = reading.runs[reading.axes[0] : reading.axes[0] + reading.axes[1]]
    x = x.reshape(*lead, *(run.size for run in runs))
    x = jnp.transpose(x, (*range(len(lead)), *(len(lead) + i for i in _order(runs, contracted))))
  # Axes of length one among the batch are none of the weight's runs.
  sizes = [run.size for run in reading.runs[: reading.axes[0]]]
  return x.reshape(*sizes, *lead[len(batch[0]) :], math.prod(x.shape[len(lead) :]))


def as_rows(y: Array, found: Matmul, order: Sequence[int], down: Matmul, reading: Reading) -> Array:
  """What a block gives for the rows of its first matmul, as `[batch..., rows..., out]` of its last one."""
  contract, batch = (numbers[1 - down.side] for numbers in down.equation.params['dimension_numbers'])
  other = down.equation.invars[1 - down.side].aval.shape
  free = (size for i, size in enumerate(other) if i not in contract and i not in batch)
  if tuple(order) != tuple(range(len(order))):
    lead = (size for size in found.result.shape[: found.lead] if size > 1)
    y = jnp.transpose(y.reshape(*lead, y.shape[-1]), (*order, len(order)))
  return y.reshape(*(run.size for run in reading.runs[: reading.axes[0]]), *free, y.shape[-1])


def as_result(y: Array, found: Matmul, reading: Reading) -> Array:
  """`[batch..., rows..., out]` as the `dot_general` gives it."""
  (out,) = (variable.aval for variable in found.equation.outvars)
  side, view = found.side, found.view
  contract, batch = found.equation.params['dimension_numbers']
  free = [i for i in range(len(view.axes)) if i not in contract[side] and i not in batch[side]]
  runs = [run for i in free for run in view.axes[i]]
  outputs = reading.runs[sum(reading.axes[:2]) :]
  lead = y.shape[:-1]
  if len(runs) != 1:
    y = y.reshape(*lead, *(run.size for run in outputs))
    y = jnp.transpose(y, (*range(len(lead)), *(len(lead) + i for i in _order(outputs, runs))))
  if side == 0:  # the axes of the weight come first
    b, last = reading.axes[0], y.ndim
    y = jnp.transpose(y, (*range(b), *range(len(lead), last), *range(b, len(lead))))
  return y.reshape(out.shape).astype(found.dtype)


def _order(given: Sequence[Run], wanted: Sequence[Run]) -> tuple[int, ...]:
  return tuple(list(given).index(run) for run in wanted)


def part_of(state: Any, view: View, layout: Layout) -> Any:
  """A mask `[batch..., in, out]` of the entries that a view holds; a state that is no mask stays as it is."""
  inside = (*layout.contracted, *layout.outputs)
  sizes = {axis: math.prod(run.size for runs in view.axes for run in runs if run.axis == axis) for axis in inside}
  whole = tuple(math.prod(view.shape[axis] for axis in axes) for axes in (layout.contracted, layout.outputs))
  if state.shape[-2:] != whole or state.ndim < 2:
    return state
  lead = state.shape[:-2]
  state = state.reshape(*lead, *(view.shape[axis] for axis in inside))
  for i, axis in enumerate(inside):
    if sizes[axis] != view.shape[axis]:
      state = jax.lax.dynamic_slice_in_dim(state, view.offsets[axis], sizes[axis], len(lead) + i)
  return state.reshape(*lead, math.prod(sizes[axis] for axis in layout.contracted), -1)
