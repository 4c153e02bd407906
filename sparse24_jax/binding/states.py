"""What a sparse model reads besides its parameters: the state of each sparse weight, packed where kernels run."""

import dataclasses
from typing import Any

from jax import Array
import jax.numpy as jnp

from sparse24_jax.binding.bound import Bound
from sparse24_jax.binding.state import WeightState
from sparse24_jax.linear_layer import pack_weight
from sparse24_jax.plan import may_pack
from sparse24_jax.policy import DotPolicy
from sparse24_jax.recipe import Recipe


def weight_states(
  recipe: Recipe, sparse: dict[str, tuple[DotPolicy, Array, Array]], pack: bool | None
) -> dict[str, Any]:
  """The states of the matrices `[stacked..., in, out]`, by path, from what `projected_weights` gives.

  A weight that the model reads in parts is not packed. One that is stored otherwise than as `[stacked..., in, out]` has
  its state in a `WeightState`: a mask along other axes may have its shape.
  """
  in_parts = {weight.path for weight in recipe.weights if not weight.packs} if isinstance(recipe, Bound) else set()
  return {path: _state(*found, pack=False if path in in_parts else pack) for path, found in sparse.items()}


def _state(policy: DotPolicy, w: Array, state: Any, *, pack: bool | None) -> Any:
  projection = policy.projection
  assert projection is not None
  layout, stored_otherwise = projection.layout_of(w), projection.matrix is not None
  if stored_otherwise:
    state = layout.matrix(state) if state.shape == w.shape else state
    policy, w = dataclasses.replace(policy, projection=projection.matrix), layout.matrix(w)
  if pack is None:
    pack = may_pack(policy, w)
  # float32 parameters are packed for bfloat16 layers; a layer of another dtype packs again, from the state.
  if pack:
    state = pack_weight(policy, w, state, jnp.bfloat16 if w.dtype == jnp.float32 else w.dtype)
  return WeightState(state, layout.stacked) if stored_otherwise else state
