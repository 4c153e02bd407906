"""The plan of a feed-forward block, as a value: `ffn` carries it out, `block_gain` prices it."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from pallas_kernels import costs
from sparse24_jax.asked import Asked, PLAIN
from sparse24_jax.availability import Target
from sparse24_jax.layer_plan import LayerPlan, ROLES
from sparse24_jax.plan import plan_layer
from sparse24_jax.policy import DotPolicy
from sparse24_jax.steps import both_ways, Matmul, PACKED8, Pass, rounded, sampled, sampled_in_fp8, Step

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
    """Whether it runs as one: one kernel for all matmuls, or FP8."""
    one = {layer.backends for layer in self.layers.values()}
    whole = len(one) == 1 and self.up.backends.sole is not None
    whole = whole or (self.fp8 and len({backends.weight_grad for backends in one}) == 1)
    # Positions are stored in tiles of 64 rows.
    joins = self.gate is None or self.up.d_out % 64 == 0
    return whole and joins and self.up.tokens % 4 == 0

  @property
  def fp8(self) -> bool:
    """Whether all of it runs in FP8."""
    return all(layer.backends.fp8 for layer in self.layers.values())

  @property
  def plain(self) -> str | None:
    """Why no kernel serves any of its layers, so that all matmuls run dense; None also where FP8 is simulated."""
    why = [None if layer.simulated else layer.plain for layer in self.layers.values()]
    return why[0] if all(why) else None

  @property
  def packed_bytes(self) -> int:
    """Bytes of the packed weights."""
    return sum(layer.packed_bytes for layer in self.layers.values())

  @property
  def saved_bytes(self) -> int:
    """Bytes that FP8 saves on x and h, which the backward keeps; gate and up-projection share one x."""
    return self.up.saved_bytes + self.down.saved_bytes

  @property
  def steps(self) -> tuple[Step, ...]:
    """Everything that runs, in order, but for the packing of weights."""
    if not self.fused:
      # XLA makes h inside a dense matmul of 16 bits.
      in_matmul = self.up.backends.forward is None and not self.up.backends.fp8 and self.up.simulated is None
      parts = (
        step for name, layer in self.layers.items() for role in ROLES
        for step in (*layer.prepared(role), layer.matmul(role, f'{role} of {name}'))
      )  # fmt: skip
      return (*parts, self._activation_by_xla(in_matmul))
    x, h, z, wide = self._entries
    backward = 'gated_silu_backward' if self.gate else 'gelu_backward'
    # With a gate the activation is a pass of its own.
    made = (Pass('h', (('gated_silu_axis-1', (z + h) * wide),)),) if self.gate else ()
    if self.fp8:
      # Without a gate the derivative is bounded.
      largest = (f'{backward}_amax', (h + z) * wide) if self.gate else ('amax', h * wide)
      return (
        rounded('x rounded', x, wide), *self._joins(PACKED8), self._up('forward'), *made, rounded('h rounded', h, wide),
        self._down('forward'), sampled_in_fp8('dy sampled and rounded', x, wide), self._down('weight_grad'),
        self._down('input_grad'), Pass('largest of dz', (largest,)),
        Pass('dz sampled and rounded', ((f'{backward}_pack8', (h + z) * wide + z * PACKED8),)),
        self._up('weight_grad'), self._up('input_grad'),
      )  # fmt: skip
    operand = wide / 2 + 1 / 8
    return (
      *self._joins(2 * operand), self._up('forward'), *made, self._down('forward'), sampled('dy sampled', x, wide),
      self._down('weight_grad'), self._down('input_grad'),
      Pass('dz, and sampled', ((f'{backward}_pack_axis-1', (h + 2 * z) * wide + z * operand),)),
      self._up('weight_grad'), self._up('input_grad'),
    )  # fmt: skip

  @property
  def dense_steps(self) -> tuple[Step, ...]:
    """The steps of a dense block in 16 bits."""
    parts = (layer.dense(role, f'{role} of {name}') for name, layer in self.layers.items() for role in ROLES)
    return (*parts, self._activation_by_xla(True))

  def dense_fp8_steps(self, weight_wide: int) -> tuple[Step, ...]:
    """The steps of a dense block in FP8. It rounds all operands both ways, weights from `weight_wide` bytes an entry.

    XLA finds the largest magnitude of h and dz in the passes that make them.
    """
    x, h, z, wide = self._entries
    weight = ('amax', self.up.d_in * self.up.d_out * weight_wide), both_ways(self.up.d_in * self.up.d_out, weight_wide)
    return (
      *(layer.dense_fp8(role, f'{role} of {name}') for name, layer in self.layers.items() for role in ROLES),
      Pass('rounded weights', weight * len(self.layers)),
      Pass('x and dy rounded', (('amax', x * wide), both_ways(x, wide)) * 2),
      Pass('h and dz rounded', (both_ways(h, wide), both_ways(z, wide))),
      self._activation_by_xla(False),
    )

  @property
  def _entries(self) -> tuple[int, int, int, int]:
    """Entries of x, h and z, and the bytes of one entry."""
    h = self.up.tokens * self.up.d_out
    return self.up.tokens * self.up.d_in, h, h * (2 if self.gate else 1), self.up.wide

  def _up(self, role: str) -> Matmul:
    """The matmul of the up-projection, joined with that of the gate; each keeps its chosen back end."""
    make = self.up.joined if self.gate else self.up.matmul
    return make(role, f'{_MAKES[role]} of up')

  def _down(self, role: str) -> Matmul:
    return self.down.matmul(role, f'{_MAKES[role]} of down')

  def _joins(self, operand: float) -> tuple[Pass, ...]:
    """The pass that a gate adds: it joins two weights, of `operand` bytes an entry, and splits their gradient."""
    if self.gate is None:
      return ()
    size = 2 * 2 * self.up.d_in * self.up.d_out * (operand + self.up.wide)
    return (Pass('joined operands, split dW', ((costs.COPY, size),)),)

  def _activation_by_xla(self, in_matmul: bool) -> Pass:
    """The activation forward and backward, and with a gate the sum of two gradients of x.

    Without a gate XLA makes h `in_matmul`, a dense one of 16 bits, and once more beside dz.
    """
    x, h, z, wide = self._entries
    apart = (z + h) + (h + 2 * z) + (3 * x if self.gate else 0)
    size = 4 * h if in_matmul and self.gate is None else apart
    return Pass('h and dz', ((costs.COPY, size * wide),))


def plan_block(
  policy: DotPolicy, tokens: int, sides: Mapping[str, tuple[int, int]], dtype: Any, arrays: Any = (), *,
  on: Target | None = None, asked: Asked = PLAIN,
) -> BlockPlan:  # fmt: skip
  """The plan of a block with weights of these `sides`, [in, out], by role, under one policy."""
  return BlockPlan(**{
    role: plan_layer(policy, tokens, *side, dtype, arrays, on=on, asked=asked) for role, side in sides.items()
  })  # fmt: skip
