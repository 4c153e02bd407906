"""What part of a stored weight a value is, followed through casts, transposes, reshapes and slices.

A `View` says of each axis of a value over which axes of the weight it runs, with which stride, so that a split axis can
be joined again and a joined one split. `follow` moves a view through one equation of a jaxpr.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparse24_jax.binding import _jax


class Run(NamedTuple):
  """A run over one axis of a weight: entries 0, stride, 2 stride, ... of it, `size` of them."""

  axis: int
  stride: int
  size: int


class Factor(NamedTuple):
  """What a weight was multiplied by, entry by entry.

  Attributes:
    array: one axis for each of `axes`.
    axes: of the weight as it is stored, along which it is not the same everywhere; none of a number.
  """

  array: Any
  axes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class View:
  """A value that holds entries of one weight, each once.

  Attributes:
    path: of the weight.
    shape: of the weight, as it is stored.
    axes: for each axis of the value the runs over the weight that it is made of, outermost first; none for an axis of
      length one, unless it is a shard.
    offsets: for each axis of the weight where the runs over it start: a number, or a scalar that is traced.
    multiples: for each axis a number of which that start is a multiple, traced or not.
    taken: axes of the weight that a loop has taken an entry of, and the states of the weight with it.
    factors: what its entries were multiplied by.
    fill: a number, traced, that is one unless it was looked up at a place where there is no entry: NaN then, or zero.
    divided: of the axes of the weight that a `shard_map` divides the mesh axes, outermost first; `shape` is a shard's.
    manual: the mesh axes of the `shard_map`s that it stands in.
  """

  path: str
  shape: tuple[int, ...]
  axes: tuple[tuple[Run, ...], ...]
  offsets: tuple[Any, ...]
  multiples: tuple[int, ...]
  taken: tuple[int, ...] = ()
  factors: tuple[Factor, ...] = ()
  fill: Any = None
  divided: tuple[tuple[int, tuple[str, ...]], ...] = ()
  manual: tuple[str, ...] = ()

  @classmethod
  def whole(cls, path: str, shape: Sequence[int]) -> 'View':
    axes = tuple((Run(axis, 1, size),) if size > 1 else () for axis, size in enumerate(shape))
    return cls(path, tuple(shape), axes, (0,) * len(shape), (0,) * len(shape))

  @property
  def value_shape(self) -> tuple[int, ...]:
    return tuple(math.prod(run.size for run in runs) for runs in self.axes)

  def arranged(self, lead: int) -> tuple[tuple[Run, ...], ...] | None:
    """The runs over the first `lead` axes, for each axis; empty for axes that run over others.

    None unless all of these are there, and none of them in one axis with others.
    """
    sizes = dict.fromkeys(range(lead), 1)
    for runs in self.axes:
      for run in runs:
        if (run.axis < lead) != (runs[0].axis < lead):
          return None
        if run.axis < lead:
          sizes[run.axis] *= run.size
    if sizes != dict(enumerate(self.shape[:lead])):
      return None
    return tuple(runs if runs and runs[0].axis < lead else () for runs in self.axes)

  def inside_loop(self) -> 'View | None':
    """What an iteration of a scan over axis 0 sees; None if axis 0 is a part of an axis of the weight, or several."""
    (*runs,) = self.axes[0]
    if not runs:
      return dataclasses.replace(self, axes=self.axes[1:])
    if len(runs) > 1 or runs[0] != Run(runs[0].axis, 1, self.shape[runs[0].axis]):
      return None
    return dataclasses.replace(self, axes=self.axes[1:], taken=(*self.taken, runs[0].axis))

  def entry(self, index: Any) -> 'View | None':
    """What one entry along axis 0 of the value is; of the weight's states all are still there."""
    found = _taken(self, 0, index, 1)
    return found and _squeeze(found, {'dimensions': (0,)}, ())


def factor_along(view: View, array: Any, places: Sequence[int]) -> Factor | None:
  """A factor of a value from an array with an axis for each of some `places` among its axes.

  None if an axis is one for a part of an axis of the weight.
  """
  runs = [run for place in places for run in view.axes[place]]
  order = sorted(range(len(runs)), key=lambda i: (runs[i].axis, -runs[i].stride))
  axes = tuple(sorted({run.axis for run in runs}))
  if any(math.prod(run.size for run in runs if run.axis == axis) != view.shape[axis] for axis in axes):
    return None
  array = array.reshape([run.size for run in runs]).transpose(order)
  return Factor(array.reshape([view.shape[axis] for axis in axes]), axes)


def follow(equation: Any, values: Sequence[Any], views: Sequence[View | None]) -> list[View] | None:
  """The views of an equation's results, given those of its arguments; None if it makes something else of the weight."""
  rule = _RULES.get(equation.primitive.name)
  if rule is None or views[0] is None or any(view is not None for view in views[1:]):
    return None
  found = rule(views[0], equation.params, values)
  if found is None:
    return None
  return found if isinstance(found, list) else [found]


def _same(view: View, params: Mapping[str, Any], values: Sequence[Any]) -> View:
  return view


def _cast(view: View, params: Mapping[str, Any], values: Sequence[Any]) -> View | None:
  """Refuses casts to 8 bits or integers: they quantise the weight, and its packed form would not be quantised."""
  dtype = jnp.dtype(params['new_dtype'])
  return view if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1 else None


def _transpose(view: View, params: Mapping[str, Any], values: Sequence[Any]) -> View:
  return dataclasses.replace(view, axes=tuple(view.axes[i] for i in params['permutation']))


def _squeeze(view: View, params: Mapping[str, Any], values: Sequence[Any]) -> View:
  dropped = {d % len(view.axes) for d in params['dimensions']}
  return dataclasses.replace(view, axes=tuple(runs for i, runs in enumerate(view.axes) if i not in dropped))


def _broadcast(view: View, params: Mapping[str, Any], values: Sequence[Any]) -> View | None:
  """New axes of length one are fine; repeated entries are not a view."""
  shape, places = params['shape'], params['broadcast_dimensions']
  axes: list[tuple[Run, ...]] = [()] * len(shape)
  for place, runs in zip(places, view.axes, strict=True):
    axes[place] = runs
  found = dataclasses.replace(view, axes=tuple(axes))
  return found if found.value_shape == tuple(shape) else None


def _reshape(view: View, params: Mapping[str, Any], values: Sequence[Any]) -> View | None:
  if params.get('dimensions') is not None:
    return None
  runs = [run for axis in view.axes for run in axis]
  axes = []
  for size in params['new_sizes']:
    mine: list[Run] = []
    left = size
    while left > 1:
      run = runs.pop(0)
      if left % run.size == 0:
        mine.append(run)
        left //= run.size
      elif run.size % left == 0:
        inner = run.size // left
        mine.append(Run(run.axis, run.stride * inner, left))
        runs.insert(0, Run(run.axis, run.stride, inner))
        left = 1
      else:
        return None
    axes.append(tuple(mine))
  if runs and all(run.size == 1 for run in runs):  # of a shard
    axes[-1] = (*axes[-1], *runs)
  return dataclasses.replace(view, axes=tuple(axes))


def _taken(view: View, place: int, start: Any, size: int, stride: int = 1) -> View | None:
  """Entries `start`, `start + stride`, ... of one axis of the value, `size` of them."""
  runs = view.axes[place]
  if math.prod(run.size for run in runs) == size:
    return view
  if size == 1 and len(runs) > 1:  # an entry of joined axes is an entry of each
    for run in reversed(runs):
      start, at = divmod(start, run.size)
      view = _from(view, run, at)
    runs = ()
  elif len(runs) != 1:
    return None
  else:
    (run,) = runs
    view, runs = _from(view, run, start), (Run(run.axis, run.stride * stride, size),) if size > 1 else ()
  return dataclasses.replace(view, axes=(*view.axes[:place], runs, *view.axes[place + 1 :]))


def _from(view: View, run: Run, start: Any) -> View:
  """The view from another start of one of its runs."""
  offsets, multiples = list(view.offsets), list(view.multiples)
  offsets[run.axis] = offsets[run.axis] + start * run.stride
  multiples[run.axis] = math.gcd(multiples[run.axis], run.stride * (start if isinstance(start, int) else 1))
  return dataclasses.replace(view, offsets=tuple(offsets), multiples=tuple(multiples))


def _slice(view: View, params: Mapping[str, Any], values: Sequence[Any]) -> View | None:
  strides = params['strides'] or (1,) * len(view.axes)
  found: View | None = view
  for place, (start, stop, stride) in enumerate(
    zip(params['start_indices'], params['limit_indices'], strides, strict=True)
  ):
    found = found and _taken(found, place, int(start), len(range(start, stop, stride)), int(stride))
  return found


def _dynamic_slice(view: View, params: Mapping[str, Any], values: Sequence[Any]) -> View | None:
  found: View | None = view
  lengths = view.value_shape
  for place, (start, size) in enumerate(zip(values[1:], params['slice_sizes'], strict=True)):
    if size != lengths[place]:
      found = found and _taken(found, place, _inside(start, lengths[place] - size), size)
  return found


def _inside(start: Any, last: int) -> Any:
  """The start of a slice, moved so that the slice ends inside of the axis."""
  return start.clip(0, last) if isinstance(start, jax.core.Tracer) else min(max(int(start), 0), last)


def _split(view: View, params: Mapping[str, Any], values: Sequence[Any]) -> list[View] | None:
  found, start = [], 0
  for size in map(int, params['sizes']):
    part = _taken(view, params['axis'], start, size)
    if part is None:
      return None
    found.append(part)
    start += size
  return found


def _unstack(view: View, params: Mapping[str, Any], values: Sequence[Any]) -> list[View] | None:
  place = params['axis']
  found = [_taken(view, place, i, 1) for i in range(view.value_shape[place])]
  return [_squeeze(part, {'dimensions': (place,)}, ()) for part in found if part] if all(found) else None


def _gather(view: View, params: Mapping[str, Any], values: Sequence[Any]) -> View | None:
  """`w[i]` with one traced number, along one axis; what looks up several rows is no view."""
  numbers, sizes = params['dimension_numbers'], params['slice_sizes']
  if len(numbers.start_index_map) != 1 or tuple(values[1].shape) != (1,) or numbers.operand_batching_dims:
    return None
  (place,) = numbers.start_index_map
  if tuple(sizes) != (*view.value_shape[:place], 1, *view.value_shape[place + 1 :]):
    return None
  if sorted(numbers.offset_dims) != list(range(len(numbers.offset_dims))):
    return None
  start, last = values[1][0], view.value_shape[place] - 1
  found = _taken(view, place, start.clip(0, last), 1)
  if params['mode'] == jax.lax.GatherScatterMode.FILL_OR_DROP and found is not None:
    fill = params['fill_value']
    if not (fill is None or fill == 0 or math.isnan(fill)):
      return None
    factor = jnp.where((start >= 0) & (start <= last), 1.0, jnp.nan if fill is None else fill).astype(jnp.float32)
    found = dataclasses.replace(found, fill=factor if found.fill is None else factor * found.fill)
  return found and _squeeze(found, {'dimensions': numbers.collapsed_slice_dims}, ())


def _all_gather(view: View, params: Mapping[str, Any], values: Sequence[Any]) -> View | None:
  """The shards of one axis of the weight, side by side or along a new axis."""
  name, n, place = params['axis_name'], params['axis_size'], params['all_gather_dimension']
  names = (name,) if isinstance(name, str) else tuple(name)
  gathered = [axis for axis, held in view.divided if held[-len(names) :] == names]
  if params['axis_index_groups'] is not None or len(gathered) != 1:
    return None  # of a weight that every shard has, each entry several times
  (axis,) = gathered
  size, axes = view.shape[axis], list(view.axes)
  places = [i for i, runs in enumerate(axes) if runs[:1] == (Run(axis, 1, size),)]
  if len(places) != 1 or view.offsets[axis] != 0:
    return None
  if params['tiled']:
    if places != [place]:
      return None
    axes[place] = (Run(axis, 1, size * n), *axes[place][1:])
  else:
    axes.insert(place, (Run(axis, size, n),))
  divided = ((a, held[: -len(names)] if a == axis else held) for a, held in view.divided)
  shape = (*view.shape[:axis], size * n, *view.shape[axis + 1 :])
  return dataclasses.replace(view, axes=tuple(axes), shape=shape, divided=tuple((a, h) for a, h in divided if h))


_RULES: Mapping[str, Callable[[View, Mapping[str, Any], Sequence[Any]], View | list[View] | None]] = {
  **dict.fromkeys((*_jax.MOVES, 'name', 'stop_gradient'), _same),
  'all_gather': _all_gather,
  'all_gather_invariant': _all_gather,
  'broadcast_in_dim': _broadcast,
  'convert_element_type': _cast,
  'dynamic_slice': _dynamic_slice,
  'gather': _gather,
  'reshape': _reshape,
  'slice': _slice,
  'split': _split,
  'squeeze': _squeeze,
  'transpose': _transpose,
  'unstack': _unstack,
}  # fmt: skip
# Primitives whose results may be views of what they are given.
FOLLOWED = frozenset(_RULES)
