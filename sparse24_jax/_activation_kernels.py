"""The parts of the squared-ReLU block on sparse tensor cores; `Reference` says what the methods do."""

import dataclasses
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.operand import to_operand
from pallas_kernels.pack.api import soft_threshold_pack
from pallas_kernels.sparse_matmul.api import sparse_matmul
from pallas_kernels.vnm.api import expand, take_columns, transpose_pack, transpose_pack_24, vnm_matmul, vnm_pack
from pallas_kernels.vnm.format import VNMOperand
from sparse24_jax._activation_reference import Activations, dot, projected, Reference, TokenPattern, Weight
from sparse24_jax.neuron_plan import NeuronLevelPlan
from sparse24_jax.projection import Projection, SoftThreshold

_DENSE_TILE = 128


# Neither kernel has a batching rule: under vmap they run one after the other.


def _sparse_matmul(a: Any, b: Array, **options: str | None) -> Array:
  return jax.custom_batching.sequential_vmap(functools.partial(sparse_matmul, **options))(a, b)


def _vnm_matmul(a: VNMOperand, b: Array, implementation: str | None) -> Array:
  return jax.custom_batching.sequential_vmap(functools.partial(vnm_matmul, implementation=implementation))(a, b)


@dataclasses.dataclass(frozen=True)
class SparseVNM(Reference):
  """V:N:M in both directions by `vnm_matmul`. Y and dH are packed once, along neurons; all else is read from there."""

  plan: NeuronLevelPlan

  def weight(self, w: Array, projection: Projection | None, state: Array | None, axis: int) -> Weight:
    if projection is not None and isinstance(projection.form, SoftThreshold) and w.dtype.itemsize == 2:
      return Weight(None, soft_threshold_pack(w, state, axis=axis, implementation=self.plan.pass_backends).operand)
    dense = projected(w, projection, state, axis)
    if projection is None:
      return Weight(dense)
    return Weight(dense, to_operand(formats.compress_unchecked(dense, dense != 0, axis=-1)))

  def by_weight(self, x: Array, w: Weight) -> Array:
    if w.operand is None:
      return dot(x, w.dense.T)
    return _sparse_matmul(w.operand, x, b_layout='nk', out_layout='nm', implementation=self.plan.by_weight)

  def _pack(self, x: Array, **kwargs: Any) -> Activations:
    features = self.policy.features
    made = vnm_pack(
      x, v=features.block, m=features.group, activation='squared_relu', implementation=self.plan.pass_backends, **kwargs
    )
    return Activations(made.masked, None, made.operand, made.inputs, made.counts)

  def activate(self, h: Array, backward: bool) -> Activations:
    return self._pack(h, residuals=backward)

  def save(self, y: Activations) -> Activations:
    return y

  def restore(self, saved: Activations) -> Activations:
    return saved

  def uses(self, y: Activations) -> Array:
    return y.counts

  def pull_back(self, y: Activations, dy: Array, entries: bool) -> Activations:
    return self._pack(y.inputs, gradient=dy, pattern=y.operand, masked=entries)

  def over_neurons(self, a: Activations, w: Weight) -> Array:
    dense = expand(w.operand, implementation=self.plan.pass_backends) if w.dense is None else w.dense
    return _vnm_matmul(_operand(a), dense, self.plan.by_activations)

  def _transposed(self, a: Activations, **options: Any) -> Any:
    return transpose_pack(_operand(a), implementation=self.plan.pass_backends, **options)

  def _by_transposed(self, a: Any, b: Array) -> Array:
    return _vnm_matmul(a, b, self.plan.by_activations)

  def token_pattern(self, y: Activations, dense: Array) -> TokenPattern:
    return TokenPattern(dense, None, self._transposed(y, used=_not_dense(y, dense)))

  def over_tokens(self, a: Activations, pattern: TokenPattern, is_y: bool, b: Array) -> Array:
    operand = pattern.operand if is_y else self._transposed(a, pattern=pattern.operand)
    return self._with_dense(self._by_transposed(operand, b), a, pattern.dense, b)

  def _with_dense(self, d: Array, a: Activations, dense: Array, b: Array) -> Array:
    """`d` [h, d] with the rows of the dense neurons from a matmul of their own."""
    if not dense.shape[0]:
      return d
    # Any neurons fill the width up to what dense matmuls do well.
    neurons = jnp.pad(dense, (0, -dense.shape[0] % _DENSE_TILE))
    columns = take_columns(_operand(a), neurons, implementation=self.plan.pass_backends)
    rows = jax.lax.dot_general(columns, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    rows = rows[: dense.shape[0]].astype(d.dtype)
    d = d.at[dense].set(rows, unique_indices=True, mode='promise_in_bounds')
    return jax.lax.optimization_barrier(d)  # before the caller's transposition: rows again


def _not_dense(y: Activations, dense: Array) -> Array | None:
  """bool [neurons], False for the dense ones; None if there are none."""
  return None if not dense.shape[0] else jnp.ones(y.counts.shape, bool).at[dense].set(False)


def _operand(a: Activations) -> VNMOperand:
  assert a.operand is not None
  return a.operand


class SparseVNMTwoOfFour(SparseVNM):
  """`SparseVNM` with two of four neighbouring tokens in the weight gradients, by `sparse_matmul`."""

  def _transposed(self, a: Activations, **options: Any) -> Any:
    return transpose_pack_24(_operand(a), implementation=self.plan.pass_backends, **options)

  def _by_transposed(self, a: Any, b: Array) -> Array:
    # In the layouts of every weight gradient, for which settings were measured.
    return _sparse_matmul(a, b, b_layout='kn', out_layout='nm', implementation=self.plan.by_activations).T
