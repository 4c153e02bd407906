"""Tables of races: losses by rate and seed, differences of seeds, and what diverged."""

import contextlib
import io
import json
from pathlib import Path

from absl.testing import absltest

from experiments.reports import provenance
from experiments.reports import race_table as table
from tests.experiments.fakes import temp_folder


class TableTest(absltest.TestCase):
  def test_the_command_prints_the_tables_of_a_file(self):
    with contextlib.redirect_stdout(io.StringIO()) as out:
      self.assertEqual(table.main([str(provenance.RESULTS / 'race_h200_124m_bpe.jsonl')]), 0)
    self.assertRegex(out.getvalue(), r'1,?200 steps[\s\S]*\| dense \|[\s\S]*\| S-STE, FP8, all linear layers \|')

  def test_seeds_are_paired_and_a_trial_that_diverged_is_said(self):
    runs = []
    for name, rate, losses in (
      ('dense', 1e-3, {0: 2.0, 1: 2.2, 2: 2.1}), ('dense', 2e-3, {0: None}), ('sparse', 1e-3, {0: 1.9, 1: 2.0, 2: 2.0}),
    ):  # fmt: skip
      runs += [
        {'bench': 'race', 'contender': name, 'title': name, 'rate': rate, 'decay': 0.0, 'seed': seed, 'share': 1.0,
         'seconds': 40.0, 'step_ms': 2.0, 'steps': 3, 'shape': {'layers': 1, 'd': 8, 'hidden': 8, 'vocab': 8},
         'batch': 1, 'length': 8, 'loss': loss, 'validation': [[1, 20.0, 2.3], [2, 40.0, loss]]}
        for seed, loss in losses.items()
      ]  # fmt: skip
    self.assertEqual(table.rows(runs)[-1][5], '0.001: 2.000, 2.200, 2.100; 0.002: diverged')
    found = table.by_seed(runs)
    self.assertEqual(list(found), ['sparse', 'dense'])
    sparse, dense = table.seeds_rows(found, 'sparse')
    # Differences -0.1, -0.2, -0.1: mean -0.1333, deviation 0.0577, times 4.303 over the root of 3.
    self.assertEqual(dense[:5], ['dense', '0.001', '3', '2.1000 ± 0.2484', '-0.1333 ± 0.1434'])
    self.assertEqual(sparse[6], '30.0 to 33.3')  # dense's 2.1 on the way from 2.3 to 1.9 and to 2.0
    # Its own seed's 2.0, 2.2 and 2.1 after 35, 26.67 and 33.33 of 40: mean 0.7917, deviation 0.1102.
    self.assertEqual(sparse[7], '0.79 ± 0.27')
    # The same share whichever of the two the row is of.
    self.assertEqual((sparse[5], dense[5]), ('', '0.79 ± 0.27'))
    self.assertEqual([row[5] for row in table.seeds_rows(found, 'dense')], ['0.79 ± 0.27', ''])
    dense, sparse = table.steps_rows(table.by_seed(runs), 'dense')[::-1]
    self.assertEqual(dense, ['dense', '0.001, at an edge', '2', '3', '2.1000 ± 0.2484', '', ''])
    # Of dense's 2.0, 2.2 and 2.1, seed by seed: -5, -9.0909 and -4.7619, deviation 2.434.
    self.assertEqual(sparse[2:], ['1', '3', '1.9667 ± 0.1434', '-0.1333 ± 0.1434', '-6.28 ± 6.05'])
    squared = [{**r, 'contender': 'dense_relu2'} if r['contender'] == 'dense' else r for r in runs]
    self.assertEqual(table.seeds_rows(table.by_seed(squared), 'sparse'), table.seeds_rows(found, 'sparse'))
    for made in (table.markdown, table.steps_markdown):  # not against the best
      self.assertEqual(made(squared), made(runs))
    diverged = [{**r, 'loss': None} if r['contender'] == 'sparse' else r for r in runs]
    self.assertEqual(table.seeds_rows(table.by_seed(diverged), 'dense')[-1][3:6], ['diverged', 'diverged', ''])

  def test_times_are_over_those_of_dense_at_the_same_commit(self):
    def run(contender, commit, ms):
      return {
        'bench': 'race', 'contender': contender, 'title': contender, 'rate': 1e-3, 'decay': 0.0, 'seed': 0,
        'share': 1.0, 'step_ms': ms, 'steps': 3, 'shape': {'layers': 1, 'd': 8, 'hidden': 8, 'vocab': 8}, 'batch': 1,
        'length': 8, 'loss': 2.0, 'seconds': 40.0, 'commit': commit,
      }  # fmt: skip

    runs = [run('dense', 'a', 4.0), run('dense', 'b', 2.0), run('fst', 'a', 2.0), run('s_ste', 'b', 2.0)]
    runs.append(run('mst', 'c', 1.5))  # beside no dense: over the mean of all
    self.assertEqual({row[0]: row[2] for row in table.rows(runs)}, {
      'dense': '1.00', 'fst': '2.00', 's_ste': '1.00', 'mst': '2.00',
    })  # fmt: skip

  def test_a_contender_of_races_has_its_name_of_today(self):
    path = Path(temp_folder(self)) / 'race.jsonl'
    race = {'size': 'wide2048', 'style': 'gpt2', 'equal_steps': None, 'seconds': 40.0, 'contender': 'dense_124m'}
    tuned = {'experiment': 'nano', 'equal_steps': 9, 'contender': 'fst', 'title': 'FST of then'}
    records = [race | {'title': 'dense, 124M (86M on bytes)'}, race | {'contender': 'gone', 'title': 'gone'}, tuned]
    path.write_text(''.join(json.dumps(record) + '\n' for record in records))
    found = [record['title'] for records in table.read(path).values() for record in records]
    self.assertEqual(found, ['dense, 124M (85M on bytes)', 'gone', 'FST of then'])

  def test_one_whose_dense_end_was_in_16_bits_is_another_contender(self):
    path = Path(temp_folder(self)) / 'race.jsonl'
    race = {'size': '124m', 'style': 'gpt2', 'equal_steps': 9, 'contender': 'fst_fp8_all', 'title': 'of then'}
    path.write_text('\n'.join(json.dumps(race | phase) for phase in ({}, {'dense_phase': 'fp8'})))
    ((then, today),) = table.read(path).values()
    self.assertNotEqual(then['contender'], today['contender'])
    self.assertEqual(then['title'], today['title'] + ', dense end in 16 bits')

  def test_records_of_two_texts_do_not_compare(self):
    path = Path(temp_folder(self)) / 'race.jsonl'
    race = {'size': '124m', 'style': 'gpt2', 'equal_steps': 9, 'contender': 'dense', 'title': 'dense'}
    path.write_text('\n'.join(json.dumps(race | text) for text in ({}, {'text': 'a'}, {'text': 'a'})))
    self.assertLen(table.read(path), 1)
    path.write_text('\n'.join(json.dumps(race | {'text': text}) for text in 'ab'))
    with self.assertRaisesRegex(ValueError, 'race.jsonl, 124m, gpt2, 9 steps each: records of the texts a, b, whose'):
      table.read(path)

  def test_losses_by_rate_and_seed_best_first(self):
    shape = {'layers': 1, 'd': 8, 'hidden': 8, 'vocab': 8}
    same = {'bench': 'race', 'shape': shape, 'batch': 1, 'length': 8, 'steps': 3, 'share': 1.0}
    runs = [
      {**same, 'contender': name, 'title': name, 'step_ms': ms, 'rate': 1e-3, 'decay': decay, 'seed': seed, 'loss': end}
      for name, ms, decay, seed, end in (
        ('dense', 3.0, 0.0, 0, 2.0), ('sparse', 2.0, 6e-4, 1, 1.75), ('sparse', 2.0, 6e-4, 0, 1.5),
        ('sparse', 2.0, 2e-4, 0, 3.0),
      )
    ]  # fmt: skip
    runs.append({**runs[0], 'share': 0.5, 'loss': 0.1})
    found = [(row[0], row[2], row[5]) for row in table.rows(runs)]
    self.assertEqual(found, [
      ('sparse', '1.50', '0.001, decay 0.0002: 3.000; 0.001, decay 0.0006: 1.500, 1.750'),
      ('dense', '1.00', '0.001: 2.000'),
    ])  # fmt: skip

  def test_gaps_compare_the_same_batches(self):
    same = {'bench': 'race', 'share': 1.0, 'equal_steps': 60, 'steps': 60, 'decay': 0.0, 'step_ms': 1.0, 'loss': 1.0}
    same |= {'validation': [[60, 0.06, 1.0]]}

    def run(name, rate, seed, losses, **more):
      train = [[20 * (i + 1), loss, 0.0, 0.0] for i, loss in enumerate(losses)]
      return {**same, 'contender': name, 'title': name, 'rate': rate, 'seed': seed, 'train': train, **more}

    text = table.gap_markdown([
      run('dense', 1.0, 0, (3.0, 2.0, 1.0)), run('dense', 1.0, 1, (3.0, 2.0, 1.0)),
      run('sparse', 1.0, 0, (3.0, 2.25, 1.5)), run('sparse', 1.0, 1, (3.5, 2.25, 1.25)),
      # Another rate that ends higher, and a seed that dense lacks.
      run('sparse', 2.0, 0, (9.0, 9.0, 9.0), loss=2.0), run('sparse', 1.0, 2, (9.0, 9.0, 9.0)),
    ], ends=(1 / 3, 1))  # fmt: skip
    self.assertEqual(text.splitlines()[-1], '| sparse | 2 | +0.2500 | +0.3125 |')


if __name__ == '__main__':
  absltest.main()
