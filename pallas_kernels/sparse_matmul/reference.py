"""The meaning of `sparse_matmul`: D = activation(alpha (A . B) / scales + bias), in plain jnp with float32 sums."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import formats, operand
from pallas_kernels._program import traced_once
from pallas_kernels.activations import ACTIVATIONS
from pallas_kernels.sparse_matmul.call import Call, Vectors

Array = jax.Array

B_LAYOUTS = ('nk', 'kn')
OUT_LAYOUTS = ('mn', 'nm')


def activate(x: Array, activation: str | None) -> Array:
  """Applies an activation as kernels do, to their float32 sums."""
  return x if activation is None else ACTIVATIONS[activation].in_kernel(x)


@traced_once('call')
def sparse_matmul(
  a: formats.Compressed24 | operand.SparseOperand,
  b: Array,
  vectors: Vectors,
  call: Call,
) -> Any:
  """D[m, n] = activation(alpha / (a_scale[m] b_scale[n]) sum_k A[m, k] B[k, n] + bias[m]), rounded once at the end.

  Args:
    a: A, [M, K].
    b: B, as `call.b_layout` says.
    vectors: bias and scales.
    call: what is returned, and alpha.

  Returns:
    D as [M, N] or [N, M]; with `keep_preactivation` (D, Z), both rounded from the same float32 values; with `amax` the
    largest magnitude of D last, float32.
  """
  a = operand.from_operand(a) if isinstance(a, operand.SparseOperand) else operand.rows_first(a)
  a32 = formats.expand(a).astype(jnp.float32)
  b32 = b.astype(jnp.float32)
  contract = 1 if call.b_layout == 'nk' else 0
  d = jax.lax.dot_general(a32, b32, (((1,), (contract,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
  return results(d, vectors, call)


def results(d: Array, vectors: Vectors, call: Call) -> Any:
  """What a back end returns whose float32 sums are `d` [M, N]: D, with Z and amax if asked, in `out_layout`."""

  def stored(x: Array) -> Array:
    # Rounded, then transposed: the other way round XLA makes a 16-bit matmul that it cannot run on a CPU.
    x = x.astype(call.out_dtype)
    return x if call.out_layout == 'mn' else x.T

  z = preactivation(d, vectors, call.alpha)
  d = stored(activate(z, call.activation))
  others = ((stored(z),) if call.keep_preactivation else ()) + ((largest(d),) if call.amax else ())
  return (d, *others) if others else d


def largest(d: Array) -> Array:
  """The largest magnitude of D, float32; NaN if it holds one."""
  return jnp.max(jnp.abs(d)).astype(jnp.float32)


def preactivation(d: Array, vectors: Vectors, alpha: float = 1.0) -> Array:
  """What follows the sum, alpha, scales and bias on the float32 [M, N] accumulator."""
  bias, a_scale, b_scale = vectors
  d = d if alpha == 1 else d * jnp.float32(alpha)
  if a_scale is not None:
    d = d * jnp.broadcast_to(1 / a_scale, d.shape[:1])[:, None]
  if b_scale is not None:
    d = d * jnp.broadcast_to(1 / b_scale, d.shape[1:])[None, :]
  return d if bias is None else d + bias[:, None]
