"""The choice of the masked-decay factor from flip rates in the warm-up."""

from collections.abc import Callable, Iterable
import math
from typing import NamedTuple

# Flip-rate ratios of healthy runs: of arXiv 2404.01847, section 4.3, from memory; its text was not at hand to check.
FEASIBLE_BAND = (0.60, 0.95)


class DecayTrial(NamedTuple):
  """One candidate of `tune_masked_decay`.

  Attributes:
    decay: its factor.
    flip_rate: after warm-up.
    ratio: mu, that rate over the dense twin's.
    feasible: whether mu is inside the band.

  >>> import sparse24_jax as s24
  >>> s24.tune_masked_decay(lambda decay: 0.2 if decay is None else 0.15, [1e-4]).trials[0].feasible
  True
  """

  decay: float
  flip_rate: float
  ratio: float
  feasible: bool


class DecayChoice(NamedTuple):
  """The outcome of `tune_masked_decay`.

  Attributes:
    decay: the factor to train with, or None if no candidate is feasible.
    reason: why, in a sentence.
    trials: every candidate in rising order of decay.
    dense_flip_rate: of the dense twin.
    band: the feasible ratios.

  >>> import sparse24_jax as s24
  >>> choice = s24.tune_masked_decay(lambda decay: 0.2 if decay is None else 0.3, [1e-4, 1e-3])
  >>> choice.decay, len(choice.trials), choice.dense_flip_rate
  (None, 2, 0.2)
  """

  decay: float | None
  reason: str
  trials: tuple[DecayTrial, ...]
  dense_flip_rate: float
  band: tuple[float, float]


def tune_masked_decay(
  run_warmup: Callable[[float | None], float],
  candidates: Iterable[float],
  *,
  band: tuple[float, float] = FEASIBLE_BAND,
) -> DecayChoice:
  """Chooses the masked-decay factor from short runs.

  A dense twin and one sparse run a candidate go through the warm-up. mu is the sparse run's flip rate over the dense
  twin's: from 1 upwards the masks flip more than a dense run's and quality suffers, far below 1 they freeze. The
  largest candidate inside `band` is chosen; that rule is ours. The reason says so when the choice tells little:
  when it is the largest tried, or when no decay at all is feasible too.

  Args:
    run_warmup: trains for the warm-up with the decay factor given, or as the dense twin if it is None
      (`recipe.dense_twin()`), and returns the flip rate at its end; the same data, seed and steps each time.
    candidates: decay factors to try, zero or more, some of them too large: a grid that ends inside the band chooses its
      own end. The released runs, of 300,000 steps, used 1e-6 to 1e-2; runs of a thousand steps want more.
    band: lowest and highest feasible mu.

  Returns:
    A `DecayChoice`.

  Raises:
    ValueError: no candidates, a negative one, an empty band, or a run that returned no finite rate (zero included
      for the dense twin).

  Source: Hu et al., arXiv 2404.01847, section 4.3.

  >>> import sparse24_jax as s24
  >>> choice = s24.tune_masked_decay(lambda decay: 0.1 if decay is None else 0.1 / (1 + 1e4 * decay), [0.0, 3e-5, 1e-3])
  >>> choice.decay, [round(trial.ratio, 2) for trial in choice.trials]
  (3e-05, [1.0, 0.77, 0.09])
  """
  candidates = sorted(set(candidates))
  if not candidates:
    raise ValueError('candidates is empty: give at least one decay factor')
  if not all(math.isfinite(decay) and decay >= 0 for decay in candidates):
    raise ValueError(f'candidates={candidates} must be finite numbers of zero or more')
  if len(band) != 2 or not 0 <= band[0] < band[1]:
    raise ValueError(f'band={band} must be two rising numbers of zero or more')
  low, high = band
  dense = _finite_rate(run_warmup(None), 'the dense twin')
  if dense == 0:
    raise ValueError('the dense twin flipped no mask in the warm-up: run more steps, or refresh the masks within it')
  trials = []
  for decay in candidates:
    rate = _finite_rate(run_warmup(decay), f'decay {decay:g}')
    trials.append(DecayTrial(decay, rate, rate / dense, low <= rate / dense <= high))
  feasible = [trial for trial in trials if trial.feasible]
  if feasible:
    best = feasible[-1]
    reason = f'the largest factor with mu in [{low}, {high}]: mu = {best.ratio:.2f}, {len(feasible)} were feasible'
    if best is trials[-1]:
      reason += '; it is the largest tried, so a larger one may serve as well'
    if feasible[0].decay == 0:
      reason += '; no decay is feasible too, so the warm-up does not show the need of one'
    return DecayChoice(best.decay, reason, tuple(trials), dense, band)
  ratios = [trial.ratio for trial in trials]
  if min(ratios) > high:
    advice = 'every candidate flips too much: try larger factors'
  elif max(ratios) < low:
    advice = 'every candidate flips too little: try smaller factors'
  else:
    advice = 'the band lies between two candidates: try factors between them'
  return DecayChoice(None, f'no mu in [{low}, {high}]: {advice}', tuple(trials), dense, band)


def _finite_rate(rate: float, run: str) -> float:
  rate = float(rate)
  if not math.isfinite(rate) or rate < 0:
    why = ': no masks were compared, in fewer steps than refresh_every, or a weight is not finite'
    raise ValueError(f'run_warmup returned flip rate {rate} for {run}{why if math.isnan(rate) else ""}')
  return rate
