"""The plan of a feed-forward block, as a value: `ffn` carries it out, `block_gain` prices it."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from pallas_kernels.costs import COPY, Move
from pallas_kernels.gated_activation import costs as activation_costs
from sparse24_jax.asked import Asked, PLAIN
from sparse24_jax.availability import Target
from sparse24_jax.layer_plan import LayerPlan
from sparse24_jax.matmuls import Role
from sparse24_jax.plan import plan_layer
from sparse24_jax.policy import DotPolicy
from sparse24_jax.precision import Precision, ROLES
from sparse24_jax.steps import Matmul, Pass, passes, Step

_MAKES = {'forward': 'y', 'input_grad': 'dx', 'weight_grad': 'dW'}


@dataclasses.dataclass(frozen=True)
class BlockPlan:
  """What runs for a feed-forward block, forward and backward.

  Attributes:
    up: plan of the up-projection.
    down: plan of the down-projection.
    gate: plan of the gate, or None.
  """

  up: LayerPlan
  down: LayerPlan
  gate: LayerPlan | None = None

  @property
  def layers(self) -> dict[str, LayerPlan]:
    """The plans of its layers, by role."""
    return {'up': self.up, 'down': self.down} | ({} if self.gate is None else {'gate': self.gate})

  @property
  def fused(self) -> bool:
    """Whether it runs as one: one kernel for all matmuls, or one precision for all, dense ones too."""
    # The last matmul may take its weight gradient of all of the output gradient.
    exact = dict(weight_grad=self.up.backends.weight_grad) if not self.down.sampled else {}
    found = {layer.backends for layer in (self.up, self.gate or self.up)}
    found.add(dataclasses.replace(self.down.backends, **exact))
    whole = len(found) == 1 and self.up.backends.sole is not None
    sampled = {backends.weight_grad for backends in found}
    whole = whole or (self.precision.scales and len(sampled) == 1 and None not in sampled)
    # Positions are stored in tiles of 64 rows.
    joins = self.gate is None or self.up.d_out % 64 == 0
    return whole and joins and self.up.tokens % 4 == 0

  @property
  def precision(self) -> Precision:
    """Of all its layers, which have one policy but for the weight gradient of the last."""
    return self.up.precision

  @property
  def plain(self) -> str | None:
    """Why no kernel serves any of its layers, so that all matmuls run dense; None also where FP8 is simulated."""
    why = [None if layer.simulated else layer.plain for layer in self.layers.values()]
    return why[0] if all(why) else None

  @property
  def simulated(self) -> str | None:
    """Why the precision of a layer is simulated, or None."""
    return next((layer.simulated for layer in self.layers.values() if layer.simulated), None)

  @property
  def packed_bytes(self) -> int:
    """Bytes of the packed weights."""
    return sum(layer.packed_bytes for layer in self.layers.values())

  @property
  def saved_bytes(self) -> int:
    """Bytes saved by keeping x and h rounded for the backward; gate and up-projection share one x."""
    return self.up.saved_bytes + self.down.saved_bytes

  @property
  def steps(self) -> tuple[Step, ...]:
    """Everything that runs, in order, but for the packing of weights.

    Of a block that is not fused, what its layers keep is counted; what XLA keeps between them is XLA's choice.
    """
    if not self.fused:
      hidden = [(layer, f' of {name}') for name in ('gate', 'up') if (layer := self.layers.get(name))]
      # XLA makes h inside a dense matmul of 16 bits.
      *h, dz = self._activation_by_xla(not (self.up.served('forward') or self.up.simulated))
      return (
        *(step for layer, of in hidden for step in layer.forward_steps(of)), *h,
        *self.down.forward_steps(' of down'), *self.down.backward_steps(' of down'), dz,
        *(step for layer, of in reversed(hidden) for step in layer.backward_steps(of)),
      )  # fmt: skip
    x, h, z, wide = self._entries
    precision, gated = self.precision, self.gate is not None
    # Whatever the activation: squared ReLU alone has no bounded derivative, and one pass more.
    width, noting = precision.width(wide), precision.notes_amax and not gated
    # What is rounded is kept so; what is not, as the step makes it that writes it.
    kept_h = 0 if precision.scales else h * wide
    return (
      *passes('x rounded', precision.rounding(x, wide), x * width), *self._joins(),
      dataclasses.replace(self._up('forward'), kept=z * wide + (0 if gated else kept_h)),
      # With a gate the activation is a pass of its own.
      *passes('h', (activation_costs.gated_activation(h, wide),) if gated else (), kept_h),
      *passes(
        'h rounded', precision.rounding(h, wide, scaled=noting and self.up.backends.forward is not None), h * width
      ), self._down('forward'),
      *self.down.prepared('weight_grad', make='dy'), self._down('weight_grad'), self._down('input_grad'),
      *precision.activation_and_sampling(
        h, wide, gated=gated, scaled=noting and self.down.backends.input_grad is not None
      ),
      self._up('weight_grad'), self._up('input_grad'),
    )  # fmt: skip

  @property
  def dense_steps(self) -> tuple[Step, ...]:
    """The steps of a dense block in 16 bits."""
    parts = (layer.dense(role, f'{role} of {name}') for name, layer in self.layers.items() for role in ROLES)
    return (*parts, *self._activation_by_xla(True))

  def rival_steps(self, stored: int) -> tuple[Step, ...]:
    """The steps of a dense block in this precision, weights of `stored` bytes an entry; none if that is 16 bits.

    XLA finds the largest magnitude of h and dz in the passes that make them.
    """
    if not self.precision.scales:
      return ()
    (x, h, z, wide), rounding = self._entries, self.precision.rounding
    return (
      *(layer.rival(role, f'{role} of {name}') for name, layer in self.layers.items() for role in ROLES),
      Pass('rounded weights', rounding(self.up.d_in * self.up.d_out, stored) * len(self.layers)),
      Pass('x and dy rounded', rounding(x, wide) * 2),
      Pass('h and dz rounded', rounding(h, wide, scaled=True) + rounding(z, wide, scaled=True)),
      *self._activation_by_xla(False),
    )

  @property
  def _entries(self) -> tuple[int, int, int, int]:
    """Entries of x, h and z, and the bytes of one entry."""
    h = self.up.tokens * self.up.d_out
    return self.up.tokens * self.up.d_in, h, h * (2 if self.gate else 1), self.up.wide

  def _up(self, role: Role) -> Matmul:
    """The matmul of the up-projection, joined with that of the gate; each keeps its chosen back end."""
    make = self.up.joined if self.gate else self.up.matmul
    return make(role, f'{_MAKES[role]} of up')

  def _down(self, role: Role) -> Matmul:
    return self.down.matmul(role, f'{_MAKES[role]} of down')

  def _joins(self) -> tuple[Pass, ...]:
    """The pass that a gate adds: it joins two packed weights and splits their gradient."""
    size = 2 * 2 * self.up.d_in * self.up.d_out * (self.up.packed_entry + self.up.wide)
    return passes('joined operands, split dW', (Move(COPY, size),) if self.gate else ())

  def _activation_by_xla(self, in_matmul: bool) -> tuple[Pass, ...]:
    """The activation, forward and then backward, there with a gate the sum of two gradients of x.

    Without a gate XLA makes h `in_matmul`, a dense one of 16 bits, and once more beside dz: no pass of the forward.
    """
    x, h, z, wide = self._entries
    if in_matmul and self.gate is None:
      return (Pass('dz, and h again', (Move(COPY, 4 * h * wide),)),)
    backward = h + 2 * z + (3 * x if self.gate else 0)
    return Pass('h', (Move(COPY, (z + h) * wide),)), Pass('dz', (Move(COPY, backward * wide),))


def plan_block(
  policy: DotPolicy, tokens: int, sides: Mapping[str, tuple[int, int]], dtype: Any, arrays: Any = (), *,
  down: DotPolicy | None = None, on: Target | None = None, asked: Asked = PLAIN,
) -> BlockPlan:  # fmt: skip
  """The plan of a block with weights of these `sides`, [in, out], by role, under one policy.

  `down` is that of the last matmul, if it is another that `may_end`.
  """
  policies = dict.fromkeys(sides, policy) | {'down': policy if down is None else down}
  return BlockPlan(**{
    role: plan_layer(policies[role], tokens, *side, dtype, arrays, on=on, asked=asked) for role, side in sides.items()
  })  # fmt: skip


def may_end(down: DotPolicy, policy: DotPolicy) -> bool:
  """Whether a block of `policy` may end with a matmul of `down`: the same, or one with an exact weight gradient."""
  return down in (policy, dataclasses.replace(policy, weight_grad='dense'))
