"""Weights packed for the sparse matmul, once per optimizer step, for every micro-batch, forward and backward."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels.operand import concatenate, SparseOperand, split
from sparse24_jax.matmuls import Role

E4M3 = jnp.dtype('float8_e4m3fn')


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['state', 'forward', 'input_grad', 'dense', 'transposed', 'scale'], meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class PackedWeight:
  """A weight `[..., in, out]` as the matmuls read it, with the projection state that it was packed under.

  It holds the values that the weight had: whoever reads it sees no others, so pack again for other parameters.

  In FP8 its values are held as bytes: what `jax.checkpoint` keeps it rounds with `reduce_precision`, and the format of
  4 and 3 bits known there makes a NaN of every number above 240, which e4m3fn has up to 448.

  Attributes:
    state: the projection's state: what a role that runs dense needs.
    forward: operand of the transposed weight, `[..., out, in]`, 2:4 along `in`; in FP8 its values as uint8.
    input_grad: operand of the weight, `[..., in, out]`, 2:4 along `out`; None unless the projection is transposable. In
      FP8 its values too are uint8.
    dense: in FP8 the projected weight, `[..., in, out]`, as uint8; None if the projection is transposable.
    transposed: in FP8 the same as `[..., out, in]`, if there is no projection: what a dense forward reads.
    scale: in FP8 float32, `[...]`, a power of two: what its values were multiplied with before they were rounded.

  >>> import jax, jax.numpy as jnp, sparse24_jax as s24
  >>> from sparse24_jax.precision import NATIVE
  >>> projection = s24.transposable()
  >>> w = jax.random.normal(jax.random.key(0), (8, 16))
  >>> packed = NATIVE.pack(projection.form, w, projection.init(w), jnp.bfloat16)
  >>> packed.forward.shape, packed.forward.values.shape, packed.input_grad.shape
  ((16, 8), (16, 4), (8, 16))
  """

  state: Any
  forward: SparseOperand | None
  input_grad: SparseOperand | None = None
  dense: Array | None = None
  transposed: Array | None = None
  scale: Array | None = None

  @property
  def dtype(self) -> jnp.dtype:
    """The dtype of its values."""
    if self.scale is not None:
      return E4M3
    operand = self.forward if self.forward is not None else self.input_grad
    assert operand is not None
    return operand.dtype

  def operand(self, role: Role) -> SparseOperand:
    """`forward` or `input_grad`, its values in their dtype."""
    operand = self.forward if role == 'forward' else self.input_grad
    assert operand is not None
    return operand if self.scale is None else with_values(E4M3, operand)

  @property
  def matrix(self) -> Array:
    """`dense` in e4m3."""
    assert self.dense is not None
    return as_dtype(E4M3, self.dense)

  @property
  def transposed_matrix(self) -> Array:
    """`transposed` in e4m3."""
    return self.matrix.mT if self.transposed is None else as_dtype(E4M3, self.transposed)


def as_dtype(dtype: Any, x: Array) -> Array:
  """The same bytes as numbers of a dtype."""
  return jax.lax.bitcast_convert_type(x, dtype)


def with_values(dtype: Any, operand: SparseOperand) -> SparseOperand:
  """An operand with the bytes of its values as numbers of a dtype."""
  return dataclasses.replace(operand, values=as_dtype(dtype, operand.values))


def side_by_side(gate: PackedWeight, up: PackedWeight) -> PackedWeight:
  """[W_gate | W_up] of what both hold; in FP8 under the smaller of their scales."""
  assert gate.transposed is None and up.transposed is None, 'no block of dense weights is fused'
  scale = None
  if gate.scale is not None and up.scale is not None:
    scale = jnp.minimum(gate.scale, up.scale)
    gate, up = _rescaled(gate, scale), _rescaled(up, scale)
  return PackedWeight(
    None,
    None if gate.forward is None or up.forward is None else concatenate(gate.forward, up.forward, axis=-2),
    None if gate.input_grad is None or up.input_grad is None else concatenate(gate.input_grad, up.input_grad, axis=-1),
    None if gate.dense is None or up.dense is None else jnp.concatenate([gate.dense, up.dense], axis=-1),
    scale=scale,
  )


def halves(p: Any, ndim: int) -> Sequence[Any]:
  """The two halves of columns of what is packed or, with `ndim` axes, an array: the inverse of `side_by_side`.

  An array with fewer axes, a scale, is that of both; None has halves that are None.
  """
  if p is None or (not isinstance(p, PackedWeight) and p.ndim != ndim):
    return p, p
  if not isinstance(p, PackedWeight):
    return jnp.split(p, 2, axis=-1)
  of_both = halves(p.state, ndim), _split(p.forward, -2), _split(p.input_grad, -1), halves(p.dense, ndim)
  return [PackedWeight(*each, scale=p.scale) for each in zip(*of_both, strict=True)]


def _split(operand: SparseOperand | None, axis: int) -> Sequence[SparseOperand | None]:
  return (None, None) if operand is None else split(operand, axis=axis)


def _rescaled(p: PackedWeight, scale: Array) -> PackedWeight:
  """All that `p` has under another scale."""

  def rescaled(values: Array) -> Array:
    wide = as_dtype(E4M3, values).astype(jnp.bfloat16)  # exact, as is the product but for what becomes subnormal
    return as_dtype(jnp.uint8, (wide * (scale / p.scale).astype(jnp.bfloat16)).astype(E4M3))

  def operand(of: SparseOperand | None) -> SparseOperand | None:
    return None if of is None else dataclasses.replace(of, values=rescaled(of.values))

  dense = None if p.dense is None else rescaled(p.dense)
  return PackedWeight(None, operand(p.forward), operand(p.input_grad), dense, scale=scale)
