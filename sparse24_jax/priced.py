"""A feed-forward block, priced part by part by the records of a GPU."""

from collections.abc import Iterable
import dataclasses

from sparse24_jax.steps import Matmul, Step, total


@dataclasses.dataclass(frozen=True)
class Part:
  """A matmul, or a pass over memory, of a block.

  Attributes:
    name: what it makes.
    ms: expected time; None if nothing near was measured.
    by: what runs a matmul: a back end, or 'dense'.
    checked: how many times as fast as dense its kernel was when it was checked on this GPU; None where a record says.
    kept: bytes of its results that stay for the backward.
  """

  name: str
  ms: float | None
  by: str = ''
  checked: float | None = None
  kept: int = 0


@dataclasses.dataclass(frozen=True)
class BlockGain:
  """A feed-forward block, forward and backward, packing of its weights included and the search for masks not.

  Attributes:
    chosen: what runs.
    dense: a dense block in 16 bits.
    dense_fp8: a dense block in FP8, all operands scaled by their own largest magnitude, weights anew in every
      micro-batch; empty where the policy is none of FP8.
    packed_bytes: of the operands of its weights.
    saved_bytes: what x and h, which the backward keeps, take less in FP8. The peak of memory need not shrink so.
    why_dense: why all matmuls run dense: no kernel serves the block, or sparse activations are not known to pay.
    simulated: why its FP8 would be simulated, in a time that nobody measured.

  >>> from sparse24_jax.block_gain import BlockGain, Part
  >>> block = BlockGain((Part('packed weights', 0.5), Part('y of up', 1.5)), (Part('forward of up', 3.0),), (), 0, 0)
  >>> block.expected_ms, block.gain, block.dense_fp8_ms
  (2.0, 1.5, None)
  """

  chosen: tuple[Part, ...]
  dense: tuple[Part, ...]
  dense_fp8: tuple[Part, ...]
  packed_bytes: int
  saved_bytes: int
  why_dense: str | None = None
  simulated: str | None = None

  @property
  def expected_ms(self) -> float | None:
    return total(part.ms for part in self.chosen)

  @property
  def dense_ms(self) -> float | None:
    return total(part.ms for part in self.dense)

  @property
  def dense_fp8_ms(self) -> float | None:
    return total(part.ms for part in self.dense_fp8) if self.dense_fp8 else None

  @property
  def gain(self) -> float | None:
    """Dense time over expected time."""
    return _over(self.dense_ms, self.expected_ms)

  @property
  def gain_over_fp8(self) -> float | None:
    """Dense FP8 time over expected time."""
    return _over(self.dense_fp8_ms, self.expected_ms)


def _over(dense: float | None, expected: float | None) -> float | None:
  return None if dense is None or expected is None else dense / expected


def priced(steps: Iterable[Step], device: str) -> tuple[Part, ...]:
  """The steps of a plan with their expected times; `device` is the folder of the records."""
  return tuple(_part(step, device) for step in steps)


def _part(step: Step, device: str) -> Part:
  ms = step.expected_ms(device)
  if not isinstance(step, Matmul):
    return Part(step.name, ms, kept=step.kept)
  return Part(step.name, ms, step.backend or 'dense', step.checked(device) if step.backend else None, step.kept)
