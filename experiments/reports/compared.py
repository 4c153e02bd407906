"""Tables of comparisons at one learning rate: losses with their spread, and differences to dense, seed by seed."""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.reports import claims, papers, tables
from experiments.runs.records import group, RunRecord

_AS_PUBLISHED = ' as published, half of the steps sparse'
# Table -> label of a method -> what its row says. Others say their label; one with nothing to say has no row.
NANO = {
  'FST': 'FST, decay 6e-3 on gradients', 'SR-STE, decay on weights': 'SR-STE, decay 3 on weights',
  'SR-STE, published decay': 'SR-STE, decay 2e-4 on weights (the published factor)',
}  # fmt: skip
ACTIVATIONS = {
  '2:4 activations, dense weights': '2:4 activations', 'neuron level, 2:4': '2:4 activations and weights',
  'neuron level, 16:2:8, half of the steps': f'16:2:8 activations{_AS_PUBLISHED}, 2:4 weights',
  'neuron level, 16:2:8': '16:2:8 activations as published, 70% of the steps sparse, 2:4 weights',
  'neuron level, 16:2:8 along sequences': '', 'neuron level, 2:4, tail from unprojected weights': '',
}  # fmt: skip
DENSE_NEURONS = {
  'neuron level, 16:2:8, 20% dense neurons, half of the steps': '16:2:8 in blocks of tokens, 20% dense neurons',
  'neuron level, 16:2:8, half of the steps': '16:2:8 as published, 5% dense neurons',
}  # fmt: skip
DENSE_NEURONS_128 = {
  'neuron level, 128:2:8, half of the steps; policy.dense_features=1.0':
    '128:2:8 in blocks of tokens, all neurons dense in the weight gradients',
  'neuron level, 128:2:8, half of the steps; policy.dense_features=0.5':
    '128:2:8 in blocks of tokens, 50% dense neurons',
  'neuron level, 128:2:8, 20% dense neurons, half of the steps': '128:2:8 in blocks of tokens, 20% dense neurons',
  'neuron level, 128:2:8, half of the steps': '128:2:8 as published, 5% dense neurons',
}  # fmt: skip
TWO_OF_FOUR_128 = {
  **dict.fromkeys(DENSE_NEURONS_128, ''),
  'dense, squared ReLU': '128 x 16 bytes a step, 1,000 steps, three seeds: dense, squared ReLU',
  'neuron level, 128:2:8, 2:4 along tokens, half of the steps': '128:2:8, two of four tokens, half of the steps sparse',
}  # fmt: skip
TWO_OF_FOUR = {
  'dense, squared ReLU': '16 x 64 bytes a step, 2,000 steps, five seeds: dense, squared ReLU',
  'neuron level, 16:2:8, 2:4 along tokens, half of the steps': '16:2:8, two of four tokens, half of the steps sparse',
  'neuron level, 16:2:8, 2:4 along tokens': '16:2:8, two of four tokens, 70% of the steps sparse',
}  # fmt: skip
FLOPS = {
  'dense': 'dense with four times the FLOPs',
  'static mask, sparse attention': 'static mask, sparse attention throughout',
  'dense, half as wide, as many FLOPs': 'dense, half as wide, 89% of the steps',
  'dense, as many FLOPs': 'dense, cut short (nano: with the head it has 0.7 of their FLOPs)',
  'MST, sparse attention': 'MST, sparse attention in its ultra-sparse stage',
  'MST, moments kept': 'MST, moments of new links kept as in the released code',
  'MST, 2:4 masks': 'MST within 2:4 groups',
  'MST, transposable 2:4 masks': 'MST with transposable 2:4 masks, the weight gradients of feed-forward layers sampled',
  **dict.fromkeys((
    'MST, transposable 2:4 masks, half dense', 'MST, the links of sparse attention',
    'RigL, topology changes every 100 steps', 'MST, topology changes every 100 steps',
  ), ''),
}  # fmt: skip


def markdown(
  *comparisons: tuple[Sequence[str], Mapping[str, str]], flips: bool = False, against: str = 'dense'
) -> str:
  """A row a method: dense of each comparison, or else the lowest, then the others in order of their losses.

  Args:
    *comparisons: files of records whose methods share a dense twin, and what the rows of some labels say.
    flips: whether flip rates are shown.
    against: what the first is called in the heading.

  Raises:
    ValueError: a label that no record has.
  """
  head = ['method', 'validation loss', f'minus {against}', 'in percent']
  head += ['flip rate, tenth before the last step, or before the step that is named'] if flips else []
  rows = []
  for files, titles in comparisons:
    groups = group(run for file in files for run in papers.runs(file))
    dense, *_ = groups.values()
    if unknown := titles.keys() - groups.keys():
      raise ValueError(f'{", ".join(files)}: no method is called {", ".join(sorted(unknown))}')
    for label, runs in groups.items():
      if title := titles.get(label, label):
        row = [title, _loss(runs), *(['', ''] if runs is dense else _above(runs, dense))]
        rows.append(row + ([_flips(runs)] if flips else []))
  return tables.markdown(head, rows)


def _loss(runs: Sequence[RunRecord]) -> str:
  """Mean and standard deviation."""
  if not runs:
    return ''
  losses = [run.validation_loss for run in runs]
  spread = np.std(losses, ddof=1)
  return f'{np.mean(losses):.3f} ± {spread:.{3 if spread >= 5e-4 else 4}f}'


def _above(runs: Sequence[RunRecord], dense: Sequence[RunRecord]) -> list[str]:
  """Difference to dense with its interval, and in percent of dense's loss."""
  differences = claims.paired(runs, dense)
  other = {run.seed: run.validation_loss for run in dense}
  percent = [100 * (run.validation_loss / other[run.seed] - 1) for run in runs if run.seed in other]
  return [f'{np.mean(differences):+.3f} ± {claims.half_width(differences):.3f}', f'{np.mean(percent):.1f}']


def _flips(runs: Sequence[RunRecord]) -> str:
  tail = np.mean([run.flip_summary()['tail'] for run in runs])
  end, steps = runs[0].flip_summary()['end'], runs[0].config['steps']
  return f'{tail:.1e}' + (f', step {end:,}' if end < steps else '')
