"""The meaning of sparse attention: dense attention with a mask, in plain jnp."""

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sparse_attention.patterns import Pattern


def sparse_attention(q: Array, k: Array, v: Array, *, patterns: tuple[Pattern, ...], scale: float) -> Array:
  """softmax(scale q k^T where the head's pattern attends) v; scores and softmax in float32.

  Args:
    q: [B, T, H, K].
    k: [B, T, G, K]; G divides H, and head h reads key-value head h div (H / G).
    v: [B, T, G, K].
    patterns: one a head.
    scale: of the scores.

  Returns:
    [B, T, H, K], dtype of `q`.
  """
  length, shared = q.shape[1], q.shape[2] // k.shape[2]
  mask = jnp.asarray(np.stack([pattern.mask(length) for pattern in patterns]))[None]
  k, v = (jnp.repeat(x, shared, axis=2) for x in (k, v))
  scores = jnp.einsum('bqhd,bkhd->bhqk', q, k, preferred_element_type=jnp.float32) * jnp.float32(scale)
  weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1).astype(q.dtype)
  return jnp.einsum('bhqk,bkhd->bqhd', weights, v, preferred_element_type=jnp.float32).astype(q.dtype)
