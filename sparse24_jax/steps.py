"""The steps of a plan, matmuls and passes over memory: what each runs on, keeps and takes, by the records of a GPU."""

from collections.abc import Iterable
import dataclasses
import math
from typing import Any, NamedTuple

from pallas_kernels import _checks, _records, costs

# Of passes over memory, one after another.
Moves = tuple[costs.Move, ...]


class Timing(NamedTuple):
  """The place of a matmul's time in the records.

  Attributes:
    op: the op of the record.
    key: the problem, as pairs.
    row: which of its times: a back end, 'dense', or 'dense_bf16' of what was timed beside a problem in FP8.
    times: how many of them.
    check: what a check on the GPU found of the problem, where the records have nothing near.
  """

  op: str
  key: tuple[tuple[str, Any], ...]
  row: str
  times: float = 1.0
  check: _checks.Entry | None = None

  def rows(self, device: str) -> dict[str, float]:
    """Milliseconds of one by all that was measured; empty if nothing near was."""
    if self.check is not None:
      return _records.times_ms(self.check)
    return _records.expected_ms(device, self.op, dict(self.key))

  def expected_ms(self, device: str) -> float | None:
    """None if nothing near was measured."""
    ms = self.rows(device).get(self.row)
    return None if ms is None else self.times * ms

  @property
  def checked(self) -> float | None:
    """How many times as fast as dense the kernel was, where the time is of a check on the GPU and of no record."""
    return None if self.check is None else _checks.gain(self.check)


@dataclasses.dataclass(frozen=True)
class Matmul:
  """One matmul.

  Attributes:
    name: what it makes.
    backend: of the kernel that runs it; None is XLA's dense one.
    timings: where its time is found, under its sizes and layouts; the first that was measured counts.
    kept: bytes of its results that stay for the backward.
  """

  name: str
  backend: str | None
  timings: tuple[Timing, ...]
  kept: int = 0

  def expected_ms(self, device: str) -> float | None:
    """None if nothing near was measured."""
    found = (timing.expected_ms(device) for timing in self.timings)
    return next((ms for ms in found if ms is not None), None)

  def checked(self, device: str) -> float | None:
    """See `Timing`; None also of a matmul that no timing is known of."""
    found = (timing for timing in self.timings if timing.expected_ms(device) is not None)
    return next((timing.checked for timing in found), None)


@dataclasses.dataclass(frozen=True)
class Pass:
  """One or more passes over memory, between matmuls.

  Attributes:
    name: what they make.
    moves: of each; None if XLA's way was not timed.
    kept: as of a `Matmul`.
  """

  name: str
  moves: Moves | None
  kept: int = 0

  def expected_ms(self, device: str) -> float | None:
    """None if one of them was not measured."""
    return None if self.moves is None else total(costs.expected_ms(device, op, round(size)) for op, size in self.moves)


Step = Matmul | Pass


def passes(name: str, moves: Moves, kept: int = 0) -> tuple[Pass, ...]:
  """One if something moves."""
  return (Pass(name, moves, kept),) if moves else ()


def total(values: Iterable[float | None]) -> float | None:
  """The sum; None if one is."""
  values = list(values)
  known = [value for value in values if value is not None]
  return math.fsum(known) if len(known) == len(values) else None
