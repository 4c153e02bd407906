"""Which trial a contender makes next: learning rates, then decays, then the winner again with other seeds."""

from collections.abc import Mapping, Sequence
import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Trial:
  """What a run is told.

  Attributes:
    rate: peak learning rate.
    decay: masked decay; 0 where there is none.
    seed: for initial weights, order of the data and sampling.
    share: of the seconds of the race.
  """

  rate: float
  decay: float
  seed: int = 0
  share: float = 1.0


@dataclasses.dataclass(frozen=True)
class Budget:
  """How much every contender may search.

  Attributes:
    rates: to begin with, in ascending order.
    most_rates: while the best is the lowest or highest, rates are added by a factor of two, up to so many.
    repeats: of the best trial, after the search: (seed, share of the seconds) each.
  """

  rates: tuple[float, ...]
  most_rates: int = 4
  repeats: tuple[tuple[int, float], ...] = ((1, 1.0), (2, 1.0), (0, 0.7))


def next_trial(done: Mapping[Trial, float], decays: Sequence[float], budget: Budget) -> Trial | None:
  """The trial after those that are done, with their final losses (not finite: diverged); None if there is none.

  >>> budget = Budget((1e-3, 2e-3), most_rates=3, repeats=((1, 1.0),))
  >>> next_trial({Trial(1e-3, 0.0): 1.2, Trial(2e-3, 0.0): 1.0}, [0.0], budget)
  Trial(rate=0.004, decay=0.0, seed=0, share=1.0)
  """
  first_decay = sorted(decays)[len(decays) // 2]
  # The middle rate first: of a race that ends early it is the one to have.
  for rate in sorted(budget.rates, key=lambda r: abs(math.log(r / budget.rates[len(budget.rates) // 2]))):
    if Trial(rate, first_decay) not in done:
      return Trial(rate, first_decay)
  rates = {trial.rate: loss for trial, loss in done.items() if trial == Trial(trial.rate, first_decay)}
  rate = _best(rates)
  if len(rates) < budget.most_rates and (rate in (min(rates), max(rates))):
    return Trial(rate / 2 if rate == min(rates) else rate * 2, first_decay)
  for decay in decays:
    if Trial(rate, decay) not in done:
      return Trial(rate, decay)
  decay = _best({trial.decay: loss for trial, loss in done.items() if trial == Trial(rate, trial.decay)})
  for seed, share in budget.repeats:
    if Trial(rate, decay, seed, share) not in done:
      return Trial(rate, decay, seed, share)
  return None


def _best(losses: Mapping[float, float]) -> float:
  return min(losses, key=lambda key: losses[key] if math.isfinite(losses[key]) else math.inf)
