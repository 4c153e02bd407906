"""`python -m experiments guide`: which recipe for a GPU, a size and a goal, from records and nothing else.

Times are those that a GPU's records of kernels expect of one feed-forward block; losses are those of comparisons in
which most methods searched their learning rates alike (° marks those that did not), with 95% intervals over seeds.
None of them is of your model: a line says of what model and device it is. Methods of a race are parted by their losses,
seed by seed.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import itertools
import math
import statistics
import textwrap
from typing import NamedTuple

from experiments.reports import best_steps
from experiments.reports.evidence import (
  against_dense,
  below,
  block_of,
  contender_of,
  edge,
  Evidence,
  evidence,
  far,
  interval,
  NAMES,
  narrowed,
  NEAR,
  near,
  OPTIONS,
  parted,
  RESULTS,
  Step,
  steps,
  told,
  under,
)
from experiments.reports.guide_code import code
from experiments.reports.guide_more import flops, squared_relu
from experiments.reports.guide_tables import LEGEND, tables
from experiments.runs.race.contenders import Contender, CONTENDERS, MANY_STEPS
from pallas_kernels import _device, _records
import sparse24_jax as s24
from sparse24_jax.block_gain import block_gain
from sparse24_jax.priced import BlockGain

QUESTIONS = {
  'sooner': 'What reaches a loss soonest?',
  'quality': 'What ends lowest after as many steps, and what does a faster step cost?',
  'sparse': 'What leaves 2:4 weights at the end, for inference?',
  'squared_relu': 'Are sparse activations worth it, where the model has squared ReLU?',
  'flops': 'What saves FLOPs, which are counted and not timed?',
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
  """How many times faster than dense of that size the feed-forward block of each contender should be; None: unknown.

  A contender with a narrower block has that block. Without a device by what runs here.
  """

  @functools.cache
  def block(recipe: str, hidden: int) -> BlockGain:
    example = s24.recipes.KNOWN[recipe].example('.*')
    return block_gain(d, hidden, example, tokens=tokens, gated=gated, device=device)

  found = {}
  for name, option in NAMES.items():
    if option.only == 'squared_relu' and name in CONTENDERS and option.recipe:
      found[name] = None if gated else _neuron_gain(CONTENDERS[name], tokens, d, hidden, device)
    # Others are not of a width that was asked about, or in no answer that has a gain.
    if option.only or contender_of(name).size:
      continue
    recipe, _, fp8 = block_of(name)
    own = block(recipe or 's_ste_fp8', narrowed(hidden, name))
    dense_ms = block(recipe or 's_ste_fp8', hidden).dense_ms
    ms = own.expected_ms if recipe else own.dense_ms if not fp8 else None if own.simulated else own.dense_fp8_ms
    found[name] = None if dense_ms is None or ms is None else dense_ms / ms
  return found


def _neuron_gain(contender: Contender, tokens: int, d: int, hidden: int, device: str | None) -> float | None:
  """That of a squared-ReLU block, where the library would run it on kernels."""
  policy = contender.make(0.0, MANY_STEPS).rules[0].activation
  recipe = s24.recipes.neuron_level('up/.*', 'down/.*', policy=dataclasses.replace(policy, implementation=None))
  return block_gain(d, hidden, recipe, tokens=tokens, device=device).gain


def answer(
  goal: str, faster: Mapping[str, float | None], found: Mapping[str, Sequence[Evidence]], device: str = '',
  d: int | None = None, *, hidden: int | None = None, timed: Mapping[str, Step] | None = None,
) -> Answer:  # fmt: skip
  """What to take for a goal, what to expect of it, and its code.

  Args:
    goal: of `QUESTIONS`.
    faster: from `gains`, by contender.
    found: from `evidence`.
    device: the GPU that is asked about.
    d: the width that is asked about.
    hidden: likewise of the hidden layer.
    timed: from `steps`.

  >>> print(answer('sooner', {'fst': 0.9}, {}))
  Take  dense, as it is
  Why   no faster method was shown to reach its loss sooner
  """
  if goal == 'squared_relu':
    return Answer(*squared_relu(faster, found, timed or {}, device, d))
  if goal == 'flops':
    return Answer(*flops(found, device, d))
  without_dense = _without_dense(faster, found, device, d)
  found = {title: [e for e in each if e.against == 'dense' and not e.option.only] for title, each in found.items()}
  of_steps = sorted(
    (e for each in found.values() for e in each if e.equal == 'steps'), key=lambda e: (far(e.width, d), e.mean)
  )

  def of(
    e: Evidence, *more: tuple[str, str], first: Sequence[tuple[str, str]] = (), take: str = '', head: str = ''
  ) -> Answer:
    alike = [other for other in of_steps if other.contender == e.contender] if e.equal == 'steps' else [e]
    gain = [f"dense's final loss after {interval(e.shares)} of dense's time ({e.place(device)})"] if e.shares else []
    if step := (timed or {}).get(e.contender):
      place = f'{step.where}, {told(step.device, device)}'
      gain.append(f'a step {step.times:.2f} times as fast as dense ({step.least:.2f} to {step.most:.2f}; {place})')
    if times := faster.get(e.contender):
      wide, dense = 'the size asked about', 'dense'
      if hidden and narrowed(hidden, e.contender) != hidden:
        wide, dense = f'hidden width {narrowed(hidden, e.contender):,}', f'dense of {hidden:,}'
      gain.append(f'a feed-forward block of {wide} {times:.2f} times as fast as {dense}')
    losses = [
      f'{against_dense(e.percent)} after equal {e.equal}{edge(e)}'
      + ('' if e.shares else f' ({e.place(device)})') for e in alike
    ]  # fmt: skip
    lines = code(
      e.contender, rate=e.own.rate, decay=e.own.decay, hidden=hidden, schedule=e.schedule,
      found=f'was {"the only one tried" if e.own.searched == 1 else "the best"} for {e.where}',
    )  # fmt: skip
    lines = [f'# {head}', *lines] if head and lines else lines
    return Answer(take or e.who, [*first, *under('Gain', gain), *under('Loss', losses), *more], lines)

  if goal == 'sooner':
    winners = _winners(faster, found, d)
    best = next((w for w in winners if not w.beaten_by and near(w.first.width, d)), None)
    warned = under('But', [text for w in winners if near(w.first.width, d) for text in w.warned()])
    if (behind := _behind_at_this_width(faster, found, d)) or best is None:
      behind = behind or [('Why', _no_race(found, d) or 'no faster method was shown to reach its loss sooner')]
      return Answer(_PLAIN, [*behind, *warned, *under('Else', [*(w.said(device) for w in winners), *without_dense])])
    others = under('Else', [*(w.said(device) for w in winners if w is not best), *without_dense])
    head = f'Of {best.first.who}.' if best.near else ''
    return of(best.first, *warned, *others, take=best.names, head=head)
  if goal == 'sparse':
    sparse = [option for option in OPTIONS if option.ends_sparse]
    pays = [option for option in sparse if _gains(faster.get(option.contenders[0]))]
    # Where none is known to be faster, the lowest loss decides.
    taken = [max(pays, key=lambda option: faster[option.contenders[0]] or 0)] if pays else sparse
    ends = ('Ends', 's24.project(params, opt_state, recipe) has the zeros, s24.verify_weights proves them')
    best = next((e for e in of_steps if e.option in taken), None)
    if best is not None:
      return of(best, ends)
    lines = code(taken[0].contenders[0], rate=1e-3, decay=0.0, found='is a guess, since none was searched')
    return Answer(taken[0].title, [('Loss', 'no tuned comparison was recorded'), ends], lines)
  if surely := [e for e in of_steps if below(e.percent)]:
    return of(surely[0])
  why = ('Why', 'no method was shown to end below it after as many steps')
  faster_ones = [e for e in of_steps if _may_gain(e, faster)]
  price = next((e for e in faster_ones if len(e.percent) > 1), None)
  if price is None:
    return Answer(_PLAIN, [why])
  lower = [
    f'{e.who} {_how(e, faster)}, and ended {abs(e.mean):.1f}% {"above" if e.mean >= 0 else "below"} dense'
    f'{edge(e)} ({e.place(device)})' for e in faster_ones[: faster_ones.index(price)]
  ]  # fmt: skip
  first = [why, *under('But', [*lower, f'{price.who} {_how(price, faster)}, for this price:'])]
  return of(price, first=first, take=_PLAIN, head=f'If you pay this price: {price.who}.')


class _Winner(NamedTuple):
  """The contender that wins a race, the first of those with several seeds.

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
    share = f"{interval(self.first.shares)} of dense's time"
    text = f"{self.first.place(device)}: {self.names} had dense's final loss in {share}"
    return f'{text}. {self.beaten_by.who}, which beat it elsewhere, did not run' if self.beaten_by else text

  def warned(self) -> list[str]:
    """What one seed cannot claim, and a reader should know before he takes what is claimed."""
    return [
      f"{e.where}: {e.who} ended lowest, and had dense's final loss in {e.shares[0]:.2f} of dense's time, by one seed"
      + edge(e)
      for e in self.lower
    ]


def _winners(
  faster: Mapping[str, float | None], found: Mapping[str, Sequence[Evidence]], d: int | None
) -> list[_Winner]:
  """The first of each race in which one was surely below dense, the nearest width first."""
  candidates = [e for title in sorted(found) for e in found[title] if _may_gain(e, faster)]
  races: dict[tuple[str, str], list[Evidence]] = {}
  for e in candidates:
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
      e for e in candidates
      if (e.where, e.device) == (first.where, first.device) and len(e.shares) == 1
      and max(e.behind(first), default=0.0) < 0
    ]  # fmt: skip
    better = next((winner for winner in elsewhere if winner.device == first.device), None)
    winners.append(_Winner(first, [e for e in others if not parted(e, first)], lower, better))
  return winners


def _behind_at_this_width(
  faster: Mapping[str, float | None], found: Mapping[str, Sequence[Evidence]], d: int | None
) -> list[tuple[str, str]]:
  """That, in the longest runs of the nearest width, no method was surely sooner at its final loss than dense.

  Nothing if one was, or if these runs were a race, which tells itself who was sooner.
  """
  known = [
    e for each in found.values() for e in each
    if e.width and e.dense_shares and _may_gain(e, faster) and near(e.width, d)
  ]  # fmt: skip
  if d is None or not known:
    return []
  width = min((e.width for e in known if e.width), key=lambda width: far(width, d))
  longest = max((e for e in known if e.width == width), key=lambda e: next(iter(e.own.curves.values()))[-1][0])
  alike = [e for e in known if (e.width, e.where, e.device) == (width, longest.where, longest.device)]
  alike.sort(key=lambda e: -statistics.fmean(e.dense_shares))
  several = [e for e in alike if len(e.percent) > 1]
  if longest.equal == 'seconds' or not several or any(map(_sooner, several)):
    return []
  best = several[0]
  why = (
    f'dense reaches the final loss of {best.who}, the soonest with several seeds of {best.where}, in'
    f' {interval(best.dense_shares)} of the time that {best.who} takes, and is then in mid-schedule ({best.device})'
  )
  ahead = [
    f'{e.where}: dense reaches the final loss of {e.who} in {e.dense_shares[0]:.2f} of the time that {e.who} takes, by'
    f' one seed{edge(e)}' for e in alike[: alike.index(best)]
  ]  # fmt: skip
  return [('Why', why), *under('But', ahead)]


def _without_dense(
  faster: Mapping[str, float | None], found: Mapping[str, Sequence[Evidence]], device: str, d: int | None
) -> list[str]:
  """Who ended lowest in races of about this width in which no dense model in 16 bits ran."""
  races: dict[str, list[Evidence]] = {}
  for e in (e for each in found.values() for e in each if e.against != 'dense' and near(e.width, d)):
    if e.equal == 'seconds' and _may_gain(e, faster):
      races.setdefault(e.where, []).append(e)
  said = []
  for where, each in races.items():
    first, *others = sorted(each, key=lambda e: e.own.mean)
    names = [first.who, *(e.who for e in others if len(e.behind(first)) > 1 and not parted(e, first))]
    names += [first.dense.title] if len(first.percent) > 1 and not below(first.percent) else []
    seeds = f'{len(first.own.losses)} seeds, {told(first.device, device)}'
    said.append(f'{where}, {seeds}, without dense in 16 bits: {" or ".join(names)} ended lowest')
  return said


def _no_race(found: Mapping[str, Sequence[Evidence]], d: int | None) -> str:
  """That all races were of other widths; '' if one was not, or there was none."""
  widths = [e.width for each in found.values() for e in each if e.shares]
  if not widths or any(near(width, d) for width in widths):
    return ''
  return f'no race was run at a width within a factor of {NEAR} of {d:,}'


def _gain(e: Evidence, faster: Mapping[str, float | None]) -> float | None:
  """The gain that decides: of a recipe that over a dense block as wide as its own."""
  return faster.get(e.option.contenders[0] if e.option.recipe else e.contender)


def _gains(gain: float | None) -> bool:
  """Whether a gain is known to be one."""
  return gain is not None and round(gain, 2) > 1


def _how(e: Evidence, faster: Mapping[str, float | None]) -> str:
  return 'is faster' if _gains(_gain(e, faster)) else 'computes less'


def _may_gain(e: Evidence, faster: Mapping[str, float | None]) -> bool:
  """Whether it may be sooner than dense; of a dense rival whose block is not priced its race says so."""
  gain = _gain(e, faster)
  return e.option.recipe is None if gain is None else _gains(gain)


def _sooner(e: Evidence) -> bool:
  """Whether it is at its final loss before dense by more than the interval."""
  return not all(map(math.isfinite, e.dense_shares)) or below([1 - share for share in e.dense_shares])


def guide(
  *, tokens: int, d: int, hidden: int, gated: bool, device: str | None, goal: str | None = None
) -> str:
  """The answers to all questions, or to that of one goal, and what they rest on.

  Raises:
    ValueError: nothing was measured on that device, or sizes that no recipe takes.
  """
  if tokens < 1:
    raise ValueError(f'--tokens is {tokens}, and must be positive')
  for name, size in (('--d', d), ('--hidden', hidden)):
    if size < 4 or size % 4:
      raise ValueError(f'{name} is {size}, and must be a positive multiple of 4, as 2:4 weights are groups of four')
  asked = _records.device_meant(device) if device else None
  device = asked or _device.current().slug
  known = _records.measured_devices()
  if _records.path_of(_records.TUNED, device, 'sparse_matmul').parent.name not in known:
    raise ValueError(f'nothing was measured on {device!r}; pass --device, one of {", ".join(known)}')
  faster, found = gains(tokens=tokens, d=d, hidden=hidden, gated=gated, device=asked), evidence()
  sessions = [best_steps.load(RESULTS / name) for name in (best_steps.FILE, 'best_steps_124m.jsonl')]
  timed = steps(d, sessions, device)
  title = (
    f'Feed-forward blocks of {d:,} x {hidden:,} with {tokens:,} tokens, on {device}. The code takes a function of'
    ' yours, loss_fn(params, tokens), and patterns that match the whole paths of your weights.'
  )
  lines = [_filled('', title), '']
  said: dict[Sequence[str], str] = {}
  for each in QUESTIONS if goal is None else [goal]:
    own = answer(each, faster, found, device, d, hidden=hidden, timed=timed)
    key = tuple(line for line in own.code if not line.startswith(('# Of ', '# If ')))
    if key and said.setdefault(key, each) != each:
      own = dataclasses.replace(own, code=[f'# As under "{QUESTIONS[said[key]]}"'])
    lines += [QUESTIONS[each], '', str(own), '']
  if goal:
    of_goal = (goal,) if goal in {option.only for option in OPTIONS} else (None, 'tables')
    found = {title: [e for e in each if e.option.only in of_goal] for title, each in found.items()}
    faster = {name: gain for name, gain in faster.items() if NAMES[name].only in of_goal}
    timed = {name: step for name, step in timed.items() if NAMES[name].only in of_goal}
  return '\n'.join([*lines, _filled('', LEGEND), *tables(faster, found, timed, d)])


def _filled(label: str, text: str) -> str:
  """A label and its text, whose further lines stand under it."""
  indent = ' ' * len(label)
  return textwrap.fill(f'{label}{text}', _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
