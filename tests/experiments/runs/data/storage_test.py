import errno
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from experiments.runs.data import corpora, storage


class DataRootTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    environment = {'XDG_CACHE_HOME': str(self.folder / 'cache')}
    self.enter_context(mock.patch.dict(os.environ, environment))
    os.environ.pop(storage.ENVIRONMENT_VARIABLE, None)

  def test_argument_then_environment_then_cache(self):
    self.assertEqual(storage.data_root(None), self.folder / 'cache' / 'sparse24_jax')
    self.assertTrue((self.folder / 'cache' / 'sparse24_jax').is_dir())
    (self.folder / 'a').mkdir()
    os.environ[storage.ENVIRONMENT_VARIABLE] = str(self.folder / 'a')
    self.assertEqual(storage.data_root(None), self.folder / 'a')
    self.assertEqual(storage.data_root(self.folder), self.folder)

  def test_a_named_folder_has_to_exist(self):
    missing = self.folder / 'missing'
    with self.assertRaisesRegex(corpora.DataError, f'data_dir is not an existing folder: {missing}. Create it'):
      storage.data_root(missing)
    os.environ[storage.ENVIRONMENT_VARIABLE] = str(missing)
    with self.assertRaisesRegex(corpora.DataError, f'SPARSE24_DATA_DIR is not an existing folder: {missing}'):
      storage.data_root(None)
    self.assertFalse(missing.exists())

  def test_cache_that_cannot_be_made(self):
    (self.folder / 'cache').write_text('a file')
    with self.assertRaisesRegex(corpora.DataError, 'cannot write to the data folder .*Not a directory.*SPARSE24_DATA'):
      storage.data_root(None)


class PreparingTest(parameterized.TestCase):
  @parameterized.parameters(errno.ENOSPC, errno.EACCES, errno.EROFS)
  def test_operating_system_errors_name_folder_and_remedy(self, number):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    with (
      self.assertRaisesRegex(corpora.DataError, rf'{folder} \({os.strerror(number)}\); free space or permit'),
      storage.preparing(folder),
    ):
      raise OSError(number, os.strerror(number))
    with storage.preparing(folder):  # the lock was given back
      pass

  def test_folder_without_permission(self):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    (folder / '.lock').mkdir()  # cannot be opened for writing, not even by root
    with (
      self.assertRaisesRegex(corpora.DataError, f'cannot write to the data folder {folder}'),
      storage.preparing(folder),
    ):
      self.fail('entered')


if __name__ == '__main__':
  absltest.main()
