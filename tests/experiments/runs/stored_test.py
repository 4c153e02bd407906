"""What configurations of runs meant stays what they mean, whatever the library's default is."""

import json
from pathlib import Path
from unittest import mock

from absl.testing import absltest, parameterized
from flax import traverse_util

from experiments.runs import build, compare, flops, method_table, methods, records, stored, train
from experiments.runs.experiment import load_config
from tests.experiments.fakes import temp_folder
from tests.experiments.reports.report_test import write_run

PUBLISHED = {'token_pattern': 'v:n:m', 'dense_features': 0.05}
TWO_OF_FOUR = {'token_pattern': '2:4', 'dense_features': 0.0}


def config_of(policy=None, name='neuron_level'):
  config = load_config('small')
  with config.unlocked():
    config.recipe.update({'name': name, 'kwargs': {} if policy is None else {'policy': policy}})
  return config


class MeaningTest(parameterized.TestCase):
  @parameterized.parameters(
    (None, TWO_OF_FOUR), ({'v': 16}, {'v': 16, **TWO_OF_FOUR}), ({'clusters': 4}, {'clusters': 4, **PUBLISHED}),
    ({'token_pattern': 'v:n:m'}, PUBLISHED), ({'pattern': '2:4'}, {'pattern': '2:4'}),
    ({'dense_features': 0.2, 'up': None}, {**TWO_OF_FOUR, 'dense_features': 0.2, 'up': None}),
  )
  def test_new_configurations_are_spelt_out(self, policy, expected):
    config = config_of(policy)
    found = stored.spelt_out(config)
    self.assertEqual(found['recipe']['kwargs']['policy'], expected)
    self.assertEqual(stored.as_meant(found), found)
    # Nothing else changes, and the recipe is the same.
    self.assertEqual({**found, 'recipe': None}, {**config.to_dict(), 'recipe': None})
    again = config_of(found['recipe']['kwargs']['policy'])
    self.assertEqual(*(build.make_recipe(c).describe() for c in (config, again)))

  @parameterized.parameters(
    (None, PUBLISHED), ({'v': 16, 'up': None}, {'v': 16, 'up': None, **PUBLISHED}),
    ({'token_pattern': '2:4'}, {'token_pattern': '2:4', 'dense_features': 0.05}),
    ({'token_pattern': None, 'dense_features': 0.2}, {**PUBLISHED, 'dense_features': 0.2}),
    (TWO_OF_FOUR, TWO_OF_FOUR), ({'pattern': '2:4'}, {'pattern': '2:4'}),
  )
  def test_older_ones_mean_what_was_the_default(self, policy, expected):
    found = stored.as_meant(config_of(policy).to_dict())
    self.assertEqual(found['recipe']['kwargs']['policy'], expected)

  def test_other_recipes_are_left_alone(self):
    config = config_of(name='s_ste')
    self.assertEqual(stored.spelt_out(config), config.to_dict())
    self.assertEqual(stored.as_meant(config.to_dict()), config.to_dict())

  def test_what_is_no_run(self):
    with self.assertRaisesRegex(ValueError, 'not the folder of a run: it has no config.json'):
      stored.read(temp_folder(self))


class RunsTest(parameterized.TestCase):
  def _finished(self, config):
    """A folder as an older version leaves it behind a run without checkpoints."""
    folder = Path(temp_folder(self))
    (folder / 'config.json').write_text(json.dumps(config.to_dict()))
    (folder / 'summary.json').write_text(json.dumps({'steps': config.steps}))
    return folder

  def test_an_older_run_of_the_published_pattern_is_found(self):
    folder = self._finished(config_of({'v': 64, 'm': 8}))
    with mock.patch.object(train, 'Run', side_effect=AssertionError('trained again')):
      self.assertEqual(train.train(config_of({'v': 64, 'm': 8, 'token_pattern': 'v:n:m'}), folder), {'steps': 2000})

  @parameterized.parameters((None,), ({'v': 64, 'm': 8},))
  def test_an_older_run_of_the_default_is_another_run(self, policy):
    config = config_of(policy)
    with self.assertRaisesRegex(ValueError, 'a run with other settings'):
      train.train(config, self._finished(config))

  def test_flops_of_an_older_run(self):
    folder = temp_folder(self)
    path = write_run(folder, 'neuron_level', 0, 1.2)
    config = json.loads((path / 'config.json').read_text())
    expected = flops.of_run(config).sum()
    for name in PUBLISHED:
      config['recipe']['kwargs']['policy'].pop(name, None)
    (path / 'config.json').write_text(json.dumps(config))
    (run,) = records.find_runs([folder])
    self.assertEqual(flops.of_run(run.config).sum(), expected)
    self.assertLess(expected.linear, flops.of_run(config).sum().linear)  # which now has half of the tokens


class RecordsTest(absltest.TestCase):
  def test_methods_are_those_of_the_records(self):
    """A record that is made anew takes the place of the older one, which has the same label and arguments."""
    by_label = {method.label: name for name, method in method_table.METHODS.items()}
    compared = set()
    for path in sorted(compare.RESULTS.glob('compare_*.jsonl')):
      for record in map(json.loads, path.read_text().splitlines()):
        label, *changes = record['label'].split('; ')
        if record['recipe'] != 'neuron_level' or label not in by_label:
          continue
        method = by_label[label]
        flat = traverse_util.flatten_dict(record['recipe_kwargs'], sep='.')
        own = {key: flat[key] for key in (change.partition('=')[0] for change in changes)}
        overrides = [f'methods={ {method: traverse_util.unflatten_dict(own, sep=".")} }'] if own else []
        config = methods.configure(load_config(record['experiment'], overrides), method, record['seed'])
        made = {**record, 'recipe_kwargs': config.recipe.kwargs.to_dict()}
        self.assertEqual(compare._key(made), compare._key(record), record['label'])
        compared.add(record['label'])
    self.assertGreater(len(compared), 10)


if __name__ == '__main__':
  absltest.main()
