"""Expected times of a layer in FP8, from the records of a card; None where one is missing.

Bytes an entry are those that a pass must move: a tensor of `wide` bytes is read once for its largest magnitude and once
more to be rounded; it is written in e4m3 both ways, or as a 2:4 operand (half of the values, two bits for each) and in
full.
"""

from collections.abc import Iterable
import math

from pallas_kernels import _records
from pallas_kernels.pack import costs
from pallas_kernels.sparse_matmul.api import OP
from sparse24_jax import products

# Bytes an entry of what a packing pass writes: operand and dense copy.
PACKED = 0.5 + 0.125 + 1


def total(values: Iterable[float | None]) -> float | None:
  """The sum; None if one is."""
  values = list(values)
  known = [value for value in values if value is not None]
  return math.fsum(known) if len(known) == len(values) else None


def product_ms(device: str, role: str, tokens: int, d_in: int, d_out: int) -> dict[str, float]:
  """In FP8 by back end, with 'dense' for the dense product; empty if nothing near was measured."""
  times = _records.expected_ms(device, OP, products.fp8_key(role, tokens, d_in, d_out))
  return {name: ms for name, ms in times.items() if name != 'dense_bf16'}


def product_16_ms(device: str, role: str, tokens: int, d_in: int, d_out: int, dtype: str) -> dict[str, float]:
  """In 16 bits by back end, with 'dense' for the dense product; empty if nothing near was measured."""
  m, n, k, b_layout = products.ROLES[role](tokens, d_in, d_out)
  key = dict(m=m, n=n, k=k, dtype=dtype, out_dtype=dtype, b_layout=b_layout, out_layout='nm')
  return _records.expected_ms(device, OP, key)


def dense_16_ms(device: str, role: str, tokens: int, d_in: int, d_out: int, dtype: str) -> float | None:
  """The dense product in 16 bits: by its own record, else by what was timed beside that in FP8."""
  own = product_16_ms(device, role, tokens, d_in, d_out, dtype).get('dense')
  if own is not None:
    return own
  return _records.expected_ms(device, OP, products.fp8_key(role, tokens, d_in, d_out)).get('dense_bf16')


def amax_ms(device: str, entries: int, wide: int) -> float | None:
  """Of the largest magnitude."""
  return costs.expected_ms(device, 'amax', entries * wide)


def both_ways_ms(device: str, entries: int, wide: int) -> float | None:
  """Of rounding a tensor and its transpose, its scale known."""
  return costs.expected_ms(device, 'quantize_both', entries * (wide + 2))


def packing_ms(device: str, d_in: int, d_out: int, wide: int) -> float | None:
  """Of a weight: its largest magnitude, then soft threshold, rounding and packing in one pass."""
  entries = d_in * d_out
  pack = costs.expected_ms(device, 'soft_threshold_pack8', round(entries * (wide + PACKED)))
  return total((amax_ms(device, entries, wide), pack))


def sample_ms(device: str, entries: int, wide: int) -> float | None:
  """Of an output gradient: its largest magnitude, then MVUE, rounding and packing in one pass."""
  pack = costs.expected_ms(device, 'mvue_pack8', round(entries * (wide + PACKED)))
  return total((amax_ms(device, entries, wide), pack))


def rounding_ms(device: str, entries: int, wide: int) -> float | None:
  """Of activations: their largest magnitude, then both ways."""
  return total((amax_ms(device, entries, wide), both_ways_ms(device, entries, wide)))


def role_packing_ms(device: str, role: str, tokens: int, d_in: int, d_out: int, wide: int) -> float | None:
  """Of the passes that a product of a layer by itself waits for; the input gradient reads what the sample left."""
  if role == 'forward':
    return rounding_ms(device, tokens * d_in, wide)
  return sample_ms(device, tokens * d_out, wide) if role == 'weight_grad' else 0.0


def dense_layer_ms(device: str, tokens: int, d_in: int, d_out: int, wide: int, weight_wide: int) -> float | None:
  """Of a dense layer in FP8: three products, and activations, weight and output gradient rounded both ways."""
  return total((
    *(product_ms(device, role, tokens, d_in, d_out).get('dense') for role in products.ROLES),
    *(rounding_ms(device, entries, bytes_)
      for entries, bytes_ in ((tokens * d_in, wide), (d_in * d_out, weight_wide), (tokens * d_out, wide))),
  ))  # fmt: skip
