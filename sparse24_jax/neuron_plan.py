"""The plan of the squared-ReLU block: what runs on sparse tensor cores, and whether the records say that it pays.

`neuron_level_ffn` carries it out, `block_gain` prices it.
"""

from collections.abc import Sequence
import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import _device, _triton
from pallas_kernels.costs import COPY, Move, sparse_entry
from pallas_kernels.pack import api as pack
from pallas_kernels.pack import costs as pack_costs
from pallas_kernels.sparse_matmul import api as sparse_matmul
from pallas_kernels.vnm import api
from pallas_kernels.vnm import costs as vnm_costs
from sparse24_jax.availability import log_once, Target, target
from sparse24_jax.matmuls import Role
from sparse24_jax.policy import ActivationPolicy, Pattern, TwoOfFour, VNM
from sparse24_jax.precision import NATIVE
from sparse24_jax.priced import BlockGain, priced
from sparse24_jax.steps import Matmul, Pass, Step, Timing

# Ours: as far as expected gains may be from measured ones (docs/speed.md, what to expect of yours); with less it is not
# known that the kernels pay.
LEAST_GAIN = 1.1


@dataclasses.dataclass(frozen=True)
class NeuronLevelPlan:
  """What runs for a block, forward and backward: kernels for V:2:M features without clusters, or dense matmuls.

  Attributes:
    policy: of the block.
    tokens: of x.
    d: width of the model.
    hidden: neurons.
    dtype: of activations and weights.
    by_weight: back end of the matmuls by a weight; None if that is dense.
    by_activations: of those by Y, dH and their transposes. On a machine without kernels both are None: what there is.
    pass_backends: back ends of its passes over memory, the best first.
    plain: why all matmuls are dense ones, with the masks that define the policy's patterns; None on kernels.
  """

  policy: ActivationPolicy
  tokens: int
  d: int
  hidden: int
  dtype: str
  by_weight: str | None = None
  by_activations: str | None = None
  pass_backends: tuple[str, ...] | None = None
  plain: str | None = None

  @property
  def steps(self) -> tuple[Step, ...]:
    """Everything that runs, in order, packing of weights and activations included."""
    if self.plain is not None:
      return self.dense_steps
    weight, wide, share = self.d * self.hidden, jnp.dtype(self.dtype).itemsize, self.policy.dense_features
    activations = self.tokens * self.hidden, wide, self.policy.features.group
    packed_rows = vnm_costs.vnm_pack(*activations)
    two_of_four = isinstance(self.policy.tokens, TwoOfFour)
    transposed = (vnm_costs.transpose_pack_24 if two_of_four else vnm_costs.transpose_pack)(*activations)
    by_weight, by_neurons, by_tokens = self._timings

    def matmul(name: str, backend: str | None, timing: Timing) -> Matmul:
      return Matmul(name, backend, (timing._replace(row=backend or 'dense'),))

    def columns(name: str) -> tuple[Step, ...]:
      """Steps of the dense neurons: they are taken out of an operand and multiplied separately."""
      if not share:
        return ()
      dense = Matmul(f'{name} of dense neurons', None, (by_tokens._replace(row='dense', times=share),))
      return Pass(f'columns for {name}', (vnm_costs.take_columns(*activations, share),)), dense

    def of_weight(name: str, move: Move) -> tuple[Pass, ...]:
      return (Pass(name, (move,)),) if self.policy.sparse_weights else ()

    return (
      *of_weight('w_up packed', pack_costs.soft_threshold_pack(weight, wide, wide, axis=-2)),
      *of_weight('w_down packed', pack_costs.soft_threshold_pack(weight, wide, wide, axis=-1)),
      matmul('h', self.by_weight, by_weight),
      Pass('y packed', (packed_rows,), vnm_costs.kept(*activations)),
      *of_weight('w_down expanded', vnm_costs.expand(weight, wide)),
      matmul('z', self.by_activations, by_neurons),
      matmul('dy', self.by_weight, by_weight),
      Pass('dh packed', (packed_rows,)),
      Pass('y transposed', (transposed,)),
      matmul('dW of down', self.by_activations, by_tokens),
      *columns('dW of down'),
      *of_weight('w_up expanded', vnm_costs.expand(weight, wide)),
      matmul('dx', self.by_activations, by_neurons),
      Pass('dh transposed', (transposed,)),
      matmul('dW of up', self.by_activations, by_tokens),
      *columns('dW of up'),
      Pass('dW of up the other way round', (Move(COPY, 2 * weight * wide),)),
    )  # fmt: skip

  @property
  def packed_bytes(self) -> int:
    """Bytes of the operands of both weights."""
    if self.plain is not None or not self.policy.sparse_weights:
      return 0
    return round(2 * self.d * self.hidden * sparse_entry(jnp.dtype(self.dtype).itemsize))

  @property
  def dense_steps(self) -> tuple[Step, ...]:
    """The steps of a dense block."""
    size = 5 * self.tokens * self.hidden * jnp.dtype(self.dtype).itemsize
    names = (('h', 'dy'), ('z', 'dx'), ('dW of up', 'dW of down'))
    return (
      *(Matmul(name, None, (timing,)) for timing, pair in zip(self._timings, names, strict=True) for name in pair),
      Pass('y from h, then dh from dy and h', (Move(COPY, size),)),
    )  # fmt: skip

  @property
  def _timings(self) -> tuple[Timing, Timing, Timing]:
    """Timings of a matmul by a weight, by Y or dH, and by their transposes; each runs twice."""
    by_neurons = self._timing(self.policy.features, 'input_grad', self.tokens, self.hidden)
    by_tokens = self._timing(self.policy.tokens, 'weight_grad', self.hidden, self.tokens)
    return self._timing(TwoOfFour(), 'forward', self.hidden, self.d), by_neurons, by_tokens

  def _timing(self, pattern: Pattern, role: Role, rows: int, summed: int) -> Timing:
    """A matmul by an operand of so many rows: that of a 2:4 layer in this role, or a V:N:M one."""
    if isinstance(pattern, VNM):
      op, key = api.OP, api.problem_key(rows, summed, self.d, pattern.v, pattern.m, self.dtype)
    else:
      op, key = sparse_matmul.OP, NATIVE.key(role, self.tokens, self.d, self.hidden, self.dtype)
    return Timing(op, tuple(key.items()), 'dense')


def priced_neurons(plan: NeuronLevelPlan, device: str) -> BlockGain:
  """What the records of a GPU say of a plan: parts of what runs, and of dense squared ReLU."""
  chosen, dense = (priced(_joined_copies(steps), device) for steps in (plan.steps, plan.dense_steps))
  return BlockGain(chosen, dense, (), plan.packed_bytes, 0, plan.plain)


def _joined_copies(steps: Sequence[Step]) -> list[Step]:
  """Joins the passes at the speed of a copy into one, at the end: what each costs beside its bytes was not timed."""
  copies = [step for step in steps if isinstance(step, Pass) and step.moves and step.moves[0].op == COPY]
  size = math.fsum(move.size for step in copies for move in step.moves or ())
  joined = Pass('copies', (Move(COPY, size),), sum(step.kept for step in copies))
  return [*(step for step in steps if step not in copies), joined]


def expected(plan: NeuronLevelPlan, device: str) -> BlockGain | None:
  """As `priced_neurons`, of a plan on kernels; None if nothing near was measured, or if a V:N:M matmul loses there."""
  for timing in plan._timings[1:]:
    times = timing.rows(device)
    if times.get(plan.by_activations or '', math.inf) >= times.get('dense', 0.0):
      return None
  found = priced_neurons(plan, device)
  return None if found.gain is None else found


def plan_neurons(
  policy: ActivationPolicy, tokens: int, d: int, hidden: int, dtype: DTypeLike, *, on: Target | None = None
) -> NeuronLevelPlan:
  """The plan of a block: on kernels where its policy names them, or names nothing and they pay.

  The choice of a policy that names nothing is logged once.

  Args:
    policy: of the block.
    tokens: of x.
    d: width of the model.
    hidden: neurons.
    dtype: of activations and weights.
    on: the GPU; None is the one that is here.
  """
  on = target() if on is None else on
  own = on.device.arch.kernel(api.OP)  # without one the ops take what there is
  kernel = own and own.backend
  by_weight = kernel if policy.sparse_weights else None
  backends = tuple(pack.candidates(dtype, on.device))
  plan = NeuronLevelPlan(policy, tokens, d, hidden, jnp.dtype(dtype).name, by_weight, kernel, backends)
  if policy.implementation == 'sparse':
    return plan
  reason = _why_unfit(plan, on)
  if reason is None:
    plan = dataclasses.replace(plan, by_weight=_by_weight(plan, on))
    reason = _why_slower(plan, on.device.slug)
  if policy.implementation is None and tokens and on.here and on.device.platform != 'cpu':
    how = 'sparse matmuls, which pay here' if reason is None else f'dense matmuls: {reason}'
    log_once(f'neuron_level_ffn of {tokens} tokens, {d} x {hidden}, takes {how}')
  return dataclasses.replace(plan, plain=reason)


def _by_weight(plan: NeuronLevelPlan, on: Target) -> str | None:
  """The back end of the matmuls by a weight: the fastest of the records if it is here, else the GPU's own kernel.

  Never 'dense': a packed weight would be expanded in every call, which was not timed.
  """
  key = NATIVE.key('forward', plan.tokens, plan.d, plan.hidden, plan.dtype)
  names = sparse_matmul.candidates_for(**key, device=on.device, check=False)
  return next((name for name in names if name != 'dense' and on.has(name)), plan.by_activations)


def _why_unfit(plan: NeuronLevelPlan, on: Target) -> str | None:
  """Why the kernels cannot take a block, or None."""
  policy = plan.policy
  if policy.implementation is not None:
    return f'implementation={policy.implementation!r}'
  if not plan.tokens:
    return 'there are no tokens'
  if plan.by_activations is None:
    return f'{on.device.name} has no kernel for V:N:M'
  if on.here:
    mesh = jax.sharding.get_abstract_mesh()
    if not _device.arrays_are_whole() or not (mesh.empty or mesh.size == 1):
      return 'V:N:M kernels cannot be divided by a mesh'
    if (reason := _triton.why_absent()) is not None:
      return f'the kernels need jax-triton, from the extra sparse24-jax[cuda]: {reason}'
  if not isinstance(policy.features, VNM) or policy.clusters:
    return f'{policy.clusters or "2:4 activations"} have no kernels'
  if not policy.sparse_weights:
    return 'with dense weights it was not timed'
  v, m = policy.features.v, policy.features.m
  # What the packers take.
  for name, size in (('tokens', plan.tokens), ('neurons', plan.hidden)):
    if size % v or size % (16 * m):
      return f'{size} {name} are no multiple of V = {v} and 16 M = {16 * m}'
  if plan.d % 64 or plan.tokens * plan.hidden >= 2**31:
    return f'a width of {plan.d} is no multiple of 64, or {plan.tokens} x {plan.hidden} activations are 2^31 or more'
  return None


def _why_slower(plan: NeuronLevelPlan, device: str) -> str | None:
  """Why the kernels are not known to pay by the records of a GPU; None: they pay."""
  found = expected(plan, device)
  if found is None or found.gain is None:
    return f'no matmuls of {plan.dtype} near these were measured on this GPU, or they lose there'
  if found.gain < LEAST_GAIN:
    return f'{found.expected_ms:.3f} ms are expected of the kernels and {found.dense_ms:.3f} of dense matmuls'
  return None
