"""Methods at equal steps, each at the best of a grid: `python -m experiments grid`.

Every method has as many trials: a grid of rates and masked decays, or, for a method without a decay, so many more rates
between the same ends. All are trained with the seeds that search; the setting of the lowest mean is trained with other
seeds, and what is reported is of these alone: a loss that chose its setting flatters it. Runs of a method train side by
side, see `population`. Records are written as a population ends; the same command given again goes on after those.
"""

from collections.abc import Mapping, Sequence
import math
from pathlib import Path
import time
from typing import Any

import numpy as np

from experiments.runs import environment, json_lines, method_table, methods
from experiments.runs.experiment import Config
from experiments.runs.race import decays, tuned
from experiments.runs.race.population import Outcome, Population
from experiments.runs.race.search import mean_losses, Trial


def settings(config: Config, rates: Sequence[float], factors: Sequence[float]) -> list[tuple[float, float]]:
  """(rate, decay) of the trials of a method.

  Args:
    config: of the method.
    rates: of the grid; a method without a decay has as many trials, evenly spread in logarithms between the ends.
    factors: of the decay that the method has.

  >>> from experiments.runs import experiment, methods
  >>> [s24_fst, dense] = [methods.configure(experiment.load_config('nano'), name, 0) for name in ('fst', 'dense')]
  >>> settings(s24_fst, [1e-3, 4e-3], [1, 3])
  [(0.001, 0.006), (0.001, 0.018), (0.004, 0.006), (0.004, 0.018)]
  >>> settings(dense, [1e-3, 4e-3], [1, 3])
  [(0.001, 0.0), (0.001587, 0.0), (0.00252, 0.0), (0.004, 0.0)]
  """
  decay = config.recipe.kwargs.get('masked_decay')
  if decay:
    return [(rate, float(f'{decay * factor:.4g}')) for rate in rates for factor in factors]
  count = len(rates) * len(factors)
  found = np.geomspace(min(rates), max(rates), count) if count > 1 else rates[:1]
  return [(float(f'{rate:.4g}'), 0.0) for rate in found]


class Grid:
  """Methods, the grid and the file of their records.

  Args:
    results: JSON-lines file of records.
    experiment: name or path of the experiment, see `experiment.load_config`.
    names: keys of `METHODS` or `GROUPS` of `method_table`.
    rates: see `settings`.
    factors: see `settings`.
    search: seeds that choose.
    seeds: other seeds, for the setting that was chosen; none makes the grid alone.
    population: how many runs train side by side.
    share: of the experiment's steps, for a search by short runs.
    tiny: the experiment's tiny twin.
    overrides: 'section.key=value' strings.
    data: batches in place of the corpus.

  Raises:
    ValueError: see `methods.run_all` and `tuned.read_records`; seeds that both choose and are reported; no trials.
  """

  def __init__(
    self,
    results: Path,
    *,
    experiment: str,
    names: Sequence[str],
    rates: Sequence[float],
    factors: Sequence[float] = (1.0,),
    search: Sequence[int] = (0, 1),
    seeds: Sequence[int] = (2, 3, 4, 5, 6),
    population: int = 32,
    share: float = 1.0,
    tiny: bool = False,
    overrides: Sequence[str] = (),
    data: Any = None,
  ):
    if not rates or not factors or not search or min(*rates, *factors, 1.0) <= 0 or set(search) & set(seeds):
      raise ValueError(
        f'rates={list(rates)}, factors={list(factors)}, search={list(search)}, seeds={list(seeds)}: give rates and'
        ' factors above zero, a seed to search with, and other seeds to report'
      )
    if not 0 < share <= 1:
      raise ValueError(f'share={share:g} of the steps must be above 0, and 1 at most')
    base = methods.load_checked(experiment, names, tiny=tiny, overrides=overrides)
    # Kernels have no axis of runs; and a search of masks at every step, for flip rates a step, would cost more than
    # the steps.
    base.recipe.update({'implementation': 'reference', 'flip_rate': 'refresh'})
    self.results, self.data, self.population, self.share = results, data, population, share
    self.experiment, self.steps = base.name, base.steps
    configs = {name: methods.configure(base, name, search[0]) for name in method_table.expand(names)}
    self.settings = {name: settings(config, rates, factors) for name, config in configs.items()}
    self.configs = {name: decays.shorten(config, share) if share < 1 else config for name, config in configs.items()}
    self.search, self.seeds = tuple(search), tuple(seeds)
    self.head = environment.head()
    self.text = tuned.text_of(next(iter(self.configs.values())), data)
    self.records = tuned.read_records(results, self.text)

  def run(self) -> list[dict[str, Any]]:
    """Makes all trials that are missing, method after method, and returns the records of all."""
    self.results.parent.mkdir(parents=True, exist_ok=True)
    ours = []
    for name, config in self.configs.items():
      seeds = min(self.population, max(len(self.search), len(self.seeds)))
      population = Population(config, self.population, seeds=seeds, data=self.data)
      grid = [Trial(*setting, seed, self.share) for setting in self.settings[name] for seed in self.search]
      found = self._train(name, population, grid)
      if self.seeds:
        best = choose(found)
        print(f'{name}: rate {best[0]:g}, decay {best[1]:g}', flush=True)
        found += self._train(name, population, [Trial(*best, seed, self.share) for seed in self.seeds])
      ours += found
    return ours

  def _train(self, name: str, population: Population, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Records of trials, of which those that are there are not trained again."""
    found = {trial: record for trial in trials if (record := self._recorded(name, trial)) is not None}
    missing = [trial for trial in trials if trial not in found]
    for at in range(0, len(missing), population.size):
      some, start = missing[at : at + population.size], time.perf_counter()
      outcomes = population.train(some)
      seconds = time.perf_counter() - start
      print(f'{name}: {len(some)} runs of {population.config.steps} steps side by side, {seconds:.0f} s', flush=True)
      made = [
        self._record(name, trial, outcome, len(some), seconds) for trial, outcome in zip(some, outcomes, strict=True)
      ]
      json_lines.append(self.results, *made)
      found |= dict(zip(some, made, strict=True))
    self.records += [found[trial] for trial in missing]
    return [found[trial] for trial in trials]

  def _record(self, name: str, trial: Trial, outcome: Outcome, count: int, seconds: float) -> dict[str, Any]:
    loss = outcome.loss
    return {
      **self._key(name, trial), 'title': self.configs[name].label, 'rate': trial.rate, 'decay': trial.decay,
      'share': trial.share, 'loss': loss, 'equal_steps': self.steps, 'seconds': None,
      'validation': [[step, None, value if math.isfinite(value) else None] for step, value in outcome.validation],
      'validation_columns': ['step', 'seconds', 'loss'],
      'flip_rate': {'refreshes': [[step, rate] for step, rate in outcome.flip_rate]},
      # For the whole population, compiling included.
      'side_by_side': count, 'wall_s': round(seconds, 1), **self.head,
    }  # fmt: skip

  def _key(self, name: str, trial: Trial) -> dict[str, Any]:
    """The fields that identify a record."""
    described = tuned.describe(tuned.configure(self.configs[name], trial))
    return {
      'bench': 'tuned', 'experiment': self.experiment, 'contender': name, 'seed': trial.seed,
      'searched_with': list(self.search), 'text': self.text, **described, 'device': self.head['device'],
    }  # fmt: skip

  def _recorded(self, name: str, trial: Trial) -> dict[str, Any] | None:
    wanted = self._key(name, trial).items()
    return next((record for record in self.records if wanted <= record.items()), None)


def choose(records: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
  """Rate and decay of the lowest mean loss; a setting of which a run diverged comes last."""
  losses = mean_losses(records, lambda record: (record['rate'], record['decay']))
  return min(losses, key=lambda setting: (losses[setting], setting))


