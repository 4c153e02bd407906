"""Answers of the guide on what has another dense rival: squared-ReLU models, and models of as many FLOPs."""

from collections.abc import Mapping, Sequence
import statistics

from experiments.reports.evidence import (
  against_dense,
  below,
  contender_of,
  edge,
  Evidence,
  far,
  interval,
  NAMES,
  near,
  parted,
  Step,
  told,
  under,
)

# What to take, and label and sentence of what else to know.
type Said = tuple[str, Sequence[tuple[str, str]]]


def squared_relu(
  faster: Mapping[str, float | None], found: Mapping[str, Sequence[Evidence]], timed: Mapping[str, Step], device: str,
  d: int | None,
) -> Said:  # fmt: skip
  """What sparse activations gain and cost, against dense squared ReLU; arguments as of `guide.answer`."""
  known = sorted(_of('squared_relu', found), key=lambda e: (far(e.width, d), e.mean))
  sparse, narrow = ([e for e in known if bool(e.option.recipe) == own] for own in (True, False))
  take = next((e.who for e in sparse if below(e.percent)), 'dense, squared ReLU, as it is')
  why = [
    f'dense reaches the final loss of {e.who} in {interval(e.dense_shares)} of the time that this takes, and is then in'
    f' mid-schedule ({e.place(device)})'
    for e in sparse if e.timed and below([share - 1 for share in e.dense_shares])
  ]  # fmt: skip
  labels = {contender_of(name).label: faster[name] for name in faster if NAMES[name].only == 'squared_relu'}
  by_label = {step.label: step for step in timed.values()}
  gain = []
  for label, times in labels.items():
    its = 'is not known to be faster' if times is None else f'{times:.2f} times as fast as dense'
    said = f'{_short(label)}: a feed-forward block of the size asked about {its}'
    if step := by_label.get(label):
      place = f'{step.where}, {told(step.device, device)}'
      said += f'; a sparse step {step.times:.2f} times ({step.least:.2f} to {step.most:.2f}; {place})'
    gain.append(said)
  losses = []
  for where in dict.fromkeys(e.where for e in sparse):
    own, rivals = ([e for e in each if e.where == where] for each in (sparse, narrow))
    ends = [own[0], *own[1:][-1:], *rivals]  # the lowest, the highest, and a dense rival
    each = [f'{_short(e.who)}: {against_dense(e.percent)}{edge(e)}' for e in ends]
    losses.append(f'{"; ".join(each)} ({own[0].place(device)})')
  code = ('Code', 's24.recipes.neuron_level; tokens of one position must be neighbours: docs/guide.md#recipes')
  return take, [*under('Why', why), *under('Gain', gain), *under('Loss', losses), code]


def flops(found: Mapping[str, Sequence[Evidence]], device: str, d: int | None) -> Said:
  """What moving topologies, MST among them, cost at equal FLOPs, and at equal steps where that was run."""
  known = sorted(_of('flops', found), key=lambda e: e.mean)
  equal = [e for e in known if e.equal == 'FLOPs']
  lower = [e for e in equal if below(e.percent)]
  take = ' or '.join(e.who for e in lower if e is lower[0] or not parted(e, lower[0])) or 'a smaller dense model'
  if lower and not near(lower[0].width, d):
    take += f', by models of width {lower[0].width} alone'
  gain = ['no time: kernels gain nothing from masks without a 2:4 pattern']
  gain += [f'a step {_times(e):.2f} times as fast as dense: {e.who} ({e.place(device)})' for e in known if e.timed]
  losses = []
  if equal:
    each = '; '.join(f'{e.who} {against_dense(e.percent)}{edge(e)}' for e in equal)
    losses.append(f'{each} (dense is half as wide, of as many FLOPs; {equal[0].place(device)})')
  losses += [
    f'{e.who} {against_dense(e.percent)} after equal steps{edge(e)} ({e.place(device)})'
    for e in known if e.equal != 'FLOPs'
  ]  # fmt: skip
  return take, [*under('Gain', gain), *under('Loss', losses)]


def _short(label: str) -> str:
  return label.removeprefix('neuron level, ')


def _of(goal: str, found: Mapping[str, Sequence[Evidence]]) -> list[Evidence]:
  return [e for each in found.values() for e in each if e.option.only == goal]


def _times(e: Evidence) -> float:
  """How many times as fast as dense its run was, of as many steps, by the clock of its race."""
  both = e.own.curves.keys() & e.dense.curves.keys()
  return statistics.fmean(e.dense.curves[seed][-1][0] / e.own.curves[seed][-1][0] for seed in both)
