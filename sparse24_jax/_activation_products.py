"""What the squared-ReLU block is made of, in plain jnp and on sparse tensor cores.

Both sides offer the same functions; the block (`activation_sparsity`) is written in terms of them.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp

from pallas_kernels import _device, formats
from pallas_kernels.pack.api import soft_threshold_pack
from pallas_kernels.sparse_matmul.api import sparse_matmul
from pallas_kernels.sparse_matmul.operand import SparseOperand
from pallas_kernels.vnm.api import vnm_matmul, vnm_pack
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


class TokenPattern(NamedTuple):
  """What the weight gradients use of the activations.

  Attributes:
    dense: int32, neurons that are used whole.
    mask: bool [tokens, neurons], 2:M along tokens for the others, none in the dense; None where `operand` has it.
    sparse: Y without its dense neurons, for the operand; None elsewhere.
    operand: V:N:M of the transpose of `sparse`, or None.
  """

  dense: Array
  mask: Any
  sparse: Any = None
  operand: VNMOperand | None = None


class Products(NamedTuple):
  """Matrix products have float32 sums and results in the dtype of the first argument.

  Attributes:
    pack: (weight before its projection, projection, state, axis) -> operand of the projected weight, or None.
    by_weight: (x [T, i], w [i, o], projection, operand) -> x w; w is 2:4 along its first axis unless the projection is
      None.
    activate: (h, entries wanted) -> Y.
    pull_back: (h, Y, dY) -> dH = 2 dY relu(h) under Y's pattern.
    over_neurons: (Y or dH, b [h, d]) -> their product.
    token_pattern: (Y, dense neurons) -> TokenPattern.
    over_tokens: (Y or dH, token pattern, whether it is Y, b [T, d]) -> [h, d], of its transpose with b.
  """

  pack: Callable[..., SparseOperand | None]
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


def _dot(a: Array, b: Array) -> Array:
  return jnp.dot(a, b, preferred_element_type=jnp.float32).astype(a.dtype)


def _kernel() -> str | None:
  """The kernels by name where there are any, so that they answer or fail; elsewhere what answers for them."""
  return 'mosaic_gpu' if _device.current().has_sparse_wgmma else None


def _sparse_by_weight(x: Array, w: Array, projection: Any, operand: SparseOperand | None) -> Array:
  if projection is None:
    return _dot(x, w)
  a = formats.compress(w, w != 0, axis=-2) if operand is None else operand
  return sparse_matmul(a, x, b_layout='nk', out_layout='nm', implementation=_kernel())


def _pack_weight(w: Array, projection: Any, state: Array | None, axis: int) -> SparseOperand | None:
  if projection is None or not projection.name.startswith('soft_threshold') or w.dtype.itemsize != 2:
    return None
  return soft_threshold_pack(w, state, axis=axis)


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
  return d.at[dense].set(_dot(jnp.take(entries, dense, axis=1).T, b), unique_indices=True)


@dataclasses.dataclass(frozen=True)
class _Reference:
  policy: Any
  feature_mask: Callable[..., Array]
  token_mask: Callable[..., Array]

  def pack(self, w: Array, projection: Any, state: Array | None, axis: int) -> SparseOperand | None:
    del w, projection, state, axis
    return None

  def by_weight(self, x: Array, w: Array, projection: Any, operand: SparseOperand | None) -> Array:
    del projection, operand
    return _dot(x, w)

  def activate(self, h: Array, entries: bool) -> Activations:
    del entries
    y = squared_relu(h)
    mask = self.feature_mask(y, self.policy)
    return Activations(jnp.where(mask, y, 0), mask)

  def pull_back(self, h: Array, y: Activations, dy: Array) -> Activations:
    dh = 2 * dy.astype(jnp.float32) * jnp.maximum(h, 0).astype(jnp.float32)
    return Activations(jnp.where(y.mask, dh, 0).astype(h.dtype), y.mask)

  def over_neurons(self, a: Activations, b: Array) -> Array:
    return _dot(a.entries, b)

  def token_pattern(self, y: Activations, dense: Array) -> TokenPattern:
    return TokenPattern(dense, self.token_mask(_without(y.entries, dense), self.policy))

  def over_tokens(self, a: Activations, pattern: TokenPattern, is_y: bool, b: Array) -> Array:
    del is_y
    whole = _flags(pattern.dense, a.entries.shape[1])
    return _dot(jnp.where(pattern.mask | whole, a.entries, 0).T, b)


class _Sparse24(_Reference):
  """2:4 in both directions by `sparse_matmul`; packed by XLA."""

  def pack(self, w: Array, projection: Any, state: Array | None, axis: int) -> SparseOperand | None:
    return _pack_weight(w, projection, state, axis)

  def by_weight(self, x: Array, w: Array, projection: Any, operand: SparseOperand | None) -> Array:
    return _sparse_by_weight(x, w, projection, operand)

  def over_neurons(self, a: Activations, b: Array) -> Array:
    return sparse_matmul(formats.compress(a.entries, a.mask, axis=-1), b, b_layout='kn', implementation=_kernel())

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

  def pack(self, w: Array, projection: Any, state: Array | None, axis: int) -> SparseOperand | None:
    return _pack_weight(w, projection, state, axis)

  def by_weight(self, x: Array, w: Array, projection: Any, operand: SparseOperand | None) -> Array:
    return _sparse_by_weight(x, w, projection, operand)

  def _pack(self, x: Array, **kwargs: Any) -> Any:
    return vnm_pack(x, v=self.policy.v, m=self.policy.m, **kwargs)

  def _activations(self, h: Array, **kwargs: Any) -> Activations:
    operand, masked = self._pack(h, activation='squared_relu', spread=bool(self.policy.clusters), **kwargs)
    return Activations(masked, None, operand)

  def activate(self, h: Array, entries: bool) -> Activations:
    return self._activations(h, masked=entries)

  def pull_back(self, h: Array, y: Activations, dy: Array) -> Activations:
    return self._activations(h, gradient=dy, pattern=y.operand, masked=True)

  def over_neurons(self, a: Activations, b: Array) -> Array:
    return vnm_matmul(a.operand, b, implementation=_kernel())

  def token_pattern(self, y: Activations, dense: Array) -> TokenPattern:
    sparse = _without(y.entries, dense)
    return TokenPattern(dense, None, sparse, self._pack(sparse, axis=-2, spread=True).operand)

  def over_tokens(self, a: Activations, pattern: TokenPattern, is_y: bool, b: Array) -> Array:
    operand = pattern.operand
    if not is_y:
      operand = self._pack(pattern.sparse, axis=-2, spread=True, gradient=a.entries, pattern=operand).operand
    return _with_dense(vnm_matmul(operand, b, implementation=_kernel()), a.entries, pattern.dense, b)
