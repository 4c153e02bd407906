"""What tuned comparisons say of each recipe and of its dense rivals, seed by seed."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from pathlib import Path
import statistics
from typing import Any, NamedTuple

from experiments.reports import best_steps
from experiments.reports import race_table as table
from experiments.reports.claims import half_width
from experiments.reports.provenance import RESULTS
from experiments.runs.race.contenders import Contender, CONTENDERS, layers_of, of
from experiments.runs.race.trials import LAST_RATE, WARM_UP
from pallas_kernels import _device

# Comparisons with seeds in which most methods were tuned, and what tells one from others of its model and length. The
# long one has rates that were tuned in shorter runs.
COMPARISONS = {
  'grid_nano.jsonl': '', 'grid_small.jsonl': '', 'race_h200_124m.jsonl': '', 'race_h200_124m_long.jsonl': '',
  'race_h200_124m_75s.jsonl': '', 'race_h200_seeds.jsonl': '',
  'race_h200_wide2048_3.jsonl': '', 'race_h200_wide2048_3_one_gpu.jsonl': 'one GPU',
  'race_h200_774m.jsonl': '',
  'race_h200_wide4096.jsonl': '', 'race_h200_wide4096_one_gpu.jsonl': 'one GPU',
  'grid_activations_small.jsonl': 'squared ReLU',
  'grid_kernel_patterns_small.jsonl': 'squared ReLU, 128 sequences a step',
  'race_h200_124m_short.jsonl': 'squared ReLU', 'grid_flops_nano_cpu.jsonl': '',
}  # fmt: skip
# What others are compared with, the first that ran.
_AGAINST = ('dense', 'dense_relu2', 'dense_small', 'dense_fp8', 'eighth_ffn_fp8')


@dataclasses.dataclass(frozen=True)
class Option:
  """A recipe, or a dense rival.

  Attributes:
    title: its name in tables.
    recipe: name in `sparse24_jax.recipes.KNOWN`; None is dense.
    contenders: what comparisons and timed steps call it.
    ends_sparse: whether the weights are 2:4 at the end.
    only: the goal whose answer alone names it; 'tables' is none. None: the answers of dense's own rivals.
  """

  title: str
  recipe: str | None
  contenders: Sequence[str]
  ends_sparse: bool = False
  only: str | None = None


OPTIONS: Sequence[Option] = (
  Option('FST', 'transposable_srste', ('fst', 'fst_all')),
  Option('FST, FP8', 'transposable_srste_fp8', ('fst_fp8', 'fst_fp8_all')),
  Option('S-STE', 's_ste', ('s_ste', 's_ste_all'), ends_sparse=True),
  Option(
    'S-STE, FP8', 's_ste_fp8',
    ('s_ste_fp8', 's_ste_fp8_all', 'half_ffn_s_ste_fp8_all', 'quarter_ffn_s_ste_fp8_all', 'eighth_ffn_s_ste_fp8_all'),
    ends_sparse=True,
  ),
  Option('SR-STE', 'sr_ste', ('sr_ste',), ends_sparse=True),
  Option('dense, FP8', None, ('dense_fp8',)),
  Option('dense, a narrower FFN', None, ('half_ffn', 'half_ffn_fp8', 'quarter_ffn_fp8', 'eighth_ffn_fp8')),
  Option('a smaller dense model', None, ('dense_124m', 'dense_124m_fp8')),
  Option(
    'FST, FP8, dense end in 16 bits', 'transposable_srste_fp8',
    (f'fst_fp8_all{table.IN_16_BITS}', f'half_ffn_fst_fp8_all{table.IN_16_BITS}'), only='tables',
  ),
  Option(
    'S-STE, FP8, exact weight gradients', 's_ste_fp8', ('s_ste_fp8_all_unsampled', 'half_ffn_s_ste_fp8_all_unsampled'),
    only='tables',
  ),
  Option('FST, exact weight gradients of down', 'transposable_srste', ('fst_exact_down',), only='tables'),
  Option(
    'FST, FP8, exact weight gradients of down', 'transposable_srste_fp8', ('fst_fp8_all_exact_down',), only='tables'
  ),
  Option(
    'FST, FP8, exact weight gradients of down, sparse to the end', 'transposable_srste_fp8',
    ('fst_fp8_all_exact_down_to_the_end',), ends_sparse=True, only='tables',
  ),
  Option(
    'FST, FP8, exact weight gradients of down, dense for a third', 'transposable_srste_fp8',
    ('fst_fp8_all_exact_down_dense_third',), only='tables',
  ),
  Option(
    'S-STE, FP8, gradients in e4m3, exact weight gradients of down', 's_ste_fp8', ('s_ste_fp8_all_e4m3_exact_down',),
    ends_sparse=True, only='tables',
  ),
  Option(
    'neuron level', 'neuron_level',
    ('neuron_level', 'neuron_level_128', 'neuron_level_24', 'neuron_level_even', 'neuron_level_64',
     'neuron_level_64_two_of_four_tokens', 'neuron_level_128_two_of_four_tokens',
     'neuron_level_128_16_two_of_four_tokens'), only='squared_relu',
  ),
  Option('squared ReLU, a narrower FFN', None, ('half_ffn_relu2',), only='squared_relu'),
  Option('2:4 activations', 'neuron_level', ('activations_24',), only='tables'),
  Option('MST', 'mixed_sparsity', ('mixed_sparsity', 'mixed_sparsity_restored', 'mst', 'mst_half_dense'), only='flops'),
  Option('RigL', 'rigl', ('rigl',), only='flops'),
  Option('SET', 'set_', ('set_',), only='flops'),
  Option('static mask', 'static', ('static',), only='flops'),
)  # fmt: skip
NAMES = {name: option for option in OPTIONS for name in option.contenders}
# Widths that differ by a larger factor are far from each other: ours.
NEAR = 2


def contender_of(name: str) -> Contender:
  """What a contender, or a method of experiments, changes in the model, and its recipe."""
  name = name.removesuffix(table.IN_16_BITS)
  return CONTENDERS.get(name) or of(name)


def block_of(name: str) -> tuple[str | None, float, bool]:
  """A contender's feed-forward block: recipe, None for dense; width as a share of dense's; whether dense FP8."""
  found = contender_of(name)
  return NAMES[name].recipe, found.model.get('ffn_width', 1), bool(found.fp8)


def narrowed(hidden: int, name: str) -> int:
  """The hidden layer of a contender beside a dense one of `hidden`: where narrower a multiple of 16, as FP8 wants it.

  >>> narrowed(8196, 'half_ffn'), narrowed(8196, 'fst')
  (4096, 8196)
  """
  _, width, _ = block_of(name)
  return hidden if width == 1 else max(16, int(width * hidden) // 16 * 16)


@dataclasses.dataclass(frozen=True)
class Evidence:
  """What a comparison says of one contender, seed by seed.

  Attributes:
    option: what it is of.
    contender: its name in the comparison.
    own: its runs at its best, with the layers that were sparse.
    dense: those of dense in the same comparison, or of its first rival where that did not run.
    where: model and length of the comparison.
    device: that trained.
    equal: what both had as much of, 'steps', 'seconds' or 'FLOPs'.
    width: of the comparison's models.
    schedule: of the learning rate: the share of steps that it rises, and what its end is of its peak.
    against: what `dense` is called in the comparison.
  """

  option: Option
  contender: str
  own: table.Seeds
  dense: table.Seeds
  where: str
  device: str
  equal: str
  width: int | None = None
  schedule: tuple[float, float] = (WARM_UP, LAST_RATE)
  against: str = 'dense'

  @property
  def who(self) -> str:
    """What tables call it."""
    return self.own.title

  @property
  def percent(self) -> list[float]:
    """Final loss above dense's."""
    return table.percent_above(self.own, self.dense)

  @property
  def mean(self) -> float:
    """Of `percent`, over the seeds."""
    return statistics.fmean(self.percent)

  @property
  def shares(self) -> list[float]:
    """Shares of dense's seconds until dense's final loss; empty where seconds were not compared."""
    return table.shares_of_time(self.own, self.dense) if self.equal == 'seconds' else []

  @property
  def timed(self) -> bool:
    """Whether steps were timed."""
    return all(seconds is not None for curve in self.own.curves.values() for seconds, _ in curve)

  @property
  def dense_shares(self) -> list[float]:
    """Shares of its seconds until dense is at its final loss, in mid-schedule, by the runs' own clocks.

    Infinite where dense never is; empty if no steps were timed.
    """
    if not self.timed:
      return []
    both = sorted(self.own.curves.keys() & self.dense.curves.keys())
    shares = table.shares_of_time(self.dense, self.own)
    slower = [self.dense.slower.get(seed, 1.0) / self.own.slower.get(seed, 1.0) for seed in both]
    return [share * times for share, times in zip(shares, slower, strict=True)]

  def behind(self, other: 'Evidence') -> list[float]:
    """Its final loss minus another's."""
    return table.pairs_of(self.own, other.own)

  def place(self, asked: str) -> str:
    """Model, length, seeds and device; and that it is another one than the GPU asked about, where seconds count."""
    device = told(self.device, asked) if self.equal == 'seconds' else self.device
    seeds = len(self.percent)
    return f'{self.where}, {seeds} seed{"s" * (seeds > 1)}, {device}'


def told(device: str, asked: str) -> str:
  """A device, and that it is another one than the GPU asked about."""
  return f'{device}, not {asked}' if asked and _slug(device) != asked else device


def _slug(device: str) -> str:
  return _device.Device(device, 'gpu').slug


def evidence(results: Path = RESULTS) -> Mapping[str, Sequence[Evidence]]:
  """What the comparisons say of each option, by title; runs whose dense end is another today are left out."""
  found: dict[str, list[Evidence]] = {option.title: [] for option in OPTIONS}
  for name, told_apart in COMPARISONS.items():
    for records in table.read(results / name).values():
      seeds = table.by_seed(records)
      against = next((rival for rival in _AGAINST if rival in seeds), None)
      if against is None:
        continue
      (where, width), steps = _model(records[0]), records[0]['equal_steps']
      length = f'{steps:,} steps' if steps else f'{records[0]["seconds"]:g} s'
      where = ', '.join(filter(None, [where, length, told_apart]))
      equal = 'FLOPs' if against == 'dense_small' else 'steps' if steps else 'seconds'
      device, schedule = records[0]['device'].removeprefix('1 x '), _schedule(records[0])
      for contender in (name for name in NAMES if name in seeds and name != against):
        e = Evidence(
          NAMES[contender], contender, seeds[contender], seeds[against], where, device, equal, width, schedule, against
        )
        if e.percent and all(map(math.isfinite, [*e.percent, *(e.shares if against == 'dense' else [])])):
          found[e.option.title].append(e)
  return found


def _model(record: Mapping[str, Any]) -> tuple[str, int]:
  """The dense model of a comparison in words, and its width."""
  shape = record.get('shape')
  layers, width = (shape['layers'], shape['d']) if shape else layers_of(record['model']['size'])
  return _layers(layers, width), width


def _schedule(record: Mapping[str, Any]) -> tuple[float, float]:
  """Shares of a comparison's warm-up and last rate; races have theirs in common."""
  if not (of_run := record.get('optimizer')):
    return WARM_UP, LAST_RATE
  return of_run['warmup_steps'] / record['steps'], of_run['end_lr'] / of_run['peak_lr']


def _layers(number: int, width: int) -> str:
  return f'{number} layers of width {width:,}'


class Step(NamedTuple):
  """The step of a contender on the timed model of the nearest width, against dense at its best.

  Attributes:
    label: what tables call it.
    times: how often as fast, the mean over sessions.
    least: the slowest process of a session against the fastest of dense's.
    most: the other way round.
    where: the model.
    device: that ran it.
  """

  label: str
  times: float
  least: float
  most: float
  where: str
  device: str


type Steps = Mapping[tuple[str, str], Mapping[str, best_steps.Best]]


def steps(d: int, sessions: Sequence[Steps], asked: str = '') -> Mapping[str, Step]:
  """By contender, over all sessions that settled it; of models of one width that on the GPU asked about."""
  having = [(*key, methods) for timed in sessions for key, methods in timed.items() if 'dense' in methods]
  found = {}
  for name in NAMES:
    own = [(key, methods) for *key, methods in having if name in methods and best_steps.settled(methods[name])]
    if not own:
      continue
    nearest = min(own, key=lambda timed: (far(timed[1]['dense'].record['shape']['d'], d), _slug(timed[0][0]) != asked))
    both = [(each[name].beside['dense'], each[name]) for key, each in own if key == nearest[0]]
    shape = both[0][0].record['shape']
    found[name] = Step(
      both[0][1].record['label'], statistics.fmean(dense.ms / its.ms for dense, its in both),
      min(dense.least / its.most for dense, its in both), max(dense.most / its.least for dense, its in both),
      _layers(shape['layers'], shape['d']), nearest[0][0],
    )  # fmt: skip
  return found


def far(width: int | None, d: int | None) -> float:
  """How far a width is from the one asked about, as a ratio; nothing is far if none was asked about."""
  if d is None:
    return 0.0
  return abs(math.log(width / d)) if width else math.inf


def near(width: int | None, d: int | None) -> bool:
  """Whether a width is within a factor of `NEAR` of the one asked about."""
  return far(width, d) <= math.log(NEAR) + 1e-9


def below(values: Sequence[float]) -> bool:
  """Whether these are below zero by more than their interval."""
  return statistics.fmean(values) + half_width(values) < 0


def parted(e: Evidence, first: Evidence) -> bool:
  """Whether it ends above another of its race by more than the interval."""
  return below([-value for value in e.behind(first)])


def interval(values: Sequence[float], form: str = '.2f', unit: str = '') -> str:
  """The mean with its 95% interval over seeds, or that it is of one.

  >>> interval([0.5, 0.7]), interval([1.0], '+.1f', '%')
  ('0.60 ± 1.27', '+1.0%, one seed')
  """
  mean = format(statistics.fmean(values), form)
  if len(values) < 2:
    return f'{mean}{unit}, one seed'
  return f'{mean}{unit} ± {format(half_width(values), form.lstrip("+"))}{unit}'


def against_dense(percent: Sequence[float]) -> str:
  """How far losses are above or below dense's.

  >>> against_dense([-2.0])
  "2.0%, one seed, below dense's"
  """
  where = 'above' if statistics.fmean(percent) >= 0 else 'below'
  far = interval(percent if where == 'above' else [-p for p in percent], '.1f', '%')
  return f"{far}{',' * (len(percent) < 2)} {where} dense's"


def edge(e: Evidence) -> str:
  """That its best setting lies at an edge of its search, so that a wider one may find a better."""
  if e.own.searched == 1:
    return ', at the one rate that was tried'
  return ', best at an edge of its search' if e.own.edge else ''


def under(label: str, texts: Sequence[str]) -> list[tuple[str, str]]:
  """Sentences under one label."""
  return [(label if not i else '', text) for i, text in enumerate(texts)]
