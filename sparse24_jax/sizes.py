"""How many tokens an array has, which `jax.export` may leave open."""

import math
from typing import Any

from jax import Array
import jax.export
import jax.numpy as jnp


def tokens_of(x: Array) -> int:
  """How many tokens x `[..., features]` has; ValueError while that is open."""
  if is_symbolic(x):
    raise ValueError(symbolic('x', x))
  return math.prod(x.shape[:-1])


def is_symbolic(x: Any) -> bool:
  """Whether a dimension of an array is open."""
  return any(map(jax.export.is_symbolic_dim, jnp.shape(x)))


def symbolic(name: str, x: Any) -> str:
  """What is wrong with such an array where a layer is sparse."""
  shape = ', '.join(map(str, jnp.shape(x)))
  return (
    f'{name} of shape ({shape}) has symbolic dimensions, and sparse layers choose kernels by the number of tokens:'
    ' export the dense model with the weights that project(params, opt_state, recipe) returns, or give these dimensions'
    ' sizes'
  )
