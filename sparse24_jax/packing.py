"""Weights packed for the sparse matmul, once per optimizer step, for every micro-batch, forward and backward."""

import dataclasses
import functools

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.pack import api as pack
from pallas_kernels.pack.reference import mask_codes
from pallas_kernels.sparse_matmul.operand import SparseOperand, to_operand


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=['state', 'forward', 'input_grad'], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class PackedWeight:
  """A weight `[..., in, out]` as the sparse tensor cores read it, with the projection state that it was packed under.

  It holds the values that the weight had: whoever reads it sees no others, so pack again for other parameters.

  Attributes:
    state: the projection's state: what a role that runs dense needs.
    forward: operand of the transposed weight, `[..., out, in]`, 2:4 along `in`.
    input_grad: operand of the weight, `[..., in, out]`, 2:4 along `out`; None unless the projection is transposable.

  >>> import jax, jax.numpy as jnp, sparse24_jax as s24
  >>> projection = s24.transposable()
  >>> w = jax.random.normal(jax.random.key(0), (8, 16))
  >>> packed = projection.pack(w, projection.init(w), jnp.bfloat16)
  >>> packed.forward.shape, packed.forward.values.shape, packed.input_grad.shape
  ((16, 8), (16, 4), (8, 16))
  """

  state: Array
  forward: SparseOperand
  input_grad: SparseOperand | None

  @property
  def dtype(self) -> jnp.dtype:
    return self.forward.dtype


def pack_transposable(w: Array, mask: Array, dtype: jnp.dtype) -> PackedWeight:
  """Both operands under a transposable mask, in one pass over `w`."""
  pair = pack.masked_pack(w, mask_codes(mask), dtype=dtype)
  return PackedWeight(mask, pair.columns, pair.rows)


def pack_soft_threshold(w: Array, scale: Array, dtype: jnp.dtype) -> PackedWeight:
  """The forward's operand of scale S(w), in one pass over `w`."""
  return PackedWeight(scale, pack.soft_threshold_pack(w, scale, axis=-2, dtype=dtype), None)


def pack_masked(w: Array, mask: Array, dtype: jnp.dtype) -> PackedWeight:
  """The forward's operand under any mask with at most two kept in each group of four along axis -2."""
  kept = jnp.where(mask, w, jnp.zeros((), w.dtype)).astype(dtype)
  return PackedWeight(mask, to_operand(formats.compress(kept, mask, axis=-2)), None)
