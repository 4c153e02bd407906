import math

from absl.testing import absltest, parameterized

import sparse24_jax as s24

DENSE_RATE = 0.02


def runs_with_ratios(ratios: dict[float, float], asked: list | None = None):
  """A warm-up whose flip rate is the given share of the dense twin's."""

  def run(decay):
    if asked is not None:
      asked.append(decay)
    return DENSE_RATE * (1 if decay is None else ratios[decay])

  return run


class TuneMaskedDecayTest(parameterized.TestCase):
  def test_the_largest_in_the_band_wins(self):
    asked = []
    ratios = {0.0: 1.3, 1e-6: 0.94, 1e-5: 0.75, 1e-4: 0.61, 1e-3: 0.2}
    choice = s24.tune_masked_decay(runs_with_ratios(ratios, asked), [1e-3, 0.0, 1e-5, 1e-4, 1e-6, 1e-5])
    self.assertEqual(choice.decay, 1e-4)
    self.assertRegex(choice.reason, r'0\.61.* 3 were feasible')
    self.assertEqual(asked, [None, 0.0, 1e-6, 1e-5, 1e-4, 1e-3])  # the twin once, each candidate once
    self.assertEqual([trial.decay for trial in choice.trials], sorted(ratios))
    self.assertEqual([trial.feasible for trial in choice.trials], [False, True, True, True, False])
    for trial in choice.trials:
      self.assertAlmostEqual(trial.ratio, ratios[trial.decay])
      self.assertAlmostEqual(trial.flip_rate, DENSE_RATE * ratios[trial.decay])
    self.assertEqual((choice.dense_flip_rate, choice.band), (DENSE_RATE, (0.60, 0.95)))

  @parameterized.parameters((0.60, True), (0.95, True), (0.599, False), (0.951, False))
  def test_the_band_holds_its_ends(self, ratio, feasible):
    choice = s24.tune_masked_decay(lambda decay: 1.0 if decay is None else ratio, [1e-5])
    self.assertEqual(choice.trials[0].feasible, feasible)

  def test_other_band(self):
    choice = s24.tune_masked_decay(runs_with_ratios({1e-5: 0.5, 1e-4: 0.3}), [1e-5, 1e-4], band=(0.25, 0.4))
    self.assertEqual((choice.decay, choice.band), (1e-4, (0.25, 0.4)))

  @parameterized.parameters(
    ((1.5, 1.2), 'too much: try larger'), ((0.5, 0.1), 'too little: try smaller'), ((1.2, 0.3), 'between')
  )
  def test_no_feasible_candidate_gives_advice(self, ratios, advice):
    choice = s24.tune_masked_decay(runs_with_ratios(dict(zip((1e-5, 1e-4), ratios, strict=True))), [1e-5, 1e-4])
    self.assertIsNone(choice.decay)
    self.assertRegex(choice.reason, advice)
    self.assertLen(choice.trials, 2)

  @parameterized.parameters(math.nan, math.inf, -0.1)
  def test_a_run_that_failed_is_an_error_that_names_it(self, rate):
    with self.assertRaisesRegex(ValueError, 'flip rate .* for decay 1e-05'):
      s24.tune_masked_decay(runs_with_ratios({1e-5: rate / DENSE_RATE}), [1e-5])
    with self.assertRaisesRegex(ValueError, 'for the dense twin'):
      s24.tune_masked_decay(lambda decay: rate, [1e-5])


if __name__ == '__main__':
  absltest.main()
