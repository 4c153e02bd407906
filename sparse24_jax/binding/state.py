"""The state of a weight on its way to the matmul: a mask, a scale or packed operands, one for each stacked matrix."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from sparse24_jax.binding.view import Run, View

NNX_STATES = 'sparse24/states/'  # where a sparsified nnx model keeps the states of its weights, by their paths


@functools.partial(jax.tree_util.register_dataclass, data_fields=['value'], meta_fields=['stacked'])
@dataclasses.dataclass(frozen=True)
class WeightState:
  """What a projection keeps of a weight, by the axes of the weight that its arrays have in front.

  Attributes:
    value: the projection's state or a `PackedWeight`, of matrices `[stacked..., in, out]`.
    stacked: axes of the stored weight, in the order of the leading axes of `value`.
  """

  value: Any
  stacked: tuple[int, ...]

  @staticmethod
  def mapped(f: Callable[[Any], Any], state: Any) -> Any:
    """`f` of a state, of one in a `WeightState` too."""
    return dataclasses.replace(state, value=f(state.value)) if isinstance(state, WeightState) else f(state)

  def to_front(self, axis: int) -> 'WeightState':
    """Moves a stacked axis to the front, where a scan takes it off; `stacked` no longer has it."""
    place = self.stacked.index(axis)
    value = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, place, 0), self.value)
    return WeightState(value, tuple(a for a in self.stacked if a != axis))

  def at(self, view: View, batch: tuple[Run, ...]) -> Any:
    """The states of the matrices that a view holds; `batch` has its runs over stacked axes, in the matmul's order."""
    axes = tuple(run.axis for run in batch)
    if len(set(axes)) < len(axes) or any(run != Run(run.axis, 1, view.shape[run.axis]) for run in batch):
      return self._looked_up(view, batch)
    value, stacked = self.value, self.stacked
    for axis in [a for a in stacked if a not in axes]:
      place = stacked.index(axis)
      entry = functools.partial(jax.lax.dynamic_index_in_dim, index=view.offsets[axis], axis=place, keepdims=False)
      value = jax.tree.map(entry, value)
      stacked = tuple(a for a in stacked if a != axis)
    order = tuple(stacked.index(axis) for axis in axes)
    if order == tuple(range(len(order))):
      return value
    return jax.tree.map(lambda leaf: jnp.transpose(leaf, (*order, *range(len(order), leaf.ndim))), value)

  def _looked_up(self, view: View, batch: tuple[Run, ...]) -> Any:
    """The state for a matmul that reads part of a stacked axis, or reads that axis split into several."""
    places = {axis: view.offsets[axis] for axis in self.stacked}
    for i, run in enumerate(batch):
      steps = run.stride * jax.lax.broadcasted_iota(jnp.int32, tuple(run.size for run in batch), i)
      places[run.axis] = places[run.axis] + steps
    index = tuple(jnp.broadcast_to(at, tuple(run.size for run in batch)) for at in places.values())
    return jax.tree.map(lambda leaf: leaf.at[index].get(mode='promise_in_bounds'), self.value)
