"""The dense choice: decompress, then XLA's matmul. Taken where the sparse kernel was measured to lose."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import formats, operand
from pallas_kernels.sparse_matmul import reference
from pallas_kernels.sparse_matmul.call import Call, Vectors

Array = jax.Array


def sparse_matmul(
  a: formats.Compressed24 | operand.SparseOperand,
  b: Array,
  vectors: Vectors,
  call: Call,
) -> Any:
  """`reference.sparse_matmul` on the dense tensor cores: same arguments and result up to rounding."""
  dense = formats.expand(operand.from_operand(a) if isinstance(a, operand.SparseOperand) else operand.rows_first(a))
  if dense.dtype != b.dtype:  # two kinds of float8
    dense, b = dense.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
  return reference.results(matmul(dense, b, b_layout=call.b_layout), vectors, call)


def matmul(a: Array, b: Array, *, b_layout: str) -> Array:
  """A . B with float32 sums as [M, N]."""
  contract = 1 if b_layout == 'nk' else 0

  def plain(a: Array, b: Array) -> Array:
    return jax.lax.dot_general(a, b, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)

  # XLA lacks 16-bit matmuls in some layouts on a CPU, and its sums are float32 of exact products anyhow.
  def wide(a: Array, b: Array) -> Array:
    return plain(a.astype(jnp.float32), b.astype(jnp.float32))

  return jax.lax.platform_dependent(a, b, cpu=wide, default=plain)
