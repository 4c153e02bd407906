"""Comparisons of methods that are tuned alike: the trials, their records, and what is made of them."""

import json
import math
from pathlib import Path
from unittest import mock

from absl.testing import absltest
import pytest

from experiments import __main__ as cli
from experiments.reports import compare, report
from experiments.reports import race_table as table
from experiments.runs import build, metrics, train
from experiments.runs.progress import SPENT_ON
from experiments.runs.race import tuned
from experiments.runs.race.search import Trial
from tests.experiments.fakes import FakeData, temp_folder


def pretend(config, folder, *, data, programs):
  """Stands in for training: the loss is lowest at a rate of 2e-2 and a decay of 18e-3; a rate of 4e-2 diverges."""
  rate, decay = config.optimizer.peak_lr, config.recipe.kwargs.get('masked_decay', 0.0)
  folder.mkdir(parents=True)
  programs[:] = [*programs, f'{config.method} {rate:g} {decay:g}']
  loss = 1.0 + 0.1 * abs(math.log(rate / 2e-2)) + 0.01 * config.seed
  loss += 0.05 * abs(math.log(decay / 18e-3)) if decay else 0.0
  environment = {'device': 'x', 'python': '3', 'versions': {}, 'commit': None, 'command': ''}
  content = {'config.json': config.to_dict(), 'environment.json': environment}
  if rate < 3e-2:
    content['summary.json'] = {'seconds': 1.0, 'spent': dict.fromkeys(SPENT_ON, 0.0), 'validation_loss': loss,
                               'text': data.fingerprint}  # fmt: skip
  for name, fields in content.items():
    (folder / name).write_text(json.dumps(fields))
  common = {'step': config.steps, 'loss': loss, 'phase': 'sparse'}
  learnt = {'grad_norm': 1.0, 'learning_rate': rate, 'flip_rate': 0.0, 'flip_rates': {}}
  lines = [{'kind': 'train', **learnt, **common}, {'kind': 'validation', **common}]
  (folder / metrics.METRICS).write_text(''.join(json.dumps(line) + '\n' for line in lines))
  if rate > 3e-2:
    raise train.TrainingDivergedError('step 1: the loss is nan')


class ComparisonTest(absltest.TestCase):
  def compare(self, root, **changes):
    settings = dict(experiment='nano', names=['dense', 'fst'], seeds=(3, 0), trials=5, tiny=True, data=FakeData())
    settings |= changes
    with mock.patch.object(train, 'train', side_effect=pretend) as trained, mock.patch('builtins.print') as said, \
         mock.patch.object(report, 'write_report') as reported:  # fmt: skip
      comparison = tuned.Comparison(root / 'runs', root / 'records.jsonl', **settings)
      comparison.run()
      compare.report_tuned(comparison)
    return trained, said, reported

  def test_a_search_of_no_trials(self):
    """Was a comparison without any search, unsaid."""
    with self.assertRaisesRegex(ValueError, 'trials=0: a search has one at least'):
      args = ['compare', '--tune', '0', '--tiny', '--folder', temp_folder(self)]
      cli.COMMANDS['compare'](cli.make_parser().parse_args(args))

  def test_a_method_with_a_share_of_the_steps_is_of_the_same_comparison(self):
    root = Path(temp_folder(self))
    self.compare(root, names=['dense', 'dense_small'], seeds=(0,), trials=1)
    (records,) = table.read(root / 'records.jsonl').values()
    self.assertEqual([(r['contender'], r['equal_steps'], r['steps']) for r in records],
                     [('dense', 60, 60), ('dense_small', 60, 53)])  # fmt: skip

  def test_as_many_trials_for_all_then_other_seeds_of_the_best(self):
    root = Path(temp_folder(self))
    trained, said, reported = self.compare(root)
    records = [json.loads(line) for line in (root / 'records.jsonl').read_text().splitlines()]
    trials = {
      name: [tuned._trial(r) for r in records if r['contender'] == name] for name in ('dense', 'fst')
    }  # fmt: skip
    # The tiny twin begins at 1e-2 and FST at 6e-3.
    self.assertEqual([(t.rate, t.seed) for t in trials['dense']], [
      (1e-2, 3), (5e-3, 3), (2e-2, 3), (4e-2, 3), (1.414e-2, 3), (2e-2, 0),
    ])  # fmt: skip
    self.assertEqual(trials['fst'], [
      Trial(1e-2, 6e-3, 3), Trial(5e-3, 6e-3, 3), Trial(1e-2, 2e-3, 3), Trial(2e-2, 6e-3, 3), Trial(2e-2, 2e-3, 3),
      Trial(2e-2, 6e-3, 0),
    ])  # fmt: skip
    diverged = [tuned._trial(r) for r in records if r['loss'] is None]
    self.assertEqual(diverged, [Trial(4e-2, 0.0, 3)])
    for call, record in zip(trained.call_args_list, records, strict=True):
      config = call.args[0]
      self.assertEqual(tuned.describe(config), {key: record[key] for key in tuned.describe(config)})
      self.assertEqual((config.seed, config.data.seed), (record['seed'],) * 2)
      self.assertEqual(config.optimizer.peak_lr, record['rate'])
      self.assertEqual(config.recipe.kwargs.get('masked_decay', 0.0), record['decay'])
      self.assertContainsSubset(('device', 'commit', 'command', 'validation'), record)
    folders = [folder.name for folder in reported.call_args.args[0]]
    self.assertCountEqual(folders, [
      'dense-rate0.02-seed3', 'dense-rate0.02-seed0', 'fst-rate0.02-decay0.006-seed3', 'fst-rate0.02-decay0.006-seed0',
    ])  # fmt: skip
    shown = said.call_args_list[-1].args[0]
    # FST is 0.05 log 3 above dense with each seed.
    self.assertIn('| FST | 0.02, 0.006, at an edge | 5 | 2 | 1.0699 ± 0.1906 | +0.0549 ± 0.0000 |', shown)
    # Trials that differ in seeds share their programs, no others do.
    shared = {id(call.kwargs['programs']): call.kwargs['programs'] for call in trained.call_args_list}
    self.assertTrue(all(len(set(programs)) == 1 for programs in shared.values()), shared)

  def test_goes_on_and_counts_only_trials_of_its_own(self):
    root = Path(temp_folder(self))
    out = root / 'records.jsonl'
    self.compare(root)
    whole = out.read_text().splitlines()
    out.write_text('\n'.join(whole[:7]) + '\n')
    (root / 'runs').rename(root / 'before')  # pretending to train makes its folders
    trained, _, _ = self.compare(root)
    self.assertLen(trained.call_args_list, len(whole) - 7)
    again, before = ([json.loads(line)['loss'] for line in lines] for lines in (out.read_text().splitlines(), whole))
    self.assertEqual(again, before)
    (root / 'runs').rename(root / 'after')
    trained, said, _ = self.compare(root, overrides=['steps=50'])
    self.assertLen(trained.call_args_list, len(whole))
    self.assertIn('12 records of other methods, settings or devices', said.call_args_list[0].args[0])

  def test_a_file_of_records_of_another_text_or_of_none_is_refused(self):
    root = Path(temp_folder(self))
    out = root / 'records.jsonl'
    self.compare(root)
    with self.assertRaisesRegex(ValueError, '12 of 12 records are of another text than another: give another file'):
      self.compare(root, data=FakeData(fingerprint='another'))
    out.write_text(out.read_text().replace('"text": "fake-1", ', '', 1))
    with self.assertRaisesRegex(ValueError, 'records.jsonl: 1 of 12 records lack text, .*: give another file'):
      self.compare(root)

  def test_a_folder_of_a_run_of_another_text_is_refused(self):
    """A run without checkpoints that is finished is not trained again, and its settings may be the same."""
    folder, text = Path(temp_folder(self)) / 'run', FakeData()
    config = tuned.methods.configure(tuned.methods.load_checked('nano', ['dense'], tiny=True), 'dense', 0)
    trial = tuned.first_trial(config, 0)
    pretend(config, folder, data=text, programs=[])
    with mock.patch.object(train, 'train'):
      found = tuned.train_trial(config, trial, folder, text.fingerprint, head={}, programs=[])
      self.assertEqual(found['text'], text.fingerprint)
      with self.assertRaisesRegex(ValueError, 'run holds a run that does not say that its text is another'):
        tuned.train_trial(config, trial, folder, 'another', head={}, programs=[])

  def test_the_final_rate_keeps_its_share_and_the_table_has_a_title(self):
    config = tuned.methods.configure(tuned.methods.load_checked('small', ['fst']), 'fst', 0)
    changed = tuned.configure(config, Trial(1e-3, 2e-3, 1))
    self.assertAlmostEqual(changed.optimizer.end_lr, 1e-4)
    self.assertEqual(config.optimizer.peak_lr, 2e-3)
    title = table.title({'experiment': 'small', 'equal_steps': 2000, 'seconds': None})
    self.assertEqual(title, 'small, 2,000 steps each')

  @pytest.mark.slow
  def test_trains(self):
    root = Path(temp_folder(self))
    make = build.make_parts

    def with_fake_data(config, data=None):
      return make(config, data=FakeData(seed=config.data.seed))

    with mock.patch.object(build, 'make_parts', with_fake_data):
      argv = f'compare --tiny --tune 2 --methods ste --seeds 0 1 --folder {root} --set model.num_layers=1'.split()
      self.assertEqual(cli.main(argv + ['--set', 'steps=20', '--set', 'log_every=5', '--set', 'eval_every=10']), 0)
    records = [json.loads(line) for line in (root / 'trials.jsonl').read_text().splitlines()]
    self.assertLen(records, 3)
    for record in records:
      (folder,) = root.glob(f'{record["contender"]}-rate{record["rate"]:g}-seed{record["seed"]}')
      lines = (folder / metrics.METRICS).read_text().splitlines()
      rates = [json.loads(line).get('learning_rate', 0.0) for line in lines]
      self.assertBetween(max(rates), 0.7 * record['rate'], record['rate'])
      self.assertLess(record['loss'], math.log(FakeData.vocab_size))
      self.assertLen(record['validation'], 2)
    self.assertLen({record['loss'] for record in records}, 3)
    self.assertIn('plain STE', (root / 'report.html').read_text())


if __name__ == '__main__':
  absltest.main()
