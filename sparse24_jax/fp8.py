"""Real FP8: of S-STE, sparse in the forward and the weight gradient, of transposable masks, and of dense layers.

    z  = x W~       sparse e4m3: W~^T packed along in         x [tokens, in]    (dense where that measured faster)
    dx = dz W~^T    dense: dz in e5m2                         W~ [in, out] in e4m3
    dw = x^T V(dz)  sparse e5m2: V(dz)^T packed along tokens  x^T [in, tokens] in e4m3
       or x^T dz    dense: dz in e5m2, its transpose too       the same

Under a transposable mask no matmul reads W~ dense: z is sparse whatever was measured, and so is

    dx = dz W~^T    sparse e4m3: W~ packed along out          dz [tokens, out] in e5m2

Without a projection W~ is the weight, and all three are dense.

`precision='fp8_e4m3'` has e4m3 in the place of e5m2. Scales are per tensor and current, those of weights powers of two.
FP8 matmuls read both operands with the contracted axis contiguous, so a tensor that is contracted along either axis is
written both ways, by the one pass that also rounds it: x and its transpose; W~ packed and dense, packed twice, or
dense twice; dz dense and its sample packed. The backward keeps x^T alone, at a byte an entry.
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
from pallas_kernels.gated_activation import costs as activation_costs
from pallas_kernels.pack import api as pack
from pallas_kernels.pack import costs as pack_costs
from pallas_kernels.pack.reference import mask_codes, MVUE_HEADROOM
from pallas_kernels.quantize import api as quantize
from pallas_kernels.quantize import costs as quantize_costs
from pallas_kernels.sparse_matmul.reference import activate
from sparse24_jax.matmuls import Role
from sparse24_jax.numerics import round_to_fp8
from sparse24_jax.packing import as_dtype, E4M3, PackedWeight, with_values
from sparse24_jax.policy import DotPolicy
from sparse24_jax.precision import NATIVE, Precision, Rounded
from sparse24_jax.projection import Form, SoftThreshold, TransposableMasked
from sparse24_jax.steps import Moves, Pass, passes

E5M2 = jnp.dtype('float8_e5m2')


@dataclasses.dataclass(frozen=True)
class Fp8(Precision):
  """FP8; kernels have no batching rule, so that under vmap all of it runs one after the other.

  Attributes:
    gradients: format of output gradients.
  """

  gradients: Any = E5M2
  notes_amax: bool = True

  scales = True
  lacks = 'no FP8 kernels, which need one Hopper GPU and the extra sparse24-jax[cuda]'
  dense, dense_wide = 'dense_fp8', 'dense_bf16'
  residual_layout, residual_axes = 'nk', 'n k*4'
  dtype, sample_alpha = E4M3, MVUE_HEADROOM

  @property
  def sample_dtype(self) -> Any:
    """What a sample of a gradient is packed in."""
    return self.gradients

  @property
  def without_kernels(self) -> Precision:
    return Simulated(gradients=self.gradients)

  def unfit(self, policy: DotPolicy) -> str | None:
    if policy.projection is None or policy.projection.form == SoftThreshold(-2):
      return None
    if policy.projection.form != TransposableMasked():
      return f'FP8 packs by the soft threshold and under transposable masks, found {policy.projection.name!r}'
    if policy.input_grad == 'dense':
      return "under transposable masks FP8 has no dense weight to read: input_grad must be 'sparse', found 'dense'"
    return None

  def by_records(self, form: Form | None) -> tuple[Role, ...]:
    return () if form == TransposableMasked() else ('forward',)

  def pack(self, form: Form | None, w: Array, state: Any, dtype: Any) -> PackedWeight:
    """beta S(w) in e4m3, packed and dense, in one pass over `w` after one for its largest magnitude.

    Under a transposable mask w packed both ways, and w both ways if it is dense.

    The scale takes |S(w)| by its bound |w|, whose maximum needs no groups: one plain reduction reads the weight once.
    It is a power of two, which is ours: a float loses no precision by a scale that is too small, only range at its
    lower end, and two weights can be brought to one scale after they were rounded.
    """
    if form is None:
      scale = quantize.current_scale(_under_power_of_two(quantize.amax(w)), E4M3)
      both = quantize.quantize(w, scale, dtype=E4M3, transpose='both', implementation=self.pass_backends)
      dense, transposed = (as_dtype(jnp.uint8, values) for values in both)
      return PackedWeight(None, None, dense=dense, transposed=transposed, scale=scale)
    how = dict(dtype=E4M3, implementation=self.pass_backends)
    if form == TransposableMasked():
      scale = quantize.current_scale(_under_power_of_two(quantize.amax(w)), E4M3)
      pair = pack.masked_pack(w, mask_codes(state), scale, **how)
      forward, input_grad = (with_values(jnp.uint8, operand) for operand in (pair.columns, pair.rows))
      return PackedWeight(state, forward, input_grad, scale=scale)
    if form != SoftThreshold(-2):
      return NATIVE.pack(form, w, state, dtype)
    scale = quantize.current_scale(_under_power_of_two(jnp.abs(state) * quantize.amax(w)), E4M3)
    p = pack.soft_threshold_pack(w, scale * state, **how)
    return PackedWeight(
      state, with_values(jnp.uint8, p.operand), dense=as_dtype(jnp.uint8, p.dense), scale=scale
    )

  def packing(self, form: Form | None, entries: int, operands: int, stored: int, wide: int) -> Moves:
    if form is None:
      packed = quantize_costs.quantize(entries, stored, transpose='both')
    elif form == TransposableMasked():
      packed = pack_costs.masked_pack(entries, stored, 1, operands=operands, from_mask=True)
    else:
      packed = pack_costs.soft_threshold_pack(entries, stored, 1)
    return quantize_costs.amax(entries, stored), packed

  def rounded(self, x: Array, *, keep: bool, amax: Array | None = None) -> Rounded:
    def one(x: Array, amax: Array | None) -> Rounded:
      scale = quantize.current_scale(quantize.amax(x) if amax is None else amax, E4M3)
      if not keep:
        return Rounded(quantize.quantize(x, scale, dtype=E4M3), None, scale)
      values, transposed = quantize.quantize(x, scale, dtype=E4M3, transpose='both', implementation=self.pass_backends)
      return Rounded(values, transposed, scale)

    return jax.custom_batching.sequential_vmap(one)(x, amax)

  def rounding(self, entries: int, wide: int, *, scaled: bool = False) -> Moves:
    both_ways = quantize_costs.quantize(entries, wide, transpose='both')
    return (both_ways,) if scaled else (quantize_costs.amax(entries, wide), both_ways)

  def reads(self, p: PackedWeight, role: Role, backend: str | None) -> PackedWeight:
    if backend is None:
      if role == 'forward' and p.transposed is not None:
        return PackedWeight(None, None, transposed=p.transposed, scale=p.scale)
      return PackedWeight(None, None, dense=p.dense, scale=p.scale)
    return super().reads(p, role, backend)

  def forward(self, w: PackedWeight, x: Rounded, *, backend: str | None, dtype: Any, **epilogue: Any) -> Any:
    if backend is None:
      run = functools.partial(_dense_forward, dtype=dtype, **epilogue)
      return jax.custom_batching.sequential_vmap(run)(x, w)
    return super().forward(w, x, backend=backend, dtype=dtype, **epilogue)

  def input_grad(
    self, w: PackedWeight, dz: Rounded, *, backend: str | None, dtype: Any, amax: bool = False
  ) -> Any:
    if backend is not None:
      return super().input_grad(w, dz, backend=backend, dtype=dtype, amax=amax)

    def run(dz: Rounded, matrix: Array, scale: Array) -> Array:
      with jax.named_scope('input_grad'):
        return _dense_matmul(dz.values, dz.scale, _partitioning.whole(matrix), scale, dtype)

    dx = jax.custom_batching.sequential_vmap(run)(dz, w.matrix, w.scale)
    return (dx, None) if amax else dx

  def scale_of(self, dz: Array) -> Any:
    return quantize.current_scale(quantize.amax(dz), self.gradients)

  def scale_of_activation(
    self, dh: Array, z: Array, amax: Array | None = None, *, activation: str, gated: bool
  ) -> Any:
    steepest = _steepest(activation, gated=gated)
    if steepest is None:
      rule = _partitioning.Rule(('n m', 'n . m' if gated else 'n m'), ('',), order=('n', 'm'), sums=('n', 'm'))
      largest = _partitioning.partitioned(
        'activation_backward_amax', _largest, rule, dh, z, activation=activation, gated=gated
      )
    else:
      # A bound of dz that needs dh alone.
      largest = steepest * (quantize.amax(dh) if amax is None else amax)
    return quantize.current_scale(largest, self.gradients)

  def notes_of_dh(self, activation: str, *, gated: bool) -> bool:
    return self.notes_amax and _steepest(activation, gated=gated) is not None

  def sampling(self, name: str, entries: int, wide: int) -> Pass:
    moves = quantize_costs.amax(entries, wide), pack_costs.mvue_pack(entries, wide, 1)
    return Pass(f'{name} sampled and rounded', moves)

  def activation_and_sampling(
    self, hidden: int, wide: int, *, gated: bool, scaled: bool = False
  ) -> tuple[Pass, ...]:
    # Without a gate the derivative is bounded.
    bounded = quantize_costs.amax(hidden, wide)
    largest = activation_costs.activation_backward_amax(hidden, wide, gated=gated) if gated else bounded
    sampled = activation_costs.activation_backward_pack(hidden, wide, 1, gated=gated)
    return *passes('largest of dz', () if scaled else (largest,)), Pass('dz sampled and rounded', (sampled,))

  def exact_weight_grad(self, dz: Array, x: Array, scales: tuple) -> tuple[Array, Array]:
    scale, x_scale = scales
    rounded, transposed = quantize.quantize(
      dz, scale, dtype=self.gradients, transpose='both', implementation=self.pass_backends
    )
    return rounded, _dense_matmul(x, x_scale, transposed, scale, dz.dtype)


@dataclasses.dataclass(frozen=True)
class Simulated(Precision):
  """FP8 where no kernel has it: plain matmuls of operands that were rounded and scaled back.

  Attributes:
    gradients: as in `Fp8`.
  """

  gradients: Any = E5M2

  simulates = True

  def plain_operands(self, role: Role, a: Array, b: Array) -> tuple[Array, Array]:
    # Activations or gradients stand before weights, and activations before gradients.
    of_a = self.gradients if role == 'input_grad' else E4M3
    of_b = self.gradients if role == 'weight_grad' else E4M3
    return round_to_fp8(a, of_a), round_to_fp8(b, of_b)


FP8, FP8_E4M3 = Fp8(), Fp8(gradients=E4M3)


def _steepest(activation: str, *, gated: bool) -> float | None:
  """A bound of the derivative, by which dh alone tells a bound of dz; None with a gate, or if there is no bound."""
  return None if gated else ACTIVATIONS[activation].steepest


def _under_power_of_two(amax: Array) -> Array:
  """The next larger number under which the scale of e4m3 is a power of two; infinite for what is not finite."""
  largest = float(jnp.finfo(E4M3).max)
  bits = jnp.minimum(as_dtype(jnp.int32, amax / largest) & 0x7FFFFFFF, 0x7F800000)  # above infinity are NaNs
  return largest * as_dtype(jnp.float32, (bits + 0x7FFFFF) & 0x7F800000)


def _largest(shard: _partitioning.Shard, dh: Array, z: Array, *, activation: str, gated: bool) -> Array:
  """The largest magnitude of the dz that these give, over all devices."""
  z = z.reshape(z.shape[0], -1)
  return shard.max(activations.activation_backward_amax(dh, z, activation=activation, gated=gated), 'n', 'm')


def _dense_forward(
  x: Rounded, w: PackedWeight, *, dtype: Any, bias: Array | None = None, activation: str | None = None,
  keep_preactivation: bool = False, amax: bool = False,
) -> Any:  # fmt: skip
  with jax.named_scope('forward'):
    z = _dense_matmul(x.values, x.scale, _partitioning.whole(w.transposed_matrix), w.scale, dtype)
  if bias is not None:
    z = z + bias.astype(dtype)[None]
  if activation is None:
    return z
  h = activate(z.astype(jnp.float32), activation).astype(dtype)
  others = ((z,) if keep_preactivation else ()) + ((None,) if amax else ())
  return (h, *others) if others else h


def _dense_matmul(x: Array, x_scale: Array, w: Array, w_scale: Array, dtype: Any) -> Array:
  # Sums of FP8 numbers, before they are divided by the scales, exceed the range of float16.
  wide = jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype
  return quantize.fp8_dot(x, w, x_scale, w_scale, out_dtype=wide).astype(dtype)
