"""The exact transposable 2:4 mask, on whatever finds it fastest here."""

import jax
from jax import Array

from pallas_kernels import _partitioning
from pallas_kernels.pack import api as pack
from pallas_kernels.pack.reference import code_mask
from pallas_kernels.transposable_mask import reference


def transposable_mask(w: Array) -> Array:
  """Bool mask of the shape of `w`, `[..., R, C]`; see `reference.transposable_mask`, to which it is equal bit for bit.

  On a GPU the packer searches it, and its operands are dropped: that is faster than XLA's search. If a mesh divides the
  array, each device searches its own part.

  Args:
    w: float32, bfloat16 or float16, whole blocks of 4 x 4.

  Raises:
    ValueError: another dtype, or axes that are no multiples of four.

  >>> import jax
  >>> from pallas_kernels.transposable_mask.api import transposable_mask
  >>> w = jax.random.normal(jax.random.key(0), (4, 4))
  >>> transposable_mask(w).sum(axis=0).tolist()
  [2, 2, 2, 2]
  """
  w = jax.lax.stop_gradient(w)  # a choice has no derivative, and the packer no rule that says so
  floats = ('bfloat16', 'float16', 'float32')
  if 'triton' in pack.candidates() and _partitioning.serves(w) and w.ndim >= 2 and w.dtype.name in floats:
    text = ' '.join([*(f'l{i}' for i in range(w.ndim - 2)), 'r*4 c*4'])
    rule = _partitioning.Rule((text,), (text,), tuple(word.split('*')[0] for word in text.split()))
    return _partitioning.partitioned('transposable_mask', _on_a_part, rule, w)
  return reference.transposable_mask(w)


def _on_a_part(shard: _partitioning.Shard, w: Array) -> Array:
  del shard
  return code_mask(pack.transposable_pack(w).codes)
