"""What a run does about numbers that are not finite and about losses that jump.

Looked at are the loss and the norm of the gradient of every step, the validation loss, and parameters and optimizer
state before each checkpoint, so that no checkpoint holds bad numbers. `config.bad_numbers.policy`:

- 'stop': the run ends with an error that says how to go on;
- 'skip': a step whose loss, gradient, new parameters or new optimizer state are bad, or whose loss jumps, leaves
  parameters, moments and masks as they were, and the next batch is taken. This is `optax.apply_if_finite` with the
  results looked at as well as the gradients; it keeps the old state until the new one is seen, which takes memory;
- 'roll_back': the run goes on from its last checkpoint with the batches that follow the bad one.

`config.bad_numbers.cap` is how many steps in a row are skipped, or how often it is rolled back, before the run stops.
"""

from collections import deque
from collections.abc import Iterable
import dataclasses
import math

import numpy as np

from experiments.runs.experiment import Config

POLICIES = ('stop', 'skip', 'roll_back')
# Steps whose median a loss is held against, and how many there must be.
_LATEST, _ENOUGH = 100, 20


class BadNumbersError(Exception):
  """A number is not finite, or a loss jumped; the message says which and at what step."""


@dataclasses.dataclass(frozen=True)
class Policy:
  """See the module.

  Attributes:
    name: one of `POLICIES`.
    cap: steps skipped in a row, or roll-backs, before the run stops.
    spike: how many times the median of the latest losses, or of 1 nat where that is more, a loss may be; 0: any.
  """

  name: str
  cap: int
  spike: float

  def __post_init__(self):
    if self.name not in POLICIES:
      raise ValueError(f'bad_numbers.policy is {self.name!r}; known: {", ".join(POLICIES)}')
    if self.cap < 1:
      raise ValueError(f'bad_numbers.cap is {self.cap}; it must be 1 or more')
    if not (self.spike == 0 or 1 < self.spike < math.inf):
      raise ValueError(f'bad_numbers.spike is {self.spike}; it must be more than 1, or 0 to allow any loss')


def policy_of(config: Config) -> Policy:
  """The policy of a configuration; ValueError for one that makes no sense."""
  section = config.bad_numbers
  return Policy(section.policy, section.cap, section.spike)


class Losses:
  """The latest good losses of a run, by which a jump is known.

  Args:
    spike: see `Policy`.
    latest: of a run that goes on.

  >>> losses = Losses(20.0, [3.0] * 30)
  >>> losses.limit()
  60.0
  """

  def __init__(self, spike: float, latest: Iterable[float] = ()):
    self._spike, self.latest = spike, deque(latest, maxlen=_LATEST)

  def limit(self) -> float:
    """A loss above it is a jump; infinity while too few are known."""
    if not self._spike or len(self.latest) < _ENOUGH:
      return math.inf
    return self._spike * max(float(np.median(self.latest)), 1.0)

  def take(self, step: int, loss: float, grad_norm: float) -> None:
    """Takes note of a step.

    Raises:
      BadNumbersError: its loss or the norm of its gradient is not finite, or its loss jumped.
    """
    require_finite(step, 'loss', loss)
    require_finite(step, 'norm of the gradient', grad_norm)
    if loss > (limit := self.limit()):
      raise BadNumbersError(
        f'the loss jumped to {loss:.4g} at step {step}, above {limit:.4g}, which is bad_numbers.spike {self._spike:g} '
        f'times the median of the {len(self.latest)} steps before'
      )
    self.latest.append(float(loss))


def require_finite(step: int, what: str, value: float) -> None:
  """Raises BadNumbersError if a number is not finite."""
  if not math.isfinite(value):
    raise BadNumbersError(f'the {what} is {value} at step {step}')
