"""Whether the squared-ReLU block pays on sparse tensor cores, by the records of the card."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _device, _records, _triton
from pallas_kernels.pack import costs
from pallas_kernels.vnm import api
from sparse24_jax import fp8_times
from sparse24_jax.fp8_times import total
from sparse24_jax.policy import ActivationPolicy, TwoOfFour, VNM

# Ours. Expected gains of blocks are 9 to 18% below measured ones, within 10% in `block_gain`: below this one it is not
# known that the kernels pay.
LEAST_GAIN = 1.1


@dataclasses.dataclass(frozen=True)
class Expected:
  """Milliseconds of a block, forward and backward.

  Of 16384 x 4096 x 16384 with 128:2:8, 128:2:16, 64:2:8 and 64:2:16 the sparse block took 3 to 8% longer on an H100,
  the dense one 17 to 24%: gains are 9 to 14% lower than measured. On an H200, with two of four tokens too, they are 11
  to 18% lower, nearly all by the dense block (measured with the H100's settings of the V:N:M products).

  Attributes:
    sparse_ms: with the kernels, packing of weights and activations included.
    dense_ms: dense squared ReLU.
  """

  sparse_ms: float
  dense_ms: float

  @property
  def gain(self) -> float:
    """Dense time over sparse time."""
    return self.dense_ms / self.sparse_ms


def expected(policy: ActivationPolicy, tokens: int, d: int, hidden: int, dtype: Any, device: str) -> Expected | None:
  """What the records of a card say of a block; None if nothing near was measured, or if a V:N:M product loses there.

  Products are those of the nearest measured problem within a factor of two in each size, scaled. What stands between
  them are passes over memory, at the measured bandwidth of their kernel or of a copy.

  Args:
    policy: `ActivationPolicy` of V:2:M.
    tokens: of a block.
    d: width of the model.
    hidden: neurons.
    dtype: of activations and weights.
    device: folder of the records.
  """
  product_16_ms = functools.partial(
    fp8_times.product_16_ms, device, tokens=tokens, d_in=d, d_out=hidden, dtype=jnp.dtype(dtype).name
  )
  by_weight = product_16_ms('forward')
  # Of Y and dH, and of their transposes.
  by_neurons = _vnm_ms(policy.features, device, tokens, d, hidden, dtype)
  if isinstance(policy.tokens, TwoOfFour):
    by_tokens = product_16_ms('weight_grad')
  else:
    by_tokens = _vnm_ms(policy.features, device, hidden, d, tokens, dtype)
  if not by_weight or any(
    times.get('mosaic_gpu', math.inf) >= times.get('dense', 0.0) for times in (by_neurons, by_tokens)
  ):
    return None
  # Each of the three is made twice: H and dY, Z and dX, dW1 and dW2.
  sparse = 2 * (min(by_weight.values()) + by_neurons['mosaic_gpu'] + by_tokens['mosaic_gpu'])
  dense = 2 * (by_weight['dense'] + by_neurons['dense'] + by_tokens['dense'])
  sparse += 2 * policy.dense_features * by_tokens['dense']
  wide = jnp.dtype(dtype).itemsize
  passes = total(
    costs.expected_ms(device, op, round(size)) for op, size in _passes(policy, tokens, d, hidden, wide).items()
  )
  # y from h, then dh from dy and h.
  dense_pass = costs.expected_ms(device, costs.COPY, 5 * tokens * hidden * wide)
  return None if passes is None or dense_pass is None else Expected(sparse + passes, dense + dense_pass)


def _vnm_ms(pattern: VNM, device: str, r: int, n: int, k: int, dtype: Any) -> dict[str, float]:
  return _records.expected_ms(device, api.OP, api.problem_key(r, k, n, pattern.v, pattern.m, dtype))


def _passes(policy: ActivationPolicy, tokens: int, d: int, hidden: int, wide: int) -> dict[str, float]:
  """Bytes that move around the sparse products, by the op whose bandwidth was measured."""
  weight, activations = d * hidden, tokens * hidden
  operand = weight * (wide / 2 + 1 / 8)
  kept = 2 / policy.features.group * activations * wide  # values of a V:2:M operand
  turned = activations * (wide / 2 + 1 / 8) if isinstance(policy.tokens, TwoOfFour) else kept
  return {
    'soft_threshold_pack_axis-2': weight * wide + operand,
    'soft_threshold_pack_axis-1': weight * wide + operand,
    costs.COPY: sum((
      2 * (operand + weight * wide),  # both weights once more as dense matrices
      activations * wide + 2 * kept,  # h, and what is packed and kept of it
      activations * wide + 2 * kept,  # dy, and dh with what was kept
      2 * (kept + turned),  # transposes of Y and dH
      # Columns of the dense neurons.
      2 * (kept + policy.dense_features * activations * wide) if policy.dense_features else 0,
      2 * weight * wide,  # dW1 the other way round
    )),
  }  # fmt: skip


def why_dense(policy: ActivationPolicy, tokens: int, d: int, hidden: int, dtype: Any) -> str | None:
  """Why a block whose policy names no implementation stays dense on this card, or None: then its kernels pay."""
  device = _device.current()
  if not device.has_sparse_wgmma:
    return f'{device.name} has no sparse wgmma'
  mesh = jax.sharding.get_abstract_mesh()
  if not _device.arrays_are_whole() or not (mesh.empty or mesh.size == 1):
    return 'V:N:M kernels cannot be divided by a mesh'
  if (reason := _triton.why_absent()) is not None:
    return f'the kernels need jax-triton, from the extra sparse24-jax[cuda]: {reason}'
  if not isinstance(policy.features, VNM) or policy.clusters:
    return f'with {policy.clusters or "2:4 activations"} it was not timed'
  if not policy.sparse_weights:
    return 'with dense weights it was not timed'
  v, m = policy.features.v, policy.features.m
  # What the packers take.
  for name, size in (('tokens', tokens), ('neurons', hidden)):
    if size % v or size % (16 * m):
      return f'{size} {name} are no multiple of V = {v} and 16 M = {16 * m}'
  if d % 64 or tokens * hidden >= 2**31:
    return f'a width of {d} is no multiple of 64, or {tokens} x {hidden} activations are 2^31 or more'
  found = expected(policy, tokens, d, hidden, dtype, device.slug)
  if found is None:
    return f'no products of {jnp.dtype(dtype).name} near these were measured on this card, or they lose there'
  if found.gain < LEAST_GAIN:
    return f'{found.sparse_ms:.3f} ms are expected of the kernels and {found.dense_ms:.3f} of dense products'
  return None
