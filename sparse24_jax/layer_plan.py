"""The plan of a layer, as a value: what each of its matmuls runs on, and what that takes. `plan` makes it."""

from collections.abc import Mapping
import dataclasses

import jax.numpy as jnp

from pallas_kernels import _checks
from pallas_kernels.pack import costs
from pallas_kernels.sparse_matmul import api
from sparse24_jax.matmuls import Role
from sparse24_jax.precision import NATIVE, Precision, ROLES
from sparse24_jax.projection import Form
from sparse24_jax.steps import Matmul, Pass, passes, Step, Timing


@dataclasses.dataclass(frozen=True)
class Backends:
  """The back end of each matmul; None is a dense one, see `LayerPlan.served`."""

  forward: str | None = None
  input_grad: str | None = None
  weight_grad: str | None = None

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
    precision: in which they are made, with the back ends of its passes.
    sampled: whether the weight gradient is taken of a sample.
    sparse: the matmuls that a kernel could make, by role.
    form: of the packed weight, or None.
    plain: why no kernel serves the layer at all, or None.
    checks: of a plan that is made to be priced, what the checks that it asked for found, by the items of the problem.
  """

  tokens: int
  d_in: int
  d_out: int
  dtype: str
  backends: Backends = Backends()
  precision: Precision = NATIVE
  sampled: bool = False
  sparse: tuple[Role, ...] = ()
  form: Form | None = None
  plain: str | None = None
  checks: Mapping[tuple, _checks.Entry] = dataclasses.field(default_factory=dict, compare=False, repr=False)

  @property
  def wide(self) -> int:
    """Bytes of an entry of the activations."""
    return jnp.dtype(self.dtype).itemsize

  @property
  def simulated(self) -> str | None:
    """Why no kernel serves the precision of the policy, so that it is simulated, or None."""
    return self.plain if self.precision.simulates else None

  def served(self, role: Role) -> bool:
    """Whether a matmul reads what was packed, sampled by a kernel, or rounded; else it is a plain one."""
    return self.precision.scales or getattr(self.backends, role) is not None

  @property
  def packs(self) -> bool:
    """Whether some matmul reads the packed weight."""
    return self.served('forward') or self.served('input_grad')

  def matmul(self, role: Role, name: str) -> Matmul:
    """One of the three, as it runs; no record has the time of a simulated one."""
    backend = getattr(self.backends, role)
    return Matmul(name, backend, () if self.simulated else (self._timing(self.precision, role, backend or 'dense'),))

  def joined(self, role: Role, name: str) -> Matmul:
    """One of the three for two such weights side by side; if nothing near was measured, it takes twice as long."""
    one = self.matmul(role, name)
    two = dataclasses.replace(self, d_out=2 * self.d_out).matmul(role, name)
    return dataclasses.replace(one, timings=(*two.timings, *(t._replace(times=2.0) for t in one.timings)))

  def dense(self, role: Role, name: str) -> Matmul:
    """One of the three in a dense layer of 16 bits, also by what was timed beside a matmul in another precision."""
    beside = self.precision.dense_wide
    timings = () if beside is None else (self._timing(self.precision, role, beside),)
    return Matmul(name, None, (self._timing(NATIVE, role, 'dense'), *timings))

  def rival(self, role: Role, name: str) -> Matmul:
    """One of the three in a dense layer of this precision."""
    return Matmul(name, None, (self._timing(self.precision, role, 'dense'),))

  def rival_steps(self, stored: int) -> tuple[Step, ...]:
    """A dense layer in this precision: activations, weight (`stored` bytes an entry) and gradient are rounded.

    Nothing if that is one of 16 bits.
    """
    if not self.precision.scales:
      return ()
    sizes = {'x': (self.d_in * self.tokens, self.wide), 'w': (self.d_in * self.d_out, stored),
             'dz': (self.d_out * self.tokens, self.wide)}  # fmt: skip
    rounding = (Pass(f'{name} rounded', self.precision.rounding(*size)) for name, size in sizes.items())
    return (*(self.rival(role, role) for role in ROLES), *rounding)

  def fastest_kernel_ms(self, role: Role, device: str) -> float | None:
    """Time of one of the three matmuls with the fastest kernel that was measured, whichever runs."""
    timing = self.matmul(role, role).timings[0]
    return min((ms for row, ms in timing.rows(device).items() if not row.startswith('dense')), default=None)

  def _timing(self, precision: Precision, role: Role, row: str) -> Timing:
    items = tuple(precision.key(role, self.tokens, self.d_in, self.d_out, self.dtype).items())
    return Timing(api.OP, items, row, check=self.checks.get(items))

  @property
  def steps(self) -> tuple[Step, ...]:
    """Everything that runs, in order, but for the packing of the weight."""
    return (*self.forward_steps(), *self.backward_steps())

  def forward_steps(self, of: str = '') -> tuple[Step, ...]:
    """Those of the forward; names end with whose they are, such as ' of up'."""
    return (*self.prepared('forward', of), self.matmul('forward', f'forward{of}'))

  def backward_steps(self, of: str = '') -> tuple[Step, ...]:
    """Likewise of the backward: the input gradient reads what the sample of the weight gradient left."""
    return (
      *self.prepared('weight_grad', of), self.matmul('weight_grad', f'weight_grad{of}'),
      self.matmul('input_grad', f'input_grad{of}'),
    )  # fmt: skip

  def prepared(self, role: Role, of: str = '', *, make: str = 'dz') -> tuple[Pass, ...]:
    """The passes that one of the three waits for, in a layer by itself, whose output gradient is called `make`."""
    x, dz = self.tokens * self.d_in, self.tokens * self.d_out
    if role == 'forward':
      return passes(f'x{of} rounded', self.precision.rounding(x, self.wide), x * self.precision.width(self.wide))
    if role == 'input_grad' or self.simulated:
      return ()
    if self.served('weight_grad') and not self.sampled:
      return passes(f'{make}{of} rounded', self.precision.rounding(dz, self.wide))
    if self.served('weight_grad'):
      return (self.precision.sampling(f'{make}{of}', dz, self.wide),)
    return (Pass(f'{make}{of} sampled by XLA', None),) if self.sampled else ()

  def packing(self, stored: int) -> Pass:
    """The pass that packs the weight, of `stored` bytes an entry, once an optimizer step."""
    moves = self.precision.packing(self.form, self.d_in * self.d_out, self._operands, stored, self.wide)
    return Pass('packed weight', moves)

  @property
  def packed_entry(self) -> float:
    """Bytes of an entry of the packed weight."""
    return costs.packed_entry(self.precision.width(self.wide), self._operands)

  @property
  def packed_bytes(self) -> int:
    """What the packed weight takes, with its scale if it has one."""
    return round(self.d_in * self.d_out * self.packed_entry) + (4 if self.precision.scales else 0)

  @property
  def saved_bytes(self) -> int:
    """Bytes saved by keeping x rounded for the backward pass."""
    return self.tokens * self.d_in * (self.wide - self.precision.width(self.wide))

  @property
  def _operands(self) -> int:
    return (self.backends.forward is not None) + (self.backends.input_grad is not None)
