"""Kernels on disk: they come back whole, and nothing is read that somebody else may have written."""

import concurrent.futures
import os
from pathlib import Path
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from pallas_kernels import _dispatch, _kept


class KeptTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    above = tempfile.TemporaryDirectory()
    self.addCleanup(above.cleanup)
    self.above, self.folder = Path(above.name), Path(above.name) / 'kernels'
    self.enter_context(mock.patch.dict(os.environ, {_kept.VARIABLE: str(self.folder)}))
    _dispatch.log_once.cache_clear()

  def test_what_is_kept_is_found_under_its_key_alone(self):
    self.assertIsNone(_kept.read('one'))
    _kept.write('one', b'code')
    self.assertEqual((_kept.read('one'), _kept.read('two')), (b'code', None))
    self.assertEqual([p.stat().st_mode & 0o777 for p in (self.folder, *self.folder.iterdir())], [0o700, 0o600])

  @parameterized.parameters(b'', _kept._MAGIC, None)
  def test_damage(self, text):
    _kept.write('one', b'code')
    (path,) = self.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1] if text is None else text)
    self.assertIsNone(_kept.read('one'))

  def test_a_file_of_another_key(self):
    _kept.write('one', b'code')
    (path,) = self.folder.iterdir()
    path.rename(_kept._path(self.folder, 'two'))
    self.assertIsNone(_kept.read('two'))

  def test_many_write_read_and_remove_at_once(self):
    """Nobody sees half of a file, and nobody fails where another one removed what it was about to use."""
    big = {key: key.encode() * 100_000 for key in 'abcdef'}

    def work(turn):
      for i in range(30):
        key = 'abcdef'[(turn + i) % 6]
        _kept.write(key, big[key])
        self.assertIn(_kept.read(key), (big[key], None))

    with (
      mock.patch.object(_kept, '_MOST_FILES', 3), concurrent.futures.ThreadPoolExecutor(6) as pool,
      self.assertNoLogs('pallas_kernels', 'WARNING'),
    ):  # fmt: skip
      list(pool.map(work, range(6)))
    self.assertEmpty(list(self.folder.glob(f'{_kept.NEW}*')))

  def _refused(self, because):
    with self.assertLogs('pallas_kernels', 'WARNING') as logs:
      self.assertIsNone(_kept.read('one'))
    self.assertIn(because, logs.output[0])

  def test_a_file_that_others_may_write(self):
    _kept.write('one', b'code')
    (path,) = self.folder.iterdir()
    path.chmod(0o620)
    self._refused('others may write to it')

  def test_a_link(self):
    _kept.write('one', b'code')
    (path,) = self.folder.iterdir()
    path.symlink_to(path.rename(self.above / 'elsewhere'))
    self._refused('not kept on disk')

  def test_a_pipe_is_not_waited_for(self):
    _kept.write('one', b'code')
    (path,) = self.folder.iterdir()
    path.unlink()
    os.mkfifo(path)
    self._refused('of another kind')

  @parameterized.parameters(0o770, 0o707)
  def test_a_folder_that_others_may_write(self, mode):
    _kept.write('one', b'code')
    self.folder.chmod(mode)
    self._refused('others may write to it')
    _kept.write('two', b'code')
    self.assertLen(list(self.folder.iterdir()), 1)

  def test_a_folder_in_one_that_everybody_may_write(self):
    _kept.write('one', b'code')
    self.above.chmod(0o777)
    self._refused('everybody may write to')
    self.above.chmod(0o1777)  # where only who owns a name may change it
    self.assertEqual(_kept.read('one'), b'code')

  def test_a_folder_of_somebody_else(self):
    _kept.write('one', b'code')
    with mock.patch.object(os, 'geteuid', lambda: os.getuid() + 1):
      self._refused('it belongs to user')

  def test_off(self):
    with mock.patch.dict(os.environ, {_kept.VARIABLE: 'off'}):
      _kept.write('one', b'code')
      self.assertIsNone(_kept.read('one'))
    self.assertFalse(self.folder.exists())

  def test_nothing_is_kept_as_of_sources_that_changed_since_they_were_imported(self):
    source, lock = self.above / 'kernel.py', self.above / '.#kernel.py'
    source.write_text('a = 1')
    lock.symlink_to('nobody@nowhere')  # as an editor leaves while a file is edited
    self.enter_context(mock.patch.object(_kept, '_SOURCES', self.above))
    self.addCleanup(_kept._digest_of_files.cache_clear)

    def imports():
      _kept._digest_of_files.cache_clear()
      return mock.patch.object(_kept, '_IMPORTED', _kept._files())

    with imports():
      first = _kept.compiled_from()
      self.assertEqual(_kept.compiled_from(), first)
      source.write_text('a = 2;')
      with self.assertLogs('pallas_kernels', 'WARNING') as logs:
        changed = {_kept.compiled_from()}
      self.assertIn(f'{self.above} has changed', logs.output[0])
      _kept._digest_of_files.cache_clear()  # as if no kernel had been compiled before the change
      changed.add(_kept.compiled_from())
      source.unlink()
      changed.add(_kept.compiled_from())
    source.write_text('a = 2;')
    with imports():
      self.assertNotIn(_kept.compiled_from(), {first, *changed})
    self.assertNotIn(first, changed)

  def test_what_was_not_used_for_longest_goes(self):
    with mock.patch.object(_kept, '_MOST_FILES', 3):
      for i, key in enumerate('abcd'):
        _kept.write(key, b'code')
        os.utime(_kept._path(self.folder, key), (i + 1, i + 1))
      self.assertEqual(_kept.read('b'), b'code')  # used now, though written before c and d
      _kept.write('e', b'code')
    self.assertEqual([bool(_kept.read(key)) for key in 'abcde'], [False, True, False, True, True])

  def test_what_killed_processes_left_goes(self):
    _kept.write('one', b'code')
    with mock.patch.object(os, 'replace', side_effect=SystemExit), self.assertRaises(SystemExit):  # as a kill would
      _kept.write('two', b'code')
    (left,) = self.folder.glob(f'{_kept.NEW}*')
    _kept.write('three', b'code')
    self.assertTrue(left.exists())  # perhaps somebody writes it now
    os.utime(left, (1, 1))
    _kept.write('four', b'code')
    self.assertCountEqual(self.folder.iterdir(), [_kept._path(self.folder, k) for k in ('one', 'three', 'four')])


if __name__ == '__main__':
  absltest.main()
