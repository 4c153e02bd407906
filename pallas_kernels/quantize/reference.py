"""What `quantize` computes, in plain jnp."""

import jax
import jax.numpy as jnp

from pallas_kernels._program import traced_once
from pallas_kernels.pack.reference import saturated

Array = jax.Array


@traced_once('dtype', 'transpose')
def quantize(x: Array, scale: Array, *, dtype: jnp.dtype, transpose: str) -> Array | tuple[Array, Array]:
  """See `api.quantize`."""
  plain = saturated(x.astype(jnp.float32) * scale[..., None, None], dtype)
  if transpose == 'no':
    return plain
  transposed = jnp.swapaxes(plain, -1, -2)
  return transposed if transpose == 'only' else (plain, transposed)
