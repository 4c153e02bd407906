"""The plan of a layer, as a value: what each of its matmuls runs on, and what that takes. `plan` makes it."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _checks
from pallas_kernels.sparse_matmul import api
from sparse24_jax.projection import Form, TransposableMasked
from sparse24_jax.steps import Matmul, PACKED8, Pass, rounded, sampled, sampled_in_fp8, Step, Timing

ROLES: Mapping[str, Any] = {
  # Sizes of the sparse operand's rows, of the dense operand's rows and of the sum; layout of the dense operand.
  'forward': lambda tokens, d_in, d_out: (d_out, tokens, d_in, 'nk'),
  'input_grad': lambda tokens, d_in, d_out: (d_in, tokens, d_out, 'nk'),
  'weight_grad': lambda tokens, d_in, d_out: (d_out, d_in, tokens, 'kn'),
}


@dataclasses.dataclass(frozen=True)
class Backends:
  """The back end of each matmul; None is a plain one with the projected weight, or with the sampled gradient.

  With `fp8` they are those of `sparse24_jax.fp8`, where None is a dense matmul in FP8; without it, an FP8 policy is
  simulated.
  """

  forward: str | None = None
  input_grad: str | None = None
  weight_grad: str | None = None
  fp8: bool = False

  @property
  def packs(self) -> bool:
    """Whether some matmul reads the packed weight."""
    return self.served('forward') or self.served('input_grad')

  def served(self, role: str) -> bool:
    """Whether one of the three reads what was packed, or sampled by a kernel."""
    return self.fp8 or getattr(self, role) is not None

  @property
  def sole(self) -> str | None:
    """The back end that all three matmuls share, or None."""
    return self.forward if self.forward == self.input_grad == self.weight_grad else None


@dataclasses.dataclass(frozen=True)
class LayerPlan:
  """What runs for x `[tokens, d_in]` and w `[d_in, d_out]`, forward and backward.

  Attributes:
    tokens: of x.
    d_in: rows of w.
    d_out: columns of w.
    dtype: of activations.
    backends: of the three matmuls.
    sampled: whether the weight gradient is taken of a sample.
    sparse: the matmuls that a kernel could make, by role.
    form: of the packed weight, or None.
    simulated: why no kernel serves a policy of FP8, or None.
    plain: why no kernel serves the layer at all, or None.
    checks: of a plan that is made to be priced, what the checks that it asked for found, by the items of the problem.
  """

  tokens: int
  d_in: int
  d_out: int
  dtype: str
  backends: Backends = Backends()
  sampled: bool = False
  sparse: tuple[str, ...] = ()
  form: Form | None = None
  simulated: str | None = None
  plain: str | None = None
  checks: Mapping[tuple, _checks.Entry] = dataclasses.field(default_factory=dict, compare=False, repr=False)

  @property
  def wide(self) -> int:
    """Bytes of an entry of the activations."""
    return jnp.dtype(self.dtype).itemsize

  def matmul(self, role: str, name: str) -> Matmul:
    """One of the three, as it runs; no record has the time of a simulated one."""
    if self.simulated:
      return Matmul(name, None, ())
    backend, key = getattr(self.backends, role), fp8_key if self.backends.fp8 else self._key
    return Matmul(name, backend, (self._timing(key(role, self.tokens, self.d_in, self.d_out), backend or 'dense'),))

  def joined(self, role: str, name: str) -> Matmul:
    """One of the three for two such weights side by side; if nothing near was measured, it takes twice as long."""
    one = self.matmul(role, name)
    two = dataclasses.replace(self, d_out=2 * self.d_out).matmul(role, name)
    return dataclasses.replace(one, timings=(*two.timings, *(t._replace(times=2.0) for t in one.timings)))

  def dense(self, role: str, name: str) -> Matmul:
    """One of the three in a dense layer of 16 bits; in FP8 also by what was timed beside that."""
    timings = (self._timing(self._key(role, self.tokens, self.d_in, self.d_out), 'dense'),)
    if self.backends.fp8:
      timings += (self._timing(fp8_key(role, self.tokens, self.d_in, self.d_out), 'dense_bf16'),)
    return Matmul(name, None, timings)

  def dense_fp8(self, role: str, name: str) -> Matmul:
    """One of the three in a dense layer of FP8."""
    return Matmul(name, None, (self._timing(fp8_key(role, self.tokens, self.d_in, self.d_out), 'dense'),))

  def dense_fp8_steps(self, weight_wide: int) -> tuple[Step, ...]:
    """A dense layer in FP8: activations, weight (`weight_wide` bytes an entry) and gradient rounded both ways."""
    return (
      *(self.dense_fp8(role, role) for role in ROLES), rounded('x rounded', self.tokens * self.d_in, self.wide),
      rounded('w rounded', self.d_in * self.d_out, weight_wide),
      rounded('dz rounded', self.tokens * self.d_out, self.wide),
    )  # fmt: skip

  def fastest_kernel_ms(self, role: str, device: str) -> float | None:
    """Time of one of the three matmuls with the fastest kernel that was measured, whichever runs."""
    timing = self.matmul(role, role).timings[0]
    return min((ms for row, ms in timing.rows(device).items() if not row.startswith('dense')), default=None)

  def _key(self, role: str, tokens: int, d_in: int, d_out: int) -> dict[str, Any]:
    return key_of(role, tokens, d_in, d_out, self.dtype)

  def _timing(self, key: Mapping[str, Any], row: str) -> Timing:
    items = tuple(key.items())
    return Timing(api.OP, items, row, check=self.checks.get(items))

  def prepared(self, role: str) -> tuple[Pass, ...]:
    """The passes that one of the three waits for, in a layer by itself."""
    x, dz = self.tokens * self.d_in, self.tokens * self.d_out
    if self.backends.fp8:
      if role == 'forward':
        return (rounded('x rounded', x, self.wide),)
      # The input gradient reads what the sample left.
      return (sampled_in_fp8('dz sampled and rounded', dz, self.wide),) if role == 'weight_grad' else ()
    if role != 'weight_grad' or not self.sampled or self.simulated:
      return ()
    if self.backends.weight_grad is None:
      return (Pass('dz sampled by XLA', None),)
    return (sampled('dz sampled', dz, self.wide),)

  def packing(self, wide: int) -> Pass:
    """The pass that packs the weight, of `wide` bytes an entry, once an optimizer step."""
    entries, operands = self.d_in * self.d_out, self._operands
    if self.backends.fp8:  # its largest magnitude, then soft threshold, rounding and packing in one pass
      moves = ('amax', entries * wide), ('soft_threshold_pack8', entries * (wide + PACKED8))
      return Pass('packed weight', moves)
    if not operands:
      return Pass('packed weight', ())
    size = entries * wide + operands * self._operand_bytes
    if isinstance(self.form, TransposableMasked):
      # A mask, a byte an entry, is made 16 bits a 4x4 block by a pass of XLA's, about as fast, and these are read.
      return Pass('packed weight', (('masked_pack', size + entries + 2 * (entries // 8)),))
    return Pass('packed weight', (('soft_threshold_pack_axis-2', size),))

  @property
  def packed_bytes(self) -> int:
    """What the packed weight takes."""
    entries = self.d_in * self.d_out
    if self.backends.fp8:
      return entries // 2 + entries // 8 + entries + 4  # operand, dense copy, factor
    return self._operands * self._operand_bytes

  @property
  def saved_bytes(self) -> int:
    """Bytes saved by keeping x in FP8 for the backward pass, at a byte an entry."""
    return self.tokens * self.d_in * (self.wide - 1) if self.backends.fp8 else 0

  @property
  def _operands(self) -> int:
    return (self.backends.forward is not None) + (self.backends.input_grad is not None)

  @property
  def _operand_bytes(self) -> int:
    # Half of the values, and two bits for each of them.
    entries = self.d_in * self.d_out
    return entries * self.wide // 2 + entries // 8


def key_of(role: str, tokens: int, d_in: int, d_out: int, dtype: Any) -> dict[str, Any]:
  """What records of a matmul in 16 bits are looked up by."""
  m, n, k, b_layout = ROLES[role](tokens, d_in, d_out)
  dtype = jnp.dtype(dtype).name
  return dict(m=m, n=n, k=k, dtype=dtype, out_dtype=dtype, b_layout=b_layout, out_layout='nm')


def fp8_key(role: str, tokens: int, d_in: int, d_out: int) -> dict[str, Any]:
  """What records of a matmul in FP8 are looked up by; that of an input gradient, which is dense, by its sizes."""
  m, n, k, _ = ROLES[role](tokens, d_in, d_out)
  dtype = 'float8_e5m2' if role == 'weight_grad' else 'float8_e4m3fn'
  return dict(m=m, n=n, k=k, dtype=dtype, out_dtype='bfloat16', b_layout='nk', out_layout='nm')
