"""`python -m experiments guide`: which recipe for a GPU, a size and a goal, from records and nothing else.

Times are those that a GPU's records of kernels expect of one feed-forward block; losses are those of comparisons in
which every method searched its learning rate alike, with 95% intervals over seeds. None of them is of your model: a
line says of what model and device it is. Methods of a race are parted by their losses, seed by seed.
"""

from collections.abc import Mapping, Sequence, Set
import dataclasses
import itertools
import math
from pathlib import Path
import statistics
import textwrap

from experiments.reports import best_steps
from experiments.reports import race_table as table
from experiments.reports.claims import half_width
from pallas_kernels import _device, _records
import sparse24_jax as s24
from sparse24_jax.block_gain import block_gain

RESULTS = Path(__file__).parents[1] / 'results'
# Comparisons with seeds in which every method was tuned. The long one has rates that were tuned in shorter runs.
COMPARISONS = (
  'grid_nano.jsonl', 'grid_small.jsonl', 'race_h200_124m.jsonl', 'race_h200_124m_long.jsonl', 'race_h200_seeds.jsonl',
  'race_h200_wide2048_3.jsonl', 'race_h200_774m.jsonl',
)  # fmt: skip
GOALS = {
  'sooner': 'a loss after the fewest seconds',
  'quality': 'the lowest loss after as many steps',
  'sparse': 'a model whose weights are 2:4 at the end, for inference',
}
_NO_LOSS = 'No tuned comparison was recorded.'


@dataclasses.dataclass(frozen=True)
class Option:
  """A recipe, or a dense rival.

  Attributes:
    title: its name in tables.
    recipe: name in `sparse24_jax.recipes.KNOWN`; None is dense.
    contenders: what comparisons and timed steps call it.
    ends_sparse: whether the weights are 2:4 at the end.
  """

  title: str
  recipe: str | None
  contenders: Sequence[str]
  ends_sparse: bool = False


OPTIONS = (
  Option('FST', 'transposable_srste', ('fst', 'fst_all')),
  Option('S-STE', 's_ste', ('s_ste', 's_ste_all'), ends_sparse=True),
  Option(
    'S-STE, FP8', 's_ste_fp8',
    ('s_ste_fp8', 's_ste_fp8_all', 'half_ffn_s_ste_fp8_all', 'quarter_ffn_s_ste_fp8_all'), ends_sparse=True,
  ),
  Option('SR-STE', 'sr_ste', ('sr_ste',), ends_sparse=True),
  Option('dense, FP8', None, ('dense_fp8',)),
  Option('dense, a narrower FFN', None, ('half_ffn', 'half_ffn_fp8', 'quarter_ffn_fp8')),
  Option('a smaller dense model', None, ('dense_124m', 'dense_124m_fp8')),
)
_DENSE = {option.title for option in OPTIONS if option.recipe is None}


@dataclasses.dataclass(frozen=True)
class Evidence:
  """What a comparison says of one contender, seed by seed.

  Attributes:
    own: its runs at its best, with the layers that were sparse.
    dense: those of dense in the same comparison.
    where: model and length of the comparison.
    device: that trained.
    equal: what both had as much of, 'steps' or 'seconds'.
    width: of the comparison's models; None if the records do not tell.
  """

  own: table.Seeds
  dense: table.Seeds
  where: str
  device: str
  equal: str
  width: int | None = None

  @property
  def who(self) -> str:
    """What tables call it."""
    return self.own.title

  @property
  def edge(self) -> str:
    """That its best setting lies at an edge of its search, so that a wider one may find a better."""
    if self.own.searched == 1:
      return ', its rate not searched'
    return ', best at an edge of its search' if self.own.edge else ''

  @property
  def percent(self) -> list[float]:
    """Final loss above dense's."""
    both = sorted(self.own.losses.keys() & self.dense.losses.keys())
    return [100 * (self.own.losses[seed] / self.dense.losses[seed] - 1) for seed in both]

  @property
  def shares(self) -> list[float]:
    """Shares of dense's seconds until dense's final loss; empty where seconds were not compared."""
    return [] if self.equal == 'steps' else table.shares_of_time(self.own, self.dense)

  @property
  def dense_shares(self) -> list[float]:
    """Shares of its seconds until dense is at its final loss, in mid-schedule, by the runs' own clocks.

    Infinite where dense never is; empty if no steps were timed.
    """
    if any(seconds is None for curve in self.own.curves.values() for seconds, _ in curve):
      return []
    both = sorted(self.own.curves.keys() & self.dense.curves.keys())
    shares = table.shares_of_time(self.dense, self.own)
    slower = [self.dense.slower.get(seed, 1.0) / self.own.slower.get(seed, 1.0) for seed in both]
    return [share * times for share, times in zip(shares, slower, strict=True)]

  def behind(self, other: 'Evidence') -> list[float]:
    """Its final loss minus another's."""
    both = self.own.losses.keys() & other.own.losses.keys()
    return [self.own.losses[seed] - other.own.losses[seed] for seed in sorted(both)]

  def place(self, asked: str) -> str:
    """Model, length and device; and that it is another one than the GPU asked about, where seconds were compared."""
    return f'{self.where}, on {self.device}' + (self.elsewhere(asked) if self.equal == 'seconds' else '')

  def elsewhere(self, asked: str) -> str:
    """That it is of another GPU than the one asked about, or ''."""
    return f', another GPU than {asked}' if asked and _device.Device(self.device, 'gpu').slug != asked else ''

  def said(self, asked: str = '') -> str:
    """Says it in a sentence, with its interval or that it is of one seed; `asked` is as in `place`."""
    text = f'After equal {self.equal} its loss is {_against_dense(self.percent)}.'
    if self.shares:
      text += f" It needs {_interval(self.shares, '.2f', '')} of dense's time to dense's final loss."
    return f'{text} ({self.who}{self.edge}: {self.place(asked)})'


def evidence(results: Path = RESULTS) -> Mapping[str, Sequence[Evidence]]:
  """What the comparisons say of each option, by title."""
  found: dict[str, list[Evidence]] = {option.title: [] for option in OPTIONS}
  for name in COMPARISONS:
    for where, records in table.read(results / name).items():
      seeds = table.by_seed(records)
      if 'dense' not in seeds:
        continue
      device, equal = records[0]['device'].removeprefix('1 x '), 'steps' if records[0]['equal_steps'] else 'seconds'
      for option in OPTIONS:
        for own in (seeds[contender] for contender in option.contenders if contender in seeds):
          e = Evidence(own, seeds['dense'], where, device, equal, records[0].get('shape', {}).get('d'))
          if e.percent and all(map(math.isfinite, [*e.percent, *e.shares])):
            found[option.title].append(e)
  return found


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


type Steps = Mapping[tuple[str, str], Mapping[str, best_steps.Best]]


def steps(option: Option, d: int, sessions: Sequence[Steps]) -> list[str]:
  """Whole steps of the timed model of the nearest width against dense at its best, the lowest gain first.

  All sessions count, each with the least and the most over the processes of its session.
  """
  wanted = {'dense', *option.contenders}
  having = [
    (*key, methods) for timed in sessions for key, methods in timed.items() if {'dense'} < methods.keys() & wanted
  ]
  if not having:
    return []
  nearest = min(having, key=lambda found: abs(math.log(found[2]['dense'].record['shape']['d'] / d)))
  said = []
  for device, model, methods in having:
    if (device, model) == nearest[:2]:
      dense = methods['dense']
      said += [
        (dense.ms / own.ms,
         f'A step of {model} is {dense.ms / own.ms:.2f} times as fast as dense. ({own.record["label"]}: width'
         f' {dense.record["shape"]["d"]:,}, on {device}, {dense.least / own.most:.2f} to'
         f' {dense.most / own.least:.2f} times)')
        for name in option.contenders if (own := methods.get(name))
      ]  # fmt: skip
  return [text for _, text in sorted(said)]


def advise(
  goal: str, faster: Mapping[str, float | None], found: Mapping[str, Sequence[Evidence]], device: str = '',
  d: int | None = None,
) -> str:
  """What to take, in a sentence, and a line for each thing more to know; of races for each that the lowest beat.

  Args:
    goal: of `GOALS`.
    faster: from `gains`.
    found: from `evidence`.
    device: the GPU that is asked about.
    d: the width that is asked about.

  >>> advise('sooner', {'FST': 0.9}, {})
  'dense: no faster method was shown to reach its loss sooner.'
  """
  pays = {title for title, gain in faster.items() if gain is not None and gain > 1}
  if goal == 'sooner':
    return _behind_at_this_width(pays, found, device, d) + _soonest(pays | _DENSE, found, device, d)
  known = [(e, title) for title, each in found.items() for e in each if e.equal == 'steps']
  if goal == 'sparse':
    sparse = {option.title for option in OPTIONS if option.ends_sparse}
    title = max(pays & sparse, key=lambda title: faster[title] or 0, default='S-STE')
    gain = faster.get(title)
    time = 'is not known here' if gain is None else f'is {gain:.2f} times as fast as dense here'
    losses = [each.said(device) for each in found.get(title, ())] or [_NO_LOSS]
    prices = _prices([e for e, title in known if title in sparse])
    cost = _listed('\nLosses of models with 2:4 weights, after equal steps:', prices)
    return _listed(f'{title}: a feed-forward block {time}.', losses) + cost
  surely = [e.who for e, _ in known if _below(e.percent)]
  said = f'{", ".join(surely)}: below dense by more than its interval.' if surely else (
    'dense: no recipe was shown to end below it.'
  )
  prices = _prices([e for e, title in known if title in pays | _DENSE])
  return said + _listed('\nLosses of the faster ones, after equal steps:', prices)


def _listed(title: str, lines: Sequence[str]) -> str:
  """A title and a line for each; '' without any."""
  return '\n'.join([title, *(f'- {line}' for line in lines)]) if lines else ''


def _soonest(candidates: Set[str], found: Mapping[str, Sequence[Evidence]], device: str, d: int | None) -> str:
  """The option of lowest loss in each race, the nearest width first, and those its seeds do not separate from it.

  None that loses in another race whose width is as near or nearer.
  """
  races: dict[tuple[str, str], list[Evidence]] = {}
  for e in (e for title, each in found.items() if title in candidates for e in each):
    if e.shares and len(e.percent) > 1 and statistics.fmean(e.percent) < 0:
      races.setdefault((e.where, e.device), []).append(e)
  for each in races.values():
    each.sort(key=lambda e: statistics.fmean(e.percent))
  # A race of the width asked about says more than others.
  races = {race: each for race, each in sorted(races.items(), key=lambda item: _far(item[1][0].width, d))
           if _below(each[0].percent)}  # fmt: skip
  # What ends lower with one seed alone.
  lower = {
    race: [e for title in sorted(candidates) for e in found.get(title, ())
           if (e.where, e.device) == race and len(e.shares) == 1 and max(e.behind(each[0]), default=0.0) < 0]
    for race, each in races.items()
  }  # fmt: skip
  # Who is ahead of whom, by more than the interval, in any race.
  ahead = [(first, e) for each in races.values() for first, e in itertools.combinations(each, 2) if _parted(e, first)]
  said, beaten, lines = [], [], []
  for race, (first, *others) in races.items():
    near = [e for e in others if not _parted(e, first)]
    lines += [f'Seeds do not part {first.who} and {e.who} ({first.where}).' for e in near]
    lines += [
      f"{winner.who} beats {e.who}: its loss is {_interval(e.behind(winner), '.4f', '')} lower. It needs"
      f" {_interval(table.shares_of_time(winner.own, e.own), '.2f', '')} of the other's time to the other's final loss"
      f' ({first.where}).'
      for winner, e in ahead if winner is first
    ]
    ran = {e.who for e in races[race]}
    elsewhere = (
      winner for winner, e in ahead
      if e.who == first.who and winner.who not in ran and _far(winner.width, d) <= _far(first.width, d)
    )  # fmt: skip
    if better := next((winner for winner in elsewhere if winner.device == first.device), None):
      beaten.append(f'{first.who} won a race in which {better.who} did not run ({first.place(device)}).')
      continue
    text = ' or '.join(e.who for e in (first, *near))
    text += ', first of those with several seeds' if lower[race] else ''
    text += f": it needs {_share(first)} of dense's time to dense's final loss"
    text += ''.join(f', {e.who} {_share(e)}' for e in near)
    width = f'width {first.width:,}: ' if first.width else ''
    said.append(f'{text} ({width}{first.place(device)})')
  # What one seed cannot claim, a reader should know before he takes what is claimed.
  warned = [
    f'But {e.who} ended lowest in its race. It has one seed'
    f"{'' if e.own.searched > 1 else ', and its rate was not searched'}. It needs {e.shares[0]:.2f} of dense's time"
    f" to dense's final loss ({e.place(device)})."
    for each in lower.values() for e in each
  ]  # fmt: skip
  if not said:
    return 'dense: no faster method was shown to reach its loss sooner.'
  best, *others = said
  more = [*warned, *(f'Or {each}.' for each in others), *beaten, 'Race it against a smaller dense model first.']
  if any('all linear layers' in each for each in (best, *more)):
    more.append('The block times below count feed-forward layers alone.')
  return _listed(f'{best}.', more) + _listed('\n\nWho beat whom, seed by seed, after equal seconds:', lines)


def _behind_at_this_width(
  sparse: Set[str], found: Mapping[str, Sequence[Evidence]], device: str, d: int | None
) -> str:
  """That, in the longest runs of the nearest width, no sparse model was surely sooner at its final loss than dense.

  '' if one was, or if these runs were a race, which tells itself who was sooner.
  """
  known = [e for title in sparse for e in found.get(title, ()) if e.width and e.dense_shares]
  if d is None or not known:
    return ''
  width = min((e.width for e in known if e.width), key=lambda width: _far(width, d))
  longest = max((e for e in known if e.width == width), key=lambda e: next(iter(e.own.curves.values()))[-1][0])
  near = [e for e in known if (e.width, e.where, e.device) == (width, longest.where, longest.device)]
  if longest.equal == 'seconds' or any(_sooner(e) for e in near):
    return ''
  best = max(near, key=lambda e: statistics.fmean(e.dense_shares))
  nearest = '' if d == width else f', the nearest to {d:,} that was tried'
  return (
    f'dense at width {width:,}{nearest}. The soonest sparse model there is {best.who}. Dense reaches its final loss'
    f" in {_interval(best.dense_shares, '.2f', '')} of the time that {best.who} takes, and is then in mid-schedule"
    f' ({best.where}, on {best.device}{best.elsewhere(device)}).\n- For wider models: '
  )


def _sooner(e: Evidence) -> bool:
  """Whether it is at its final loss before dense by more than the interval."""
  return not all(map(math.isfinite, e.dense_shares)) or _below([1 - share for share in e.dense_shares])


def _prices(known: Sequence[Evidence]) -> list[str]:
  """Losses above dense's, the lowest first."""
  known = sorted(known, key=lambda e: statistics.fmean(e.percent))
  return [f'{_against_dense(e.percent)}: {e.who} ({e.where}{e.edge})' for e in known]


def _below(values: Sequence[float]) -> bool:
  """Whether these are below zero by more than their interval."""
  return statistics.fmean(values) + half_width(values) < 0


def _far(width: int | None, d: int | None) -> float:
  """How far a width is from the one asked about, as a ratio; nothing is far if none was asked about."""
  if d is None:
    return 0.0
  return abs(math.log(width / d)) if width else math.inf


def _parted(e: Evidence, first: Evidence) -> bool:
  """Whether it ends above another of its race by more than the interval."""
  return _below([-value for value in e.behind(first)])


def _share(e: Evidence) -> str:
  return _interval(e.shares, '.2f', '')


def guide(*, tokens: int, d: int, hidden: int, gated: bool, device: str | None, goal: str) -> str:
  """The whole answer.

  Raises:
    ValueError: nothing was measured on that device, or sizes that no recipe takes.
  """
  asked = _records.device_meant(device) if device else None
  device = asked or _device.current().slug
  known = _records.measured_devices()
  if _records.path_of(_records.TUNED, device, 'sparse_matmul').parent.name not in known:
    raise ValueError(f'nothing was measured on {device!r}; pass --device, one of {", ".join(known)}')
  faster, found = gains(tokens=tokens, d=d, hidden=hidden, gated=gated, device=asked), evidence()
  timed = [best_steps.load(RESULTS / name) for name in (best_steps.FILE, 'best_steps_124m.jsonl')]
  lines = [
    f'A block of {tokens} x {d} x {hidden} on {device}; the goal: {GOALS[goal]}', '',
    f'Take {advise(goal, faster, found, device, d)}', '',
    'All methods against dense. ± is the 95% interval over seeds. A need of 0.80 of the time means: what dense reaches'
    ' at its end after 100 s, this reaches after 80 s. In brackets behind a loss: method, model, length of the runs,'
    ' GPU. Behind a step: method, width, GPU, and the range over processes. Best at an edge of its search means: no'
    ' lower, or no higher, learning rate or decay was tried, and a wider search may find a better.', '',
  ]  # fmt: skip
  for option in OPTIONS:
    time = ''
    if option.recipe is not None:
      gain = faster[option.title]
      time = ' The time of a feed-forward block is not known.'
      if gain is not None:
        time = f' A feed-forward block is {gain:.2f} times as fast as dense.'
    lines.append(f'{option.title}.{time}')
    lines += [f'  {each}' for each in steps(option, d, timed)]
    lines += [f'  {each.said(device)}' for each in found[option.title]] or [f'  {_NO_LOSS}']
  return '\n'.join(lines)


def wrapped(text: str, width: int = 120) -> str:
  """The answer for a terminal; what continues a line is indented.

  >>> wrapped('Take it:\\n- of two words', 9)
  'Take it:\\n- of two\\n  words'
  """
  def one(line: str) -> str:
    indent = ' ' * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)

  return '\n'.join(map(one, text.split('\n')))


def _against_dense(percent: Sequence[float]) -> str:
  """How far losses are above or below dense's."""
  where = 'above' if statistics.fmean(percent) >= 0 else 'below'
  far = _interval(percent if where == 'above' else [-p for p in percent], '.1f', '%')
  return f"{far} {where} dense's"


def _interval(values: Sequence[float], form: str, unit: str) -> str:
  mean = format(statistics.fmean(values), form)
  if len(values) < 2:
    return f'{mean}{unit} (one seed)'
  return f'{mean}{unit} ± {format(half_width(values), form.lstrip("+"))}{unit}'
