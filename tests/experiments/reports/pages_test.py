"""Everything that is made of records and committed can be made again, and says which records it is of."""

import itertools
import json
from pathlib import Path
import re
from unittest import mock
import xml.etree.ElementTree as ET

from absl.testing import absltest, parameterized
import numpy as np
import pytest

from experiments import __main__ as cli
from experiments.reports import best_steps, claims, pages, papers, provenance, speed
from experiments.reports import race_picture as picture
from experiments.reports import race_table as table
from experiments.runs.records import group
from tests.experiments.fakes import temp_folder
from tests.experiments.reports import prose

QUALITY = (pages.DOCS / 'quality.md', pages.DOCS / 'quality_runs.md')
DOCUMENTS = (
  provenance.ROOT / 'README.md', provenance.ROOT / 'pallas_kernels' / 'README.md', *QUALITY,
  *(pages.DOCS / f'{name}.md' for name in ('guide', 'speed', 'tasks', 'scale', 'faults', 'hosts')),
)


class PagesTest(absltest.TestCase):
  def test_records_with_markup_are_refused(self):
    """Whoever gives us a record writes its text, and the site shows tables as HTML."""
    given = table.read(provenance.RESULTS / 'grid_nano.jsonl')
    (title,) = [name for name in given if name.startswith('nano, 4,000')]
    for text in ('<script>alert(1)</script>', '<!-- end -->', '[FST](JavaScript:alert(1))'):
      evil = {title: [{**record, 'title': text, 'label': text} for record in given[title]]}
      with (
        mock.patch.object(table, 'read', lambda path, evil=evil: evil),
        self.assertRaisesRegex(ValueError, "the table 'grid nano' of quality.md would have .*records are text"),
      ):
        pages.document('quality.md')
    evil = [{**record, 'expected': '<script>'} for record in provenance.read('faults.jsonl')]
    with (
      mock.patch.object(provenance, 'read', lambda name: evil if name == 'faults.jsonl' else []),
      self.assertRaisesRegex(ValueError, "faults.md would have '<script>"),
    ):
      pages.page('faults.md')

  def test_documents_have_the_tables_and_the_pictures_of_the_committed_records(self):
    for name in pages.TABLES:
      self.assertEqual((pages.DOCS / name).read_text(), pages.document(name), 'python -m experiments pages')
    for name in pages.PAGES:
      self.assertEqual((pages.DOCS / name).read_text(), pages.page(name), 'python -m experiments pages')
    shown = {name: ET.parse(pages.DOCS / name).findtext('{http://www.w3.org/2000/svg}desc') for name in pages.PICTURES}
    records = speed.load(provenance.RESULTS.glob('*.jsonl'))
    steps = best_steps.figure_rows(best_steps.load())
    rows = {
      'speed.svg': speed.figure_rows(records, steps), 'race.svg': picture.curves(table.by_seed(pages.race('302m'))),
      'race_of_three_layers.svg': picture.curves(table.by_seed(pages.race('three layers'))),
      'race_of_774m.svg': picture.curves(table.by_seed(pages.race('774m'))),
    }  # fmt: skip
    for name, made in rows.items():
      self.assertEqual(json.loads(shown[name] or ''), json.loads(json.dumps(made)), 'python -m experiments pages')

  @pytest.mark.slow
  def test_one_command_makes_all(self):
    folder = Path(temp_folder(self))
    committed = {name: (pages.DOCS / name).read_text() for name in pages.TABLES}
    for name, text in committed.items():  # without the tables that it makes
      (folder / name).write_text(re.sub(r'(?s)(<!-- made: .*? -->\n).*?(\n<!-- end -->)', r'\1\2', text))
    with mock.patch.object(pages, 'DOCS', folder):
      self.assertEqual(cli.main(['pages']), 0)
    self.assertEqual({name: (folder / name).read_text() for name in pages.TABLES}, committed)
    for name in pages.PAGES:
      self.assertEqual((folder / name).read_text(), pages.page(name))
    for name in pages.PICTURES:
      self.assertIn('<svg', (folder / name).read_text())

  def test_a_race_of_774m_of_made_up_records(self):
    """Two contenders with three seeds each, and one with the seed of its search alone."""
    same = {
      'bench': 'race', 'size': '774m', 'style': 'rotary_qk_norm', 'seconds': 300.0, 'equal_steps': None, 'share': 1.0,
      'decay': 0.0, 'shape': {'layers': 36, 'd': 1280, 'hidden': 5120, 'vocab': 256}, 'batch': 16, 'length': 1024,
    }  # fmt: skip
    records = [
      {**same, 'contender': name, 'title': 'a name of then', 'rate': rate, 'seed': seed, 'loss': loss, 'step_ms': ms,
       'steps': round(3e5 / ms), 'validation': [[1, 150.0, loss + 0.5], [2, 300.0, loss]]}
      for name, ms, trials in (
        ('dense', 200.0, ((1e-3, 0, 1.5), (2e-3, 0, 2.0), (1e-3, 1, 1.75), (1e-3, 2, 1.25))),
        ('s_ste_fp8_all', 125.0, ((1e-3, 0, 1.25), (2e-3, 0, 1.5), (1e-3, 1, 1.5), (1e-3, 2, 1.0))),
        ('fst', 160.0, ((1e-3, 0, 1.375), (5e-4, 0, 1.5))),
      )
      for rate, seed, loss in trials
    ]  # fmt: skip
    folder = Path(temp_folder(self))
    (folder / 'race_h200_774m.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
    with mock.patch.object(provenance, 'RESULTS', folder):
      by_seed, trials = pages.race_by_seed('774m', 's_ste_fp8_all'), pages.trials_of_race('774m')
      drawn = ET.fromstring(pages.picture_of_race('774m'))
    head, _, *rows = ([cell.strip() for cell in line.strip('|').split('|')] for line in by_seed.splitlines())
    self.assertEqual(head[4], 'S-STE, FP8, all linear layers minus it')
    # S-STE is at dense's loss, 0.25 higher, halfway between its two evaluations; FST at its own 0.125 above S-STE's.
    self.assertEqual([(row[0], row[2], *row[4:]) for row in rows], [
      ('S-STE, FP8, all linear layers', '3', '', '', '150.0 to 300.0', '0.75 ± 0.00'),
      ('FST', '1', '-0.125, one seed', '0.88, one seed', '262.5', '0.88, one seed'),
      ('dense', '3', '-0.2500 ± 0.0000', '0.75 ± 0.00', '', ''),
    ])  # fmt: skip
    self.assertIn('| dense | 200.0 | 1.00 |', trials)
    self.assertIn('| 1500 | 0.001: 1.500, 1.750, 1.250; 0.002: 2.000 |', trials)
    curves = json.loads(drawn.findtext('{http://www.w3.org/2000/svg}desc') or '')
    self.assertEqual(curves['dense'], [[150.0, 2.0, 1.75, 2.25], [300.0, 1.5, 1.25, 1.75]])

  def test_no_page_is_committed(self):
    """Pages are large, and are made by one command of what is."""
    self.assertEmpty([*provenance.RESULTS.glob('**/*.html'), *pages.DOCS.glob('**/*.html')])


class RecordsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({'commit': 'df15449', 'command': 'python -m experiments compare'}, ()),
    ({'commit': 'df15449', 'command': 'python -m pallas_kernels.pack.bench --out x'}, ('a program that is gone',)),
    ({'commit': 'df15449', 'command': 'python -m experiments.race --out x'}, ()),
    ({'commit': 'df15449', 'command': 'python -m experiments together --seeds 0'}, ('a program that is gone',)),
    ({'commit': 'df15449+', 'command': 'python -m pallas_kernels tune'}, ('uncommitted changes',)),
    ({'commit': '6348563-dirt-dirty', 'command': 'python -m tests.soak'}, ('uncommitted changes',)),
    ({'command': 'python pack7.py'}, ('no commit', 'no command that is kept')),
    ({'commit': '0000000', 'command': 'python -m experiments grid'}, ('a commit that is not in git',)),
    ({'command': 'python pack7.py', 'median_ms': 1.0, 'samples_ms': [1.0, 1.0]},
     ('no commit', 'no command that is kept', 'a median of fewer than three samples')),
  )  # fmt: skip
  def test_faults(self, record, expected):
    if provenance.NOT_IN_GIT in expected and not provenance.has_history():
      self.skipTest('no history to look into')
    self.assertEqual(provenance.faults(record), expected)

  def test_every_record_stands_by_itself(self):
    found = {
      path.name: faults for path in provenance.RESULTS.glob('*.jsonl')
      if (faults := sorted({f for line in path.read_text().splitlines() for f in provenance.faults(json.loads(line))}))
    }  # fmt: skip
    self.assertEqual(found, {}, 'commit, then measure')

  @parameterized.parameters(*DOCUMENTS)
  def test_tables_cite_their_records(self, document):
    found = provenance.tables(document)
    self.assertEqual([problem for cited in found for problem in provenance.problems(cited)], [])

  def test_a_table_that_does_not(self):
    folder = Path(temp_folder(self))
    path, clean, faulty = folder / 'page.md', folder / 'clean.jsonl', folder / 'dirty.jsonl'
    clean.write_text('{"commit": "df15449", "command": "python -m experiments bench", "samples_ms": [1.5]}\n')
    faulty.write_text('{"commit": "df15449-dirty", "command": "python -m experiments grid"}\n')
    cases = (
      ('', 'without <!-- records'), (f'In one process:\n<!-- records: {clean} -->\n', None),
      (f'<!-- records: {clean} -->\n', 'its times are of one process each, not three'),
      ('<!-- records: best_steps.jsonl -->\n', None),
      (f'<!-- records: {clean};\n {faulty} -->\n', 'do not stand by themselves: uncommitted changes'),
      ('<!-- records: none, a setting -->\n', None), ('<!-- records: gone.jsonl -->\n', 'no file .*gone.jsonl'),
      (f'<!-- records: {clean} -->\n\n# B\n', 'without'), (f'<!-- records: {clean}?device=x -->\n', 'no such record'),
    )  # fmt: skip
    for comment, problem in cases:
      path.write_text(comment + '\n| a | b |\n|---|---|\n| x | 1.5 |\n')
      (cited,) = provenance.tables(path)
      found = provenance.problems(cited)
      self.assertLen(found, bool(problem), comment)
      if problem:
        self.assertRegex(found[0], problem)


class FiguresTest(absltest.TestCase):
  def test_losses_of_the_documents_are_those_of_the_records_that_they_cite(self):
    """Means with their spreads, and differences with their intervals, each to the digits that are written."""
    count = 0
    for cited in itertools.chain(*map(provenance.tables, QUALITY)):
      groups, known = [], set()
      for citation in cited.citations or ():
        # Records of races and of grids have tests of their own.
        runs = [papers.run_of(record) for record in provenance.read(citation) if 'label' in record]
        groups += group(runs).values()
      for runs in groups:
        losses = [run.validation_loss for run in runs]
        if len(losses) > 1:
          known |= {f'{np.mean(losses):.3f} ± {np.std(losses, ddof=1):.{digits}f}' for digits in (3, 4)}
      # A method may have been run later than its dense twin, into another file.
      for a, b in itertools.product(groups, groups):
        if len(pairs := claims.paired(a, b)) > 1:
          known.add(f'{np.mean(pairs):+.3f} ± {claims.half_width(pairs):.3f}')
          other = {run.seed: run.validation_loss for run in b}
          percent = [100 * (run.validation_loss / other[run.seed] - 1) for run in a if run.seed in other]
          known.add(f'{np.mean(percent):.1f}% ± {claims.half_width(percent):.1f}%')
          known.add(f'{np.mean(percent):.1f}')
      written = re.findall(r'[+-]?\d\.\d{3} ± \d\.\d+|-?\d\.\d% ± \d\.\d%', cited.text) if groups else []
      written += re.findall(r'\| (-?\d+\.\d) \|', cited.text) if groups else []
      self.assertEqual([text for text in written if text not in known], [], f'{cited.document.name}, line {cited.line}')
      count += len(written)
    self.assertGreater(count, 60)

  def test_claims_are_judged_by_the_seeds_that_a_grid_reports(self):
    for name, methods in (('grid_nano.jsonl', 5), ('compare_nano.jsonl', 8)):
      found = [{run.seed: run.validation_loss for run in runs} for runs in group(papers.runs(name)).values()]
      self.assertLen(found, methods)
      self.assertCountEqual(found, prose.compared(name))


if __name__ == '__main__':
  absltest.main()
