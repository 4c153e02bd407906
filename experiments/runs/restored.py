"""A checkpoint that was read, looked at before anything is computed with it: it may be from elsewhere.

Masks say which entries a kernel packs. It would drop one of a group of three, and the run would not be what it says.
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from experiments.runs import shapes
from experiments.runs.checkpoint import Restored
import sparse24_jax as s24
from sparse24_jax.optim import sparse_states
from sparse24_jax.projection import Masked, TransposableMasked
from sparse24_jax.rules import match_rules

# The axes of [stacked..., in, out] along which at most two of four are kept.
_GROUPED = {Masked: (-2,), TransposableMasked: (-2, -1)}

_NAMED = 4  # masks in a message


def require_ours(directory: Path, found: Restored, recipe: s24.Recipe) -> None:
  """Raises ValueError unless a checkpoint has what a run writes, and masks that are 2:4 where those of the recipe are.

  Args:
    directory: of the checkpoints.
    found: what was read.
    recipe: of the run.
  """
  name = f'checkpoint {directory / str(found.meta["step"])}'
  shapes.require(f'{name}, its meta', found.meta, shapes.META)
  masks, states = {}, sparse_states(found.opt_state)
  for path, rule in match_rules(found.params, recipe).items():
    if (projection := rule.policy.projection) is not None:
      form = (projection.matrix or projection).form
      for axis in _GROUPED.get(type(form), ()):
        masks[path, axis] = projection.layout_of(states[path]).matrix(states[path])
  counts = jax.device_get(_fullest([*masks.values()], [axis for _, axis in masks]))
  full = {path: int(count) for (path, _), count in zip(masks, counts, strict=True) if count > 2}
  if full:
    named = [f'{path} ({count} of four)' for path, count in full.items()][:_NAMED]
    more = f' and {len(full) - _NAMED} others' if len(full) > _NAMED else ''
    raise ValueError(
      f'{name}: masks keep more than two of four: {", ".join(named)}{more}. A run writes none such, and kernels would'
      ' drop what is too many: take another checkpoint (--from-step of train, --step of other commands)'
    )


def _fullest(masks: Sequence[jax.Array], axes: Sequence[int]) -> list[jax.Array]:
  """How many the fullest group of four of each mask keeps along an axis."""

  def most(mask: jax.Array, axis: int) -> jax.Array:
    at = mask.ndim + axis
    groups = mask.reshape(*mask.shape[:at], -1, 4, *mask.shape[at + 1 :])
    return jnp.max(jnp.sum(groups, axis=at + 1, dtype=jnp.int32))

  return jax.jit(lambda masks: [most(m, axis) for m, axis in zip(masks, axes, strict=True)])(masks)
