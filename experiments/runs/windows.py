"""What a run reads of its steps: a line of metrics for each window of them, and whether their numbers are good.

Steps are dispatched ahead of the device, so their numbers are read a window later, all at once.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.runs import bad_numbers, events
from experiments.runs.build import Parts
from experiments.runs.programs import StepMetrics
from experiments.runs.progress import Progress, Stopwatch


class Windows:
  """The steps since the last line of the metrics, and what is known of those before.

  Args:
    parts: of the run.
    folder: the run's, for notes of skipped steps.
    names: of the weights that have flip rates.
  """

  def __init__(self, parts: Parts, folder: Path, names: Sequence[str]):
    data = parts.config.data
    self.folder, self.names = folder, names
    self.policy = bad_numbers.policy_of(parts.config)
    self.losses = bad_numbers.Losses(self.policy.spike)
    self.skipped_in_a_row = 0
    self.steps: list[StepMetrics] = []
    self._tokens, self._every_step = data.batch_size * data.seq_len, parts.recipe.flip_rate == 'step'
    self._logged = 0.0

  def begin(self, watch: Stopwatch) -> None:
    """Measures speed from here on."""
    self._logged = watch.spent['training']

  def close(self) -> list[StepMetrics]:
    """The steps so far; the next ones are of another window."""
    closed, self.steps = self.steps, []
    return closed

  def to_meta(self) -> dict[str, Any]:
    """What a checkpoint keeps of it. It has no steps unless the run was told to stop."""
    return {
      'window': [[x.tolist() for x in map(np.asarray, step)] for step in jax.device_get(self.steps)],
      'latest_losses': list(self.losses.latest),
      'skipped_in_a_row': self.skipped_in_a_row,
    }

  def restore(self, meta: Mapping[str, Any]) -> None:
    """Takes up what `to_meta` gave."""
    self.losses = bad_numbers.Losses(self.policy.spike, meta['latest_losses'])
    self.skipped_in_a_row = meta['skipped_in_a_row']
    self.steps = [StepMetrics(*step) for step in meta['window']]

  def write(
    self, step: int, phase: str, window: list[StepMetrics], watch: Stopwatch, writer: Any, progress: Progress
  ) -> None:
    """Writes one line about the window of steps that ends at `step`.

    Raises:
      BadNumbersError: one of them is bad, and the policy does not skip it, or too many were skipped.
    """
    *read, learning_rate = jax.device_get(
      ([m.loss for m in window], [m.grad_norm for m in window], [m.good for m in window], window[-1].learning_rate)
    )
    watch.lap('training')
    taken = []
    for at, (loss, norm, good) in enumerate(zip(*read, strict=True), step - len(window) + 1):
      if self.policy.name == 'skip' and not good:
        self._skipped(at, loss, norm)
        continue
      self.skipped_in_a_row = 0
      self.losses.take(at, loss, norm)
      taken.append((loss, norm))
    # Steps are dispatched ahead, so that a window is read one step late, or on time if an evaluation waits for it.
    spent = watch.spent
    tokens = sum(isinstance(m.loss, jax.Array) for m in window)  # and not read from a checkpoint
    tokens *= self._tokens
    speed, self._logged = tokens / max(spent['training'] - self._logged, 1e-9), spent['training']
    writer.write('timing', step, {'seconds': watch.total, 'spent': spent, 'tokens_per_s': speed})
    if not taken:
      return
    losses, norms = zip(*taken, strict=True)
    rates = self._flip_rates(window)
    bad_numbers.require_finite(step, 'flip rate, and so a weight,', rates[0])
    flip_rate, *flip_rates = (None if rate < 0 else rate for rate in rates)
    writer.write(
      'train',
      step,
      {
        'loss': float(np.mean(losses, dtype=np.float64)),
        'grad_norm': float(np.mean(norms, dtype=np.float64)),
        'learning_rate': float(learning_rate),
        'phase': phase,
        'flip_rate': flip_rate,
        'flip_rates': dict(zip(self.names, flip_rates, strict=True)),
      },
    )
    progress.update(
      step, loss=float(losses[-1]), flip_rate=flip_rate if self.names else None, tokens_per_s=speed
    )

  def require_good(self, step: int) -> None:
    """Looks at the steps since the last line of the metrics, before a checkpoint of `step` would keep what they did.

    There are none, unless the run was told to stop. Their line is written when the run goes on.

    Raises:
      BadNumbersError: see `write`.
    """
    losses = bad_numbers.Losses(self.policy.spike, self.losses.latest)
    read = jax.device_get([(m.loss, m.grad_norm, m.good) for m in self.steps])
    for at, (loss, norm, good) in enumerate(read, step - len(read) + 1):
      if good or self.policy.name != 'skip':
        losses.take(at, loss, norm)

  def _flip_rates(self, window: list[StepMetrics]) -> list[float]:
    """Flip rates of all weights, then of each: the mean over the steps of a window, or what the last refresh found.

    Links that move every so many steps flip in those steps alone: a rate a step is a mean, not that of one step. Steps
    before the first comparison, whose rates are below zero, do not count unless there are no others.
    """
    steps = window if self._every_step else window[-1:]
    rates = np.stack([np.append(*pair) for pair in jax.device_get([(m.flip_rate, m.flip_rates) for m in steps])])
    found = ~(rates < 0)  # a bad number counts
    means = np.sum(rates, axis=0, where=found, dtype=np.float64) / np.maximum(found.sum(axis=0), 1)
    return np.where(found.any(axis=0), means, rates[-1]).tolist()

  def _skipped(self, step: int, loss: float, norm: float) -> None:
    self.skipped_in_a_row += 1
    what = f'step {step} was skipped: its loss is {loss:.4g}, the norm of its gradient {norm:.4g}'
    if self.skipped_in_a_row > self.policy.cap:
      raise bad_numbers.BadNumbersError(f'{what}; bad_numbers.cap allows {self.policy.cap} in a row')
    events.note(self.folder, step, 'skipped', what)
