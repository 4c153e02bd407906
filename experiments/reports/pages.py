"""What is made of the committed records: tables and pictures of the documents."""

from collections.abc import Callable, Mapping
from pathlib import Path
import re
from typing import Any

from experiments.reports import best_steps, decay_grid, papers, provenance, speed, tasks
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
    content = make()
    if found := _MARKUP.search(content):
      raise ValueError(
        f'the table {made!r} of {name} would have {content[found.start() :][:60]!r}: records are text, without HTML'
        ' and scripts; look which record has it'
      )
    text, count = between.subn(lambda found, content=content: f'{found[1]}\n{content}\n{found[2]}', text)
    if count != 1:
      raise ValueError(f'{name} has {count} places between <!-- made: {made} --> and <!-- end -->; it needs one')
  return text


def write() -> list[Path]:
  """Writes documents and pictures in place; returns what was written."""
  content = {DOCS / name: document(name) for name in TABLES} | {DOCS / name: make() for name, make in PICTURES.items()}
  for path, text in content.items():
    path.write_text(text)
  return list(content)


def _speed() -> list[Any]:
  return speed.load(provenance.RESULTS.glob('*.jsonl'))


def _race(
  name: str = 'race_h200_seeds.jsonl', title: str = 'wide2048, rotary_qk_norm, 100 s each'
) -> list[dict[str, Any]]:
  return table.read(provenance.RESULTS / name)[title]


def _race_of_three() -> list[dict[str, Any]]:
  return _race('race_h200_wide2048_3.jsonl', 'wide2048_3, rotary_qk_norm, 40 s each')


def _race_of_124m() -> list[dict[str, Any]]:
  return _race('race_h200_124m.jsonl', '124m, rotary_qk_norm, 1,600 steps each')


def _tuned(name: str, title: str = 'nano, 1,500 steps each', against: str | None = None) -> str:
  return table.steps_markdown(_race(name, title), against)


def _decays() -> str:
  """Short runs of the rate that is FST's best on nano, and whole runs of the same rate, decays and seeds."""
  whole, short = (provenance.read(name) for name in ('grid_nano.jsonl?contender=fst', 'decay_short_nano.jsonl'))
  tried = {(r['rate'], r['decay'], r['seed']) for r in short}
  return decay_grid.markdown([*short, *(r for r in whole if (r['rate'], r['decay'], r['seed']) in tried)])


# Document -> table -> what makes it.
TABLES: Mapping[str, Mapping[str, Callable[[], str]]] = {
  'speed.md': {
    'best steps': lambda: best_steps.markdown(best_steps.load()),
    'speed': lambda: speed.markdown(_speed()),
  },
  'tasks.md': {'tasks': tasks.markdown},
  'quality.md': {
    'grid nano': lambda: _tuned('grid_nano.jsonl', 'nano, 4,000 steps each'),
    'grid decay': _decays,
    'grid small': lambda: _tuned('grid_small.jsonl', 'small, 900 steps each'),
    'race of 124m at equal steps': lambda: table.steps_markdown(_race_of_124m()),
    'grid flops': lambda: _tuned('grid_flops_nano.jsonl', 'nano, 2,000 steps each', 'dense_small'),
    'grid flops cpu': lambda: _tuned('grid_flops_nano_cpu.jsonl', 'nano, 2,000 steps each', 'dense_small'),
    'papers': papers.markdown,
    'race by seed': lambda: table.seeds_markdown(_race(), 's_ste_fp8_all'),
    'race of three layers by seed': lambda: table.seeds_markdown(_race_of_three(), 'half_ffn_s_ste_fp8_all'),
  },
  'quality_runs.md': {
    'tuned nano': lambda: _tuned('compare_tuned_nano.jsonl'),
    'tuned nano learnt': lambda: _tuned('compare_tuned_nano_learnt.jsonl'),
    'race': lambda: table.markdown(_race()),
    'race of three layers': lambda: table.markdown(_race_of_three()),
    'race of 124m': lambda: table.markdown(_race_of_124m()),
    'race of all': lambda: table.markdown(_race('race_h200.jsonl', 'wide2048, rotary_qk_norm, 55 s each')),
  },
}
PICTURES: Mapping[str, Callable[[], str]] = {
  'speed.svg': lambda: speed.figure(_speed(), best_steps.figure_rows(best_steps.load())),
  'race.svg': lambda: picture.draw(table.by_seed(_race())),
  'race_of_three_layers.svg': lambda: picture.draw(table.by_seed(_race_of_three())),
}
