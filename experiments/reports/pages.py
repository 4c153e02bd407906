"""What is made of the committed records: tables and pictures of the documents."""

from collections.abc import Callable, Mapping
from pathlib import Path
import re
from typing import Any

from experiments.reports import (
  best_steps,
  compared,
  decay_grid,
  equal_flops,
  faults,
  in_short,
  measured,
  papers,
  provenance,
  scale,
  speed,
  styles,
  tasks,
)
from experiments.reports import race_picture as picture
from experiments.reports import race_table as table

DOCS = provenance.ROOT / 'docs'
# What the site would take for more than text; the tables themselves have comments that name their records.
_MARKUP = re.compile(r'<(?!!-- records: [^<>]*-->)|javascript:|\bdata:text', re.IGNORECASE)


def document(name: str) -> str:
  """A document with the tables that the records make, between `<!-- made: TABLE -->` and `<!-- end -->`.

  Raises:
    ValueError: not each of its tables has one such place, or a record has HTML or a script in it.
  """
  text = (DOCS / name).read_text()
  for made, make in TABLES[name].items():
    between = re.compile(rf'(<!-- made: {made} -->\n).*?(\n<!-- end -->)', re.DOTALL)
    content = _as_text(f'the table {made!r} of {name}', make())
    text, count = between.subn(lambda found, content=content: f'{found[1]}\n{content}\n{found[2]}', text)
    if count != 1:
      raise ValueError(f'{name} has {count} places between <!-- made: {made} --> and <!-- end -->; it needs one')
  return text


def _as_text(what: str, content: str) -> str:
  """The content, if a site shows it as text."""
  if found := _MARKUP.search(content):
    raise ValueError(
      f'{what} would have {content[found.start() :][:60]!r}: records are text, without HTML and scripts; look which'
      ' record has it'
    )
  return content


def page(name: str) -> str:
  """A document of which all is made of records.

  Raises:
    ValueError: a record has HTML or a script in it.
  """
  return _as_text(name, PAGES[name]())


def write() -> list[Path]:
  """Writes documents and pictures in place; returns what was written."""
  content = {DOCS / name: document(name) for name in TABLES} | {DOCS / name: page(name) for name in PAGES}
  content |= {DOCS / name: make() for name, make in PICTURES.items()}
  for path, text in content.items():
    path.write_text(text)
  return list(content)


def _speed() -> list[Any]:
  return speed.load(provenance.RESULTS.glob('*.jsonl'))


def _read(name: str, title: str) -> list[dict[str, Any]]:
  return table.read(provenance.RESULTS / name)[title]


# Race -> file of its records, and its title there.
_RACES = {
  'three layers': ('race_h200_wide2048_3.jsonl', 'wide2048_3, rotary_qk_norm, 40 s each'),
  'three layers, one GPU': ('race_h200_wide2048_3_one_gpu.jsonl', 'wide2048_3, rotary_qk_norm, 40 s each'),
  'width 4096': ('race_h200_wide4096.jsonl', 'wide4096, rotary_qk_norm, 70 s each'),
  'width 4096, one GPU': ('race_h200_wide4096_one_gpu.jsonl', 'wide4096, rotary_qk_norm, 70 s each'),
  '302m': ('race_h200_seeds.jsonl', 'wide2048, rotary_qk_norm, 100 s each'),
  '302m, all': ('race_h200.jsonl', 'wide2048, rotary_qk_norm, 55 s each'),
  '774m': ('race_h200_774m.jsonl', '774m, rotary_qk_norm, 300 s each'),
  '124m': ('race_h200_124m.jsonl', '124m, rotary_qk_norm, 1,600 steps each'),
  '124m, parts': ('race_h200_124m_parts.jsonl', '124m, rotary_qk_norm, 1,600 steps each'),
  '124m, short': ('race_h200_124m_short.jsonl', '124m_short, rotary_qk_norm, 1,600 steps each'),
  '124m, BPE': ('race_h200_124m_bpe.jsonl', '124m, rotary_qk_norm, 1,200 steps each'),
  '124m, long': ('race_h200_124m_long.jsonl', '124m, rotary_qk_norm, 4,800 steps each'),
  '124m, 75 s': ('race_h200_124m_75s.jsonl', '124m, rotary_qk_norm, 75 s each'),
}


def race(name: str) -> list[dict[str, Any]]:
  """The records of a race that the documents show."""
  return _read(*_RACES[name])


def trials_of_race(name: str) -> str:
  """The table of all trials of a race."""
  return table.markdown(race(name))


def race_by_seed(name: str, against: str) -> str:
  """The table over seeds of a race, against one of its contenders."""
  return table.seeds_markdown(race(name), against)


def _parts_of_the_gap() -> str:
  """Methods with a part left out, and the dense runs of another race that had their rate and steps."""
  parts = race('124m, parts')
  [rate] = {r['rate'] for r in parts if 'rate' in r}
  dense = [r for r in race('124m') if r['contender'] == 'dense' and r.get('rate') == rate]
  return table.steps_markdown([*parts, *dense])


def picture_of_race(name: str) -> str:
  """The picture of loss against seconds of a race."""
  return picture.draw(table.by_seed(race(name)))


def _tuned(name: str, title: str = 'nano, 1,500 steps each', against: str | None = None) -> str:
  return table.steps_markdown(_read(name, title), against)


def _compared(name: str, titles: Mapping[str, str], flips: bool = False) -> str:
  return compared.markdown(([f'compare_{name}.jsonl'], titles), flips=flips)


def _losses_by_decay() -> str:
  """FST's losses by its decay, at three sizes, each at one rate."""
  grid = provenance.read('decay_grid.jsonl')
  fst = [r for r in race('124m') if r['contender'] == 'fst' and r.get('rate') == 1.414e-3 and r['seed'] == 0]
  return decay_grid.losses_markdown({
    'nano, two seeds': [r for r in grid if r['experiment'] == 'nano'],
    '10.7 M, two seeds': [r for r in grid if r['experiment'] == 'small'],
    '124M, one seed': fst,
  })  # fmt: skip


def _decay_by_flips(experiment: str, dense: str) -> str:
  """FST's flip rates and losses by its decay at one size, beside dense runs of the same rate and seeds."""
  fst = [r for r in provenance.read('decay_grid.jsonl') if r['experiment'] == experiment and r['share'] == 1]
  alike = {(r['rate'], r['seed']) for r in fst}
  watched = [r for r in provenance.read(dense) if r['contender'] == 'dense' and (r['rate'], r['seed']) in alike]
  return decay_grid.flips_markdown(fst, watched)


def _equal_flops() -> str:
  """Moving topologies and dense models of several shapes, at equal FLOPs."""
  shapes = table.read(provenance.RESULTS / 'grid_flops_shapes_nano_cpu.jsonl').values()
  others = [equal_flops.named_by_shape(record) for records in shapes for record in records]
  never = map(equal_flops.named_by_stage, _read('grid_flops_never_restored_nano_cpu.jsonl', _FLOPS))
  others += [record for record in never if 'density' in record['recipe']['kwargs']]  # fewer links take fewer FLOPs
  return table.steps_markdown([*_read('grid_flops_nano_cpu.jsonl', _FLOPS), *others], 'dense_small')


def _restoration() -> str:
  mst = [r for r in _read('grid_flops_nano.jsonl', _FLOPS) if r['contender'] == equal_flops.MST]
  files = (f'grid_flops_{name}_nano_cpu.jsonl' for name in ('restored', 'never_restored'))
  ours = [record for file in files for record in _read(file, _FLOPS)]
  return equal_flops.restoration_markdown([('CPU cores', ours), ('H200', mst)])


def _in_short_at_equal_steps() -> str:
  return in_short.equal_steps({
    '0.1 M': _read(*_NANO), '10.7 M': _read(*_SMALL), '85 M': race('124m'), '85 M, longer': race('124m, long'),
  })  # fmt: skip


def _in_short_at_equal_seconds() -> str:
  return in_short.equal_seconds({
    '40 s, three layers of width 2,048': race('three layers'),
    '40 s, the same on one GPU': race('three layers, one GPU'),
    '75 s, GPT-2 124M': race('124m, 75 s'), '100 s, six layers of width 2,048': race('302m'),
    '300 s, GPT-2 774M': race('774m'),
    '70 s, four layers of width 4,096': race('width 4096'), '70 s, the same on one GPU': race('width 4096, one GPU'),
  })  # fmt: skip


_NANO = 'grid_nano.jsonl', 'nano, 4,000 steps each'
_SMALL = 'grid_small.jsonl', 'small, 900 steps each'
_FLOPS = 'nano, 2,000 steps each'

# Document -> table -> what makes it.
TABLES: Mapping[str, Mapping[str, Callable[[], str]]] = {
  'speed.md': {
    'best steps': lambda: best_steps.markdown(best_steps.load()),
    'profile': measured.profile,
    'compile time': measured.compile_time,
    'compile seconds': measured.compile_seconds,
    'speed': lambda: speed.markdown(_speed()),
    'matmuls': measured.matmuls,
    'attention': measured.attention,
    'V:N:M matmuls': measured.vnm_matmuls,
    'meshes': measured.meshes,
  },
  'tasks.md': {'tasks': tasks.markdown},
  'quality.md': {
    'grid nano': lambda: _tuned(*_NANO),
    'losses by decay': _losses_by_decay,
    'decay by short runs': lambda: decay_grid.markdown(provenance.read('decay_grid.jsonl')),
    'decay by flips small': lambda: _decay_by_flips('small', 'grid_small.jsonl'),
    'decay by flips nano': lambda: _decay_by_flips('nano', 'decay_flips_nano.jsonl'),
    'grid small': lambda: _tuned(*_SMALL),
    'race of 124m at equal steps': lambda: table.steps_markdown(race('124m')),
    'parts of the gap at 124m': _parts_of_the_gap,
    'long race of 124m at equal steps': lambda: table.steps_markdown(race('124m, long')),
    'race of 124m on BPE': lambda: table.steps_markdown(race('124m, BPE')),
    'long race of 124m by part': lambda: table.gap_markdown(race('124m, long')),
    'grid activations': lambda: _tuned('grid_activations_nano.jsonl', 'nano, 4,000 steps each'),
    'grid activations small': lambda: _tuned('grid_activations_small.jsonl', 'small, 900 steps each'),
    'grid kernel patterns': lambda: _tuned('grid_kernel_patterns_small.jsonl', 'small, 900 steps each'),
    'race of activations at 124m': lambda: table.steps_markdown(race('124m, short')),
    'race of activations by seed': lambda: race_by_seed('124m, short', 'neuron_level'),
    'grid flops': lambda: _tuned('grid_flops_nano.jsonl', _FLOPS, 'dense_small'),
    'grid flops cpu': _equal_flops,
    'restoration': _restoration,
    'papers': papers.markdown,
    'race by seed': lambda: race_by_seed('302m', 's_ste_fp8_all'),
    'race of 110 seconds': lambda: measured.race_by_the_clock(
      'race_h200_wide2048_3_110s.jsonl', 's_ste_fp8_all', 'half_ffn_fp8'
    ),
    'race of 20 minutes': lambda: measured.race_by_the_minute(
      'race_h200_wide2048_3_20_minutes.jsonl', 's_ste_fp8_all', 'half_ffn_fp8', every=4
    ),
    'race of 75 seconds by seed': lambda: race_by_seed('124m, 75 s', 's_ste_fp8_all_e4m3_exact_down'),
    'race of 774m by seed': lambda: race_by_seed('774m', 's_ste_fp8_all'),
    'race of 774m by the clock': lambda: measured.race_by_the_clock(_RACES['774m'][0], 's_ste_fp8_all', 'half_ffn_fp8'),
    'race of three layers by seed': lambda: race_by_seed('three layers', 'half_ffn_s_ste_fp8_all'),
    'race of three layers on one GPU': lambda: race_by_seed('three layers, one GPU', 'half_ffn_s_ste_fp8_all'),
    'race of width 4096 on one GPU': lambda: race_by_seed('width 4096, one GPU', 'eighth_ffn_s_ste_fp8_all'),
    'race of width 4096 by seed': lambda: race_by_seed('width 4096', 'eighth_ffn_s_ste_fp8_all'),
    'in short at equal steps': _in_short_at_equal_steps,
    'in short in equal seconds': _in_short_at_equal_seconds,
  },
  'quality_runs.md': {
    'one rate for all': lambda: _compared('nano', compared.NANO, flips=True),
    'dense end': lambda: compared.markdown((['compare_dense_end_nano.jsonl'], {}), against='FST'),
    'activations': lambda: _compared('neuron_level_nano', compared.ACTIVATIONS),
    'dense neurons': lambda: _compared('dense_neurons_nano', compared.DENSE_NEURONS),
    'dense neurons 128': lambda: _compared('dense_neurons_128_nano', compared.DENSE_NEURONS_128),
    'two of four tokens': lambda: compared.markdown(
      (['compare_dense_neurons_128_nano.jsonl', 'compare_two_of_four_tokens_128_nano.jsonl'], compared.TWO_OF_FOUR_128),
      (['compare_two_of_four_tokens_nano.jsonl'], compared.TWO_OF_FOUR),
    ),
    'equal FLOPs': lambda: _compared('flops_nano', compared.FLOPS),
    'tuned nano': lambda: _tuned('compare_tuned_nano.jsonl'),
    'tuned nano learnt': lambda: _tuned('compare_tuned_nano_learnt.jsonl'),
    'styles': lambda: styles.markdown(provenance.read('grid_styles_nano.jsonl')),
    'race': lambda: trials_of_race('302m'),
    'race of three layers': lambda: trials_of_race('three layers'),
    'race of width 4096': lambda: trials_of_race('width 4096'),
    'race of 774m': lambda: trials_of_race('774m'),
    'race of 124m': lambda: trials_of_race('124m'),
    'race of parts at 124m': lambda: trials_of_race('124m, parts'),
    'race of 124m on BPE': lambda: trials_of_race('124m, BPE'),
    'long race of 124m': lambda: trials_of_race('124m, long'),
    'race of 75 seconds': lambda: trials_of_race('124m, 75 s'),
    'race of activations': lambda: trials_of_race('124m, short'),
    'race of all': lambda: trials_of_race('302m, all'),
  },
}
# Document -> what makes all of it.
PAGES: Mapping[str, Callable[[], str]] = {'faults.md': faults.page, 'scale.md': scale.page}
PICTURES: Mapping[str, Callable[[], str]] = {
  'speed.svg': lambda: speed.figure(_speed(), best_steps.figure_rows(best_steps.load())),
  'race.svg': lambda: picture_of_race('302m'),
  'race_of_three_layers.svg': lambda: picture_of_race('three layers'),
  'race_of_774m.svg': lambda: picture_of_race('774m'),
}
