"""`python -m experiments guide`: which recipe for a GPU, a size and a goal, from records and nothing else.

Times are those that a GPU's records of kernels expect of one feed-forward block; losses are those of comparisons in
which every method searched its learning rate alike, with 95% intervals over seeds. None of them is of your model: a
line says of what model and device it is. Methods of a race are parted by their losses, seed by seed.
"""

from collections.abc import Mapping, Sequence, Set
import dataclasses
import itertools
import math
import statistics
import textwrap
from typing import NamedTuple

from experiments.reports import best_steps
from experiments.reports.evidence import (
  against_dense,
  below,
  DENSE,
  Evidence,
  evidence,
  far,
  interval,
  OPTIONS,
  parted,
  RESULTS,
  Step,
  steps,
)
from experiments.reports.guide_code import code
from experiments.reports.guide_tables import LEGEND, tables
from pallas_kernels import _device, _records
import sparse24_jax as s24
from sparse24_jax.block_gain import block_gain

QUESTIONS = {
  'sooner': 'What reaches a loss soonest?',
  'quality': 'What ends lowest after as many steps, and what does a faster step cost?',
  'sparse': 'What leaves 2:4 weights at the end, for inference?',
}
_WIDTH = 100
_PLAIN = 'dense, as it is'


@dataclasses.dataclass(frozen=True)
class Answer:
  """What to take for a goal.

  Attributes:
    take: the method.
    facts: label and sentence of what to expect, and of what else to know.
    code: lines that make a function `loss_fn(params, tokens)` train so.
  """

  take: str
  facts: Sequence[tuple[str, str]]
  code: Sequence[str] = ()

  def __str__(self) -> str:
    lines = [_filled(f'{label:6}', text) for label, text in (('Take', self.take), *self.facts)]
    return '\n'.join([*lines, *([''] if self.code else []), *(f'    {line}' for line in self.code)])


def gains(*, tokens: int, d: int, hidden: int, gated: bool, device: str | None) -> Mapping[str, float | None]:
  """How many times faster than dense the feed-forward block of each sparse option should be; None: unknown.

  Without a device by what runs here.
  """
  return {
    option.title: block_gain(
      d, hidden, s24.recipes.KNOWN[option.recipe].example('.*'), tokens=tokens, gated=gated, device=device
    ).gain
    for option in OPTIONS if option.recipe is not None
  }  # fmt: skip


def answer(
  goal: str, faster: Mapping[str, float | None], found: Mapping[str, Sequence[Evidence]], device: str = '',
  d: int | None = None, *, hidden: int | None = None, timed: Mapping[str, Sequence[Step]] | None = None,
) -> Answer:  # fmt: skip
  """What to take for a goal, what to expect of it, and its code.

  Args:
    goal: of `QUESTIONS`.
    faster: from `gains`.
    found: from `evidence`.
    device: the GPU that is asked about.
    d: the width that is asked about.
    hidden: likewise of the hidden layer.
    timed: from `steps`.

  >>> print(answer('sooner', {'FST': 0.9}, {}))
  Take  dense, as it is
  Why   no faster method was shown to reach its loss sooner
  """
  pays = {title for title, gain in faster.items() if gain is not None and gain > 1}
  of_steps = sorted(
    (e for each in found.values() for e in each if e.equal == 'steps'), key=lambda e: (far(e.width, d), e.mean)
  )

  def of(e: Evidence, *more: tuple[str, str], first: tuple[tuple[str, str], ...] = (), take: str = '') -> Answer:
    alike = [other for other in of_steps if other.contender == e.contender] if e.equal == 'steps' else [e]
    gain = [f"dense's final loss after {interval(e.shares)} of dense's time ({e.place(device)})"] if e.shares else []
    gain += [
      f'a step {step.times:.2f} times as fast as dense ({step.least:.2f} to {step.most:.2f}; {step.where})'
      for step in (timed or {}).get(e.contender, ())
    ]
    if times := faster.get(e.option.title):
      gain.append(f'a feed-forward block {times:.2f} times as fast as dense, at the size asked about')
    losses = [
      f'{against_dense(e.percent)} after equal {e.equal}{_edge(e)}'
      + ('' if e.shares else f' ({e.place(device)})') for e in alike
    ]  # fmt: skip
    lines = code(e.option, e.contender, rate=e.own.rate, decay=e.own.decay, hidden=hidden)
    return Answer(take or e.who, [*first, *_under('Gain', gain), *_under('Loss', losses), *more], lines)

  if goal == 'sooner':
    winners = _winners(pays | DENSE, found, d)
    behind, best = _behind_at_this_width(pays, found, d), next((w for w in winners if not w.beaten_by), None)
    warned = _under('But', [text for w in winners for text in w.warned()])
    if behind or best is None:
      why = behind or 'no faster method was shown to reach its loss sooner'
      return Answer(_PLAIN, [('Why', why), *warned, *_under('Else', [w.said(device) for w in winners])])
    others = _under('Else', [w.said(device) for w in winners if w is not best])
    return of(best.first, *warned, *others, take=best.names)
  if goal == 'sparse':
    sparse = [option for option in OPTIONS if option.ends_sparse]
    option = max(sparse, key=lambda option: (option.title in pays, faster.get(option.title) or 0))
    ends = ('Ends', 's24.project(params, opt_state, recipe) has the zeros, s24.verify_weights proves them')
    best = next((e for e in of_steps if e.option.title == option.title), None)
    if best is not None:
      return of(best, ends)
    lines = code(option, option.contenders[0], rate=1e-3, decay=0.0)
    return Answer(option.title, [('Loss', 'no tuned comparison was recorded'), ends], lines)
  if surely := [e for e in of_steps if below(e.percent)]:
    return of(surely[0])
  why = ('Why', 'no recipe was shown to end below it after as many steps')
  price = next((e for e in of_steps if e.option.title in pays and len(e.percent) > 1), None)
  if price is None:
    return Answer(_PLAIN, [why])
  return of(price, first=(why, ('But', f'{price.who} is faster, for this price:')), take=_PLAIN)


class _Winner(NamedTuple):
  """Of a race: the first of those with several seeds.

  Attributes:
    first: of the lowest loss.
    near: those that its seeds do not part from it.
    lower: those of one seed that ended lower.
    beaten_by: what beat the first in a race whose width is as near or nearer, and did not run in this one.
  """

  first: Evidence
  near: Sequence[Evidence]
  lower: Sequence[Evidence]
  beaten_by: Evidence | None

  @property
  def names(self) -> str:
    """All that may be the first."""
    return ' or '.join(e.who for e in (self.first, *self.near))

  def said(self, device: str) -> str:
    """The race in a sentence."""
    text = f"{self.first.place(device)}: {self.names}, {interval(self.first.shares)} of dense's time"
    return f'{text}. {self.beaten_by.who}, which beat it elsewhere, did not run' if self.beaten_by else text

  def warned(self) -> list[str]:
    """What one seed cannot claim, and a reader should know before he takes what is claimed."""
    return [
      f"{e.where}: {e.who} ended lowest, {e.shares[0]:.2f} of dense's time, with one seed{_edge(e)}"
      for e in self.lower
    ]


def _winners(candidates: Set[str], found: Mapping[str, Sequence[Evidence]], d: int | None) -> list[_Winner]:
  """The first of each race in which one was surely below dense, the nearest width first."""
  races: dict[tuple[str, str], list[Evidence]] = {}
  for e in (e for title in found if title in candidates for e in found[title]):
    if e.shares and len(e.percent) > 1 and e.mean < 0:
      races.setdefault((e.where, e.device), []).append(e)
  for each in races.values():
    each.sort(key=lambda e: e.mean)
  # A race of the width asked about says more than others.
  ordered = [each for each in sorted(races.values(), key=lambda each: far(each[0].width, d)) if below(each[0].percent)]
  # Who is ahead of whom, by more than the interval, in any race.
  ahead = [(first, e) for each in ordered for first, e in itertools.combinations(each, 2) if parted(e, first)]
  winners = []
  for first, *others in ordered:
    ran = {e.who for e in (first, *others)}
    elsewhere = (
      winner for winner, e in ahead
      if e.who == first.who and winner.who not in ran and far(winner.width, d) <= far(first.width, d)
    )  # fmt: skip
    lower = [
      e for title in sorted(candidates) for e in found.get(title, ())
      if (e.where, e.device) == (first.where, first.device) and len(e.shares) == 1
      and max(e.behind(first), default=0.0) < 0
    ]  # fmt: skip
    better = next((winner for winner in elsewhere if winner.device == first.device), None)
    winners.append(_Winner(first, [e for e in others if not parted(e, first)], lower, better))
  return winners


def _behind_at_this_width(sparse: Set[str], found: Mapping[str, Sequence[Evidence]], d: int | None) -> str:
  """That, in the longest runs of the nearest width, no sparse model was surely sooner at its final loss than dense.

  '' if one was, or if these runs were a race, which tells itself who was sooner.
  """
  known = [e for title in sparse for e in found.get(title, ()) if e.width and e.dense_shares]
  if d is None or not known:
    return ''
  width = min((e.width for e in known if e.width), key=lambda width: far(width, d))
  longest = max((e for e in known if e.width == width), key=lambda e: next(iter(e.own.curves.values()))[-1][0])
  near = [e for e in known if (e.width, e.where, e.device) == (width, longest.where, longest.device)]
  if longest.equal == 'seconds' or any(_sooner(e) for e in near):
    return ''
  best = max(near, key=lambda e: statistics.fmean(e.dense_shares))
  return (
    f'it has the final loss of {best.who}, the soonest sparse model at {best.where}, after'
    f' {interval(best.dense_shares)} of its time, and is then in mid-schedule ({best.device})'
  )


def _sooner(e: Evidence) -> bool:
  """Whether it is at its final loss before dense by more than the interval."""
  return not all(map(math.isfinite, e.dense_shares)) or below([1 - share for share in e.dense_shares])


def _under(label: str, texts: Sequence[str]) -> list[tuple[str, str]]:
  """Sentences under one label."""
  return [(label if not i else '', text) for i, text in enumerate(texts)]


def _edge(e: Evidence) -> str:
  """That its best setting lies at an edge of its search, so that a wider one may find a better."""
  if e.own.searched == 1:
    return ', its rate not searched'
  return ', best at an edge of its search' if e.own.edge else ''


def guide(
  *, tokens: int, d: int, hidden: int, gated: bool, device: str | None, goal: str | None = None
) -> str:
  """The answers to all questions, or to that of one goal, and what they rest on.

  Raises:
    ValueError: nothing was measured on that device, or sizes that no recipe takes.
  """
  asked = _records.device_meant(device) if device else None
  device = asked or _device.current().slug
  known = _records.measured_devices()
  if _records.path_of(_records.TUNED, device, 'sparse_matmul').parent.name not in known:
    raise ValueError(f'nothing was measured on {device!r}; pass --device, one of {", ".join(known)}')
  faster, found = gains(tokens=tokens, d=d, hidden=hidden, gated=gated, device=asked), evidence()
  timed = steps(d, [best_steps.load(RESULTS / name) for name in (best_steps.FILE, 'best_steps_124m.jsonl')])
  title = (
    f'Feed-forward blocks of {d:,} x {hidden:,} with {tokens:,} tokens, on {device}. The code takes a function of'
    ' yours, loss_fn(params, tokens), and patterns that match the whole paths of your weights.'
  )
  lines = [_filled('', title), '']
  for each in QUESTIONS if goal is None else [goal]:
    lines += [QUESTIONS[each], '', str(answer(each, faster, found, device, d, hidden=hidden, timed=timed)), '']
  return '\n'.join([*lines, _filled('', LEGEND), *tables(faster, found, timed, d)])


def _filled(label: str, text: str) -> str:
  """A label and its text, whose further lines stand under it."""
  indent = ' ' * len(label)
  return textwrap.fill(f'{label}{text}', _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
