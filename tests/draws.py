"""Normal numbers by NumPy: for each shape that `jax.random` draws a program is compiled, for a tenth of a second."""

import jax
import jax.numpy as jnp
import numpy as np


def gaussian(seed: int, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
  """Drawn in float32 and rounded to `dtype`."""
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype))
