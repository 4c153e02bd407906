"""When a run is at a loss, and after what share of the time of another it is at the other's final loss.

Losses between two evaluations are taken from the line through them, which lies above curves that flatten as these do:
seconds are rather too many.
"""

from collections.abc import Sequence
import math

# (seconds, loss) of each evaluation of a run.
type Curve = Sequence[tuple[float, float]]


def seconds_to(curve: Curve, loss: float) -> float | None:
  """Seconds after which a curve is first at or below a loss; None if it never is.

  >>> seconds_to([(10.0, 3.0), (20.0, 2.0), (30.0, 1.0)], 1.5)
  25.0
  """
  before = None
  for seconds, now in curve:
    if now <= loss:
      if before is None:
        return seconds
      return before[0] + (seconds - before[0]) * (before[1] - loss) / (before[1] - now)
    before = seconds, now
  return None


def share_of_time(curve: Curve, other: Curve) -> float:
  """The share of the other run's seconds after which a run is at the other's final loss; infinite if it never is.

  >>> share_of_time([(10.0, 3.0), (20.0, 2.0)], [(20.0, 3.5), (40.0, 2.5)])
  0.375
  """
  reached = seconds_to(curve, other[-1][1])
  return math.inf if reached is None else reached / other[-1][0]
