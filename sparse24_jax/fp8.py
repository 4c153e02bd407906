"""S-STE in real FP8: sparse matmuls in the forward and the weight gradient, a dense one in the input gradient.

    z  = x W~       sparse e4m3: W~^T packed along in         x [tokens, in]    (dense where that measured faster)
    dx = dz W~^T    dense: dz in e5m2                         W~ [in, out] in e4m3
    dw = x^T V(dz)  sparse e5m2: V(dz)^T packed along tokens  x^T [in, tokens] in e4m3

Scales are per tensor and current, those of weights powers of two. FP8 matmuls read both operands with the contracted
axis contiguous, so a tensor that is contracted along either axis is written both ways, by the one pass that also rounds
it: x and its transpose; W~ packed and dense; dz dense and its sample packed. The backward keeps x^T alone, at a byte an
entry.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import _partitioning
from pallas_kernels.activations import ACTIVATIONS
from pallas_kernels.gated_activation import api as activations
from pallas_kernels.operand import SparseOperand
from pallas_kernels.pack.reference import MVUE_HEADROOM
from pallas_kernels.quantize import api as quantize
from pallas_kernels.sparse_matmul.reference import activate
from sparse24_jax.matmuls import multiply
from sparse24_jax.numerics import Format, round_to_fp8
from sparse24_jax.packing import E4M3, PackedWeight
from sparse24_jax.precision import Precision, Rounded

E5M2 = jnp.dtype('float8_e5m2')


def rounded(x: Array, *, keep: bool) -> Rounded:
  """x `[tokens, features]` in e4m3; both ways if a backward is to `keep` it."""
  scale, factor = quantize.current_scale(quantize.amax(x), E4M3)
  if not keep:
    return Rounded(quantize.quantize(x, scale, dtype=E4M3), None, factor)
  values, transposed = quantize.quantize(x, scale, dtype=E4M3, transpose='both')
  return Rounded(values, transposed, factor)


@dataclasses.dataclass(frozen=True)
class Fp8(Precision):
  """FP8; kernels have no batching rule, so that under vmap all of it runs one after the other."""

  kept_axes = 'n k*4'
  scales = True
  sample_dtype = E5M2

  def rounded(self, x: Array, *, keep: bool) -> Rounded:
    return jax.custom_batching.sequential_vmap(lambda x: rounded(x, keep=keep))(x)

  def reads(self, p: PackedWeight, role: str, backend: str | None) -> PackedWeight:
    sparse = role == 'forward' and backend is not None
    return dataclasses.replace(p, state=None, **(dict(dense=None) if sparse else dict(forward=None)))

  def forward(self, w: PackedWeight, x: Rounded, *, backend: str | None, dtype: Any, **epilogue: Any) -> Any:
    if backend is None:
      run = functools.partial(_dense_forward, dtype=dtype, **epilogue)
      return jax.custom_batching.sequential_vmap(run)(x, w)
    return multiply(
      'forward', w.operand, x.values, backend=backend, scales=(w.factor, x.factor), dtype=dtype, **epilogue
    )

  def input_grad(self, w: PackedWeight, dz: Rounded, *, backend: str | None, dtype: Any) -> Array:
    def run(dz: Rounded, matrix: Array, factor: Array) -> Array:
      with jax.named_scope('input_grad'):
        return _dense_matmul(dz.values, dz.factor, _partitioning.whole(matrix), factor, dtype)

    return jax.custom_batching.sequential_vmap(run)(dz, w.matrix, w.factor)

  def simulated(self, a: Array, b: Array, formats: tuple[Format, Format]) -> tuple[Array, Array]:
    return round_to_fp8(a, formats[0]), round_to_fp8(b, formats[1])

  def scale_of(self, dz: Array) -> tuple[Any, Any]:
    return quantize.current_scale(quantize.amax(dz), E5M2)

  def scale_of_activation(self, dh: Array, z: Array, *, activation: str, gated: bool) -> tuple[Any, Any]:
    steepest = None if gated else ACTIVATIONS[activation].steepest
    if steepest is None:
      rule = _partitioning.Rule(('n m', 'n . m' if gated else 'n m'), ('',), order=('n', 'm'), sums=('n', 'm'))
      largest = _partitioning.partitioned(
        'activation_backward_amax', _largest, rule, dh, z, activation=activation, gated=gated
      )
    else:
      # A bound of dz that needs dh alone.
      largest = steepest * quantize.amax(dh)
    return quantize.current_scale(largest, E5M2)

  def weight_grad(self, sample: SparseOperand, x: Array, factors: tuple, *, backend: str, dtype: Any) -> Array:
    factor, x_factor = factors
    scales = MVUE_HEADROOM * factor, x_factor
    return multiply('weight_grad', sample, x, backend=backend, scales=scales, b_layout='nk', dtype=dtype)

  def bias_grad(self, dz: Rounded, dtype: Any) -> Array:
    total = jnp.sum(dz.values.astype(jnp.float32), axis=0)
    return (total if dz.factor is None else total * dz.factor).astype(dtype)


FP8 = Fp8()


def _largest(shard: _partitioning.Shard, dh: Array, z: Array, *, activation: str, gated: bool) -> Array:
  """The largest magnitude of the dz that these give, over all devices."""
  z = z.reshape(z.shape[0], -1)
  return shard.max(activations.activation_backward_amax(dh, z, activation=activation, gated=gated), 'n', 'm')


def _dense_forward(
  x: Rounded, w: PackedWeight, *, dtype: Any, bias: Array | None = None, activation: str | None = None,
  keep_preactivation: bool = False,
) -> Any:  # fmt: skip
  with jax.named_scope('forward'):
    z = _dense_matmul(x.values, x.factor, _partitioning.whole(w.matrix).T, w.factor, dtype)
  if bias is not None:
    z = z + bias.astype(dtype)[None]
  if activation is None:
    return z
  h = activate(z.astype(jnp.float32), activation).astype(dtype)
  return (h, z) if keep_preactivation else h


def _dense_matmul(x: Array, x_factor: Array, w: Array, w_factor: Array, dtype: Any) -> Array:
  # Sums of FP8 numbers, before the factors scale them, exceed the range of float16.
  wide = jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype
  return quantize.fp8_dot(x, w, x_factor, w_factor, out_dtype=wide).astype(dtype)
