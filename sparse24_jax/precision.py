"""A precision as a value: how activations and gradients are rounded, what the backward keeps of them, what it packs.

The paths of a layer and of a block are written once, in terms of these. The backward of both keeps `Rounded.kept`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels.gated_activation import api as activations
from pallas_kernels.operand import SparseOperand
from pallas_kernels.pack import api as pack
from pallas_kernels.pack.reference import Packed
from sparse24_jax.matmuls import multiply
from sparse24_jax.numerics import Format
from sparse24_jax.packing import PackedWeight


@dataclasses.dataclass(frozen=True)
class Rounded:
  """An array as the matmuls read it.

  Attributes:
    values: `[tokens, features]`; None where only the backward is to read it.
    kept: what the weight gradient reads: the same, or in FP8 its transpose; None where no gradient is taken.
    factor: in FP8 float32 scalar, undoes the scale; else None.
  """

  values: Any
  kept: Any
  factor: Any = None

  @property
  def for_backward(self) -> 'Rounded':
    """A copy without what the backward pass does not read."""
    return dataclasses.replace(self, values=None)


jax.tree_util.register_dataclass(Rounded, ['values', 'kept', 'factor'], [])


@dataclasses.dataclass(frozen=True)
class Precision:
  """The dtype of the operands; `fp8.Fp8` differs from it.

  The scale of a gradient is (scale, its inverse), or (None, None) without one.
  """

  # Axes of what is kept for the weight gradient, as a rule of `_partitioning` names them.
  kept_axes = 'k*4 n'
  # Whether values have scales, and a gradient that was sampled is rewritten for the input gradient.
  scales = False
  # What a sample of a gradient is packed in; None is the dtype of the gradient.
  sample_dtype: ClassVar[Any] = None

  def rounded(self, x: Array, *, keep: bool) -> Rounded:
    """x `[tokens, features]`, for a backward if `keep`."""
    return Rounded(x, x)

  def reads(self, p: PackedWeight, role: str, backend: str | None) -> PackedWeight:
    """The part of a packed weight that the forward, or the input gradient, reads."""
    return PackedWeight(None, p.forward) if role == 'forward' else PackedWeight(None, None, p.input_grad)

  def forward(self, w: PackedWeight, x: Rounded, *, backend: str | None, dtype: Any, **epilogue: Any) -> Any:
    """z `[tokens, out]`; with an epilogue its activation, or (activation(z), z), see `multiply`."""
    return multiply('forward', w.operand, x.values, backend=backend, **epilogue)

  def input_grad(self, w: PackedWeight, dz: Rounded, *, backend: str | None, dtype: Any) -> Array:
    """dx `[tokens, in]`."""
    return multiply('input_grad', w.input_grad, dz.values, backend=backend)

  def simulated(self, a: Array, b: Array, formats: tuple[Format, Format]) -> tuple[Array, Array]:
    """The operands of a plain matmul for a and b; FP8 rounds them to these formats."""
    return a, b

  def scale_of(self, dz: Array) -> tuple[Any, Any]:
    """The scale of a gradient."""
    return None, None

  def scale_of_activation(self, dh: Array, z: Array, *, activation: str, gated: bool) -> tuple[Any, Any]:
    """The scale of the dz that these give."""
    return None, None

  def sample(self, dz: Array, key: Array, scale: Any, origin: Any) -> Packed:
    """The operand of the MVUE sample of dz, and dz if it is rewritten."""
    return pack.mvue_pack(dz, key, scale, origin=origin, dtype=self.sample_dtype)

  def activation_and_sample(
    self, dh: Array, z: Array, key: Array, scale: Any, origin: Any, *, activation: str, gated: bool
  ) -> Packed:
    """dz and the operand of its MVUE sample, in one pass."""
    return activations.activation_backward_pack(
      dh, z, key, scale, activation=activation, gated=gated, origin=origin, dtype=self.sample_dtype
    )

  def weight_grad(self, sample: SparseOperand, x: Array, factors: tuple, *, backend: str, dtype: Any) -> Array:
    """dw `[in, out]`, from what was kept of x, and from what undoes the scales of the gradient and of x."""
    return multiply('weight_grad', sample, x, backend=backend)

  def bias_grad(self, dz: Rounded, dtype: Any) -> Array:
    """The sum over tokens."""
    return jnp.sum(dz.values, axis=0, dtype=jnp.float32).astype(dtype)


NATIVE = Precision()
