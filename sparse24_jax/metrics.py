"""Health metrics of a sparse run."""

import jax
from jax import Array
import jax.numpy as jnp


def flip_rate(old_masks, new_masks) -> Array:
  """The share of weights whose mask changed: ||m_new - m_old||_1 / D over all leaves together.

  The rate is per interval between the two masks: per optimizer step if they are one step apart, per refresh if the
  mask is refreshed every l steps.

  Args:
    old_masks: a pytree of bool arrays.
    new_masks: the same structure and shapes.

  Returns:
    float32 scalar in [0, 1].

  Raises:
    ValueError: structures or shapes differ, a mask is not bool, or there is none.

  Source: Hu et al., arXiv 2404.01847, definition 4.1.

  >>> import jax.numpy as jnp, sparse24_jax as s24
  >>> s24.flip_rate(jnp.array([True, False, True, False]), jnp.array([True, True, False, False])).item()
  0.5
  """
  old, structure = jax.tree.flatten(old_masks)
  new = structure.flatten_up_to(new_masks)
  if not old:
    raise ValueError('flip_rate needs at least one mask')
  for a, b in zip(old, new, strict=True):
    if a.shape != b.shape:
      raise ValueError(f'masks to compare have shapes {a.shape} and {b.shape}')
    if not a.dtype == b.dtype == jnp.bool_:
      raise ValueError(f'masks must be bool, found {a.dtype} and {b.dtype}')
  flips = jnp.stack([jnp.sum(a != b, dtype=jnp.float32) for a, b in zip(old, new, strict=True)])
  return jnp.sum(flips) / float(sum(a.size for a in old))
