"""What the papers claim, held against what the runs show. Verdicts come from the figures, never from here."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Literal

from ml_collections import ConfigDict
import numpy as np

from experiments.runs import build
from experiments.runs.records import Groups, RunRecord

Verdict = Literal['agrees', 'disagrees', 'open']

# Two-sided 95% quantiles of Student's t by degrees of freedom; the normal one beyond.
_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}

# How much higher a loss may be, relative to the other, and still count as the same quality.
TIE = 0.01

FST = 'Hu et al., Accelerating Transformer Pre-training with 2:4 Sparsity, arXiv 2404.01847'
MST = 'Liu et al., Mixed Sparsity Training, arXiv 2408.11746'
NEURON_LEVEL = 'To 2:4 Sparsity and Beyond: Neuron-level Activation Function, arXiv 2602.06183'
ACTIVATIONS = 'Haziza et al., 2:4 Activation Sparsity, arXiv 2503.16672'
S_STE = 'Hu et al., S-STE: Continuous Pruning Function for Efficient 2:4 Sparse Pre-training, arXiv 2409.09099'


@dataclasses.dataclass(frozen=True)
class Finding:
  """One claim with its verdict.

  Attributes:
    claim: the claim in plain words.
    source: the paper.
    verdict: 'agrees', 'disagrees', or 'open' where the runs cannot tell.
    evidence: the figures behind the verdict, in a sentence.
  """

  claim: str
  source: str
  verdict: Verdict
  evidence: str


def paired(a: Sequence[RunRecord], b: Sequence[RunRecord]) -> list[float]:
  """Differences in final validation loss, a minus b, for the seeds that both have; nats a token."""
  other = {run.seed: run.validation_loss for run in b}
  return [run.validation_loss - other[run.seed] for run in a if run.seed in other]


def half_width(differences: Sequence[float]) -> float:
  """Half the 95% confidence interval of the mean; infinite for fewer than two."""
  n = len(differences)
  if n < 2:
    return math.inf
  return _T95.get(n - 1, 1.96) * float(np.std(differences, ddof=1)) / math.sqrt(n)


def _describe(a: str, b: str, differences: Sequence[float]) -> str:
  mean = float(np.mean(differences))
  direction = 'above' if mean > 0 else 'below'
  text, half = f'{a} ends {abs(mean):.3f} nats {direction} {b}', half_width(differences)
  if len(differences) < 2:
    return f'{text}, with one seed: an indication only.'
  each = ', '.join(f'{d:+.4f}' for d in differences)
  return f'{text} (seed by seed {each}; 95% interval {mean - half:+.4f} to {mean + half:+.4f}).'


def _lower(methods: Groups, a: str, b: str, names: tuple[str, str], *, ties: bool) -> tuple[Verdict, str] | None:
  """Whether `a` ends lower than `b`; with `ties`, being surely less than one percent higher is enough."""
  if not (differences := paired(methods.get(a, ()), methods.get(b, ()))):
    return None
  mean, half = float(np.mean(differences)), half_width(differences)
  evidence = _describe(*names, differences)
  if math.isinf(half):
    return 'open', evidence
  margin = TIE * float(np.mean([run.validation_loss for run in methods[b]]))
  if ties and 0 <= mean + half < margin:
    return 'agrees', f'{evidence} Even the upper end of the interval is less than {TIE:.0%} of the loss.'
  if abs(mean) > half:
    small = f' The difference is real but small, less than {TIE:.0%} of the loss.' if abs(mean) < margin else ''
    return ('agrees' if mean < 0 else 'disagrees'), evidence + small
  return 'open', f'{evidence} The interval is too wide to tell.'


def _label(methods: Groups, name: str) -> str:
  """Which of several settings a method is judged by."""
  label = methods[name][0].label if name in methods else name
  return label[:1].upper() + label[1:]


def comparable_flips(methods: Groups, a: str, b: str) -> list[tuple[RunRecord, RunRecord]]:
  """Pairs of runs of equal seed whose flip rates are on one scale."""
  other = {run.seed: run for run in methods.get(b, ())}
  pairs = [(run, other[run.seed]) for run in methods.get(a, ()) if run.seed in other]

  def scale(run: RunRecord) -> int | None:
    # The built recipe knows the interval also where the configuration leaves it to the recipe's default.
    try:
      recipe = build.make_recipe(ConfigDict({'recipe': run.config['recipe'], 'steps': run.config['steps']}))
    except ValueError:  # a run of another version
      return None
    return 1 if recipe.flip_rate == 'step' else recipe.refresh_every

  return [
    (x, y) for x, y in pairs
    if scale(x) is not None and scale(x) == scale(y) and len(x.flip_curve()[0]) and len(y.flip_curve()[0])
  ]


def _tails(x: RunRecord, y: RunRecord) -> tuple[float, float]:
  """Mean flip rates of both over the last tenth of the sparse phase of `x`."""
  out = []
  for run in (x, y):
    steps, rates = run.flip_curve()
    inside = (steps > 0.9 * x.sparse_end) & (steps <= x.sparse_end)
    out.append(float(rates[inside].mean()) if inside.any() else math.nan)
  return out[0], out[1]


def _flips_settle(methods: Groups) -> tuple[Verdict, str] | None:
  if not (pairs := comparable_flips(methods, 'fst', 'dense')):
    return None
  held, texts = [], []
  for fst, dense in pairs:
    summary, (tail, dense_tail) = fst.flip_summary(), _tails(fst, dense)
    held.append(summary['peak'] > 2 * tail and tail < dense_tail)
    texts.append(
      f'seed {fst.seed}: peak {summary["peak"]:.2e} at step {summary["peak_step"]}, then {tail:.2e} at the end of the '
      f'sparse phase against {dense_tail:.2e} for dense'
    )
  return ('agrees' if all(held) else 'disagrees'), '; '.join(texts) + '.'


def _flips_stay_without_decay(methods: Groups) -> tuple[Verdict, str] | None:
  if not (pairs := comparable_flips(methods, 'fst_no_decay', 'dense')):
    return None
  tails = [(run.seed, *_tails(run, dense)) for run, dense in pairs]
  text = '; '.join(f'seed {seed}: {tail:.2e} without decay, {dense:.2e} for dense' for seed, tail, dense in tails)
  return ('agrees' if all(tail > dense for _, tail, dense in tails) else 'disagrees'), text + '.'


_CLAIMS: Sequence[tuple[str, str, Callable[[Groups], tuple[Verdict, str] | None]]] = (
  ('FST reaches the quality of dense training.', FST,
   lambda m: _lower(m, 'fst', 'dense', ('FST', 'dense'), ties=True)),
  ('FST beats a dense model whose feed-forward layers are half as wide.', FST,
   lambda m: _lower(m, 'fst', 'half_ffn', ('FST', 'the half-width dense model'), ties=False)),
  ('FST beats plain straight-through training.', FST,
   lambda m: _lower(m, 'fst', 'ste', ('FST', 'plain STE'), ties=False)),
  ('With Adam, decay belongs on gradients: FST beats SR-STE with decay on weights.', FST,
   lambda m: _lower(m, 'fst', 'sr_ste', ('FST', 'SR-STE with decay on weights'), ties=False)),
  ('Masked decay helps: FST beats FST without decay.', FST,
   lambda m: _lower(m, 'fst', 'fst_no_decay', ('FST', 'FST without decay'), ties=False)),
  ('With masked decay the flip rate rises to a peak and then falls below that of dense training.', FST, _flips_settle),
  ('Without decay the flip rate stays above that of dense training.', FST, _flips_stay_without_decay),
  ('S-STE beats FST.', S_STE, lambda m: _lower(m, 's_ste', 'fst', ('S-STE', 'FST'), ties=False)),
  ('S-STE reaches the quality of dense training.', S_STE,
   lambda m: _lower(m, 's_ste', 'dense', ('S-STE', 'dense'), ties=True)),
  ('Mixed sparsity training reaches the quality of dense training.', MST,
   lambda m: _lower(m, 'mixed_sparsity', 'dense', (_label(m, 'mixed_sparsity'), 'dense'), ties=True)),
  ('Mixed sparsity training beats RigL at as many FLOPs.', MST,
   lambda m: _lower(m, 'mixed_sparsity', 'rigl', (_label(m, 'mixed_sparsity'), 'RigL'), ties=False)),
  ('Mixed sparsity training beats a static mask at as many FLOPs.', MST,
   lambda m: _lower(m, 'mixed_sparsity', 'static', (_label(m, 'mixed_sparsity'), 'the static mask'), ties=False)),
  ('2:4 weights with V:N:M activations reach the quality of dense squared ReLU.', NEURON_LEVEL,
   lambda m: _lower(m, 'neuron_level', 'dense_relu2', (_label(m, 'neuron_level'), 'dense squared ReLU'), ties=True)),
  ('2:4 weights with 2:4 activations reach the quality of dense squared ReLU.', NEURON_LEVEL,
   lambda m: _lower(m, 'neuron_level_24', 'dense_relu2', ('2:4', 'dense squared ReLU'), ties=True)),
  ('2:4 activations with dense weights reach the quality of dense squared ReLU.', ACTIVATIONS,
   lambda m: _lower(m, 'activations_24', 'dense_relu2', ('2:4', 'dense squared ReLU'), ties=True)),
)  # fmt: skip


def findings(runs: Sequence[RunRecord]) -> list[Finding]:
  """Judges every claim that the given finished runs speak to; of several settings of a method the best counts."""
  labels: dict[tuple[str, str], list[RunRecord]] = {}
  for run in runs:
    if run.summary is not None:
      labels.setdefault((run.method, run.label), []).append(run)
  # A method that was run with several settings is judged by its best.
  methods: dict[str, list[RunRecord]] = {}
  for (method, _), group in sorted(labels.items(), key=lambda item: -np.mean([run.validation_loss for run in item[1]])):
    methods[method] = group
  judged = ((claim, source, judge(methods)) for claim, source, judge in _CLAIMS)
  return [Finding(claim, source, *result) for claim, source, result in judged if result]
