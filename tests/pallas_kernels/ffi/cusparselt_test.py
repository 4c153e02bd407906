"""The calls to cuSPARSELt against a stand-in that keeps its contract, and against the real header where it is there."""

import concurrent.futures
import ctypes
import importlib.util
import os
import pathlib
import re
import shutil
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from pallas_kernels.ffi import build, cusparselt
from tests.pallas_kernels.ffi import stand_in

_folder: tempfile.TemporaryDirectory | None = None


def setUpModule():
  global _folder  # noqa: PLW0603
  try:
    build.compiler()
  except NotImplementedError as e:
    raise absltest.SkipTest(str(e)) from e
  _folder = tempfile.TemporaryDirectory()
  shutil.copy(stand_in.handlers(), _path('handlers'))
  shutil.copy(stand_in.library(), _path('good'))


def tearDownModule():
  if _folder is not None:
    _folder.cleanup()


def _path(name: str) -> pathlib.Path:
  return pathlib.Path(_folder.name, f'{name}.so')


def _installed(pattern: str) -> list[pathlib.Path]:
  """Files of the wheels under site-packages/nvidia."""
  spec = importlib.util.find_spec('nvidia')
  return [x for f in (spec.submodule_search_locations or ()) for x in pathlib.Path(f).glob(pattern)] if spec else []


class CusparseltTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    # A copy for each test: what was opened once stays open in a library.
    self.folder = tempfile.TemporaryDirectory(dir=_folder.name)
    self.addCleanup(self.folder.cleanup)
    handlers, self.good = (pathlib.Path(self.folder.name, f'{x}.so') for x in ('handlers', 'good'))
    shutil.copy(_path('handlers'), handlers)
    shutil.copy(_path('good'), self.good)
    patch = mock.patch.dict(os.environ, {build.PREBUILT: str(handlers), cusparselt.LIBRARY: str(self.good)})
    patch.start()
    self.addCleanup(patch.stop)
    self._forget()
    self.addCleanup(self._forget)

  @staticmethod
  def _forget():
    build.load.cache_clear()
    cusparselt._open.cache_clear()

  def _count(self, name):
    return getattr(ctypes.CDLL(str(self.good)), f'fake_{name}')()

  def _plan(self, m=64, n=64, k=64, dtype='bfloat16', out_dtype=None, b_layout='nk', out_layout='mn', **config):
    return cusparselt.workspace_bytes(
      m, n, k, dtype, out_dtype or dtype, b_layout=b_layout, out_layout=out_layout, config=cusparselt.Config(**config)
    )

  def test_version_is_read(self):
    self.assertEqual(cusparselt.version(), (0, 8, 1))

  @parameterized.parameters((0, 7), (0, 11), (1, 8))
  def test_other_versions_are_refused(self, major, minor):
    os.environ.update(FAKE_MAJOR=str(major), FAKE_MINOR=str(minor))  # the patch of setUp puts them back
    with self.assertRaisesRegex(
      NotImplementedError, rf'(?s)sparse24-jax\[cuda\].*it is version {major}.{minor}.1, 0.8.0 to 0.10 are served'
    ):
      cusparselt.library()

  @parameterized.parameters(9, 10)
  def test_later_versions_up_to_0_10_are_taken(self, minor):
    os.environ['FAKE_MINOR'] = str(minor)
    self.assertEqual(cusparselt.version(), (0, minor, 1))

  def test_a_missing_library_names_the_extra(self):
    os.environ[cusparselt.LIBRARY] = '/no/such/file.so'
    with self.assertRaisesRegex(NotImplementedError, r'(?s)pip install "sparse24-jax\[cuda\]".*/no/such/file.so'):
      cusparselt.library()

  def test_a_library_without_a_function_is_refused_by_its_name(self):
    incomplete, name = pathlib.Path(self.folder.name, 'incomplete.so'), b'cusparseLtSpMMACompress2'
    incomplete.write_bytes(self.good.read_bytes().replace(name, name[:-1] + b'_'))
    os.environ[cusparselt.LIBRARY] = str(incomplete)
    with self.assertRaisesRegex(NotImplementedError, 'it has no cusparseLtSpMMACompress2'):
      cusparselt.library()

  def test_a_plan_is_made_once_for_each_problem_and_setting(self):
    base = dict(m=64, n=64, k=64, dtype='bfloat16', out_dtype='bfloat16', b_layout='nk', out_layout='mn')
    changes = [
      {}, dict(m=96), dict(n=96), dict(k=128), dict(dtype='float16', out_dtype='float16'), dict(b_layout='kn'),
      dict(out_layout='nm'), dict(algorithm=3), dict(algorithm=3, split_k=2),
      dict(algorithm=3, split_k=2, split_k_mode=1), dict(algorithm=3, split_k=2, split_k_mode=2, split_k_buffers=1),
      dict(dtype='float8_e4m3fn'),
      dict(dtype='float8_e4m3fn', out_dtype='float32'),
    ]
    for _ in range(3):
      for change in changes:
        self.assertEqual(self._plan(**(base | change)), 4096)
    self.assertEqual(self._count('plans'), len(changes))
    self.assertEqual(cusparselt.library().sparse24_cusparselt_plans_made(0), len(changes))
    self.assertEqual(self._count('inits'), 1)
    self.assertEqual(self._count('wrong'), 0)

  def test_each_device_has_its_handle_and_plans(self):
    library = cusparselt.library()
    problem = cusparselt._problem(64, 64, 64, 'bfloat16', 'bfloat16', 'nk', 'mn', cusparselt.Config())
    for _ in range(2):
      for ordinal in (0, 1, 5):
        cusparselt._answer(library.sparse24_cusparselt_plan, ctypes.c_int64(ordinal), ctypes.byref(problem))
    self.assertEqual(self._count('inits'), 3)
    self.assertEqual([library.sparse24_cusparselt_plans_made(i) for i in (0, 1, 5)], [1, 1, 1])

  def test_threads_share_plans_and_never_a_handle_at_once(self):
    problems = [dict(m=32 * i) for i in range(1, 7)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      found = list(pool.map(lambda i: self._plan(**problems[i % len(problems)]), range(96)))
    self.assertEqual(set(found), {4096})
    self.assertEqual(self._count('plans'), len(problems))
    self.assertEqual(self._count('inits'), 1)
    self.assertEqual(self._count('overlaps'), 0)

  @parameterized.parameters(
    (dict(algorithm=7), 'algorithm id refused for m=64 n=64 k=64.*algorithm 7.*invalid value'),
    (dict(split_k=99), 'split_k refused'), (dict(split_k_mode=9), 'split_k_mode refused'),
    (dict(m=33), 'cusparseLtStructuredDescriptorInit'), (dict(n=33), 'cusparseLtDenseDescriptorInit of B'),
  )
  def test_what_the_library_refuses_is_named_and_leaves_nothing_behind(self, change, message):
    with self.assertRaisesRegex(NotImplementedError, message):
      self._plan(**change)
    self.assertEqual(self._count('plans'), 0)
    made = self._count('destroyed')
    self._plan()  # the device is as good as new
    self.assertEqual(self._count('plans'), 1)
    self.assertEqual(self._count('destroyed'), made)

  def test_algorithms(self):
    kwargs = dict(b_layout='nk', out_layout='mn')
    self.assertEqual(cusparselt.algorithms(64, 64, 64, 'float16', 'float16', **kwargs), 7)

  def test_candidates_are_the_named_file_alone_or_the_wheels_then_the_system(self):
    self.assertEqual(list(cusparselt.candidates()), [str(self.good)])
    site = pathlib.Path(self.folder.name)
    found = site / 'nvidia/cu13/lib/libcusparseLt.so.0'
    found.parent.mkdir(parents=True)
    found.write_text('')
    spec = mock.Mock(submodule_search_locations=[str(site / 'nvidia')])
    os.environ.pop(cusparselt.LIBRARY)  # the patch of setUp puts it back
    with mock.patch.object(importlib.util, 'find_spec', return_value=spec):
      self.assertEqual(list(cusparselt.candidates()), [str(found), 'libcusparseLt.so.0'])


class RealLibraryTest(parameterized.TestCase):
  """Skipped where the wheel nvidia-cusparselt is not installed: it takes 170 MB, too much for CI."""

  def test_it_opens_and_its_version_is_served(self):
    paths = _installed('**/libcusparseLt.so.0')
    if not paths:
      self.skipTest('no libcusparseLt.so.0 among the installed wheels')
    handlers = ctypes.CDLL(str(_path('handlers')))
    handlers.sparse24_cusparselt_open.restype = ctypes.c_int64
    version = cusparselt._answer(handlers.sparse24_cusparselt_open, os.fsencode(paths[0]))
    self.assertBetween(version, 800, 1099)

  def test_values_are_those_of_the_header(self):
    headers = _installed('**/cusparseLt.h')
    if not headers:
      self.skipTest('no cusparseLt.h among the installed wheels')
    header, source = headers[0].read_text(), build.SOURCE.read_text()
    for enumeration, ours in (
      ('cusparseComputeType', {'CUSPARSE_COMPUTE_32F': 'kCompute32F'}),
      ('cusparseLtSparsity_t', {'CUSPARSELT_SPARSITY_50_PERCENT': 'kSparsity50Percent'}),
      ('cusparseLtMatmulAlg_t', {'CUSPARSELT_MATMUL_ALG_DEFAULT': 'kAlgDefault'}),
      ('cusparseLtMatmulAlgAttribute_t', {
        'CUSPARSELT_MATMUL_ALG_CONFIG_ID': 'kConfigId', 'CUSPARSELT_MATMUL_ALG_CONFIG_MAX_ID': 'kConfigMaxId',
        'CUSPARSELT_MATMUL_SPLIT_K': 'kSplitK', 'CUSPARSELT_MATMUL_SPLIT_K_MODE': 'kSplitKMode',
        'CUSPARSELT_MATMUL_SPLIT_K_BUFFERS': 'kSplitKBuffers',
      }),
    ):
      body = re.search(rf'typedef enum \{{([^}}]*)\}} {enumeration};', header).group(1)
      names = re.findall(r'^\s*(CUSPARSE\w+)', body, re.MULTILINE)  # none of these has a written value
      self.assertNotIn('=', body)
      for theirs, name in ours.items():
        self.assertEqual(int(re.search(rf'{name} = (\d+)', source).group(1)), names.index(theirs), name)
    sizes = {int(x) for x in re.findall(r'uint8_t data\[(\d+)\]', header)}
    self.assertLessEqual(max(sizes), int(re.search(r'uint8_t data\[(\d+)\]', source).group(1)))


if __name__ == '__main__':
  absltest.main()
