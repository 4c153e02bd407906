"""Weights of S-STE packed in FP8, once per optimizer step, for every micro-batch, forward and backward."""

import dataclasses
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels.pack import api
from pallas_kernels.quantize import api as quantize
from pallas_kernels.sparse_matmul.operand import concatenate, SparseOperand

E4M3 = jnp.dtype('float8_e4m3fn')


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=['state', 'forward', 'dense', 'factor'], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class PackedWeight8:
  """A weight `[..., in, out]` in e4m3 for the three products.

  Its values are held as bytes: what `jax.checkpoint` keeps it rounds with `reduce_precision`, and the format of 4 and 3
  bits known there makes a NaN of every number above 240, which e4m3fn has up to 448.

  Attributes:
    state: the projection's state; as the two after it None where what reads a packed weight does not need it.
    forward: operand of the transposed weight, `[..., out, in]`, 2:4 along `in`, its values as uint8.
    dense: the projected weight, `[..., in, out]`, as uint8.
    factor: float32, `[...]`, a power of two: what a product is multiplied with to undo the scale.
  """

  state: Any
  forward: SparseOperand | None
  dense: Array | None
  factor: Array

  @property
  def dtype(self) -> jnp.dtype:
    return E4M3

  @property
  def operand(self) -> SparseOperand:
    """`forward` in e4m3."""
    assert self.forward is not None
    return dataclasses.replace(self.forward, values=_as(E4M3, self.forward.values))

  @property
  def matrix(self) -> Array:
    """`dense` in e4m3."""
    assert self.dense is not None
    return _as(E4M3, self.dense)


def _as(dtype: Any, x: Array) -> Array:
  return jax.lax.bitcast_convert_type(x, dtype)


def pack8(w: Array, beta: Array) -> PackedWeight8:
  """beta S(w) in e4m3, packed and dense, in one pass over `w` after one for its largest magnitude.

  The scale takes |S(w)| by its bound |w|, whose maximum needs no groups: one plain reduction reads the weight once. It
  is a power of two, which is ours: a float loses no precision by a scale that is too small, only range at its lower
  end, and two weights can be brought to one scale after they were rounded.
  """
  scale, factor = quantize.current_scale(_under_power_of_two(jnp.abs(beta) * quantize.amax(w)), E4M3)
  p = api.soft_threshold_pack8(w, scale * beta, axis=-2)
  operand = dataclasses.replace(p.operand, values=_as(jnp.uint8, p.operand.values))
  return PackedWeight8(beta, operand, _as(jnp.uint8, p.dense), factor)


def _under_power_of_two(amax: Array) -> Array:
  """The next larger number under which the scale of e4m3 is a power of two; what is not finite stays."""
  largest = float(jnp.finfo(E4M3).max)
  bits = _as(jnp.int32, amax / largest)
  rounded_up = _as(jnp.float32, (bits + 0x7FFFFF) & 0x7F800000)
  return jnp.where(jnp.isfinite(amax), largest * rounded_up, amax)


def side_by_side(gate: PackedWeight8, up: PackedWeight8) -> PackedWeight8:
  """[W_gate | W_up] under the larger of their scales' factors, of what they hold of `forward` and `dense`."""
  factor = jnp.maximum(gate.factor, up.factor)

  def rescaled(values: Array, own: Array) -> Array:
    wide = _as(E4M3, values).astype(jnp.bfloat16)  # exact, as is the product but for what becomes subnormal
    return _as(jnp.uint8, (wide * (own / factor).astype(jnp.bfloat16)).astype(E4M3))

  def one(p: PackedWeight8) -> PackedWeight8:
    forward = None if p.forward is None else dataclasses.replace(p.forward, values=rescaled(p.forward.values, p.factor))
    dense = None if p.dense is None else rescaled(p.dense, p.factor)
    return PackedWeight8(None, forward, dense, factor)

  gate, up = one(gate), one(up)
  operand = None if gate.forward is None or up.forward is None else concatenate(gate.forward, up.forward, axis=-2)
  dense = None if gate.dense is None or up.dense is None else jnp.concatenate([gate.dense, up.dense], axis=-1)
  return PackedWeight8(None, operand, dense, factor)
