"""`python -m experiments guide`: which recipe for a GPU, a size and a goal, from records and nothing else.

Times are those that a GPU's records of kernels expect of one feed-forward block; losses are those of comparisons in
which most methods searched their learning rates alike (° marks those that did not), with 95% intervals over seeds.
None of them is of your model: a line says of what model and device it is. Methods of a race are parted by their losses,
seed by seed.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
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
  near,
  OPTIONS,
  Step,
  steps,
  told,
  under,
)
from experiments.reports.guide_code import code
from experiments.reports.guide_more import flops, squared_relu
from experiments.reports.guide_races import (
  behind_at_this_width,
  how,
  is_gain,
  may_gain,
  no_race,
  winners,
  without_dense,
)
from experiments.reports.guide_tables import LEGEND, tables
from experiments.reports.provenance import RESULTS
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
  plain = {title: [e for e in each if e.against == 'dense' and not e.option.only] for title, each in found.items()}
  asked = _Asked(faster, plain, device, d, hidden, timed or {})
  if goal == 'sooner':
    return _soonest(asked, without_dense(faster, found, device, d))
  return _sparse(asked) if goal == 'sparse' else _lowest(asked)


class _Asked(NamedTuple):
  """Arguments of `answer`, of `found` what is compared with a plain dense model."""

  faster: Mapping[str, float | None]
  found: Mapping[str, Sequence[Evidence]]
  device: str
  d: int | None
  hidden: int | None
  timed: Mapping[str, Step]

  def of_steps(self) -> list[Evidence]:
    """Comparisons of as many steps, the nearest width first."""
    alike = [e for each in self.found.values() for e in each if e.equal == 'steps']
    return sorted(alike, key=lambda e: (far(e.width, self.d), e.mean))

  def of(
    self, e: Evidence, *more: tuple[str, str], first: Sequence[tuple[str, str]] = (), take: str = '', head: str = ''
  ) -> Answer:
    """That this is what to take."""
    alike = [other for other in self.of_steps() if other.contender == e.contender] if e.equal == 'steps' else [e]
    losses = [
      f'{against_dense(e.percent)} after equal {e.equal}{edge(e)}'
      + ('' if e.shares else f' ({e.place(self.device)})') for e in alike
    ]  # fmt: skip
    lines = code(
      e.contender, rate=e.own.rate, decay=e.own.decay, hidden=self.hidden, schedule=e.schedule,
      found=f'was {"the only one tried" if e.own.searched == 1 else "the best"} for {e.where}',
    )  # fmt: skip
    lines = [f'# {head}', *lines] if head and lines else lines
    return Answer(take or e.who, [*first, *under('Gain', self._gain(e)), *under('Loss', losses), *more], lines)

  def _gain(self, e: Evidence) -> list[str]:
    gain = []
    if e.shares:
      gain.append(f"dense's final loss after {interval(e.shares)} of dense's time ({e.place(self.device)})")
    if step := self.timed.get(e.contender):
      place = f'{step.where}, {told(step.device, self.device)}'
      gain.append(f'a step {step.times:.2f} times as fast as dense ({step.least:.2f} to {step.most:.2f}; {place})')
    if times := self.faster.get(e.contender):
      wide, dense = 'the size asked about', 'dense'
      if self.hidden and narrowed(self.hidden, e.contender) != self.hidden:
        wide, dense = f'hidden width {narrowed(self.hidden, e.contender):,}', f'dense of {self.hidden:,}'
      gain.append(f'a feed-forward block of {wide} {times:.2f} times as fast as {dense}')
    return gain


def _soonest(asked: _Asked, without: Sequence[str]) -> Answer:
  """What wins a race of about this width, unless it is known to lose another; `without` says what ran without dense."""
  faster, found, device, d = asked[:4]
  won = winners(faster, found, d)
  best = next((w for w in won if not w.beaten_by and near(w.first.width, d)), None)
  warned = under('But', [text for w in won if near(w.first.width, d) for text in w.warned()])
  if (behind := behind_at_this_width(faster, found, d)) or best is None:
    behind = behind or [('Why', no_race(found, d) or 'no faster method was shown to reach its loss sooner')]
    return Answer(_PLAIN, [*behind, *warned, *under('Else', [*(w.said(device) for w in won), *without])])
  others = under('Else', [*(w.said(device) for w in won if w is not best), *without])
  head = f'Of {best.first.who}.' if best.near else ''
  return asked.of(best.first, *warned, *others, take=best.names, head=head)


def _sparse(asked: _Asked) -> Answer:
  """The fastest method that ends sparse; where none is known to be faster, that of the lowest loss."""
  sparse = [option for option in OPTIONS if option.ends_sparse]
  pays = [option for option in sparse if is_gain(asked.faster.get(option.contenders[0]))]
  taken = [max(pays, key=lambda option: asked.faster[option.contenders[0]] or 0)] if pays else sparse
  ends = ('Ends', 's24.project(params, opt_state, recipe) has the zeros, s24.verify_weights proves them')
  best = next((e for e in asked.of_steps() if e.option in taken), None)
  if best is not None:
    return asked.of(best, ends)
  lines = code(taken[0].contenders[0], rate=1e-3, decay=0.0, found='is a guess, since none was searched')
  return Answer(taken[0].title, [('Loss', 'no tuned comparison was recorded'), ends], lines)


def _lowest(asked: _Asked) -> Answer:
  """What is surely below dense after as many steps; else dense, and the price of what is faster."""
  of_steps = asked.of_steps()
  if surely := [e for e in of_steps if below(e.percent)]:
    return asked.of(surely[0])
  why = ('Why', 'no method was shown to end below it after as many steps')
  faster_ones = [e for e in of_steps if may_gain(e, asked.faster)]
  price = next((e for e in faster_ones if len(e.percent) > 1), None)
  if price is None:
    return Answer(_PLAIN, [why])
  lower = [
    f'{e.who} {how(e, asked.faster)}, and ended {abs(e.mean):.1f}% {"above" if e.mean >= 0 else "below"} dense'
    f'{edge(e)} ({e.place(asked.device)})' for e in faster_ones[: faster_ones.index(price)]
  ]  # fmt: skip
  first = [why, *under('But', [*lower, f'{price.who} {how(price, asked.faster)}, for this price:'])]
  return asked.of(price, first=first, take=_PLAIN, head=f'If you pay this price: {price.who}.')


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
