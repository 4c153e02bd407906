"""Weights packed for the sparse matmul, once per optimizer step, for every micro-batch, forward and backward."""

import dataclasses
import functools

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.pack import api
from pallas_kernels.pack.reference import mask_codes
from pallas_kernels.sparse_matmul.operand import SparseOperand, to_operand
from sparse24_jax.projection import Form, Masked, SoftThreshold, TransposableMasked


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
  >>> from sparse24_jax.packing import pack
  >>> projection = s24.transposable()
  >>> w = jax.random.normal(jax.random.key(0), (8, 16))
  >>> packed = pack(projection.form, w, projection.init(w), jnp.bfloat16)
  >>> packed.forward.shape, packed.forward.values.shape, packed.input_grad.shape
  ((16, 8), (16, 4), (8, 16))
  """

  state: Array
  forward: SparseOperand
  input_grad: SparseOperand | None

  @property
  def dtype(self) -> jnp.dtype:
    return self.forward.dtype


def pack(form: Form, w: Array, state: Array, dtype: jnp.dtype) -> PackedWeight:
  """`w` packed under the state of its projection, of this form: in one pass, but for other masks than transposable."""
  match form:
    case TransposableMasked():
      pair = api.masked_pack(w, mask_codes(state), dtype=dtype)
      return PackedWeight(state, pair.columns, pair.rows)
    case SoftThreshold(-2):
      return PackedWeight(state, api.soft_threshold_pack(w, state, axis=-2, dtype=dtype), None)
    case Masked():
      kept = jnp.where(state, w, jnp.zeros((), w.dtype)).astype(dtype)
      return PackedWeight(state, to_operand(formats.compress(kept, state, axis=-2)), None)
  raise ValueError(f'{form} is not 2:4 along the input, as the forward reads a packed weight')
