"""The search of the masked decay by loss: what is trained, what is kept, and what is chosen."""

import json
import math
from pathlib import Path
from unittest import mock

from absl.testing import absltest

from experiments.runs import methods, train
from experiments.runs.experiment import load_config
from experiments.runs.race import decays
from tests.experiments.fakes import FakeData, temp_folder
from tests.experiments.runs.race import tuned_test


def config_of(*overrides):
  return methods.configure(load_config('nano', overrides), 'fst', 0)


class DecaysTest(absltest.TestCase):
  def search(self, root, **changes):
    with mock.patch.object(train, 'train', side_effect=tuned_test.pretend) as trained, mock.patch('builtins.print'):
      settings = dict(candidates=(2e-3, 18e-3, 0.0), seeds=(0, 1), data=FakeData()) | changes
      chosen = decays.search(config_of('optimizer.peak_lr=2e-2'), root / 'runs', root / 'decays.jsonl', **settings)
    return trained, chosen

  def test_short_runs_of_every_candidate_and_seed_once(self):
    root = Path(temp_folder(self))
    trained, chosen = self.search(root)
    tried = [(call.args[0].recipe.kwargs.masked_decay, call.args[0].seed) for call in trained.call_args_list]
    self.assertEqual(tried, [(decay, seed) for decay in (0.0, 2e-3, 18e-3) for seed in (0, 1)])
    self.assertEqual({(call.args[0].steps, call.args[0].optimizer.warmup_steps) for call in trained.call_args_list},
                     {(2000, 50)})  # fmt: skip
    # What `pretend` loses: nothing with a decay of 0 or 18e-3, so the two are as good, and the seeds differ.
    self.assertEqual(chosen.decay, 0.0)
    self.assertIn('as good within 0.5%: 0.018', chosen.reason)
    self.assertAlmostEqual(chosen.losses[2e-3], 1.005 + 0.05 * math.log(9))
    records = [json.loads(line) for line in (root / 'decays.jsonl').read_text().splitlines()]
    self.assertEqual([r['share'] for r in records], [0.5] * 6)
    trained, again = self.search(root)
    trained.assert_not_called()
    self.assertEqual(again, chosen)
    trained, _ = self.search(root, share=0.25)  # other settings, other records
    self.assertEqual(trained.call_count, 6)
    with self.assertRaisesRegex(ValueError, '12 of 12 records are of another text than another: give another file'):
      self.search(root, data=FakeData(fingerprint='another'))

  def test_refusals(self):
    root = Path(temp_folder(self))
    for changes, message in (
      ({'candidates': ()}, 'give factors of zero or more, and a seed'),
      ({'candidates': (-1.0,)}, 'give factors of zero or more'),
      ({'seeds': ()}, 'and a seed'),
      ({'share': 0.0}, r'share=0.0 must be in \(0, 1\]'),
    ):
      with self.assertRaisesRegex(ValueError, message):
        self.search(root, **changes)


if __name__ == '__main__':
  absltest.main()
