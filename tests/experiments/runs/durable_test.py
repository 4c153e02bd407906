"""Files of a run that were damaged: each message names the file, or what is in it is made again where that is safe."""

import json
from pathlib import Path
import shutil
import tempfile

from absl.testing import absltest, parameterized

from experiments.runs import durable, events, experiment, metrics, patterns, records, run_folder
from experiments.runs.recipes import make_recipe
from tests.experiments.fakes import temp_folder
from tests.experiments.runs.train_test import run, tiny


class JsonTest(parameterized.TestCase):
  @parameterized.parameters(
    ('', 'is empty'), ('{"a":', 'is not JSON'), ('\0\0', 'is not JSON'), ('[]', 'but list'),
    ('[' * 10**5, 'is not JSON'),
  )  # fmt: skip
  def test_the_file_is_named(self, content, message):
    file = Path(temp_folder(self), 'x.json')
    file.write_text(content)
    with self.assertRaisesRegex(ValueError, f'{file}.*{message}'):
      durable.read_json(file)

  def test_written_whole_or_not_at_all(self):
    file = Path(temp_folder(self), 'x.json')
    durable.write_json(file, {'a': 1})
    with self.assertRaises(TypeError):
      durable.write_json(file, {'a': object()})
    self.assertEqual(durable.read_json(file), {'a': 1})
    self.assertLen(list(file.parent.iterdir()), 1)


class RecordsTest(absltest.TestCase):
  def _file(self, *lines):
    file = Path(temp_folder(self), 'metrics.jsonl')
    file.write_bytes(b''.join(lines))
    return file

  def test_bad_lines_at_the_end_are_left_out(self):
    good = b'{"step": 1, "kind": "train"}\n'
    others = b'{"step": "2", "kind": "train"}\n', b'{"step": 2, "kind": [1]}\n', b'[' * 10**5 + b'\n'
    for bad in (b'\0\0\0\n', b'{"step": 2, "ki', b'\0' * 5000, b'7\n', *others):
      self.assertEqual(list(metrics.read_records(self._file(good, bad))), [{'step': 1, 'kind': 'train'}])

  def test_a_bad_line_before_a_good_one_is_named(self):
    good = b'{"step": 1, "kind": "train"}\n'
    file = self._file(good, b'\0\0\0\n', good)
    with self.assertRaisesRegex(ValueError, rf'{file}, line 2 is no record'):
      list(metrics.read_records(file))


class FolderTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = Path(tempfile.mkdtemp(prefix='damaged-'))
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    cls.summary = run(tiny('ste'), cls.folder)

  def test_an_empty_summary_is_made_again(self):
    (self.folder / 'summary.json').write_text('')
    with self.assertRaisesRegex(ValueError, 'summary.json is empty'):
      records.read_run(self.folder)
    found = run(tiny('ste'), self.folder)
    self.assertEqual(found['validation_loss'], self.summary['validation_loss'])
    self.assertEqual(records.read_run(self.folder).summary, found)

  def test_an_empty_configuration_is_named_or_written_again(self):
    (self.folder / 'config.json').write_text('')
    with self.assertRaisesRegex(ValueError, 'config.json is empty'):
      records.read_run(self.folder)
    (self.folder / 'summary.json').unlink()
    run(tiny('ste'), self.folder)
    self.assertEqual(records.read_run(self.folder).config['steps'], 30)


class HostileTest(parameterized.TestCase):
  @parameterized.parameters(
    (lambda folder: run_folder.held(folder).__enter__(), '.lock'),
    (lambda folder: events.note(folder, 1, 'resumed', 'going on'), 'events.jsonl'),
    (lambda folder: durable.write_json(folder / 'config.json', {}), 'config.json'),
    (metrics.MetricsWriter, 'metrics.jsonl'),
    (metrics.MetricsWriter, 'timing.jsonl'),
    (metrics.MetricsWriter, 'tensorboard'),
  )
  def test_a_link_in_the_place_of_what_is_written(self, write, name):
    folder, other = Path(temp_folder(self)), Path(temp_folder(self), 'mine')
    if name == 'tensorboard':
      other.mkdir()
    else:
      other.write_text('{"step": 0, "kind": "train"}\n')
    (folder / name).symlink_to(other)
    with self.assertRaisesRegex(ValueError, f'{folder / name} is a link, and a run writes into its own folder'):
      write(folder)
    self.assertTrue((folder / name).is_symlink())
    if other.is_dir():
      self.assertEmpty(list(other.iterdir()))
    else:
      self.assertEqual(other.read_text(), '{"step": 0, "kind": "train"}\n')

  @parameterized.parameters('../../evil', '/evil', '', '..', 'a/b', 'a\n')
  def test_names_that_would_be_other_folders(self, name):
    with self.assertRaisesRegex(ValueError, 'it takes letters, digits'):
      experiment.load_config('nano', [f'name={name!r}'])

  @parameterized.parameters(
    '(a+)+$', '(.*a)*b', '(a|a)*b', '((x?)y)+', '(?:a*)*', 'a?' * 40 + 'a' * 40, '.*.*.*.*.*.*.*x', '(a|a)' * 30,
    '(?P<n>a*){20}', 'x' * 400,
  )  # fmt: skip
  def test_patterns_that_could_take_forever(self, pattern):
    with self.assertRaisesRegex(ValueError, 'others can take forever'):
      make_recipe(tiny('ste', {'path': pattern}))

  @parameterized.parameters(
    r'.*/mlp/.*', r'.*/(attn|mlp)/.*', r'h_(0|1|2|3)/mlp/c_fc/kernel', r'h_[0-9]+/(?!attn)[^/]*/(c_fc|c_proj)/kernel',
    r'.*\(x\)+', r'(layer_\d)?.*',
  )  # fmt: skip
  def test_patterns_of_weights(self, pattern):
    patterns.require_fast('path', pattern)


class DataFileTest(absltest.TestCase):
  def test_an_experiment_as_data(self):
    file = Path(temp_folder(self), 'mine.toml')
    file.write_text('base = "nano"\nsteps = 70\n[recipe]\nname = "ste"\n[model]\nnum_layers = 3\n')
    config = experiment.load_config(str(file), ['seed=2'])
    self.assertEqual((config.steps, config.recipe.name, config.seed, config.model.num_layers), (70, 'ste', 2, 3))
    self.assertEqual(config.data.seq_len, experiment.load_config('nano').data.seq_len)
    file.write_text('base = "nano"\nstepz = 70\n')
    with self.assertRaisesRegex(ValueError, "no field 'stepz'"):
      experiment.load_config(str(file))
    for text in ('base = "nano', 'a = ' + '[' * 10**5):
      file.write_text(text)
      with self.assertRaisesRegex(ValueError, 'mine.toml cannot be read'):
        experiment.load_config(str(file))

  def test_the_base_of_data_is_no_code(self):
    file, ran = Path(temp_folder(self), 'mine.toml'), Path(temp_folder(self), 'ran')
    code = file.with_name('evil.py')
    code.write_text(f'open({str(ran)!r}, "w")\ndef get_config(tiny): pass\n')
    for base in (str(code), str(file), 3, ['nano']):  # of itself there would be no end
      file.write_text(f'base = {json.dumps(base)}\n')
      with self.assertRaisesRegex(ValueError, r'mine.toml: base is .*; known: bert, .*nano'):
        experiment.load_config(str(file))
    self.assertFalse(ran.exists())

  def test_the_configuration_of_a_run(self):
    file, config = Path(temp_folder(self), 'config.json'), tiny('transposable_srste', {'masked_decay': 1e-4})
    file.write_text(json.dumps(config.to_dict()))
    self.assertEqual(experiment.load_config(str(file)).to_dict(), config.to_dict())
    for section, name in (('data', 'batch_size'), ('optimizer', 'b2')):  # which another default would stand in for
      fields = config.to_dict()
      del fields[section][name]
      file.write_text(json.dumps(fields))
      with self.assertRaisesRegex(ValueError, f'names no base, and lacks {section}.{name}; add base'):
        experiment.load_config(str(file))
    file.write_text('{"steps": 3}')
    with self.assertRaisesRegex(ValueError, 'names no base, and lacks'):
      experiment.load_config(str(file))


if __name__ == '__main__':
  absltest.main()
