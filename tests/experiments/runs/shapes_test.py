"""A run folder with fields that are missing or of another kind is refused by the name of file and field."""

import copy
import json
from pathlib import Path
import shutil
import tempfile

from absl.testing import absltest, parameterized

from experiments.reports import report
from experiments.runs import records, shapes
from tests.experiments.reports.report_test import without_pictures
from tests.experiments.reports.run_folders import write_run

_GONE, _EVIL = object(), '<script>alert(1)</script>'


def _fields(tree, path=()):
  for key, value in tree.items():
    yield (*path, key)
    if isinstance(value, dict):
      yield from _fields(value, (*path, key))


def _changed(tree, path, value):
  tree = node = copy.deepcopy(tree)
  for key in path[:-1]:
    node = node[key]
  if value is _GONE:
    del node[path[-1]]
  else:
    node[path[-1]] = value
  return tree


class FolderTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    root = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.whole, cls.folder = write_run(root, 'fst', 0, 1.4, second_per_step=0.1), root / 'changed'
    for name in ('metrics.jsonl', 'timing.jsonl'):  # a few lines say as much
      lines = (cls.whole / name).read_text().splitlines(keepends=True)
      (cls.whole / name).write_text(''.join(lines[-3:]))

  def _with(self, name, path, value):
    """A run one field of one file of which is another; in the last line of a file of lines."""
    shutil.rmtree(self.folder, ignore_errors=True)
    shutil.copytree(self.whole, self.folder)
    *before, last = (self.whole / name).read_text().splitlines() if name.endswith('.jsonl') else [
      (self.whole / name).read_text()
    ]  # fmt: skip
    text = json.dumps(_changed(json.loads(last), path, value))
    (self.folder / name).write_text(''.join(f'{line}\n' for line in (*before, text)))
    return self.folder

  @parameterized.parameters(
    ('config.json', 'steps', 10**12, 'steps is 1000000000000, and must be an integer from 1 to'),
    ('config.json', 'steps', True, 'steps is True, and must be an integer'),
    ('config.json', 'model', [], r'model is \[\], and must be an object'),
    ('config.json', 'data.batch_size', _EVIL, 'data.batch_size is .*, and must be an integer'),
    ('config.json', 'recipe.kwargs', None, 'recipe.kwargs is None, and must be an object'),
    ('config.json', 'label', _GONE, "it has no 'label'"),
    ('environment.json', 'versions', 3, 'versions is 3, and must be an object'),
    ('summary.json', 'seconds', '40', "seconds is '40', and must be a number"),
    ('summary.json', 'spent.training', float('nan'), 'spent.training is nan, and must be a number'),
    ('metrics.jsonl', 'loss', _GONE, "step 4000: it has no 'loss'"),
    ('metrics.jsonl', 'step', 10**12, 'step 1000000000000; .* the run has 4000 steps'),
    ('metrics.jsonl', 'kind', _EVIL, f"kind '{_EVIL}'.*known kinds are train"),
    ('timing.jsonl', 'tokens_per_s', {}, 'step 4000: tokens_per_s is {}, and must be a number'),
  )
  def test_the_file_and_the_field_are_named(self, name, field, value, message):
    folder = self._with(name, field.split('.'), value)
    with self.assertRaisesRegex(ValueError, f'{folder / name}.*{message.replace("(", "[(]").replace(")", "[)]")}'):
      records.read_run(folder)

  @parameterized.parameters('config.json', 'summary.json', 'environment.json', 'metrics.jsonl', 'timing.jsonl')
  @without_pictures
  def test_a_report_names_it_or_does_without(self, name):
    """Whatever field is another: a page without a script, or an error that names the folder."""
    text = (self.whole / name).read_text().splitlines()
    last = json.loads(text[-1] if name.endswith('.jsonl') else '\n'.join(text))
    page = self.folder.with_name('r.html')
    for i, path in enumerate(_fields(last)):
      if name == 'config.json' and path[0] in ('optimizer', 'mesh', 'bad_numbers'):
        continue  # which a report quotes and does not read
      value = (_GONE, None, [], {_EVIL: 1}, _EVIL, -1)[i % 6]
      try:
        report.write_report([self._with(name, path, value)], page)
      except ValueError as error:
        self.assertIn(str(self.folder / name), str(error), (path, value))
      else:
        self.assertNotIn('<script', page.read_text(), (path, value))


class ShapeTest(absltest.TestCase):
  def test_lists_and_fields_that_may_be_missing(self):
    shape = {'a': [float], 'b?': str | None}
    for good in ({'a': []}, {'a': [1, 2.5], 'b': None, 'c': []}):
      shapes.require('x', good, shape)
    with self.assertRaisesRegex(ValueError, r"x: a\[1\] is '2', and must be a number"):
      shapes.require('x', {'a': [1, '2']}, shape)
    with self.assertRaisesRegex(ValueError, 'x: b is 3, and must be text or null'):
      shapes.require('x', {'a': [], 'b': 3}, shape)
    with self.assertRaisesRegex(ValueError, 'x: it is 3, and must be an object'):
      shapes.require('x', 3, shape)


if __name__ == '__main__':
  absltest.main()
