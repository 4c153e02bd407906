"""Choosing the masked-decay factor from short warm-up runs, with a record and a plot of mu against lambda."""

from collections.abc import Sequence
import inspect
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.runs import build, meshes, programs
from experiments.runs.environment import environment
from experiments.runs.experiment import Config
import sparse24_jax as s24

# Values like those of the released scripts, which are for 300,000 steps, and on to where short runs flip too little:
# the largest feasible one is chosen, so a grid that ends before chooses its own end.
CANDIDATES = (0.0, 6e-6, 6e-5, 2e-4, 6e-4, 2e-3, 6e-3, 2e-2, 6e-2, 2e-1)

# Fields that the search sets itself, and what to use instead; the second lot where a dense experiment is tuned.
SET_BY_TUNING = {
  'recipe.kwargs.masked_decay': 'it is what is searched; use --candidates',
  'recipe.flip_rate': 'rates are always a step here; use train',
}
SET_FOR_DENSE = {
  **dict.fromkeys(('recipe', 'label'), 'a dense experiment is tuned with FST; set recipe.name=transposable_srste too'),
  'data.seed': 'it follows the seed; use --set seed',
}


def require_decay(config: Config) -> None:
  """Raises ValueError for an experiment whose recipe has no masked decay to tune."""
  make = getattr(s24.recipes, config.recipe.name, None)
  if make is None or 'masked_decay' not in inspect.signature(make).parameters:
    raise ValueError(f'recipe {config.recipe.name!r} takes no masked_decay; set recipe.name=transposable_srste')


def warmup_flip_rate(config: Config, decay: float | None, *, steps: int, last: int, data: Any = None) -> float:
  """Trains for the warm-up and returns the mean flip rate of its end.

  The learning rate follows the full run's schedule; only the number of steps is cut.

  Args:
    config: an experiment whose recipe takes `masked_decay`.
    decay: the factor, or None for the dense twin, whose would-be masks are watched.
    steps: optimizer steps.
    last: mean over this many last steps; rates are per step.
    data: batches in place of the corpus.
  """
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.recipe.flip_rate = 'step'
    config.recipe.kwargs.masked_decay = decay or 0.0
  parts = build.make_parts(config, data=data)
  if decay is None:
    parts = parts._replace(recipe=parts.recipe.dense_twin())
  phase = s24.phase_at(parts.recipe, 0, config.steps)
  state = programs.init_state(parts)
  shardings = (meshes.state_sharding(parts.mesh, state), None) if parts.mesh else None
  step = programs.make_step(parts, phase, shardings)
  batches, rates = parts.data.train(), []
  for _ in range(steps):
    state, metrics = step(state, build.shard_batch(parts, next(batches)))
    rates.append(metrics.flip_rate)
  return float(np.mean(jax.device_get(rates[-last:])))


def tune(
  config: Config, folder: str | Path, *, candidates: Sequence[float] = CANDIDATES, steps: int = 0, data: Any = None
) -> s24.DecayChoice:
  """Runs the warm-ups, writes `tune_decay.json` and `tune_decay.svg`, and returns the choice.

  Args:
    config: the experiment.
    folder: where to write; made when missing.
    candidates: decay factors to try.
    steps: optimizer steps a run; 0 means the experiment's learning-rate warm-up, or ten mask refreshes if longer.
    data: batches in place of the corpus.

  Raises:
    ValueError: a recipe without masked decay, or what `tune_masked_decay` refuses.
  """
  require_decay(config)
  steps = steps or max(config.optimizer.warmup_steps, 10 * config.recipe.kwargs.get('refresh_every', 40))
  # Single steps vary by a tenth or more; a quarter of the run averages that out.
  last = max(1, steps // 4)

  def run_warmup(decay: float | None) -> float:
    rate = warmup_flip_rate(config, decay, steps=steps, last=last, data=data)
    print(f'  {"dense twin" if decay is None else f"decay {decay:g}":<14} flip rate {rate:.3e} a step', flush=True)
    return rate

  print(f'{config.name}: {len(candidates) + 1} runs of {steps} steps, flip rates averaged over the last {last}')
  choice = s24.tune_masked_decay(run_warmup, candidates)
  folder = Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  record = {
    'experiment': config.name,
    'recipe': config.recipe.to_dict(),
    'steps': steps,
    'averaged_over': last,
    **choice._asdict(),
    'trials': [trial._asdict() for trial in choice.trials],
    **environment(),
  }
  (folder / 'tune_decay.json').write_text(json.dumps(record, indent=2) + '\n')
  plot(choice, folder / 'tune_decay.svg')
  return choice


def plot(choice: s24.DecayChoice, path: str | Path) -> None:
  """Draws mu against lambda with the feasible band; the file's ending decides its format."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(7, 4.2), layout='constrained')
  axes = figure.add_subplot()
  decays = [trial.decay for trial in choice.trials]
  ratios = [trial.ratio for trial in choice.trials]
  smallest = min((d for d in decays if d > 0), default=1e-6)
  axes.axhspan(*choice.band, color='#009e73', alpha=0.14, label=f'feasible, {choice.band[0]:g} to {choice.band[1]:g}')
  axes.axhline(1.0, color='#59636e', linewidth=1, linestyle=':', label='dense twin')
  axes.plot(decays, ratios, color='#0072b2', marker='o')
  if choice.decay is not None:
    chosen = next(trial for trial in choice.trials if trial.decay == choice.decay)
    axes.plot([chosen.decay], [chosen.ratio], 'o', color='#d55e00', markersize=11, label=f'chosen, {chosen.decay:g}')
  axes.set_xscale('symlog', linthresh=smallest)
  axes.set_xlim(left=0 if decays[0] == 0 else smallest)
  axes.set_xlabel(r'masked decay $\lambda$')
  axes.set_ylabel(r'flip-rate ratio $\mu$, sparse over dense')
  axes.spines[['top', 'right']].set_visible(False)
  axes.legend(frameon=False)
  figure.savefig(path)
