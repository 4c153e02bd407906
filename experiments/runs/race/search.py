"""Which trial comes next: a search of rate and decay with as many trials for all, then the winner with other seeds."""

from collections.abc import Callable, Hashable, Iterable, Mapping
import dataclasses
import math
import statistics
from typing import Any

# A whole step of the search multiplies a rate, and a decay, by these; the last steps are a quarter of it.
_FACTORS = (2.0, 3.0)
_PARTS = 4

# How many of the finest steps a trial is away from the first: of the rate and, if there is one, of the decay.
type _Place = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Trial:
  """The settings of a run.

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
  """How much every method may search.

  Attributes:
    trials: of the search, which is with one seed.
    repeats: of the best trial, after the search: (seed, share of the seconds) each.
  """

  trials: int
  repeats: tuple[tuple[int, float], ...] = ()

  def __post_init__(self):
    if self.trials < 1:
      raise ValueError(f'trials={self.trials}: a search has one at least')


def or_inf(loss: float | None) -> float:
  """A loss of a record; infinite where the run had diverged, of which a record has none."""
  return math.inf if loss is None else loss


def mean_losses[Setting: Hashable](
  records: Iterable[Mapping[str, Any]], setting: Callable[[Mapping[str, Any]], Setting]
) -> dict[Setting, float]:
  """Final loss by setting, the mean over the records that have it; infinite where one of them diverged.

  >>> mean_losses([{'rate': 1.0, 'loss': loss} for loss in (1.5, 2.5)], lambda record: record['rate'])
  {1.0: 2.0}
  """
  found: dict[Setting, list[float]] = {}
  for record in records:
    found.setdefault(setting(record), []).append(or_inf(record['loss']))
  return {each: statistics.fmean(losses) for each, losses in found.items()}


def next_trial(done: Mapping[Trial, float], first: Trial, budget: Budget) -> Trial | None:
  """The trial after those that are done, with their final losses (not finite: diverged); None if there is none.

  The search begins at `first` and goes on at neighbours of the best so far: half and twice its rate, a third and three
  times its decay, if it has one; when no neighbour is left, at smaller steps. A method without a decay so spends on
  rates what others spend on decays.

  >>> done = {Trial(1e-3, 0.0): 1.2, Trial(5e-4, 0.0): 1.3, Trial(2e-3, 0.0): 1.0}
  >>> next_trial(done, Trial(1e-3, 0.0), Budget(trials=4))
  Trial(rate=0.004, decay=0.0, seed=0, share=1.0)
  """
  found = {place: loss for trial, loss in done.items() if (place := _place(trial, first)) is not None}
  if not found:
    return first
  best = _best(found)
  if len(found) < budget.trials and (place := _neighbour(found, best)):
    return _trial(place, first)
  for seed, share in budget.repeats:
    again = dataclasses.replace(_trial(best, first), seed=seed, share=share)
    if again not in done:
      return again
  return None


def _neighbour(found: Mapping[_Place, float], best: _Place) -> _Place | None:
  """The first place around the best that was not tried, nor lies behind one that was, at the largest steps.

  Whichever of rate and decay was varied less comes first; otherwise a rate that can still rise would use up all trials.
  Of the two sides of the best, the one whose nearest trial ended lower comes first.
  """

  def nearest(axis: int, sign: int) -> float:
    others = [p for p in found if (p[axis] - best[axis]) * sign > 0 and _but(p, axis) == _but(best, axis)]
    return _finite(found[min(others, key=lambda p: abs(p[axis] - best[axis]))]) if others else math.inf

  axes = sorted(range(len(best)), key=lambda axis: len({place[axis] for place in found}))
  for step in (_PARTS, _PARTS // 2, 1):
    for axis in axes:
      for sign in sorted((-1, 1), key=lambda sign: nearest(axis, sign)):
        way = [(*best[:axis], best[axis] + sign * part, *best[axis + 1 :]) for part in range(1, step + 1)]
        if found.keys().isdisjoint(way):
          return way[-1]
  return None


def _but(place: _Place, axis: int) -> _Place:
  return place[:axis] + place[axis + 1 :]


def _best(found: Mapping[_Place, float]) -> _Place:
  """The lowest loss; of trials that diverged, the one of the lowest rate."""
  return min(found, key=lambda place: (_finite(found[place]), place))


def _finite(loss: float) -> float:
  return loss if math.isfinite(loss) else math.inf


def _axes(first: Trial) -> tuple[float, ...]:
  return (first.rate, first.decay) if first.decay else (first.rate,)


def _trial(place: _Place, first: Trial) -> Trial:
  rate, *decay = (
    float(f'{start * factor ** (steps / _PARTS):.4g}') if steps else start  # the first trial is told as it is
    for start, factor, steps in zip(_axes(first), _FACTORS, place, strict=False)
  )
  return dataclasses.replace(first, rate=rate, decay=decay[0] if decay else 0.0)


def _place(trial: Trial, first: Trial) -> _Place | None:
  """None for a trial that this search does not make."""
  axes = _axes(trial)
  if len(axes) != len(_axes(first)):
    return None
  steps = zip(axes, _axes(first), _FACTORS, strict=False)
  place = tuple(round(_PARTS * math.log(value / start, factor)) for value, start, factor in steps)
  return place if trial == _trial(place, first) else None
