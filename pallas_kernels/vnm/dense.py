"""`vnm_matmul` on the dense tensor cores: A is written out first."""

from typing import Any

from jax import Array
import jax.numpy as jnp

from pallas_kernels.vnm import format as fmt
from pallas_kernels.vnm.api import expand
from pallas_kernels.vnm.format import CompressedVNM, VNMOperand


def vnm_matmul(a: CompressedVNM | VNMOperand, b: Array, *, out_dtype: Any, out_layout: str) -> Array:
  """See `api.vnm_matmul`."""
  whole = expand(a) if isinstance(a, VNMOperand) else fmt.expand(a)
  d = jnp.dot(whole, b, preferred_element_type=jnp.float32)
  return (d if out_layout == 'mn' else d.T).astype(out_dtype)
