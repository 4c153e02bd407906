"""The meaning of `sparse_matmul`: D = activation(scale * (A . B) + bias), in plain jnp with float32 accumulation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.sparse_matmul import operand

Array = jax.Array

B_LAYOUTS = ('nk', 'kn')
OUT_LAYOUTS = ('mn', 'nm')


def _gelu(x: Array) -> Array:
  return 0.5 * x * (1.0 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))


def _relu(x: Array) -> Array:
  return jnp.where(x > 0, x, 0.0)


def _squared_relu(x: Array) -> Array:
  return _relu(x) * _relu(x)


# Written out, not taken from jax.nn: kernels apply the same functions to their accumulators, and Mosaic GPU lowers no
# function with a custom derivative.
ACTIVATIONS: dict[str | None, Callable[[Array], Array]] = {
  None: lambda x: x,
  'gelu': _gelu,
  'silu': lambda x: x * jax.lax.logistic(x),
  'relu': _relu,
  'squared_relu': _squared_relu,
}


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
    activation: a key of `ACTIVATIONS`.
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
    # Rounded, then transposed: the other way round XLA makes a 16-bit product that it cannot run on a CPU.
    x = x.astype(out_dtype)
    return x if out_layout == 'mn' else x.T

  z = finish(d, bias, a_scale, b_scale, None)
  d = stored(ACTIVATIONS[activation](z))
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
  return ACTIVATIONS[activation](d)
