"""`python -m experiments guide`: which recipe for a GPU, a size and a goal, from records and nothing else.

Times are those that a GPU's records of kernels expect of one feed-forward block; losses are those of comparisons in
which every method searched its learning rate alike, with 95% intervals over seeds. None of them is of your model: a
line says of what model it is.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from pathlib import Path
import statistics

from experiments.race import table
from experiments.reports.claims import half_width
from pallas_kernels import _device, _records
import sparse24_jax as s24
from sparse24_jax.block_gain import block_gain
from sparse24_jax.recipe import Recipe

RESULTS = Path(__file__).parents[1] / 'results'
# Comparisons in which every method was tuned, with seeds.
COMPARISONS = ('compare_tuned_nano.jsonl', 'race_h200_seeds.jsonl')
GOALS = {
  'sooner': 'a loss after the fewest seconds',
  'quality': 'the lowest loss after as many steps',
  'sparse': 'a model whose weights are 2:4 at the end, for inference',
}


@dataclasses.dataclass(frozen=True)
class Option:
  """A recipe.

  Attributes:
    title: its name in tables.
    recipe: of the weights that a pattern matches; None is dense.
    contenders: what comparisons call it.
    ends_sparse: whether the weights are 2:4 at the end.
  """

  title: str
  recipe: Callable[[str], Recipe] | None
  contenders: Sequence[str]
  ends_sparse: bool = False


OPTIONS = (
  Option('FST', lambda path: s24.recipes.transposable_srste(path, masked_decay=0.0), ('fst',)),
  Option('S-STE', s24.recipes.s_ste, ('s_ste',), ends_sparse=True),
  Option(
    'S-STE, FP8', lambda path: s24.recipes.s_ste(path, fp8=True), ('s_ste_fp8', 's_ste_fp8_all'), ends_sparse=True
  ),
  Option('dense, FP8', None, ('dense_fp8',)),
  Option('dense, FFN half as wide', None, ('half_ffn',)),
)


@dataclasses.dataclass(frozen=True)
class Evidence:
  """What a comparison says of one contender, seed by seed.

  Attributes:
    where: model and length of the comparison, and the contender.
    percent: final loss above dense's.
    shares: of dense's seconds until dense's final loss; empty where seconds were not compared.
    equal: what both had as much of, 'steps' or 'seconds'.
  """

  where: str
  percent: Sequence[float]
  shares: Sequence[float]
  equal: str

  def said(self) -> str:
    """As a sentence, with its interval or that it is of one seed."""
    text = f'loss {_interval(self.percent, "+.1f", "%")} against dense at equal {self.equal}'
    if self.shares:
      text += f", dense's final loss in {_interval(self.shares, '.2f', '')} of its time"
    return f'{text} ({self.where})'


def evidence(results: Path = RESULTS) -> Mapping[str, Sequence[Evidence]]:
  """Of each option, by title, what the comparisons say."""
  found: dict[str, list[Evidence]] = {option.title: [] for option in OPTIONS}
  for name in COMPARISONS:
    for where, records in table.read(results / name).items():
      seeds = table.by_seed(records)
      if 'dense' not in seeds:
        continue
      dense, equal = seeds['dense'], 'steps' if records[0].get('equal_steps') else 'seconds'
      for option in OPTIONS:
        for own in (seeds[contender] for contender in option.contenders if contender in seeds):
          both = own.losses.keys() & dense.losses.keys()
          percent = [100 * (own.losses[seed] / dense.losses[seed] - 1) for seed in sorted(both)]
          shares = [] if equal == 'steps' else table.shares_of_time(own, dense)
          if percent and all(map(math.isfinite, [*percent, *shares])):
            found[option.title].append(Evidence(f'{own.title}: {where}', percent, shares, equal))
  return found


def gains(*, tokens: int, d: int, hidden: int, gated: bool, device: str) -> Mapping[str, float | None]:
  """Of each sparse option, how many times faster than dense its feed-forward block is expected to be; None: unknown."""
  return {
    option.title: block_gain(d, hidden, option.recipe('.*'), tokens=tokens, gated=gated, device=device).gain
    for option in OPTIONS if option.recipe is not None
  }  # fmt: skip


def advise(goal: str, faster: Mapping[str, float | None], found: Mapping[str, Sequence[Evidence]]) -> str:
  """What to take, in a sentence or two.

  >>> seconds = Evidence('a race', [-7.0, -8.0], [0.66, 0.68], 'seconds')
  >>> advise('sooner', {'FST': 1.1, 'S-STE, FP8': 1.4}, {'S-STE, FP8': [seconds]})
  "S-STE, FP8: dense's final loss in 0.67 ± 0.13 of its time (a race). Race it against a smaller dense model first."
  >>> advise('sooner', {'FST': 0.9}, {})
  'dense: nothing that is faster here was shown to reach its loss sooner.'
  """
  pays = {title for title, gain in faster.items() if gain is not None and gain > 1}
  if goal == 'sooner':
    known = [(e, title) for title, each in found.items() if title in pays for e in each if e.shares]
    if not known:
      return 'dense: nothing that is faster here was shown to reach its loss sooner.'
    best, title = min(known, key=lambda pair: statistics.fmean(pair[0].shares))
    share = _interval(best.shares, '.2f', '')
    return (
      f"{title}: dense's final loss in {share} of its time ({best.where})."
      ' Race it against a smaller dense model first.'
    )
  if goal == 'sparse':
    sparse = {option.title for option in OPTIONS if option.ends_sparse}
    fast = sorted(pays & sparse, key=lambda title: -(faster[title] or 0))
    return f'{fast[0] if fast else "S-STE"}' + ('.' if fast else ', though its steps are not faster than dense here.')
  known = [(e, title) for title, each in found.items() for e in each if e.equal == 'steps']
  below = [(e, title) for e, title in known if len(e.percent) > 1]
  surely = [title for e, title in below if statistics.fmean(e.percent) + half_width(e.percent) < 0]
  said = f'{", ".join(surely)}: below dense by more than its interval.' if surely else (
    'dense: no recipe was shown to end below it.'
  )
  price = [f'{title} {_interval(e.percent, "+.1f", "%")}' for e, title in known if title in pays]
  return said + (f' The price of those that are faster: {", ".join(price)}.' if price else '')


def guide(*, tokens: int, d: int, hidden: int, gated: bool, device: str | None, goal: str) -> str:
  """The whole answer.

  Raises:
    ValueError: nothing was measured on that device, or sizes that no recipe takes.
  """
  device = device or _device.current().slug
  known = sorted(path.name for path in _records.TUNED.iterdir() if path.is_dir())
  if _records.path_of(_records.TUNED, device, 'sparse_matmul').parent.name not in known:
    raise ValueError(f'nothing was measured on {device!r}; pass --device, one of {", ".join(known)}')
  faster, found = gains(tokens=tokens, d=d, hidden=hidden, gated=gated, device=device), evidence()
  lines = [f'A block of {tokens} x {d} x {hidden} on {device}; the goal: {GOALS[goal]}', '']
  for option in OPTIONS:
    gain = faster.get(option.title)
    time = '' if option.recipe is None else ' block: not known' if gain is None else f' block {gain:.2f} times as fast'
    lines.append(f'{option.title}:{time}')
    lines += [f'  {each.said()}' for each in found[option.title]] or ['  loss: no tuned comparison']
  return '\n'.join([*lines, '', f'Take {advise(goal, faster, found)}'])


def _interval(values: Sequence[float], form: str, unit: str) -> str:
  mean = format(statistics.fmean(values), form)
  if len(values) < 2:
    return f'{mean}{unit} (one seed)'
  return f'{mean}{unit} ± {format(half_width(values), form.lstrip("+"))}{unit}'
