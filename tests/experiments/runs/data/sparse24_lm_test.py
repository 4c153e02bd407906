import pathlib
import shutil
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import tensorflow_datasets as tfds

from experiments.runs.data import corpora, sparse24_lm, units

TEXTS = [f'document {i}: two of four weights' for i in range(40)]


def write_texts(folder, texts=TEXTS):
  folder.mkdir(exist_ok=True)
  if not (path := folder / 'a.txt').exists() or texts is not TEXTS:  # its time is part of what is compared
    path.write_text(units.END_OF_TEXT.join(texts))
  return folder


class BuilderTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    self.data_dir = self.folder / 'data'
    self.data_dir.mkdir()

  def open(self, **options):
    return sparse24_lm.open_documents('folder', self.data_dir, write_texts(self.folder / 'mine'), **options)

  def test_documents_keep_their_order(self):
    count = mock.Mock()
    documents = self.open(on_document=count)
    self.assertEqual(list(documents['train']), TEXTS[:19] + TEXTS[20:39])
    self.assertEqual(list(documents['validation']), [TEXTS[19], TEXTS[39]])
    self.assertEqual(count.call_count, 40)
    self.open(on_document=count)  # prepared already
    self.assertEqual(count.call_count, 40)

  def test_reads_through_tfds(self):
    builder = sparse24_lm.Sparse24Lm(config='folder', data_dir=self.data_dir, file_format='array_record')
    folder = write_texts(self.folder / 'mine')
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(manual_dir=folder))
    keywords = {'data_dir': self.data_dir, 'builder_kwargs': {'file_format': 'array_record'}}
    source = tfds.data_source('sparse24_lm/folder', split='train[:50%]', **keywords)
    self.assertLen(source, 19)
    self.assertEqual(source[0], {'name': b'a.txt#0', 'text': TEXTS[0].encode()})

  def test_each_corpus_is_a_config_with_its_package_version(self):
    configs = sparse24_lm.Sparse24Lm.builder_configs
    self.assertSameElements(configs, corpora.CORPORA)
    self.assertEqual(str(configs['aws_docs'].version), corpora.version('aws_docs'))

  @parameterized.parameters(('1.2', '1.2.0'), ('3.14.0rc1', '3.14.0'), ('2026.08.1.dev3', '2026.8.1'))
  def test_any_package_version_becomes_three_numbers(self, version, expected):
    with mock.patch.object(corpora, 'version', return_value=version):
      self.assertEqual(sparse24_lm._tfds_version('aws_docs'), expected)
      tfds.core.Version(expected)

  def test_config_of_a_missing_package_is_still_listed(self):
    with mock.patch.object(corpora, 'version', side_effect=corpora.DataError):
      self.assertEqual(sparse24_lm._tfds_version('google_docs'), '0.0.0')

  def test_changed_folder_is_read_again(self):
    self.open()
    write_texts(self.folder / 'mine', [text.upper() for text in TEXTS])
    documents = sparse24_lm.open_documents('folder', self.data_dir, self.folder / 'mine')
    self.assertEqual(documents['train'][0], TEXTS[0].upper())

  def test_left_overs_of_a_killed_preparation_go(self):
    self.open()
    (prepared,) = self.data_dir.glob('reader*/*/sparse24_lm/folder/1.0.0')
    prepared.rename(prepared.with_name('incomplete.ABCDEF_1.0.0'))
    self.assertLen(self.open()['train'], 38)
    self.assertEqual([path.name for path in prepared.parent.iterdir()], ['1.0.0'])

  @parameterized.parameters(0, 1000, None)
  def test_damaged_files_are_named(self, size):
    self.open()
    for path in self.data_dir.rglob('*.array_record*'):
      raw = path.read_bytes()
      path.write_bytes(raw[:size] if size is not None else bytes(len(raw)))
    with self.assertRaisesRegex(corpora.DataError, r'folder/1\.0\.0 is damaged .*delete this folder'):
      list(self.open()['train'])

  def test_full_disk(self):
    failure = RuntimeError('write() failed: No space left on device')
    with (
      mock.patch.object(sparse24_lm.Sparse24Lm, 'download_and_prepare', side_effect=failure),
      self.assertRaisesRegex(corpora.DataError, 'cannot write .*No space left on device.*free space'),
    ):
      self.open()

  def test_bad_text_is_reported_as_it_is(self):
    (self.folder / 'bad').mkdir()
    (self.folder / 'bad' / 'a.jsonl').write_text('{"text": 1}')
    with self.assertRaisesRegex(corpora.DataError, r"a\.jsonl:1: expected an object with a string under 'text'"):
      sparse24_lm.open_documents('folder', self.data_dir, self.folder / 'bad')


class OnlineSetTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    self.enter_context(mock.patch.object(tfds.core.constants, 'DATA_DIR', str(self.folder / 'tfds')))

  @parameterized.parameters(*corpora.ONLINE_SETS)
  def test_unprepared(self, name):
    with self.assertRaises(corpora.DataError) as caught:
      sparse24_lm.open_documents(name, self.folder)
    message = str(caught.exception)
    self.assertIn(f'{name} is not prepared: not found under {self.folder}', message)
    self.assertIn("pip install -e '.[prepare]'", message)
    self.assertIn(f"tfds.builder({name!r}, data_dir='{self.folder}', file_format='array_record')", message)

  def test_prepared_as_tfrecord(self):
    folder = self.folder / 'lm1b' / '1.1.0'
    folder.mkdir(parents=True)
    (folder / 'dataset_info.json').write_text('{}')
    with self.assertRaisesRegex(corpora.DataError, r'lm1b/1\.1\.0 is not in array_record format'):
      sparse24_lm.open_documents('lm1b', self.folder)

  @parameterized.parameters('.', 'tfds')
  def test_prepared(self, where):
    sparse24_lm.open_documents('folder', self.folder, write_texts(self.folder / 'mine'))
    (prepared,) = self.folder.glob('reader*/*/sparse24_lm/folder/1.0.0')
    shutil.copytree(prepared, self.folder / where / 'wiki40b' / 'en' / '1.3.0')  # the same features and splits
    documents = sparse24_lm.open_documents('wiki40b/en', self.folder)
    self.assertEqual(list(documents['validation']), [TEXTS[19], TEXTS[39]])


class ImportTest(parameterized.TestCase):
  def test_tensorflow_is_never_imported_and_tfds_only_to_prepare(self):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    code = f"""
import sys
from experiments.runs.data import pipeline
options = {{'manual_dir': {str(write_texts(folder / 'mine'))!r}, 'data_dir': {str(folder)!r}}}
load = lambda: pipeline.load(corpus='folder', seq_len=8, batch_size=2, **options)
if sys.argv[1] == 'prepare':
  next(load().train())
  assert 'tensorflow_datasets' in sys.modules
else:
  load().validation(1)
  assert not {{'tensorflow_datasets', 'jax', 'grain', 'tokenizers', 'pyarrow'}} & set(sys.modules)
assert not {{'tensorflow', 'botocore', 'torch'}} & set(sys.modules)
"""
    for step in ('prepare', 'open'):
      subprocess.run([sys.executable, '-c', code, step], check=True, cwd=pathlib.Path(__file__).parents[4])


if __name__ == '__main__':
  absltest.main()
