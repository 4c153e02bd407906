"""The meaning of `sparse_matmul`: D = activation(scale * (A . B) + bias), in plain jnp with float32 accumulation."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import formats, operand
from pallas_kernels._program import one_program
from pallas_kernels.activations import ACTIVATIONS

Array = jax.Array

B_LAYOUTS = ('nk', 'kn')
OUT_LAYOUTS = ('mn', 'nm')


def activate(x: Array, activation: str | None) -> Array:
  """Applies an activation as kernels do, to their float32 sums."""
  return x if activation is None else ACTIVATIONS[activation].in_kernel(x)


@one_program('activation', 'out_dtype', 'b_layout', 'out_layout', 'keep_preactivation')
def sparse_matmul(
  a: formats.Compressed24 | operand.SparseOperand,
  b: Array,
  bias: Array | None = None,
  a_scale: Array | None = None,
  b_scale: Array | None = None,
  *,
  activation: str | None,
  out_dtype: Any,
  b_layout: str,
  out_layout: str,
  keep_preactivation: bool = False,
) -> Any:
  """D[m, n] = activation(a_scale[m] b_scale[n] sum_k A[m, k] B[k, n] + bias[m]), rounded once at the end.

  Args:
    a: A, [M, K].
    b: B as [N, K] ('nk') or [K, N] ('kn').
    bias: float32 [M] or None.
    a_scale: float32 scalar or [M], or None for 1.
    b_scale: float32 scalar or [N], or None for 1.
    activation: a key of `ACTIVATIONS`, or None.
    out_dtype: dtype of D.
    b_layout: 'nk' or 'kn'.
    out_layout: 'mn' or 'nm', the transpose.
    keep_preactivation: also return what the activation was applied to.

  Returns:
    D as [M, N] or [N, M]; with `keep_preactivation` (D, Z), both rounded from the same float32 values.
  """
  a = operand.from_operand(a) if isinstance(a, operand.SparseOperand) else operand.rows_first(a)
  a32 = formats.expand(a).astype(jnp.float32)
  b32 = b.astype(jnp.float32)
  contract = 1 if b_layout == 'nk' else 0
  d = jax.lax.dot_general(a32, b32, (((1,), (contract,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
  return results(
    d, bias, a_scale, b_scale, activation=activation, out_dtype=out_dtype, out_layout=out_layout,
    keep_preactivation=keep_preactivation,
  )  # fmt: skip


def results(
  d: Array, bias: Array | None, a_scale: Array | None, b_scale: Array | None, *, activation: str | None,
  out_dtype: Any, out_layout: str, keep_preactivation: bool,
) -> Any:  # fmt: skip
  """What a back end returns whose float32 sums are `d` [M, N]: D, or (D, Z), rounded and in `out_layout`."""

  def stored(x: Array) -> Array:
    # Rounded, then transposed: the other way round XLA makes a 16-bit matmul that it cannot run on a CPU.
    x = x.astype(out_dtype)
    return x if out_layout == 'mn' else x.T

  z = finish(d, bias, a_scale, b_scale, None)
  d = stored(activate(z, activation))
  return (d, stored(z)) if keep_preactivation else d


def finish(
  d: Array, bias: Array | None, a_scale: Array | None, b_scale: Array | None, activation: str | None
) -> Array:
  """What follows the sum: scales, bias and activation on the float32 [M, N] accumulator."""
  if a_scale is not None:
    d = d * jnp.broadcast_to(a_scale, d.shape[:1])[:, None]
  if b_scale is not None:
    d = d * jnp.broadcast_to(b_scale, d.shape[1:])[None, :]
  if bias is not None:
    d = d + bias[:, None]
  return activate(d, activation)
