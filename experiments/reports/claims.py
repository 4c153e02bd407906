"""What the papers claim, held against what the runs show. Verdicts come from the figures, never from here."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
import math
from typing import Literal

from ml_collections import ConfigDict
import numpy as np
import scipy.special

from experiments.runs import recipes
from experiments.runs.records import group, RunRecord

Verdict = Literal['agrees', 'disagrees', 'open']

# The runs of one method with one setting, one per seed.
type Runs = Sequence[RunRecord]

# How much higher a loss may be, relative to the other, and still count as the same quality.
TIE = 0.01

FST = 'Hu et al., Accelerating Transformer Pre-training with 2:4 Sparsity, arXiv 2404.01847'
MST = 'Liu et al., Mixed Sparsity Training, arXiv 2408.11746'
NEURON_LEVEL = 'To 2:4 Sparsity and Beyond: Neuron-level Activation Function, arXiv 2602.06183'
ACTIVATIONS = 'Haziza et al., 2:4 Activation Sparsity, arXiv 2503.16672'
OURS = 'ours; no paper claims it'
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
  return float(scipy.special.stdtrit(n - 1, 0.975) * np.std(differences, ddof=1)) / math.sqrt(n)


def _describe(a: str, b: str, differences: Sequence[float]) -> str:
  mean = float(np.mean(differences))
  direction = 'above' if mean > 0 else 'below'
  text, half = f'{a} ends {abs(mean):.3f} nats {direction} {b}', half_width(differences)
  if len(differences) < 2:
    return f'{text}, with one seed: an indication only.'
  each = ', '.join(f'{d:+.4f}' for d in differences)
  return f'{text} (seed by seed {each}; 95% interval {mean - half:+.4f} to {mean + half:+.4f}).'


def _lower(a: Runs, b: Runs, *, ties: bool) -> tuple[Verdict, str] | None:
  """Whether `a` ends lower than `b`; with `ties` it may end higher by less than one percent.

  The 95% interval decides: where it holds both what meets the claim and what does not, the verdict is 'open'.
  """
  if not (differences := paired(a, b)):
    return None
  mean, half = float(np.mean(differences)), half_width(differences)
  label = a[0].label
  evidence = _describe(label[:1].upper() + label[1:], b[0].label, differences)
  if math.isinf(half):
    return 'open', evidence
  margin = TIE * float(np.mean([run.validation_loss for run in b]))
  if ties and 0 <= mean + half < margin:
    return 'agrees', f'{evidence} Even the upper end of the interval is less than {TIE:.0%} of the loss.'
  if ties and 0 < mean - half < margin:
    return 'open', f'{evidence} It is higher, and the interval does not tell whether by {TIE:.0%} of the loss.'
  if abs(mean) > half:
    small = f' The difference is real but small, less than {TIE:.0%} of the loss.' if abs(mean) < margin else ''
    return ('agrees' if mean < 0 else 'disagrees'), evidence + small
  return 'open', f'{evidence} The interval is too wide to tell.'


_reaches = functools.partial(_lower, ties=True)
_beats = functools.partial(_lower, ties=False)


def _reaches_as_published(a: Runs, b: Runs) -> tuple[Verdict, str] | None:
  """None where a setting of activations was changed, which no paper speaks of."""
  policy = a[0].config['recipe']['kwargs']['policy']
  return _reaches(a, b) if recipes.as_published(policy['features']).items() <= policy.items() else None


def comparable_flips(a: Runs, b: Runs) -> list[tuple[RunRecord, RunRecord]]:
  """Pairs of runs of equal seed whose flip rates are on one scale."""
  other = {run.seed: run for run in b}
  pairs = [(run, other[run.seed]) for run in a if run.seed in other]

  def scale(run: RunRecord) -> int | None:
    # The built recipe knows the interval also where the configuration leaves it to the recipe's default.
    try:
      recipe = recipes.make_recipe(ConfigDict({'recipe': run.config['recipe'], 'steps': run.config['steps']}))
    except ValueError:  # a run of another version
      return None
    return 1 if recipe.flip_rate == 'step' else recipe.refresh_every

  return [
    (x, y) for x, y in pairs
    if scale(x) is not None and scale(x) == scale(y) and x.flip_summary() and y.flip_summary()
  ]


def _tails(x: RunRecord, y: RunRecord) -> tuple[float, float]:
  """Mean flip rates of both over the last tenth of the sparse phase of `x`; of records before the step they say."""
  if not (x.train and y.train):
    return x.flip_summary()['tail'], y.flip_summary()['tail']
  out = []
  for run in (x, y):
    steps, rates = run.flip_curve()
    inside = (steps > 0.9 * x.sparse_end) & (steps <= x.sparse_end)
    out.append(float(rates[inside].mean()) if inside.any() else math.nan)
  return out[0], out[1]


def _at_equal_steps(x: RunRecord, y: RunRecord) -> bool:
  """Whether `_tails` are of the same steps, and so of the same learning rate, with which flip rates fall."""
  return bool(x.train and y.train) or x.flip_summary()['end'] == y.flip_summary()['end']


_OTHER_STEPS = ' The learning rate differs between these steps, so the rates cannot be compared.'


def flips_in_short(a: Runs, b: Runs) -> str:
  """Peak and late flip rates of records, means over seeds, and until which steps."""
  pairs = comparable_flips(a, b)
  tails = np.mean([_tails(x, y) for x, y in pairs], axis=0)
  first, peak = pairs[0], np.mean([x.flip_summary()['peak'] for x, _ in pairs])
  late, dense = (
    f'{tail:.1e} before step {run.flip_summary()["end"]:,}' for tail, run in zip(tails, first, strict=True)
  )
  return f'flip rate {peak:.1e} at its peak, {late}; {b[0].label} {dense}'


def _flips_settle(a: Runs, b: Runs) -> tuple[Verdict, str] | None:
  if not (pairs := comparable_flips(a, b)):
    return None
  settled, below, texts = [], [], []
  for fst, dense in pairs:
    summary, (tail, dense_tail) = fst.flip_summary(), _tails(fst, dense)
    settled.append(summary['peak'] > 2 * tail)
    below.append(tail < dense_tail)
    texts.append(
      f'seed {fst.seed}: peak {summary["peak"]:.2e} at step {summary["peak_step"]}, then {tail:.2e} at the end of the '
      f'sparse phase against {dense_tail:.2e} for dense'
    )
  text = '; '.join(texts) + '.'
  if all(settled) and not all(itertools.starmap(_at_equal_steps, pairs)):
    return 'open', text + _OTHER_STEPS
  return ('agrees' if all(settled + below) else 'disagrees'), text


def _flips_stay_without_decay(a: Runs, b: Runs) -> tuple[Verdict, str] | None:
  if not (pairs := comparable_flips(a, b)):
    return None
  tails = [(run.seed, *_tails(run, dense)) for run, dense in pairs]
  text = '; '.join(f'seed {seed}: {tail:.2e} without decay, {dense:.2e} for dense' for seed, tail, dense in tails)
  if not all(itertools.starmap(_at_equal_steps, pairs)):
    return 'open', f'{text}.{_OTHER_STEPS}'
  return ('agrees' if all(tail > dense for _, tail, dense in tails) else 'disagrees'), text + '.'


def _each(names: Sequence[str], baseline: str) -> tuple[tuple[str, str], ...]:
  return tuple((name, baseline) for name in names)


_PUBLISHED_BLOCKS = (
  'neuron_level', 'neuron_level_even', 'neuron_level_64', 'neuron_level_128', 'neuron_level_128_16',
  'neuron_level_clusters',
)  # fmt: skip
_MORE_DENSE_NEURONS = ('neuron_level_dense_neurons', 'neuron_level_128_dense_neurons')
_TWO_OF_FOUR_TOKENS = (
  'neuron_level_two_of_four_tokens', 'neuron_level_two_of_four_tokens_even', 'neuron_level_128_two_of_four_tokens',
)  # fmt: skip
OF_FLIPS = (_flips_settle, _flips_stay_without_decay)
# Claim, source, how it is judged, and of which pairs of methods: each pair by itself, so that no setting is picked.
CLAIMS: Sequence[tuple[str, str, Callable[[Runs, Runs], tuple[Verdict, str] | None], Sequence[tuple[str, str]]]] = (
  ('FST reaches the quality of dense training.', FST, _reaches, [('fst', 'dense')]),
  ('FST beats a dense model whose feed-forward layers are half as wide.', FST, _beats, [('fst', 'half_ffn')]),
  ('FST beats plain straight-through training.', FST, _beats, [('fst', 'ste')]),
  ('With Adam, decay belongs on gradients: FST beats SR-STE with decay on weights.', FST, _beats,
   [('fst', 'sr_ste'), ('fst', 'sr_ste_published')]),
  ('Masked decay helps: FST beats FST without decay.', FST, _beats, [('fst', 'fst_no_decay')]),
  ('With masked decay the flip rate rises to a peak and then falls below that of dense training.', FST, _flips_settle,
   [('fst', 'dense')]),
  ('Without decay the flip rate stays above that of dense training.', FST, _flips_stay_without_decay,
   [('fst_no_decay', 'dense')]),
  ('S-STE beats FST.', S_STE, _beats, [('s_ste', 'fst')]),
  ('S-STE reaches the quality of dense training.', S_STE, _reaches, [('s_ste', 'dense')]),
  ('Mixed sparsity training reaches the quality of dense training.', MST, _reaches,
   [('mixed_sparsity', 'dense'), ('mixed_sparsity_attention', 'dense')]),
  ('Mixed sparsity training beats RigL at as many FLOPs.', MST, _beats, [('mixed_sparsity', 'rigl')]),
  # Attention is full in both, or sparse in both.
  ('Mixed sparsity training beats a static mask at as many FLOPs.', MST, _beats,
   [('mixed_sparsity', 'static'), ('mixed_sparsity_attention', 'static_attention')]),
  ('2:4 weights with V:N:M activations, as published, reach the quality of dense squared ReLU.', NEURON_LEVEL,
   _reaches_as_published, _each(_PUBLISHED_BLOCKS, 'dense_relu2')),
  ('2:4 weights with V:N:M activations of more dense neurons reach the quality of dense squared ReLU.', OURS, _reaches,
   _each(_MORE_DENSE_NEURONS, 'dense_relu2')),
  ('2:4 weights with V:N:M activations of two of four tokens reach the quality of dense squared ReLU.', OURS, _reaches,
   _each(_TWO_OF_FOUR_TOKENS, 'dense_relu2')),
  ('2:4 weights with 2:4 activations reach the quality of dense squared ReLU.', NEURON_LEVEL, _reaches,
   [('neuron_level_24', 'dense_relu2')]),
  ('2:4 activations with dense weights reach the quality of dense squared ReLU.', ACTIVATIONS, _reaches,
   [('activations_24', 'dense_relu2')]),
)  # fmt: skip


def findings(runs: Sequence[RunRecord]) -> list[Finding]:
  """Judges every claim that the given finished runs speak to; a method that has several settings, by each of them."""
  groups = [*group(run for run in runs if run.summary is not None).values()]
  found = []
  for claim, source, judge, pairs in CLAIMS:
    for ours, theirs in pairs:
      sides = ([g for g in groups if g[0].method == method] for method in (ours, theirs))
      results = itertools.starmap(judge, itertools.product(*sides))
      found += [Finding(claim, source, *result) for result in results if result]
  return found
