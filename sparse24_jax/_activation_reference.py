"""The parts of the squared-ReLU block in plain jnp; `_activation_kernels` has them on sparse tensor cores.

The block (`activation_sparsity`) is written in terms of `Reference`.
"""

import dataclasses
from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp

from pallas_kernels.operand import SparseOperand
from pallas_kernels.vnm.format import VNMOperand
from pallas_kernels.vnm.reference import squared_relu
from sparse24_jax.activation_patterns import feature_mask, token_mask
from sparse24_jax.policy import ActivationPolicy
from sparse24_jax.projection import Projection


class Activations(NamedTuple):
  """Y or dH, [tokens, neurons], under the pattern along neurons.

  Attributes:
    entries: zero outside the pattern; None where only the operand is needed.
    mask: bool, the pattern, or None where `operand` has it.
    operand: V:N:M, or None.
    inputs: of Y, the H that it was made from: all of it, or what the operand's places have of it.
    counts: of Y, how many tokens use each neuron, or None where `entries` tell.
  """

  entries: Any
  mask: Any
  operand: VNMOperand | None = None
  inputs: Any = None
  counts: Any = None


class Weight(NamedTuple):
  """A projected weight with a row for each neuron, [h, d]: W1 transposed, or W2. Both are 2:4 along d.

  Attributes:
    dense: the array, or None where `operand` has it.
    operand: what sparse matmuls read, or None.
  """

  dense: Any
  operand: SparseOperand | None = None


class TokenPattern(NamedTuple):
  """The part of the activations that the weight gradients use.

  Attributes:
    dense: int32, neurons that are used whole.
    mask: bool [tokens, neurons], 2:M along tokens for the others, none in the dense; None where `operand` has it.
    operand: the transpose of Y without its dense neurons, V:N:M or 2:4, or None.
  """

  dense: Array
  mask: Any
  operand: VNMOperand | SparseOperand | None = None


def dot(a: Array, b: Array) -> Array:
  return jnp.dot(a, b, preferred_element_type=jnp.float32).astype(a.dtype)


def projected(w: Array, projection: Projection | None, state: Array | None, axis: int) -> Array:
  w = w if projection is None else projection.apply(w, state)
  return w.T if axis == -2 else w


def _flags(neurons: Array, size: int) -> Array:
  """bool [1, size], True for `neurons`."""
  return jnp.zeros((1, size), bool).at[0, neurons].set(True)


def _without(entries: Array, neurons: Array) -> Array:
  """`entries` with zeros for `neurons`; a scatter of whole columns would be slow."""
  return jnp.where(_flags(neurons, entries.shape[1]), 0, entries)


@dataclasses.dataclass(frozen=True)
class Reference:
  """The matmuls and what stands between them; sums are float32, results have the dtype of the first argument.

  `SparseVNM` does the same on sparse tensor cores.
  """

  policy: ActivationPolicy

  def weight(self, w: Array, projection: Projection | None, state: Array | None, axis: int) -> Weight:
    """The `Weight` of `w`, which is not projected yet; `axis` goes with d."""
    return Weight(projected(w, projection, state, axis))

  def by_weight(self, x: Array, w: Weight) -> Array:
    """`[tokens, neurons]` from x `[tokens, d]`."""
    return dot(x, w.dense.T)

  def activate(self, h: Array, backward: bool) -> Activations:
    """Y, with what the backward needs if one follows."""
    y = squared_relu(h)
    mask = feature_mask(y, self.policy)
    return Activations(jnp.where(mask, y, 0), mask, inputs=h)

  def save(self, y: Activations) -> Activations:
    """The part of Y that the backward needs."""
    return Activations(None, None, inputs=y.inputs)

  def restore(self, saved: Activations) -> Activations:
    """Y again."""
    # The forward's pattern, found again from the same numbers: what it dropped gets no gradient.
    return self.activate(saved.inputs, True)

  def uses(self, y: Activations) -> Array:
    """int32, how many tokens use each neuron."""
    return jnp.sum(y.entries != 0, axis=0, dtype=jnp.int32)

  def pull_back(self, y: Activations, dy: Array, entries: bool) -> Activations:
    """dH = 2 dY relu(H) under Y's pattern, with its `entries` if they are asked for."""
    dh = 2 * dy.astype(jnp.float32) * jnp.maximum(y.inputs, 0).astype(jnp.float32)
    return Activations(jnp.where(y.mask, dh, 0).astype(dy.dtype), y.mask)

  def over_neurons(self, a: Activations, w: Weight) -> Array:
    """`[tokens, d]`, of Y or dH and a weight."""
    return dot(a.entries, w.dense)

  def token_pattern(self, y: Activations, dense: Array) -> TokenPattern:
    """The part of Y that the weight gradients use; all of it for `dense` neurons."""
    return TokenPattern(dense, token_mask(_without(y.entries, dense), self.policy))

  def over_tokens(self, a: Activations, pattern: TokenPattern, is_y: bool, b: Array) -> Array:
    """`[neurons, d]`, of the transpose of Y (`is_y`) or dH and b `[tokens, d]`."""
    whole = _flags(pattern.dense, a.entries.shape[1])
    return dot(jnp.where(pattern.mask | whole, a.entries, 0).T, b)
