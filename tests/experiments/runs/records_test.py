"""Run folders say what they are, and committed records are those that the programs would write today."""

import json
from pathlib import Path
from unittest import mock

from absl.testing import absltest, parameterized
from flax import traverse_util
import numpy as np

from experiments.reports import charts, compare, page, provenance, report_curves
from experiments.runs import experiment, method_table, methods, records, train
from tests.experiments.fakes import temp_folder
from tests.experiments.reports.run_folders import write_run


class ConfigTest(parameterized.TestCase):
  def test_what_is_no_run(self):
    with self.assertRaisesRegex(ValueError, 'not the folder of a run: it has no config.json'):
      records.read_config(temp_folder(self))

  def test_a_folder_that_does_not_say_its_method(self):
    folder = write_run(temp_folder(self), 'fst', 0, 1.2)
    file = folder / 'config.json'
    config = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in config.items() if key != 'method'}))
    with self.assertRaisesRegex(ValueError, "it has no 'method'"):
      records.read_run(folder)
    file.write_text(json.dumps(config | {'method': 'magic'}))
    with self.assertRaisesRegex(ValueError, "method is 'magic'; known: dense, "):
      records.read_run(folder)

  @parameterized.parameters(*method_table.METHODS)
  def test_the_method_is_what_was_put_in(self, method):
    """Whatever the settings look like: several methods differ in a number only."""
    (run,) = records.find_runs([write_run(temp_folder(self), method, 0, 1.2)])
    self.assertEqual(run.method, method)
    relu2 = run.config['model'].get('mlp') == 'relu2'
    dense = {name: write_run(temp_folder(self), name, 0, 1.2) for name in ('dense', 'dense_relu2')}
    self.assertEqual(
      [name for name, folder in dense.items() if records.read_run(folder).is_dense_of(run)],
      ['dense_relu2' if relu2 else 'dense'],
    )
    self.assertEqual(run.is_baseline, method in ('dense', 'dense_relu2'))

  def test_rates_begin_with_the_first_comparison(self):
    folder = write_run(temp_folder(self), 'fst', 0, 1.2)
    file = folder / 'metrics.jsonl'
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    early = [line for line in lines if line['kind'] == 'train'][:3]
    for line in early:
      line |= {'flip_rate': None, 'flip_rates': dict.fromkeys(line['flip_rates'])}
    file.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    run = records.read_run(folder)
    steps, rates = run.flip_curve()
    self.assertEqual((steps[0], len(steps)), (400, len(run.train) - 3))
    self.assertEqual(rates.dtype, np.float64)
    drawn = mock.Mock(return_value=page.Html(''))
    with mock.patch.object(charts, 'line_chart', drawn):
      report_curves.flip_rates({'fst': [run]}, {'fst': 'black'})
    for call in drawn.mock_calls:
      for line in call.args[0]:
        self.assertEqual((line.x[0], line.y.dtype), (400, np.float64))

  def test_a_finished_run_of_other_settings_is_another_run(self):
    config, folder = experiment.load_config('small'), Path(temp_folder(self))
    for steps, refused in ((config.steps, False), (config.steps + 1, True)):
      (folder / 'config.json').write_text(json.dumps(config.to_dict() | {'steps': steps}))
      (folder / 'summary.json').write_text(json.dumps({'steps': steps}))
      if refused:
        with self.assertRaisesRegex(ValueError, 'a run with other settings'):
          train.train(config, folder)
      else:
        self.assertEqual(train.train(config, folder), {'steps': steps})


class CommittedTest(absltest.TestCase):
  def test_methods_are_those_of_the_table(self):
    """A record that is made anew takes the place of the older one, which has the same label and arguments."""
    compared = set()
    for path in sorted(provenance.RESULTS.glob('*.jsonl')):
      for record in map(json.loads, path.read_text().splitlines()):
        if record.get('bench') != 'quality' or 'label' not in record:
          continue
        label, *changes = record['label'].split('; ')
        self.assertEqual(method_table.METHODS[record['method']].label, label, path.name)
        if record['recipe'] != 'neuron_level' or record['experiment'] not in ('nano', 'small'):
          continue
        flat = traverse_util.flatten_dict(record['recipe_kwargs'], sep='.')
        own = {key: flat[key] for key in (change.partition('=')[0] for change in changes)}
        method = record['method']
        overrides = [f'methods={ {method: traverse_util.unflatten_dict(own, sep=".")} }'] if own else []
        config = methods.configure(experiment.load_config(record['experiment'], overrides), method, record['seed'])
        made = {**record, 'recipe_kwargs': config.recipe.kwargs.to_dict()}
        self.assertEqual(compare._key(made), compare._key(record), record['label'])
        compared.add(record['label'])
    self.assertGreater(len(compared), 10)


if __name__ == '__main__':
  absltest.main()
