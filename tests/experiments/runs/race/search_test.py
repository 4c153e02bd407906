"""The search of a race: which trials it makes, and in which order."""

import math

from absl.testing import absltest, parameterized

from experiments.runs.race.search import Budget, next_trial, Trial


def searched(loss_of, first, budget):
  """All trials, in their order, where `loss_of` says how they end."""
  done = {}
  while (trial := next_trial(done, first, budget)) is not None:
    done[trial] = loss_of(trial)
  return list(done)


class SearchTest(parameterized.TestCase):
  @parameterized.parameters(
    (1e-3, [1e-3, 5e-4, 2e-3, 7.071e-4, 1.414e-3]),  # surrounded, then closer
    (4e-3, [1e-3, 5e-4, 2e-3, 4e-3, 8e-3]),
    (1e-4, [1e-3, 5e-4, 2.5e-4, 1.25e-4, 6.25e-5]),
    (1.3e-3, [1e-3, 5e-4, 2e-3, 1.414e-3, 1.189e-3, 1.682e-3]),  # the better side first, never behind a worse one
  )
  def test_rates_surround_the_best(self, best, rates):
    found = searched(lambda t: abs(math.log(t.rate / best)), Trial(1e-3, 0.0), Budget(len(rates)))
    self.assertSequenceAlmostEqual([trial.rate for trial in found], rates)
    self.assertEqual({trial.decay for trial in found}, {0.0})

  def test_rate_and_decay_together_with_as_many_trials_then_the_winner_again(self):
    def loss(trial):
      return abs(math.log(trial.rate / 5e-4)) + abs(math.log(trial.decay / 1.8e-3))

    budget = Budget(6, ((1, 1.0), (0, 0.5)))
    found = searched(loss, Trial(1e-3, 6e-4), budget)
    self.assertEqual(found, [
      Trial(1e-3, 6e-4), Trial(5e-4, 6e-4), Trial(5e-4, 2e-4), Trial(2.5e-4, 6e-4), Trial(5e-4, 1.8e-3),
      Trial(2.5e-4, 1.8e-3), Trial(5e-4, 1.8e-3, 1), Trial(5e-4, 1.8e-3, 0, 0.5),
    ])  # fmt: skip

  def test_a_search_that_begins_at_numbers_of_many_digits_ends(self):
    first, done = Trial(0.00123456, 0.000123456), {}
    for _ in range(5):
      trial = next_trial(done, first, Budget(trials=3, repeats=((1, 1.0),)))
      if trial is not None:
        done[trial] = trial.rate
    self.assertLen(done, 4)
    self.assertIn(first, done)

  def test_a_run_that_diverged_does_not_win_and_lower_rates_are_tried(self):
    found = searched(lambda t: math.nan if t.rate > 4e-4 else 1.0, Trial(1e-3, 0.0), Budget(3, ((1, 1.0),)))
    self.assertEqual(found, [Trial(1e-3, 0.0), Trial(5e-4, 0.0), Trial(2.5e-4, 0.0), Trial(2.5e-4, 0.0, 1)])

  def test_trials_of_another_search_do_not_count(self):
    done = {Trial(1.1e-3, 0.0): 0.0, Trial(1e-3, 6e-4): 0.0, Trial(1e-3, 0.0, seed=3): 0.0}
    self.assertEqual(next_trial(done, Trial(1e-3, 0.0), Budget(2)), Trial(1e-3, 0.0))


if __name__ == '__main__':
  absltest.main()
