"""What flip rates choose, against the losses of whole runs."""

from absl.testing import absltest

from experiments.reports import decay_grid


def run(decay, seed, loss, *rates, steps=300):
  """A whole run that was evaluated every 100 steps."""
  refreshes = [[100 * (i + 1), rate] for i, rate in enumerate(rates)]
  return {
    'decay': decay, 'rate': 6e-3, 'seed': seed, 'share': 1.0, 'steps': steps, 'loss': loss,
    'flip_rate': {'refreshes': refreshes},
  }  # fmt: skip


def cells(markdown):
  return [[cell.strip() for cell in line.strip('|').split('|')] for line in markdown.splitlines()[2:]]


class FlipsTest(absltest.TestCase):
  def test_ratios_are_of_means_over_seeds_and_the_largest_feasible_decay_is_chosen_at_each_step(self):
    fst = [
      run(1e-3, 1, 1.50, 0.16, 0.02, 0.5), run(1e-3, 0, 1.40, 0.20, 0.10, 0.5),
      run(1e-4, 0, 1.60, 0.36, 0.09, 0.5), run(1e-4, 1, 1.70, 0.36, 0.03, 0.5),
      run(1e-2, 0, 1.46, 0.14, 0.04, 0.5), run(1e-2, 1, 1.50, 0.14, 0.02, 0.5),
    ]  # fmt: skip
    dense = [run(0.0, 0, 1.3, 0.30, 0.20, 0.1), run(0.0, 1, 1.3, 0.10, 0.04, 0.1)]
    self.assertEqual(
      cells(decay_grid.flips_markdown(fst, dense)),
      [
        ['0.0001', '1.800', '0.500', '1.6500', '13.79', '+0.2000, +0.2000'],
        ['0.001', '0.900, feasible', '0.500', '1.4500', '', ''],
        ['0.01', '0.700, chosen', '0.250', '1.4800', '2.07', '+0.0600, +0.0000'],
      ],
    )

  def test_a_dense_run_of_another_seed_rate_or_length_is_refused(self):
    fst = [run(1e-3, 0, 1.4, 0.2, 0.1, 0.5)]
    for dense in ([], [run(0.0, 1, 1.3, 0.2, 0.1, 0.1)], [run(0.0, 0, 1.3, 0.2, 0.1, 0.1, steps=400)]):
      with self.assertRaisesRegex(ValueError, 'other rates, steps or seeds'):
        decay_grid.flips_markdown(fst, dense)


if __name__ == '__main__':
  absltest.main()
