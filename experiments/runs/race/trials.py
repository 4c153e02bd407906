"""Steps timed by the clock, and one run."""

import itertools
import math
import statistics
import time
from typing import Any

import jax
import numpy as np

from experiments.runs.race.contenders import MANY_STEPS
from experiments.runs.race.programs import Numbers, Programs, State
from experiments.runs.race.search import Trial
import sparse24_jax as s24

WARM_UP, LAST_RATE = 0.1, 0.1  # shares: of the steps, of the peak rate
_LOG_EVERY = 20
# In its first runs a program is loaded and recorded: the first burst of FST's dense end, or two, took up to 12% longer.
_WARM_BURSTS = 2


def rate_at(step: int, steps: int, peak: float) -> float:
  """Linear warm-up, then half a cosine down to a tenth.

  >>> [round(rate_at(step, 100, 1.0), 2) for step in (0, 9, 10, 55, 99)]
  [0.1, 1.0, 1.0, 0.55, 0.1]
  """
  warm = max(1, round(WARM_UP * steps))
  if step < warm:
    return peak * (step + 1) / warm
  done = (step - warm) / max(1, steps - warm)
  return peak * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done)))


def order(seed: int, count: int, windows: int, length: int) -> np.ndarray:
  """Starts of `count` training windows, each of all windows once before any comes again; int32."""
  rng = np.random.default_rng(seed)
  passes = [rng.permutation(windows) for _ in range(-(-count // windows))]
  return (np.concatenate(passes)[:count] * length).astype(np.int32)


def clock(
  programs: Programs, tokens: Any, *, search_every: int, bursts: int = 3, warm_s: float = 0.0
) -> dict[str, Any]:
  """Milliseconds a step of each phase, mask searches included, on real text, and of all phases by their shares.

  Phases of one name are timed once, and count with all their shares: MST is dense first and last. A burst is as many
  steps as the period of a mask search or, for MST, four of its periods. Bursts that do not count come first in each
  phase, so that all its programs have run, the one with the search too. In the first phase they take `warm_s` seconds:
  a GPU that had nothing to do makes faster steps than it keeps up.
  """
  state, count = programs.init(np.int32(0)), itertools.count()
  numbers = Numbers(np.float32(1e-5), np.float32(0.0), np.int32(0), np.float32(MANY_STEPS))
  starts = order(0, programs.batch, 1000, programs.length)

  def burst(phase: str, steps: int) -> float:
    nonlocal state
    start = time.perf_counter()
    for step in itertools.islice(count, steps):
      state, out = programs.step(phase, step)(state, tokens, starts, numbers)
    jax.block_until_ready((state, out))
    return round(1e3 * (time.perf_counter() - start) / steps, 3)

  samples = {}
  warm = time.perf_counter() + warm_s
  for phase in dict(programs.phases):
    burst(phase, _WARM_BURSTS * search_every)
    while time.perf_counter() < warm:
      burst(phase, search_every)
    samples[phase] = [burst(phase, search_every) for _ in range(bursts)]
  medians = {phase: statistics.median(found) for phase, found in samples.items()}
  mean = sum(share * medians[phase] for phase, share in programs.phases)
  return {'bursts_ms': samples, 'steps_a_burst': search_every, 'phases_ms': medians, 'step_ms': round(mean, 3)}


def run(
  programs: Programs, tokens: Any, num_windows: int, trial: Trial, *, steps: int, step_ms: float, evaluations: int
) -> dict[str, Any]:
  """Trains once; returns losses over the steps.

  Args:
    programs: compiled.
    tokens: text on the device, the training windows first.
    num_windows: training windows in it.
    trial: what to train with.
    steps: how many.
    step_ms: of a step, by `clock`: seconds of training are counted with it.
    evaluations: on held-out text, evenly spread; the last at the end.

  Raises:
    ValueError: fewer steps than the recipe takes; nothing is trained then.
  """
  recipe = programs.recipe(trial.decay, steps)
  state: State = programs.init(np.int32(trial.seed))
  starts = order(trial.seed, steps * programs.batch, num_windows, programs.length).reshape(steps, programs.batch)
  held_out = jax.device_put(programs.held_out)
  due = {round(steps * (i + 1) / evaluations) for i in range(evaluations)}
  pending: list[Any] = []
  train: list[list[float]] = []
  validation: list[list[float | None]] = []
  wall, last = 0.0, time.perf_counter()
  for step in range(steps):
    numbers = Numbers(
      np.float32(rate_at(step, steps, trial.rate)), np.float32(trial.decay), np.int32(trial.seed), np.float32(steps)
    )
    phase = s24.phase_at(recipe, step, steps)
    if step and phase != s24.phase_at(recipe, step - 1, steps):
      state = programs.enter(phase, state)
    state, out = programs.step(phase, step)(state, tokens, starts[step], numbers)
    pending.append(out)
    evaluates = step + 1 in due
    if evaluates or len(pending) == 2 * _LOG_EVERY:
      count = len(pending) if evaluates else _LOG_EVERY
      found = np.asarray(jax.device_get(pending[:count]), np.float64)
      pending = pending[count:]
      train.append([step + 1 - len(pending), *_rounded(found[:, 0].mean(), found[:, 1].mean(), found[:, 1].max())])
      if not np.isfinite(found[:, 0]).all():
        validation.append([step + 1, round((step + 1) * step_ms / 1e3, 3), None])
        break
    if evaluates:
      now = time.perf_counter()
      wall += now - last
      loss = float(programs.evaluate(phase)(state, tokens, held_out))
      validation.append([step + 1, round((step + 1) * step_ms / 1e3, 3), round(loss, 5)])
      last = time.perf_counter()
  return {
    'validation': validation, 'validation_columns': ['step', 'seconds', 'loss'],
    'train': train, 'train_columns': ['step', 'loss', 'mean gradient norm', 'largest gradient norm'],
    'wall_s': round(wall, 2), 'loss': validation[-1][-1],
  }  # fmt: skip


def _rounded(*values: float) -> list[float]:
  return [round(float(value), 5) for value in values]
