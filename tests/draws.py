"""Numbers by NumPy: for each shape that `jax.random` draws a program is compiled, for a tenth of a second."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def gaussian(seed: int, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
  """Drawn in float32 and rounded to `dtype`."""
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype))


def parameters(model: Any, *inputs: Any) -> Any:
  """Those of a linen model, of the size that Flax gives them; its own `init` is compiled operation by operation."""
  rng, start = np.random.default_rng(3), {'scale': 1.0, 'bias': 0.0}

  def draw(path, leaf):
    first = start.get(path[-1].key)
    values = rng.standard_normal(leaf.shape) / leaf.shape[-2] ** 0.5 if first is None else np.full(leaf.shape, first)
    return jnp.asarray(values.astype(leaf.dtype))

  shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)['params']
  return jax.tree_util.tree_map_with_path(draw, shapes)
