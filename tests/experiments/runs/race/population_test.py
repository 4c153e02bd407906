"""Runs side by side against the same runs one by one, and the grid of them."""

import json
from pathlib import Path
from unittest import mock

from absl.testing import absltest, parameterized
import numpy as np
import pytest

from experiments.reports import race_table as table
from experiments.runs import experiment, methods, train
from experiments.runs.race import grid, population, tuned
from experiments.runs.race.population import Outcome, Population
from experiments.runs.race.search import Trial
from tests.experiments.fakes import FakeData, temp_folder


def configure(method, *overrides):
  config = experiment.load_config('nano', overrides, tiny=True)
  return methods.configure(config, method, 0)


class PopulationTest(absltest.TestCase):
  @pytest.mark.slow
  def test_each_run_is_what_it_is_alone(self):
    # The third differs in seed, rate and decay from the first, and links are drawn. FST has what SR-STE has.
    for method, compared in (('fst', 2), ('rigl', 1), ('neuron_level', 2)):
      changes = ('model.num_layers=1', 'steps=12', 'log_every=6', 'eval_every=6', 'optimizer.warmup_steps=3')
      config = configure(method, *changes)
      config.recipe.update({'implementation': 'reference', 'flip_rate': 'refresh'})
      if method == 'fst':
        config.recipe.kwargs.refresh_every = 8
      decay = config.recipe.kwargs.get('masked_decay', 0.0)
      trials = [Trial(1e-2, decay, 0), Trial(1e-2, decay, 3), Trial(3e-2, 5 * decay, 3)]
      data = FakeData(seq_len=config.data.seq_len, batch_size=config.data.batch_size)
      outcomes = Population(config, 3, seeds=2, data=data).train(trials)
      alone = tuned.configure(config, trials[compared])
      if method == 'rigl':
        with alone.unlocked():
          alone.recipe.kwargs.seed = 0  # links are drawn alike for all
      loss = train.train(alone, Path(temp_folder(self)) / 'run', data=data, quiet=True)['validation_loss']
      with self.subTest(method):
        found = outcomes[compared].validation
        self.assertEqual([step for step, _ in found], [6, 12])
        np.testing.assert_allclose(found[-1][1], loss, rtol=2e-4)
        if method == 'fst':
          (_, before), (_, after) = outcomes[compared].flip_rate
          self.assertIsNone(before)
          self.assertGreater(after, 0)
      losses = [outcome.validation[-1][1] for outcome in outcomes]
      self.assertGreater(min(np.diff(sorted(losses))), 2e-3)  # or the trials would not be told apart

  def test_what_cannot_be_trained_side_by_side(self):
    data = FakeData(seq_len=16, batch_size=16)
    with self.assertRaisesRegex(ValueError, 'without clusters of neurons, which are made anew'):
      Population(configure('neuron_level_clusters'), 2, data=data)
    one = Population(configure('dense'), 2, data=data)
    with self.assertRaisesRegex(ValueError, '3 trials, 2 at a time'):
      one.train([Trial(1e-2, 0.0, seed) for seed in range(3)])
    with self.assertRaisesRegex(ValueError, 'trials of 2 seeds, made for 1'):
      one.train([Trial(1e-2, 0.0, seed) for seed in range(2)])

  def test_a_run_that_diverged_has_no_loss(self):
    self.assertIsNone(Outcome([(1, 2.0), (2, float('nan'))], []).loss)


class GridTest(parameterized.TestCase):
  def run_grid(self, results, **changes):
    """A grid whose losses are lowest at rate 1e-2 and decay 6e-3 for the seeds that search, and 0.5 for others."""

    def pretend(self, trials):
      def loss(trial):
        if trial.seed > 1:
          return 0.5 + 0.01 * trial.seed
        if trial.rate > 3e-2:
          return float('nan')
        return 1 + abs(trial.rate - 1e-2) + abs(trial.decay - 6e-3) * bool(trial.decay) - 0.2 * (trial.rate == 5e-3) * (1 - 2 * trial.seed)  # fmt: skip  # noqa: E501

      return [Outcome([(self.config.steps, loss(trial))], []) for trial in trials]

    settings = dict(
      experiment='nano', names=['dense', 'fst'], rates=[5e-3, 1e-2, 4e-2], factors=[1.0, 3.0], search=(0, 1),
      seeds=(2, 3), population=5, tiny=True, data=FakeData(seq_len=16, batch_size=16),
    ) | changes  # fmt: skip
    with mock.patch.object(population.Population, 'train', autospec=True, side_effect=pretend) as trained, \
         mock.patch('builtins.print') as said:  # fmt: skip
      grid.Grid(results, **settings).run()
    return [call.args[1] for call in trained.call_args_list], said

  def test_the_best_by_the_mean_of_the_search_is_reported_by_other_seeds(self):
    results = Path(temp_folder(self)) / 'records.jsonl'
    trained, _ = self.run_grid(results)
    self.assertEqual(list(map(len, trained)), [5, 5, 2, 2, 5, 5, 2, 2])
    self.assertEqual(trained[-1], [Trial(1e-2, 6e-3, 2), Trial(1e-2, 6e-3, 3)])
    ((_, records),) = table.read(results).items()
    found = table.by_seed(records)
    self.assertEqual((found['fst'].rate, found['fst'].decay, found['fst'].searched), (1e-2, 6e-3, 6))
    self.assertEqual(found['dense'].searched, 6)
    self.assertEqual((dict(found['fst'].losses), found['fst'].of_search), ({2: 0.52, 3: 0.53}, False))
    alone = table.by_seed([r for r in records if r['seed'] < 2])
    self.assertEqual((list(alone['fst'].losses), alone['fst'].of_search), ([0, 1], True))
    self.assertIn('2, which chose', table.steps_markdown([r for r in records if r['seed'] < 2]))
    self.assertIsNone(next(r for r in records if r['rate'] == 4e-2)['loss'])
    again, _ = self.run_grid(results)
    self.assertEqual(again, [])
    more, _ = self.run_grid(results, seeds=(2, 3, 4))
    self.assertEqual([[t.seed for t in trials] for trials in more], [[4], [4]])

  @parameterized.parameters(0.0, 2.0)
  def test_a_share_is_of_the_steps(self, share):
    with self.assertRaisesRegex(ValueError, f'share={share:g} of the steps must be above 0, and 1 at most'):
      self.run_grid(Path(temp_folder(self)) / 'records.jsonl', share=share)

  def test_seeds_that_choose_are_not_reported(self):
    results = Path(temp_folder(self)) / 'records.jsonl'
    with self.assertRaisesRegex(ValueError, 'and other seeds to report'):
      self.run_grid(results, seeds=(1, 2))

  def test_a_file_of_records_of_another_text_or_of_none_is_refused(self):
    results = Path(temp_folder(self)) / 'records.jsonl'
    self.run_grid(results)
    with self.assertRaisesRegex(ValueError, '28 of 28 records are of another text than another: give another file'):
      self.run_grid(results, data=FakeData(seq_len=16, batch_size=16, fingerprint='another'))
    records = [json.loads(line) for line in results.read_text().splitlines()]
    records[1].pop('text')
    results.write_text(''.join(json.dumps(record) + '\n' for record in records))
    with self.assertRaisesRegex(ValueError, 'records.jsonl: 1 of 28 records lack text, .*: give another file'):
      self.run_grid(results)

  def test_short_runs_are_records_of_their_own(self):
    results = Path(temp_folder(self)) / 'records.jsonl'
    self.run_grid(results, seeds=())
    trained, _ = self.run_grid(results, seeds=(), share=0.25)
    self.assertEqual(sum(map(len, trained)), 24)
    records = [json.loads(line) for line in results.read_text().splitlines()]
    self.assertEqual({(r['share'], r['steps']) for r in records}, {(1.0, 60), (0.25, 15)})
    self.assertEqual({r['recipe']['flip_rate'] for r in records}, {'refresh'})  # no search of masks at every step


if __name__ == '__main__':
  absltest.main()
