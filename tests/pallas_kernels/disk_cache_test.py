"""Kernels on disk: they come back whole, and nothing is read that somebody else may have written."""

import concurrent.futures
import os
from pathlib import Path
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from pallas_kernels import _disk_cache, _dispatch


class KeptTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    above = tempfile.TemporaryDirectory()
    self.addCleanup(above.cleanup)
    self.above, self.folder = Path(above.name), Path(above.name) / 'kernels'
    self.enter_context(mock.patch.dict(os.environ, {_disk_cache.VARIABLE: str(self.folder)}))
    _dispatch.log_once.cache_clear()

  def test_what_is_kept_is_found_under_its_key_alone(self):
    self.assertIsNone(_disk_cache.read('one'))
    _disk_cache.write('one', b'code')
    self.assertEqual((_disk_cache.read('one'), _disk_cache.read('two')), (b'code', None))
    self.assertEqual([p.stat().st_mode & 0o777 for p in (self.folder, *self.folder.iterdir())], [0o700, 0o600])

  @parameterized.parameters(b'', _disk_cache._MAGIC, None)
  def test_damage(self, text):
    _disk_cache.write('one', b'code')
    (path,) = self.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1] if text is None else text)
    self.assertIsNone(_disk_cache.read('one'))

  def test_a_file_of_another_key(self):
    _disk_cache.write('one', b'code')
    (path,) = self.folder.iterdir()
    path.rename(_disk_cache._path(self.folder, 'two'))
    self.assertIsNone(_disk_cache.read('two'))

  def test_many_write_read_and_remove_at_once(self):
    """Nobody sees half of a file, and nobody fails where another one removed what it was about to use."""
    big = {key: key.encode() * 100_000 for key in 'abcdef'}

    def work(turn):
      for i in range(30):
        key = 'abcdef'[(turn + i) % 6]
        _disk_cache.write(key, big[key])
        self.assertIn(_disk_cache.read(key), (big[key], None))

    with (
      mock.patch.object(_disk_cache, '_MOST_FILES', 3), concurrent.futures.ThreadPoolExecutor(6) as pool,
      self.assertNoLogs('pallas_kernels', 'WARNING'),
    ):  # fmt: skip
      list(pool.map(work, range(6)))
    self.assertEmpty(list(self.folder.glob(f'{_disk_cache.NEW}*')))

  def _refused(self, because):
    with self.assertLogs('pallas_kernels', 'WARNING') as logs:
      self.assertIsNone(_disk_cache.read('one'))
    self.assertIn(because, logs.output[0])

  def test_a_file_that_others_may_write(self):
    _disk_cache.write('one', b'code')
    (path,) = self.folder.iterdir()
    path.chmod(0o620)
    self._refused('others may write to it')

  def test_a_link(self):
    _disk_cache.write('one', b'code')
    (path,) = self.folder.iterdir()
    path.symlink_to(path.rename(self.above / 'elsewhere'))
    self._refused('not kept on disk')

  def test_a_pipe_is_not_waited_for(self):
    _disk_cache.write('one', b'code')
    (path,) = self.folder.iterdir()
    path.unlink()
    os.mkfifo(path)
    self._refused('of another kind')

  @parameterized.parameters(0o770, 0o707)
  def test_a_folder_that_others_may_write(self, mode):
    _disk_cache.write('one', b'code')
    self.folder.chmod(mode)
    self._refused('others may write to it')
    _disk_cache.write('two', b'code')
    self.assertLen(list(self.folder.iterdir()), 1)

  def test_a_folder_in_one_that_everybody_may_write(self):
    _disk_cache.write('one', b'code')
    self.above.chmod(0o777)
    self._refused('everybody may write to')
    self.above.chmod(0o1777)  # where only who owns a name may change it
    self.assertEqual(_disk_cache.read('one'), b'code')

  def test_a_folder_of_somebody_else(self):
    _disk_cache.write('one', b'code')
    with mock.patch.object(os, 'geteuid', lambda: os.getuid() + 1):
      self._refused('it belongs to user')

  def test_off(self):
    with mock.patch.dict(os.environ, {_disk_cache.VARIABLE: 'off'}):
      _disk_cache.write('one', b'code')
      self.assertIsNone(_disk_cache.read('one'))
    self.assertFalse(self.folder.exists())

  def test_nothing_is_kept_as_of_sources_that_changed_since_they_were_imported(self):
    source, lock = self.above / 'kernel.py', self.above / '.#kernel.py'
    source.write_text('a = 1')
    lock.symlink_to('nobody@nowhere')  # as an editor leaves while a file is edited
    self.enter_context(mock.patch.object(_disk_cache, '_SOURCES', self.above))
    self.addCleanup(_disk_cache._digest_of_files.cache_clear)

    def imports():
      _disk_cache._digest_of_files.cache_clear()
      return mock.patch.object(_disk_cache, '_IMPORTED', _disk_cache._files())

    with imports():
      first = _disk_cache.compiled_from()
      self.assertEqual(_disk_cache.compiled_from(), first)
      source.write_text('a = 2;')
      with self.assertLogs('pallas_kernels', 'WARNING') as logs:
        changed = {_disk_cache.compiled_from()}
      self.assertIn(f'{self.above} has changed', logs.output[0])
      _disk_cache._digest_of_files.cache_clear()  # as if no kernel had been compiled before the change
      changed.add(_disk_cache.compiled_from())
      source.unlink()
      changed.add(_disk_cache.compiled_from())
    source.write_text('a = 2;')
    with imports():
      self.assertNotIn(_disk_cache.compiled_from(), {first, *changed})
    self.assertNotIn(first, changed)

  def test_what_was_not_used_for_longest_goes(self):
    with mock.patch.object(_disk_cache, '_MOST_FILES', 3):
      for i, key in enumerate('abcd'):
        _disk_cache.write(key, b'code')
        os.utime(_disk_cache._path(self.folder, key), (i + 1, i + 1))
      self.assertEqual(_disk_cache.read('b'), b'code')  # used now, though written before c and d
      _disk_cache.write('e', b'code')
    self.assertEqual([bool(_disk_cache.read(key)) for key in 'abcde'], [False, True, False, True, True])

  def test_what_killed_processes_left_goes(self):
    _disk_cache.write('one', b'code')
    with mock.patch.object(os, 'replace', side_effect=SystemExit), self.assertRaises(SystemExit):  # as a kill would
      _disk_cache.write('two', b'code')
    (left,) = self.folder.glob(f'{_disk_cache.NEW}*')
    _disk_cache.write('three', b'code')
    self.assertTrue(left.exists())  # perhaps somebody writes it now
    os.utime(left, (1, 1))
    _disk_cache.write('four', b'code')
    self.assertCountEqual(self.folder.iterdir(), [_disk_cache._path(self.folder, k) for k in ('one', 'three', 'four')])


if __name__ == '__main__':
  absltest.main()
