"""What rounding to float8 is checked and timed on, and the settings that are tried."""

import math

import jax.numpy as jnp

from pallas_kernels import _triton
from pallas_kernels._passes import Case, normal, tiles
from pallas_kernels.quantize import api, costs, reference

triton = _triton.kernels('pallas_kernels.quantize.triton')
F32, E4M3 = jnp.float32, jnp.dtype(jnp.float8_e4m3fn)
SHAPES = ((16384, 4096), (16384, 16384))
# Tokens, in and out, of the layer whose matmuls are timed.
LAYER = (16384, 4096, 16384)


def cases() -> list[Case]:
  """All rows; the list of settings starts with the default. The largest magnitude, which makes a scale, is XLA's."""
  settings = tiles('32x32x8', '16x16x4', '32x32x4', '16x32x4', '32x16x4', '32x64x8', '64x32x8')
  rounded = [
    Case(
      costs.quantize(math.prod(shape), 2, transpose='both'), shape, lambda key, s=shape: (normal(s)(key), F32(80)),
      lambda x, s, config: triton.quantize(x, s, dtype=E4M3, transpose='both', config=config),
      lambda x, s: reference.quantize(x, s, dtype=E4M3, transpose='both'), settings,
    )
    for shape in SHAPES
  ]  # fmt: skip
  largest = [
    Case(costs.amax(math.prod(s), 2), s, lambda key, s=s: (normal(s)(key),), None, api.amax, ()) for s in SHAPES
  ]
  return rounded + largest
