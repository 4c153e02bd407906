"""A precision as a value: how activations and gradients are rounded, what the backward keeps of them, what it packs.

The paths of a layer and of a block are written once, in terms of these, and so are their plans: beside each pass stands
what it moves, as the `costs` of its op count it. The backward of both reads `Rounded.residual`.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.gated_activation import api as activations
from pallas_kernels.gated_activation import costs as activation_costs
from pallas_kernels.operand import SparseOperand, to_operand
from pallas_kernels.pack import api as pack
from pallas_kernels.pack import costs as pack_costs
from pallas_kernels.pack.reference import mask_codes, Packed
from sparse24_jax.matmuls import matmul, multiply, Role
from sparse24_jax.packing import PackedWeight
from sparse24_jax.policy import DotPolicy
from sparse24_jax.projection import Form, Masked, SoftThreshold, TransposableMasked
from sparse24_jax.steps import Moves, Pass

ROLES: Mapping[Role, Any] = {
  # Sizes of the sparse operand's rows, of the dense operand's rows and of the sum.
  'forward': lambda tokens, d_in, d_out: (d_out, tokens, d_in),
  'input_grad': lambda tokens, d_in, d_out: (d_in, tokens, d_out),
  'weight_grad': lambda tokens, d_in, d_out: (d_out, d_in, tokens),
}


@dataclasses.dataclass(frozen=True)
class Rounded:
  """An array as the matmuls read it.

  Attributes:
    values: `[tokens, features]`; None where only the backward is to read it.
    residual: what the weight gradient reads: the same, or in FP8 its transpose; None where no gradient is taken.
    scale: in FP8 float32 scalar, what the array was multiplied with before it was rounded; else None.
  """

  values: Any
  residual: Any
  scale: Any = None

  @property
  def for_backward(self) -> 'Rounded':
    """A copy without what the backward pass does not read."""
    return dataclasses.replace(self, values=None)


jax.tree_util.register_dataclass(Rounded, ['values', 'residual', 'scale'], [])


@dataclasses.dataclass(frozen=True)
class Precision:
  """The dtype of the operands; `fp8.Fp8` differs from it.

  Attributes:
    pass_backends: back ends of its passes over memory, the best first; None are those of the device that runs them.
    notes_amax: whether matmuls in a block are asked for the largest magnitude of what they make, for the scale with
      which it is rounded next.
  """

  pass_backends: tuple[str, ...] | None = None
  notes_amax: bool = False

  # Whether values have scales. Its dense matmuls then read what was rounded, too; a gradient that was sampled is
  # rewritten for the input gradient; and a dense layer in it is not one in 16 bits.
  scales: ClassVar[bool] = False
  # What GPUs without its kernels lack.
  lacks: ClassVar[str] = 'no kernels that can run here'
  # Whether it is simulated in another one, which nobody timed.
  simulates: ClassVar[bool] = False
  # What reports call a dense matmul, and, if its records have it, the row of one in 16 bits.
  dense: ClassVar[str] = 'dense'
  dense_wide: ClassVar[str | None] = None
  # The layout of the residual, and its axes as a rule of `_partitioning` names them.
  residual_layout: ClassVar[str] = 'kn'
  residual_axes: ClassVar[str] = 'k*4 n'
  # What weights and activations are multiplied in, and what a sample of a gradient is packed in; None is the dtype of
  # the activations.
  dtype: ClassVar[Any] = None
  sample_dtype: ClassVar[Any] = None
  # What the weight gradient of a sample is multiplied with.
  sample_alpha: ClassVar[float] = 1.0

  @property
  def without_kernels(self) -> 'Precision':
    """What stands in for it where no kernel serves."""
    return self

  def unfit(self, policy: DotPolicy) -> str | None:
    """Why its kernels do not serve a policy, or None."""
    return None

  def by_records(self, form: Form | None) -> tuple[Role, ...]:
    """The matmuls of a weight of this form whose back ends records choose; the others take the GPU's kernel."""
    return tuple(ROLES)

  def key(self, role: Role, tokens: int, d_in: int, d_out: int, dtype: Any) -> dict[str, Any]:
    """What records of a matmul are looked up by."""
    m, n, k = ROLES[role](tokens, d_in, d_out)
    b_layout, operand = (self.residual_layout, self.sample_dtype) if role == 'weight_grad' else ('nk', self.dtype)
    # Records of narrower operands have results in bfloat16.
    out_dtype = jnp.dtype(dtype).name if operand is None else 'bfloat16'
    dtype = out_dtype if operand is None else operand.name
    return dict(m=m, n=n, k=k, dtype=dtype, out_dtype=out_dtype, b_layout=b_layout, out_layout='nm')

  def width(self, wide: int) -> int:
    """Bytes of an entry as it is multiplied, by those of an entry of the activations."""
    return wide if self.dtype is None else self.dtype.itemsize

  def packed_dtype(self, dtype: Any) -> jnp.dtype:
    """What weights are packed in, for activations of this dtype."""
    return jnp.dtype(dtype) if self.dtype is None else self.dtype

  def pack(self, form: Form | None, w: Array, state: Any, dtype: Any) -> PackedWeight:
    """`w` `[..., in, out]` packed under its state, for activations of this dtype."""
    how = dict(dtype=jnp.dtype(dtype), implementation=self.pass_backends)
    match form:
      case SoftThreshold(-2):
        return PackedWeight(state, pack.soft_threshold_pack(w, state, **how).operand)
      case TransposableMasked():
        pair = pack.masked_pack(w, mask_codes(state), **how)
        return PackedWeight(state, pair.columns, pair.rows)
      case Masked():
        kept = jnp.where(state, w, jnp.zeros((), w.dtype)).astype(dtype)
        return PackedWeight(state, to_operand(formats.compress_unchecked(kept, state, axis=-2)))
    raise ValueError(f'{form} is not 2:4 along the input, as the forward reads a packed weight')

  def packing(self, form: Form | None, entries: int, operands: int, stored: int, wide: int) -> Moves:
    """The passes of `pack` over a weight of `stored` bytes an entry."""
    if not operands:
      return ()
    width = self.width(wide)
    if isinstance(form, TransposableMasked):
      return (pack_costs.masked_pack(entries, stored, width, operands=operands, from_mask=True),)
    return (pack_costs.soft_threshold_pack(entries, stored, width),)

  def rounded(self, x: Array, *, keep: bool, amax: Array | None = None) -> Rounded:
    """x `[tokens, features]`, for a backward if `keep`; `amax` is its largest magnitude, if known."""
    return Rounded(x, x)

  def rounding(self, entries: int, wide: int, *, scaled: bool = False) -> Moves:
    """The passes of `rounded`; without the one for the scale if that is known."""
    return ()

  def reads(self, p: PackedWeight, role: Role, backend: str | None) -> PackedWeight:
    """The part of a packed weight that the forward, or the input gradient, reads."""
    if role == 'forward':
      return PackedWeight(None, p.forward, scale=p.scale)
    return PackedWeight(None, None, p.input_grad, scale=p.scale)

  def forward(self, w: PackedWeight, x: Rounded, *, backend: str | None, dtype: Any, **epilogue: Any) -> Any:
    """z `[tokens, out]`; with an epilogue its activation, alone or before z and its largest magnitude."""
    scales = w.scale, x.scale
    return multiply('forward', w.operand('forward'), x.values, backend=backend, scales=scales, dtype=dtype, **epilogue)

  def input_grad(
    self, w: PackedWeight, dz: Rounded, *, backend: str | None, dtype: Any, amax: bool = False
  ) -> Any:
    """dx `[tokens, in]`; with `amax` (dx, its largest magnitude, or None where a dense matmul does not note it)."""
    scales = w.scale, dz.scale
    operand = w.operand('input_grad')
    return multiply('input_grad', operand, dz.values, backend=backend, scales=scales, dtype=dtype, amax=amax)

  def plain_operands(self, role: Role, a: Array, b: Array) -> tuple[Array, Array]:
    """The operands of a plain matmul for a and b; a simulation rounds them."""
    return a, b

  def scale_of(self, dz: Array) -> Any:
    """The scale of a gradient, or None."""
    return None

  def scale_of_activation(
    self, dh: Array, z: Array, amax: Array | None = None, *, activation: str, gated: bool
  ) -> Any:
    """The scale of the dz that these give, or None; `amax` is the largest magnitude of dh, if known."""
    return None

  def sample(self, dz: Array, key: Array, scale: Any, origin: Any) -> Packed:
    """The operand of the MVUE sample of dz, and dz if it is rewritten."""
    return pack.mvue_pack(dz, key, scale, origin=origin, dtype=self.sample_dtype, implementation=self.pass_backends)

  def sampling(self, name: str, entries: int, wide: int) -> Pass:
    """The passes of `scale_of` and `sample`."""
    return Pass(f'{name} sampled', (pack_costs.mvue_pack(entries, wide, self.width(wide)),))

  def notes_of_dh(self, activation: str, *, gated: bool) -> bool:
    """Whether `scale_of_activation` wants the largest magnitude of dh of the matmul that makes it."""
    return False

  def activation_and_sample(
    self, dh: Array, z: Array, key: Array, scale: Any, origin: Any, *, activation: str, gated: bool
  ) -> Packed:
    """dz and the operand of its MVUE sample, in one pass."""
    return activations.activation_backward_pack(
      dh, z, key, scale, activation=activation, gated=gated, origin=origin, dtype=self.sample_dtype,
      implementation=self.pass_backends,
    )  # fmt: skip

  def activation_and_sampling(
    self, hidden: int, wide: int, *, gated: bool, scaled: bool = False
  ) -> tuple[Pass, ...]:
    """The passes of `activation_and_sample`, of so many entries of dh, and of `scale_of_activation` unless `scaled`."""
    sampled = activation_costs.activation_backward_pack(hidden, wide, self.width(wide), gated=gated)
    return (Pass('dz, and sampled', (sampled,)),)

  def weight_grad(self, sample: SparseOperand, x: Array, scales: tuple, *, backend: str, dtype: Any) -> Array:
    """dw `[in, out]`, from the residual of x, and from the scales of the gradient and of x."""
    how = dict(scales=scales, alpha=self.sample_alpha, b_layout=self.residual_layout)
    return multiply('weight_grad', sample, x, backend=backend, dtype=dtype, **how)

  def exact_weight_grad(self, dz: Array, x: Array, scales: tuple) -> tuple[Array, Array]:
    """(dz as the input gradient reads it, dw), as `weight_grad` but from all of dz."""
    return dz, matmul(x.T, dz)

  def bias_grad(self, dz: Rounded, dtype: Any) -> Array:
    """The sum over tokens."""
    total = jnp.sum(dz.values, axis=0, dtype=jnp.float32)
    return (total if dz.scale is None else total / dz.scale).astype(dtype)


NATIVE = Precision()
