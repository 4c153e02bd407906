"""What the squared-ReLU block is made of, in plain jnp and on sparse tensor cores.

Both sides offer the same functions; the block (`activation_sparsity`) is written in terms of them.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import _device, formats
from pallas_kernels.pack.api import soft_threshold_pack
from pallas_kernels.sparse_matmul.api import sparse_matmul
from pallas_kernels.sparse_matmul.operand import SparseOperand, to_operand
from pallas_kernels.vnm.api import expand, vnm_matmul, vnm_pack
from pallas_kernels.vnm.format import VNMOperand
from pallas_kernels.vnm.reference import squared_relu
from sparse24_jax.neurons import spread


class Activations(NamedTuple):
  """Y or dH, [tokens, neurons], under the pattern along neurons.

  Attributes:
    entries: zero outside the pattern; None where only the operand is needed.
    mask: bool, the pattern, or None where `operand` has it.
    operand: V:N:M, or None.
  """

  entries: Any
  mask: Any
  operand: VNMOperand | None = None


class Weight(NamedTuple):
  """A projected weight with a row for each neuron, [h, d]: W1 transposed, or W2. Both are 2:4 along d.

  Attributes:
    dense: the array, or None where `operand` has it.
    operand: what sparse products read, or None.
  """

  dense: Any
  operand: SparseOperand | None = None


class TokenPattern(NamedTuple):
  """What the weight gradients use of the activations.

  Attributes:
    dense: int32, neurons that are used whole.
    mask: bool [tokens, neurons], 2:M along tokens for the others, none in the dense; None where `operand` has it.
    operand: V:N:M of the transpose of Y without its dense neurons, or None.
  """

  dense: Array
  mask: Any
  operand: VNMOperand | None = None


class Products(NamedTuple):
  """Matrix products have float32 sums and results in the dtype of the first argument.

  Attributes:
    weight: (weight before its projection, projection, state, axis that goes with d) -> Weight.
    by_weight: (x [T, d], Weight) -> [T, h].
    activate: (h, entries wanted) -> Y.
    pull_back: (h, Y, dY) -> dH = 2 dY relu(h) under Y's pattern.
    over_neurons: (Y or dH, Weight) -> their product, [T, d].
    token_pattern: (Y, dense neurons) -> TokenPattern.
    over_tokens: (Y or dH, token pattern, whether it is Y, b [T, d]) -> [h, d], of its transpose with b.
  """

  weight: Callable[..., Weight]
  by_weight: Callable[..., Array]
  activate: Callable[..., Activations]
  pull_back: Callable[..., Activations]
  over_neurons: Callable[..., Array]
  token_pattern: Callable[..., TokenPattern]
  over_tokens: Callable[..., Array]


def make(policy: Any, feature_mask: Callable[..., Array], token_mask: Callable[..., Array]) -> Products:
  """The functions for an `ActivationPolicy`, given the masks that define its patterns."""
  if policy.implementation != 'kernels':
    ops: Any = _Reference(policy, feature_mask, token_mask)
  elif policy.pattern == '2:4':
    ops = _Sparse24(policy, feature_mask, token_mask)
  else:
    ops = _SparseVNM(policy)
  return Products(*(getattr(ops, name) for name in Products._fields))


_DENSE_TILE = 128


def _dot(a: Array, b: Array) -> Array:
  return jnp.dot(a, b, preferred_element_type=jnp.float32).astype(a.dtype)


def _kernel() -> str | None:
  """The kernels by name where there are any, so that they answer or fail; elsewhere what answers for them."""
  return 'mosaic_gpu' if _device.current().has_sparse_wgmma else None


def _projected(w: Array, projection: Any, state: Array | None, axis: int) -> Array:
  w = w if projection is None else projection.apply(w, state)
  return w.T if axis == -2 else w


# Names of `soft_threshold_projection`, along either axis.
_SOFT_THRESHOLDS = ('soft_threshold', 'soft_threshold along out')


def _sparse_weight(w: Array, projection: Any, state: Array | None, axis: int) -> Weight:
  if getattr(projection, 'name', None) in _SOFT_THRESHOLDS and w.dtype.itemsize == 2:
    return Weight(None, soft_threshold_pack(w, state, axis=axis))
  dense = _projected(w, projection, state, axis)
  if projection is None:
    return Weight(dense)
  return Weight(dense, to_operand(formats.compress(dense, dense != 0, axis=-1)))


def _dense_weight(w: Weight) -> Array:
  return expand(w.operand) if w.dense is None else w.dense


def _sparse_by_weight(x: Array, w: Weight) -> Array:
  if w.operand is None:
    return _dot(x, w.dense.T)
  return sparse_matmul(w.operand, x, b_layout='nk', out_layout='nm', implementation=_kernel())


def _flags(neurons: Array, size: int) -> Array:
  """bool [1, size], True for `neurons`."""
  return jnp.zeros((1, size), bool).at[0, neurons].set(True)


def _without(entries: Array, neurons: Array) -> Array:
  """`entries` with zeros for `neurons`; a scatter of whole columns would be slow."""
  return jnp.where(_flags(neurons, entries.shape[1]), 0, entries)


def _with_dense(d: Array, entries: Array, dense: Array, b: Array) -> Array:
  """`d` [h, d] with the rows of the dense neurons from a product of their own."""
  if not dense.shape[0]:
    return d
  # As [tokens, dense] and entry by entry: a gather of columns becomes [dense, tokens] in XLA, whose neighbouring
  # threads read different rows. Any columns fill the width up to what dense products do well.
  count = dense.shape[0]
  padded = jnp.pad(dense, (0, -count % _DENSE_TILE))
  token = jax.lax.broadcasted_iota(jnp.int32, (entries.shape[0], padded.shape[0]), 0)
  columns = jax.lax.optimization_barrier(entries.at[token, padded[None, :]].get(mode='promise_in_bounds'))
  product = jax.lax.dot_general(columns, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)[:count]
  d = d.at[dense].set(product.astype(d.dtype), unique_indices=True, mode='promise_in_bounds')
  return jax.lax.optimization_barrier(d)  # before the caller's transposition: rows again


@dataclasses.dataclass(frozen=True)
class _Reference:
  policy: Any
  feature_mask: Callable[..., Array]
  token_mask: Callable[..., Array]

  def weight(self, w: Array, projection: Any, state: Array | None, axis: int) -> Weight:
    return Weight(_projected(w, projection, state, axis))

  def by_weight(self, x: Array, w: Weight) -> Array:
    return _dot(x, w.dense.T)

  def activate(self, h: Array, entries: bool) -> Activations:
    del entries
    y = squared_relu(h)
    mask = self.feature_mask(y, self.policy)
    return Activations(jnp.where(mask, y, 0), mask)

  def pull_back(self, h: Array, y: Activations, dy: Array) -> Activations:
    dh = 2 * dy.astype(jnp.float32) * jnp.maximum(h, 0).astype(jnp.float32)
    return Activations(jnp.where(y.mask, dh, 0).astype(h.dtype), y.mask)

  def over_neurons(self, a: Activations, w: Weight) -> Array:
    return _dot(a.entries, w.dense)

  def token_pattern(self, y: Activations, dense: Array) -> TokenPattern:
    return TokenPattern(dense, self.token_mask(_without(y.entries, dense), self.policy))

  def over_tokens(self, a: Activations, pattern: TokenPattern, is_y: bool, b: Array) -> Array:
    del is_y
    whole = _flags(pattern.dense, a.entries.shape[1])
    return _dot(jnp.where(pattern.mask | whole, a.entries, 0).T, b)


class _Sparse24(_Reference):
  """2:4 in both directions by `sparse_matmul`; packed by XLA."""

  def weight(self, w: Array, projection: Any, state: Array | None, axis: int) -> Weight:
    return _sparse_weight(w, projection, state, axis)

  def by_weight(self, x: Array, w: Weight) -> Array:
    return _sparse_by_weight(x, w)

  def over_neurons(self, a: Activations, w: Weight) -> Array:
    packed = formats.compress(a.entries, a.mask, axis=-1)
    return sparse_matmul(packed, _dense_weight(w), b_layout='kn', implementation=_kernel())

  def over_tokens(self, a: Activations, pattern: TokenPattern, is_y: bool, b: Array) -> Array:
    del is_y
    entries, mask = (spread(x, 4, 0) for x in (jnp.where(pattern.mask, a.entries, 0), pattern.mask))
    packed = formats.compress(entries, mask, axis=-2)
    d = sparse_matmul(packed, spread(b, 4, 0), b_layout='kn', implementation=_kernel())
    return _with_dense(d, a.entries, pattern.dense, b)


@dataclasses.dataclass(frozen=True)
class _SparseVNM:
  """V:N:M in both directions by `vnm_matmul`; the packer finds each pattern, and its index the rows of the sum."""

  policy: Any

  def weight(self, w: Array, projection: Any, state: Array | None, axis: int) -> Weight:
    return _sparse_weight(w, projection, state, axis)

  def by_weight(self, x: Array, w: Weight) -> Array:
    return _sparse_by_weight(x, w)

  def _pack(self, x: Array, **kwargs: Any) -> Any:
    return vnm_pack(x, v=self.policy.v, m=self.policy.m, **kwargs)

  def _activations(self, h: Array, **kwargs: Any) -> Activations:
    operand, masked = self._pack(h, activation='squared_relu', spread=bool(self.policy.clusters), **kwargs)
    return Activations(masked, None, operand)

  def activate(self, h: Array, entries: bool) -> Activations:
    return self._activations(h, masked=entries)

  def pull_back(self, h: Array, y: Activations, dy: Array) -> Activations:
    return self._activations(h, gradient=dy, pattern=y.operand, masked=True)

  def over_neurons(self, a: Activations, w: Weight) -> Array:
    return vnm_matmul(a.operand, _dense_weight(w), implementation=_kernel())

  def token_pattern(self, y: Activations, dense: Array) -> TokenPattern:
    used = jnp.ones(y.entries.shape[1:], bool).at[dense].set(False)
    return TokenPattern(dense, None, self._pack(y.entries, axis=-2, spread=True, used=used).operand)

  def over_tokens(self, a: Activations, pattern: TokenPattern, is_y: bool, b: Array) -> Array:
    operand = pattern.operand
    if not is_y:
      # Without an activation the packer reads the gradient alone.
      operand = self._pack(a.entries, axis=-2, spread=True, gradient=a.entries, pattern=operand).operand
    return _with_dense(vnm_matmul(operand, b, implementation=_kernel()), a.entries, pattern.dense, b)
