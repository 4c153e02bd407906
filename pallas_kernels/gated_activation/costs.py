"""What the activations' passes move, for `hidden` entries of dh of `wide` bytes; with a gate z has twice as many.

Plans do not know the activation: without one, names are of 'silu' with a gate and of 'gelu' else.
"""

from pallas_kernels.costs import Move
from pallas_kernels.pack.costs import packed_entry


def gated_activation(hidden: int, wide: int, *, activation: str | None = None) -> Move:
  """Of `gated_activation.api.gated_activation`."""
  return Move(f'{_name(True, activation)}_axis-1', 3 * hidden * wide)


def activation_backward(hidden: int, wide: int, *, gated: bool, activation: str | None = None) -> Move:
  """Of `gated_activation.api.activation_backward`."""
  return Move(f'{_name(gated, activation)}_backward', (hidden + 2 * _z(hidden, gated)) * wide)


def activation_backward_pack(hidden: int, wide: int, width: int, *, gated: bool, activation: str | None = None) -> Move:
  """Of `gated_activation.api.activation_backward_pack`, its sample in values of `width`; in float8 dz is, too."""
  z, name = _z(hidden, gated), f'{_name(gated, activation)}_backward_pack'
  written = packed_entry(width) + (0 if width == 1 else wide)
  return Move(f'{name}8' if width == 1 else f'{name}_axis-1', (hidden + z) * wide + z * written)


def activation_backward_amax(hidden: int, wide: int, *, gated: bool, activation: str | None = None) -> Move:
  """Of `gated_activation.api.activation_backward_amax`."""
  return Move(f'{_name(gated, activation)}_backward_amax', (hidden + _z(hidden, gated)) * wide)


def _z(hidden: int, gated: bool) -> int:
  return 2 * hidden if gated else hidden


def _name(gated: bool, activation: str | None) -> str:
  return f'gated_{activation or "silu"}' if gated else activation or 'gelu'
