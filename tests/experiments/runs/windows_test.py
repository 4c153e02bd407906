"""What a line of metrics says of the steps of a window."""

import json
from pathlib import Path

from absl.testing import absltest
import numpy as np

from experiments.runs import bad_numbers, build, metrics, programs, progress
from experiments.runs.windows import Windows
from tests.experiments.fakes import FakeData, temp_folder
from tests.experiments.runs.train_test import RECIPES, tiny


def step(overall, *rates):
  return programs.StepMetrics(3.0, 1.0, np.float32(1e-3), np.float32(overall), np.array(rates, np.float32))


class WindowsTest(absltest.TestCase):
  def lines(self, mode, *windows):
    """The overall rate and those of two weights in a line for each window."""
    fst, folder = 'transposable_srste', Path(temp_folder(self))
    parts = build.make_parts(tiny(fst, RECIPES[fst], recipe__flip_rate=mode), data=FakeData())
    found = Windows(parts, folder, ['up', 'down'])
    with metrics.MetricsWriter(folder) as writer:
      for at, window in enumerate(windows):
        found.write(at + 1, 'sparse', window, progress.Stopwatch(), writer, progress.Progress('', 0, 9, quiet=True))
    lines = map(json.loads, (folder / metrics.METRICS).read_text().splitlines())
    return [(line['flip_rate'], *line['flip_rates'].values()) for line in lines]

  def test_a_rate_is_null_before_the_first_comparison_and_none_that_was_found_is(self):
    windows = [[step(-1, -1, -1)], [step(-1, -1, -1), step(0, 0, 0)], [step(0, 0, 0), step(0.5, 0.25, 0.75)]]
    self.assertEqual(self.lines('refresh', *windows), [(None, None, None), (0, 0, 0), (0.5, 0.25, 0.75)])
    self.assertEqual(self.lines('step', windows[2]), [(0.25, 0.125, 0.375)])
    self.assertEqual(self.lines('step', [step(-1, -1, -1), step(0.5, 0.25, 0.75)]), [(0.5, 0.25, 0.75)])

  def test_a_rate_that_is_not_a_number_is_a_weight_that_is_none(self):
    with self.assertRaisesRegex(bad_numbers.BadNumbersError, 'flip rate, and so a weight, is nan at step 1'):
      self.lines('refresh', [step(np.nan, np.nan, 0)])


if __name__ == '__main__':
  absltest.main()
