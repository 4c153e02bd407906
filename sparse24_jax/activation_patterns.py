"""The patterns of a squared-ReLU block's activations, as masks: along neurons and along tokens."""

from jax import Array
import jax.numpy as jnp

from pallas_kernels.two_of_four.prune import magnitude_mask
from pallas_kernels.vnm.reference import vnm_mask
from sparse24_jax.neurons import spread, unspread
from sparse24_jax.policy import ActivationPolicy, TwoOfFour, VNM


def feature_mask(y: Array, policy: ActivationPolicy) -> Array:
  """The forward's pattern, along neurons."""
  if isinstance(policy.features, TwoOfFour):
    return magnitude_mask(y, axis=-1) | jnp.isnan(y)
  v, m = policy.features.v, policy.features.m
  if not policy.clusters:
    return vnm_mask(y, v=v, m=m)
  # Neurons come sorted by cluster, and a group takes one from each part of them.
  return unspread(vnm_mask(spread(y, m, 1), v=v, m=m), m, 1)


def token_mask(y: Array, policy: ActivationPolicy) -> Array:
  """The weight gradients' pattern, along tokens, of activations `y` that are zero outside the forward's pattern.

  Tokens are grouped across the batch, a quarter (an M-th) of it apart: neighbours use the same neurons, and of four
  that do, two would be lost. This is the fixed permutation of arXiv 2503.16672, which does not say which one. In blocks
  of V:N:M neighbours are tokens of different sequences, which 2:4 along tokens takes as they come.
  """
  match policy.features, policy.tokens:
    case VNM(), TwoOfFour():
      return magnitude_mask(y, axis=-2)
    case _, VNM(v, m):
      return unspread(vnm_mask(spread(y, m, 0).T, v=v, m=m).T, m, 0)
    case _:
      return unspread(magnitude_mask(spread(y, 4, 0), axis=-2), 4, 0)
