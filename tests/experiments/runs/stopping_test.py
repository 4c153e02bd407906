"""A run that is told to stop saves the step it is at, and goes on from there as if nothing had been."""

import json
import os
from pathlib import Path
import signal
from unittest import mock

from absl.testing import absltest, parameterized
import pytest

from experiments.runs import stopping
from experiments.runs.checkpoint import Checkpoints
from tests.experiments import fakes
from tests.experiments.fakes import temp_folder
from tests.experiments.runs.train_test import final_arrays, programs_of, RECIPES, run, tiny, whole_run

# What 'ste' compiles to, also for `bad_numbers_test`.
STE = programs_of(tiny('ste'))


def run_and_signal(config, folder, number, step, programs=None):
  """Sends this process a signal while it fetches the batch of a step."""
  fetch = fakes._Iterator.__next__

  def fetch_and_signal(self):
    if self._position == step:
      os.kill(os.getpid(), number)
    return fetch(self)

  with mock.patch.object(fakes._Iterator, '__next__', fetch_and_signal):
    return run(config, folder, programs=programs)


class StoppingTest(parameterized.TestCase):
  @parameterized.parameters((signal.SIGTERM, 75), (signal.SIGINT, 130))
  @pytest.mark.few
  def test_the_step_is_saved_and_the_rest_is_bit_for_bit(self, number, status):
    config, folder = tiny('transposable_srste', RECIPES['transposable_srste']), temp_folder(self)
    whole, _ = whole_run()
    handlers = [signal.getsignal(n) for n in stopping.STATUS]
    with self.assertRaisesRegex(stopping.StoppedError, f'{number.name}; step 18 is saved') as caught:
      run_and_signal(config, folder, number, 17)
    self.assertEqual(caught.exception.status, status)
    self.assertEqual([signal.getsignal(n) for n in stopping.STATUS], handlers)
    with Checkpoints(Path(folder, 'checkpoints'), read_only=True) as checkpoints:
      self.assertEqual(checkpoints.latest(), 18)
    summary = json.loads(Path(whole, 'summary.json').read_text())
    self.assertEqual(run(config, folder)['validation_loss'], summary['validation_loss'])
    self.assertEqual(*(Path(f, 'metrics.jsonl').read_bytes() for f in (folder, whole)))
    (found, _), (expected, _) = (final_arrays(config, f) for f in (folder, whole))
    for path, array in expected.items():
      self.assertEqual(found[path].tobytes(), array.tobytes(), path)

  def test_a_run_without_checkpoints_says_that_it_starts_again(self):
    with self.assertRaisesRegex(stopping.StoppedError, 'after step 4; checkpoint_every is 0'):
      run_and_signal(tiny('ste', checkpoint_every=0), temp_folder(self), signal.SIGTERM, 3, STE)


if __name__ == '__main__':
  absltest.main()
