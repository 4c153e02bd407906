"""Many runs of one configuration as one program: every array has an axis of runs, which differ in rate, decay and seed.

A model of a tenth of a million parameters leaves a GPU idle, run by run. Side by side its runs cost little more than
one of them, so that a whole grid is trained in the time of a few. Each computes what `train` computes, up to
rounding. There are no checkpoints: a population that is cut starts again.
"""

from collections.abc import Sequence
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.runs import build, programs
from experiments.runs.experiment import Config
from experiments.runs.race.search import Trial
from sparse24_jax.attention import Attention


class Outcome(NamedTuple):
  """The result of one run of a population.

  Attributes:
    validation: (step, loss) of each evaluation; the loss is not a number once the run has diverged.
    flip_rate: (step, flip rate of the last refresh, None before the first) at each evaluation.
  """

  validation: list[tuple[int, float]]
  flip_rate: list[tuple[int, float | None]]

  @property
  def loss(self) -> float | None:
    """The loss at the end; None if the run diverged."""
    last = self.validation[-1][1]
    return last if np.isfinite(last) else None


class Population:
  """The programs of a configuration for `size` runs at a time.

  Args:
    config: of all runs, but for peak rate, masked decay and seeds. Links that a recipe draws at random are drawn with
      its seed for all runs, as `compare` does.
    size: how many train side by side.
    seeds: how many different ones they have at most.
    data: batches in place of the corpus, the same for all seeds.

  Raises:
    ValueError: what cannot be trained so.
  """

  def __init__(self, config: Config, size: int, *, seeds: int = 1, data: Any = None):
    self.config, self.size, self.seeds, self._given = config, size, seeds, data
    self.parts = build.make_parts(config, data=data)
    recipe = self.parts.recipe
    clusters = any(rule.activation and rule.activation.clusters for rule in recipe.rules)
    if size < 1 or self.parts.mesh is not None or clusters:
      raise ValueError(
        f'{config.name}: {size} runs side by side; there is one at least, on one device, of a recipe without clusters'
        ' of neurons, which are made anew between steps'
      )
    self._init = jax.jit(jax.vmap(programs.make_init(self.parts)))
    self._advance = functools.cache(self._make_advance)
    self._evaluate = functools.cache(self._make_evaluate)
    self._batches = functools.lru_cache(maxsize=16)(self._read_batches)

  def train(self, trials: Sequence[Trial]) -> list[Outcome]:
    """Trains `size` runs or fewer; fewer take as long."""
    if not 1 <= len(trials) <= self.size:
      raise ValueError(f'{len(trials)} trials, {self.size} at a time')
    config = self.config
    padded = [*trials, *[trials[-1]] * (self.size - len(trials))]
    seeds = sorted({trial.seed for trial in padded})
    if len(seeds) > self.seeds:
      raise ValueError(f'trials of {len(seeds)} seeds, made for {self.seeds}')
    # [seeds, steps, micro-batches, ...]: runs that have a seed in common read the same. Always as many seeds, for one
    # program.
    read = [self._batches(seed) for seed in (*seeds, *[seeds[-1]] * (self.seeds - len(seeds)))]
    batches = jax.device_put(jax.tree.map(lambda *x: np.stack(x), *read))
    which = jnp.asarray([seeds.index(trial.seed) for trial in padded], jnp.int32)
    seed = jnp.asarray([trial.seed for trial in padded], jnp.int32)
    told = programs.Told(
      jnp.asarray([trial.rate / config.optimizer.peak_lr for trial in padded], jnp.float32),
      jnp.asarray([trial.decay for trial in padded], jnp.float32) if _decays(config) else None,
    )
    states, good = self._init(seed), jnp.ones(self.size, bool)
    validation, flips = [], []
    for start, stop in itertools.pairwise(self._stops()):
      phase = build.phase_of(self.parts, start)
      if build.projects_at(self.parts, start):
        states = self._project(states)
      states, good, flip_rates = self._advance(*phase)(states, good, batches, which, seed, told, start, stop)
      if stop % config.eval_every == 0 or stop == config.steps:
        losses = jnp.where(good, self._evaluate(*phase)(states), jnp.nan)
        validation.append((stop, losses))
        flips.append((stop, flip_rates))
    validation, flips = jax.device_get((validation, flips))
    return [
      Outcome(
        [(step, float(losses[i])) for step, losses in validation],
        [(step, None if rates[i] < 0 else float(rates[i])) for step, rates in flips],
      )
      for i in range(len(trials))
    ]

  @functools.cached_property
  def _project(self) -> Any:
    project = build.projection(self.parts, jax.eval_shape(programs.make_init(self.parts), 0).params)
    return jax.jit(jax.vmap(lambda s: s._replace(params=project(s.params, s.opt_state))), donate_argnums=0)

  def _stops(self) -> list[int]:
    """The steps at which phases change or losses are evaluated, both ends included."""
    steps, every = self.config.steps, self.config.eval_every
    changes = {s for s in range(1, steps) if build.phase_of(self.parts, s) != build.phase_of(self.parts, s - 1)}
    return sorted({0, steps} | changes | set(range(every, steps, every)))

  def _read_batches(self, seed: int) -> dict[str, np.ndarray]:
    config = self.config.copy_and_resolve_references()
    config.data.seed = seed
    parts = build.make_parts(config, data=self._given)
    read = [build.shard_batch(parts, batch) for batch in itertools.islice(parts.data.train(), config.steps)]
    return {name: np.stack([batch[name] for batch in read]) for name in read[0]}

  def _make_advance(self, phase: str, attention: Attention) -> Any:
    step = programs.step_of(self.parts, phase, attention)
    axes = programs.Told(0, 0 if _decays(self.config) else None)
    many = jax.vmap(lambda *given: step(*given[:3], told=given[3]), in_axes=(0, 0, 0, axes))

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(
      states: Any, good: jax.Array, batches: Any, which: jax.Array, seed: jax.Array, told: Any, start: int, stop: int
    ) -> tuple[Any, jax.Array, jax.Array]:
      def body(i: jax.Array, carried: Any) -> Any:
        states, good, _ = carried
        batch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False)[which], batches)
        states, metrics = many(states, batch, seed, told)
        return states, good & metrics.good, metrics.flip_rate

      return jax.lax.fori_loop(start, stop, body, (states, good, jnp.zeros(self.size)))

    return advance

  def _make_evaluate(self, phase: str, attention: Attention) -> Any:
    evaluate = programs.make_eval(self.parts, phase, attention, num_batches=self.config.eval_batches)
    return jax.jit(jax.vmap(lambda state: evaluate(state)['loss']))


def _decays(config: Config) -> bool:
  return bool(config.recipe.kwargs.get('masked_decay'))
