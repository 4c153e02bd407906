"""Building the FFI library: once, by whoever is first, and with a remedy in every refusal."""

import concurrent.futures
import os
import pathlib
import stat
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from pallas_kernels import _disk_cache
from pallas_kernels.ffi import build

_NO_COMPILER = 'needs a C++ compiler'


def has_compiler() -> bool:
  try:
    return bool(build.compiler())
  except NotImplementedError:
    return False


class BuildTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)
    self.environment = mock.patch.dict(os.environ, {build.CACHE: str(self.folder / 'cache')})
    self.environment.start()
    self.addCleanup(self.environment.stop)
    for name in (build.PREBUILT, 'CXX'):
      os.environ.pop(name, None)
    build.load.cache_clear()
    self.addCleanup(build.load.cache_clear)

  def _compiler(self, body: str) -> pathlib.Path:
    """A compiler that is a shell script."""
    path = self.folder / 'cxx'
    path.write_text(f'#!/bin/sh\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    os.environ['CXX'] = str(path)
    return path

  def test_without_a_compiler_the_error_says_what_to_do(self):
    os.environ['PATH'] = str(self.folder)  # the patch of setUp puts it back
    with self.assertRaisesRegex(NotImplementedError, rf'no C\+\+ compiler was found \(c\+\+.*{build.PREBUILT}'):
      build.load()

  def test_a_failing_compiler_is_quoted(self):
    self._compiler('echo "no such header" >&2; exit 1')
    with self.assertRaisesRegex(NotImplementedError, '(?s)building cusparselt.cc failed.*no such header'):
      build.load()
    self.assertEmpty(list((self.folder / 'cache').iterdir()))

  def test_builds_once_and_whole_with_several_at_it(self):
    # Writes its output in two halves, and a line for each run.
    self._compiler(
      f'echo run >> {self.folder}/runs\n'
      'for a in "$@"; do if [ "$out" = next ]; then out="$a"; fi; if [ "$a" = -o ]; then out=next; fi; done\n'
      'printf half > "$out"; sleep 0.1; printf half >> "$out"'
    )
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
      paths = set(pool.map(lambda _: build.library_path(), range(4)))
    (path,) = paths
    self.assertEqual(path.read_text(), 'halfhalf')
    runs = (self.folder / 'runs').read_text()
    build.library_path()
    self.assertEqual((self.folder / 'runs').read_text(), runs)
    self.assertLen(list(path.parent.iterdir()), 1)

  def _build_constant(self, text):
    self._compiler(
      f'echo run >> {self.folder}/runs\n'
      'for a in "$@"; do if [ "$out" = next ]; then out="$a"; fi; if [ "$a" = -o ]; then out=next; fi; done\n'
      f'printf {text} > "$out"'
    )

  def _runs(self):
    runs = self.folder / 'runs'
    return len(runs.read_text().splitlines()) if runs.exists() else 0

  def test_a_library_that_was_cut_short_is_built_again(self):
    self._build_constant('whole')
    path = build.library_path()
    path.write_text('who')
    self.assertEqual(build.library_path().read_text(), 'whole')
    self.assertEqual((build.library_path(), self._runs()), (path, 2))

  @parameterized.parameters('link', 'others may write', 'of another')
  def test_a_library_of_somebody_else_is_built_again(self, how):
    self._build_constant('whole')
    path = build.library_path()
    if how == 'link':
      path.symlink_to(path.rename(self.folder / 'theirs'))
    elif how == 'others may write':
      path.chmod(0o666)

    def lstat(found):
      status = list(os.lstat(found))
      status[stat.ST_UID] += how == 'of another' and found == path
      return os.stat_result(status)

    with mock.patch.object(pathlib.Path, 'lstat', lstat):
      found = build.library_path()
    self.assertEqual((found.read_text(), found.is_symlink(), self._runs()), ('whole', False, 2))
    self.assertEqual(found.stat().st_mode & 0o022, 0)

  def test_what_a_killed_build_left_goes(self):
    self._build_constant('whole')
    left = self.folder / 'cache' / f'{_disk_cache.NEW}left'
    left.mkdir(parents=True, mode=0o700)
    (left / 'built.so').write_text('half')
    os.utime(left, (1, 1))
    path = build.library_path()
    self.assertEqual(list(path.parent.iterdir()), [path])

  @parameterized.parameters(0o777, 0o1777, 0o775)
  def test_nothing_is_loaded_from_where_others_may_write(self, mode):
    self._build_constant('mine')
    shared = self.folder / 'shared'
    shared.mkdir()
    shared.chmod(mode)
    os.environ[build.CACHE] = str(shared)
    planted = shared / f'cusparselt-{build._fingerprint()}.so'
    planted.write_text('theirs')
    (shared / f'cusparselt-{build._fingerprint()}-{build._hash(planted)}.so').write_text('theirs')
    path = build.library_path()
    self.assertEqual(path.read_text(), 'mine')
    self.assertEqual(path.parent.parent, shared)
    self.assertEqual(path.parent.stat().st_mode & 0o777, 0o700)
    self.assertEqual((build.library_path(), self._runs()), (path, 1))

  def test_a_folder_of_somebody_else_is_not_ours(self):
    shared = self.folder / 'shared'
    shared.mkdir()
    os.environ[build.CACHE] = str(shared)
    with mock.patch.object(os, 'geteuid', lambda: 12345), self.assertLogs('pallas_kernels', 'WARNING') as logs:
      folder = build.cache_folder()
    self.assertNotIn(str(self.folder), str(folder))
    self.assertIn('others may put a library there', logs.output[0])

  def test_name_follows_source_and_jaxlib(self):
    names = {build._fingerprint()}
    other = self.folder / 'other.cc'
    other.write_text('int x;')
    with mock.patch.object(build, 'SOURCE', other):
      names.add(build._fingerprint())
    with mock.patch.object(build.jaxlib.version, '__version__', '0.0.0'):
      names.add(build._fingerprint())
    self.assertLen(names, 3)

  def test_read_only_cache_is_replaced_by_a_temporary_folder(self):
    blocked = self.folder / 'file'
    blocked.write_text('')
    with mock.patch.dict(os.environ, {build.CACHE: str(blocked / 'below')}):
      folder = build.cache_folder()
    self.assertTrue(folder.is_dir())
    self.assertNotIn(str(self.folder), str(folder))

  def test_prebuilt_library_must_be_there(self):
    os.environ[build.PREBUILT] = '/no/such/library.so'
    with self.assertRaisesRegex(NotImplementedError, f'{build.PREBUILT}=/no/such/library.so is no file'):
      build.load()

  @absltest.skipUnless(has_compiler(), _NO_COMPILER)
  def test_a_library_for_another_ffi_is_refused(self):
    """XLA would refuse its handlers at registration, and with them the whole platform."""
    source, library = self.folder / 'other.cc', self.folder / 'other.so'
    major, minor = build.api_version()
    for version in ((major + 1, 0), (major, minor + 1)):
      source.write_text(
        f'extern "C" long long sparse24_ffi_api_version() {{ return {1000 * version[0] + version[1]}; }}'
      )
      build.compile_source(source, library)
      copied = self.folder / f'{version}.so'
      copied.write_bytes(library.read_bytes())
      build.load.cache_clear()
      os.environ[build.PREBUILT] = str(copied)
      with self.assertRaisesRegex(NotImplementedError, f'version {version[0]}.{version[1]} of the XLA FFI'):
        build.load()

  def test_a_file_that_is_no_library_is_refused(self):
    path = self.folder / 'text.so'
    path.write_text('text')
    os.environ[build.PREBUILT] = str(path)
    with self.assertRaisesRegex(NotImplementedError, 'cannot be loaded'):
      build.load()


if __name__ == '__main__':
  absltest.main()
