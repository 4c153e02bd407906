"""The masked decay of an experiment, by the loss of short runs: `python -m experiments tune-decay`.

A short run is a whole one with fewer steps: warm-up, fall of the learning rate and dense end are its own. The same
program with `--share 1` and several seeds makes the grid that a short search is judged by. Every run is a record, one
a line, with its flip rates; the same command given again goes on after those that are there.
"""

from collections.abc import Iterable, Mapping, Sequence
import math
from pathlib import Path
from typing import Any, NamedTuple

from experiments.runs import environment, json_lines, records, tune_decay
from experiments.runs.experiment import Config
from experiments.runs.programs import Programs
from experiments.runs.race import tuned
from experiments.runs.race.search import mean_losses, Trial

# Factors of about three, from those of the released scripts (300,000 steps) to what runs of a few hundred steps want.
CANDIDATES = (0.0, 6e-6, 2e-5, 6e-5, 2e-4, 6e-4, 2e-3, 6e-3, 2e-2, 6e-2, 2e-1)
# Half: a quarter of the steps prefers a larger decay than whole runs do (docs/quality.md).
SHARE = 0.5
# Losses that differ by less than this share of the lowest are as good.
EQUAL = 0.005


class Choice(NamedTuple):
  """The result of a search.

  Attributes:
    decay: the factor whose mean loss is lowest.
    reason: in a sentence, and what speaks against it.
    losses: decay -> mean loss over the seeds; infinite where a run diverged.
  """

  decay: float
  reason: str
  losses: Mapping[float, float]


def shorten(config: Config, share: float) -> Config:
  """A copy with a share of the steps; the warm-up keeps its share, the period of mask searches its steps.

  Raises:
    ValueError: a share that is not in (0, 1], or one that leaves too few steps for the warm-up.
  """
  if not 0 < share <= 1:
    raise ValueError(f'share={share} must be in (0, 1]')
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.steps = max(2, round(share * config.steps))
    config.optimizer.warmup_steps = max(1, round(share * config.optimizer.warmup_steps))
    config.log_every = max(1, min(config.log_every, config.steps // 20))
    config.eval_every = config.log_every * -(-config.steps // config.log_every)  # at the end alone
    config.checkpoint_every = 0
  return config


def search(
  config: Config,
  folder: str | Path,
  results: Path,
  *,
  candidates: Iterable[float] = CANDIDATES,
  share: float = SHARE,
  seeds: Sequence[int] = (0, 1),
  data: Any = None,
) -> Choice:
  """Trains every candidate with every seed and chooses.

  Args:
    config: an experiment whose recipe takes `masked_decay`; its learning rate is that of all.
    folder: gets a folder a run.
    results: JSON-lines file of records.
    candidates: decay factors.
    share: of the experiment's steps.
    seeds: a run each.
    data: batches in place of the corpus, for tests.

  Raises:
    ValueError: no candidates or seeds, a recipe without masked decay, or what `shorten` and `tuned.read_records`
      refuse.
  """
  tune_decay.require_decay(config)
  candidates = sorted(set(candidates))
  if not candidates or not seeds or not all(math.isfinite(decay) and decay >= 0 for decay in candidates):
    raise ValueError(f'candidates={candidates}, seeds={list(seeds)}: give factors of zero or more, and a seed')
  base, head = shorten(config, share), environment.head()
  results.parent.mkdir(parents=True, exist_ok=True)
  own = {'bench': 'decay', 'experiment': config.name, 'text': tuned.text_of(base, data)}
  found = tuned.read_records(results, own['text'])
  mine = []
  for decay in candidates:
    programs: list[Programs] = []
    for seed in seeds:
      trial = Trial(config.optimizer.peak_lr, decay, seed, share)
      run = _configure(base, trial)
      wanted = {**tuned.describe(run), 'device': head['device'], **own}
      record = next((r for r in found if wanted.items() <= r.items() and r['seed'] == seed), None)
      if record is None:
        path = Path(folder) / run.name
        record = tuned.train_trial(run, trial, path, own['text'], head=head, data=data, programs=programs)
        steps, rates = records.read_run(path).flip_curve()
        curve = [[int(step), float(rate)] for step, rate in zip(steps, rates, strict=True)]
        record |= {**own, 'contender': config.method, 'flip_rates': curve}
        json_lines.append(results, record)
        print(f'  decay {decay:<8g} seed {seed}: loss {_said(record["loss"])} after {run.steps} steps', flush=True)
      mine.append(record)
  return choose(mine)


def choose(found: Sequence[Mapping[str, Any]]) -> Choice:
  """The decay of the lowest mean loss.

  >>> choose([{'decay': d, 'loss': loss} for d, loss in ((0.0, 1.2), (2e-3, 1.0), (6e-3, 1.002), (2e-2, None))])
  Choice(decay=0.002, reason='the lowest loss, 1.0000; as good within 0.5%: 0.006', losses={...})
  """
  losses = mean_losses(found, lambda record: record['decay'])
  best = min(losses, key=lambda decay: losses[decay])
  if math.isinf(losses[best]):
    return Choice(best, 'all diverged: lower optimizer.peak_lr', losses)
  as_good = [f'{decay:g}' for decay, loss in losses.items() if decay != best and loss <= (1 + EQUAL) * losses[best]]
  reason = f'the lowest loss, {losses[best]:.4f}'
  if as_good:
    reason += f'; as good within {100 * EQUAL:g}%: {", ".join(as_good)}'
  if best == max(losses) and len(losses) > 1:
    reason += '; it is the largest tried, so a larger one may be better'
  return Choice(best, reason, losses)


def _configure(base: Config, trial: Trial) -> Config:
  config = base.copy_and_resolve_references()
  with config.unlocked():
    config.recipe.flip_rate = 'step'
    config.recipe.kwargs.masked_decay = trial.decay
    config.seed = config.data.seed = trial.seed
    config.name = f'{config.recipe.name}-{config.steps}-decay{trial.decay:g}-seed{trial.seed}'
  return config


def _said(loss: float | None) -> str:
  return 'diverged' if loss is None else f'{loss:.4f}'
