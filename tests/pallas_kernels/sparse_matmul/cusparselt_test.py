"""The cuSPARSELt back end without a GPU: what it refuses, what it pads, and the calls in the compiled program.

Multiplying needs a GPU: `cusparselt_gpu_test.py`. Here the custom calls are stood in for by what they mean.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _device, _records, _tuning, formats, operand
from pallas_kernels.activations import ACTIVATIONS
from pallas_kernels.ffi import build
from pallas_kernels.ffi import cusparselt as library
from pallas_kernels.sparse_matmul import api, cusparselt, reference
from pallas_kernels.sparse_matmul.call import Call, Vectors
from tests import targets
from tests.pallas_kernels import compiling
from tests.pallas_kernels.ffi import stand_in

_H100 = targets.target_device('sm_90a')
_A100 = targets.target_device('sm_80')
_RESULTS = pathlib.Path(__file__).parents[3] / 'experiments/results/sparse_matmul.jsonl'


_compress = jax.jit(functools.partial(formats.compress, axis=-1))
_reference = jax.jit(reference.sparse_matmul, static_argnames='call')


@functools.cache
def _problem(m, n, k, dtype, b_layout, seed=0):
  rng = np.random.default_rng(seed)
  keep = np.argsort(rng.random((m, k // 4, 4)), axis=-1) < 2
  w = rng.standard_normal((m, k)).astype(np.float32).astype(jnp.dtype(dtype))
  a = _compress(w, keep.reshape(m, k))
  shape = (n, k) if b_layout == 'nk' else (k, n)
  return a, jnp.asarray(rng.standard_normal(shape).astype(np.float32).astype(jnp.dtype(dtype)))


def zeros_of_both_signs(values):
  """Rows of every group of four that holds at most two of a row's value, the rest 0.0 or -0.0: [len(values), 288]."""
  groups = np.array([g for g in itertools.product((0.0, -0.0, 1.0), repeat=4) if sum(g) <= 2], np.float32).reshape(-1)
  return np.where(groups == 1, np.float32(values)[:, None], groups)


class _Meaning:
  """Stands in for `jax.ffi.ffi_call`: a blob that is the matrix itself, and a matmul that notes what it is given.

  As a compressor may, `compress` keeps the first two entries of a group that have any bit set, and -0.0 has one.
  """

  def __init__(self):
    self.calls = []
    self.dense = None

  def __call__(self, name, result, **kwargs):
    del kwargs

    def compress(a):
      groups = np.array(a).reshape(len(a), -1, 4)
      kept = groups.view(f'u{groups.dtype.itemsize}') != 0
      groups[~kept | (np.cumsum(kept, axis=-1) > 2)] = 0
      self.dense = groups.reshape(a.shape)
      return jnp.asarray(np.zeros(result.shape, result.dtype))

    def matmul(blob, b, *, b_layout, out_layout, **settings):
      self.calls.append((self.dense.shape, b.shape, result, settings))
      a32, b32 = self.dense.astype(np.float32), np.asarray(b, np.float32)
      d = a32 @ (b32.T if b_layout == 'nk' else b32)
      return jnp.asarray((d if out_layout == 'mn' else d.T).astype(result.dtype))

    return {library.COMPRESS: compress, library.MATMUL: matmul}[name]


class MeaningTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.ffi = _Meaning()
    for target, name, value in (
      (jax.ffi, 'ffi_call', self.ffi), (library, 'register', lambda: None), (library, 'version', lambda: (0, 8, 0)),
    ):
      patch = mock.patch.object(target, name, value)
      patch.start()
      self.addCleanup(patch.stop)

  def _run(self, a, b, bias=None, a_scale=None, b_scale=None, **kwargs):
    call = Call(**dict(out_dtype=a.dtype, b_layout='nk', out_layout='mn') | kwargs)
    args = (a, b, Vectors(bias, a_scale, b_scale))
    found = cusparselt.sparse_matmul(*args, call, device=_H100)
    expected = _reference(*args, dataclasses.replace(call, out_dtype=jnp.dtype('float32')))
    self.assertEqual((found.shape, found.dtype), (expected.shape, call.out_dtype))
    self.assertLessEqual(_tuning.relative_error(found, expected), _tuning.TOLERANCE)

  @parameterized.parameters(
    ((1, 1, 4), 'bfloat16', 'nk', 'mn'), ((33, 65, 68), 'bfloat16', 'nk', 'nm'), ((33, 65, 68), 'float16', 'kn', 'mn'),
    ((64, 96, 128), 'bfloat16', 'kn', 'nm'),
  )
  @pytest.mark.few
  def test_ragged_sizes_are_padded_to_the_library_s_multiples(self, size, dtype, b_layout, out_layout):
    a, b = _problem(*size, dtype, b_layout)
    self._run(a, b, b_layout=b_layout, out_layout=out_layout)
    (rows, total), b_shape, result, _ = self.ffi.calls[0]
    m, n, k = size
    self.assertEqual((rows, total), (-(-m // 32) * 32, -(-k // 64) * 64))
    self.assertEqual(b_shape, (-(-n // 32) * 32, total) if b_layout == 'nk' else (total, -(-n // 32) * 32))
    self.assertEqual(result.dtype, jnp.dtype(dtype))

  @parameterized.parameters(None, *ACTIVATIONS)
  @pytest.mark.few(2)
  def test_epilogue(self, activation):
    a, b = _problem(40, 24, 64, 'bfloat16', 'nk')
    self._run(a, b, jnp.asarray(np.linspace(-1, 1, 40, dtype=np.float32)), activation=activation, out_layout='nm')

  @parameterized.parameters('float8_e4m3fn', 'float8_e5m2')
  def test_float8_with_an_epilogue_keeps_a_float32_matmul(self, dtype):
    a, b = _problem(40, 24, 64, dtype, 'nk')
    scales = jnp.asarray(np.linspace(0.5, 2, 40, dtype=np.float32)), jnp.float32(0.25)
    self._run(a, b, None, *scales, activation='gelu', out_dtype=jnp.dtype('bfloat16'))
    self._run(a, b, out_dtype=jnp.dtype('float16'))
    self.assertEqual([call[2].dtype for call in self.ffi.calls], [jnp.dtype('float32'), jnp.dtype('float16')])

  def test_every_form_of_the_operand(self):
    a, b = _problem(32, 24, 64, 'bfloat16', 'nk')
    transposed = formats.Compressed24(a.values.T, a.metadata.T, -2)
    for form in (a, operand.to_operand(a), transposed):
      self._run(form, b)
    dense = jax.jit(formats.decompress)(a)
    prepared = cusparselt.prepare(dense, device=_H100)
    found = cusparselt.sparse_matmul(prepared, b, Vectors(), Call(a.dtype, 'nk', 'mn'), device=_H100)
    self.assertEqual(prepared.shape, (32, 64))
    expected = np.asarray(dense, np.float32) @ np.asarray(b, np.float32).T
    self.assertLessEqual(_tuning.relative_error(found, jnp.asarray(expected)), 4e-3)

  @parameterized.parameters('bfloat16', 'float16', 'float8_e4m3fn', 'float8_e5m2')
  def test_negative_zeros_push_out_no_value(self, dtype):
    w = zeros_of_both_signs([1, -2, 3.5, np.inf, -np.inf, np.nan]).astype(dtype)
    cusparselt.prepare(jnp.asarray(w), device=_H100)
    kept = np.asarray(self.ffi.dense)[: len(w), : w.shape[1]]
    np.testing.assert_array_equal(kept.astype(np.float32), w.astype(np.float32))

  def test_the_recorded_algorithm_is_used_for_its_own_problem_and_version(self):
    key = dict(m=32, n=24, k=64, dtype='bfloat16', out_dtype='bfloat16', b_layout='nk', out_layout='mn')
    rows = [
      dict(implementation='cusparselt', config=dict(algorithm=i, split_k=0, split_k_mode=0, split_k_buffers=0,
                                                    version=[0, 8, 0]),
           error=1e-3, rejected=reason, samples_ms=[ms])
      for i, ms, reason in ((3, 2.0, None), (4, 1.0, 'differs'), (5, 3.0, None))
    ]
    a, b = _problem(32, 24, 64, 'bfloat16', 'nk')
    near, b_near = _problem(32, 32, 64, 'bfloat16', 'nk')
    with tempfile.TemporaryDirectory() as folder:
      _records.save(
        pathlib.Path(folder, _H100.slug, 'sparse_matmul.json'), {'op': 'sparse_matmul'},
        [dict(key=key, baseline={}, candidates=rows, choice=dict(implementation='dense', config=None))],
      )
      tuned = functools.partial(cusparselt.tuned_config, folder=pathlib.Path(folder))
      with mock.patch.object(cusparselt, 'tuned_config', tuned):
        self._run(a, b)
        self._run(near, b_near)
        with mock.patch.object(library, 'version', lambda: (0, 10, 0)):
          self._run(a, b)
    self.assertEqual([call[3]['algorithm'] for call in self.ffi.calls], [3, -1, -1])


class ShippedTest(parameterized.TestCase):

  def test_the_benchmark_s_problems_run_the_algorithm_that_was_fastest(self):
    """By the tuner's records of an H100; the benchmark's search on an H200 found the same ones."""
    found = set()
    for record in map(json.loads, _RESULTS.read_text().splitlines()):
      if 'layouts' not in record:  # of another kernel
        continue
      shape, layouts, measured = record['shape'], record['layouts'], record['baselines'].get('cusparselt')
      problem = shape['m'], shape['n'], shape['k'], record['dtype'], 'bfloat16', layouts['b'], layouts['out']
      with mock.patch.object(library, 'version', lambda: (0, 8, 0)):
        if measured is None or cusparselt.tuned_config(*problem, _H100) is None:
          continue
      found.add(problem)
      *settings, version = measured['config'].values()
      with mock.patch.object(library, 'version', lambda version=version: tuple(version)):
        self.assertEqual(cusparselt.tuned_config(*problem, _H100), cusparselt.Config(*settings))
      with mock.patch.object(library, 'version', lambda: (0, 9, 0)):
        self.assertIsNone(cusparselt.tuned_config(*problem, _H100))
    self.assertLen(found, 5)


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
    (_device.current(), 'bfloat16', {}, 'compute capability 8.0 and later, this is cpu'),
    (_A100, 'float8_e4m3fn', dict(out_dtype=jnp.dtype('bfloat16')), 'compute capability 8.9'),
    (_H100, 'bfloat16', dict(out_dtype=jnp.dtype('float32')), 'writes the matmul of bfloat16 matrices as bfloat16'),
    (_H100, 'float8_e4m3fn', dict(out_dtype=jnp.dtype('float8_e4m3fn')), 'is written as bfloat16, float16 or float32'),
    (_H100, 'float8_e4m3fn', dict(out_dtype=jnp.dtype('bfloat16'), b_layout='kn'), "b_layout='nk'"),
  )
  def test_what_cusparselt_does_not_take(self, device, dtype, change, message):
    call = Call(**dict(out_dtype=jnp.dtype(dtype), b_layout='nk', out_layout='mn') | change)
    a, b = _problem(32, 32, 64, dtype, call.b_layout)
    with self.assertRaisesRegex(NotImplementedError, message):
      cusparselt.sparse_matmul(a, b, Vectors(), call, device=device)

  def test_two_kinds_of_float8(self):
    a, _ = _problem(32, 32, 64, 'float8_e4m3fn', 'nk')
    _, b = _problem(32, 32, 64, 'float8_e5m2', 'nk')
    with self.assertRaisesRegex(NotImplementedError, 'one dtype, not float8_e4m3fn x float8_e5m2'):
      cusparselt.sparse_matmul(a, b, Vectors(), Call(jnp.dtype('bfloat16'), 'nk', 'mn'), device=_H100)

  def test_the_user_is_told_by_a_value_error(self):
    a, b = _problem(32, 32, 64, 'bfloat16', 'nk')
    with self.assertRaisesRegex(ValueError, 'cusparselt: cuSPARSELt multiplies bfloat16 on NVIDIA GPUs'):
      api.sparse_matmul(a, b, implementation='cusparselt')

  def test_without_a_compiler_the_user_is_told_so(self):
    a, b = _problem(32, 32, 64, 'bfloat16', 'nk')
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
      environment = {build.CACHE: folder, 'PATH': folder, build.PREBUILT: '', 'CXX': ''}
      stack.enter_context(mock.patch.dict(os.environ, environment))
      stack.enter_context(mock.patch.object(_device, 'current', lambda: _H100))
      build.load.cache_clear()
      library._open.cache_clear()
      with self.assertRaisesRegex(ValueError, r'cusparselt: .*no C\+\+ compiler was found'):
        api.sparse_matmul(a, b, implementation='cusparselt')

  @parameterized.parameters((1, 4), (300, 64), (4096, 16384))
  def test_the_blob_has_room_for_values_and_positions(self, m, k):
    for dtype in ('bfloat16', 'float8_e4m3fn'):
      self.assertGreaterEqual(
        cusparselt.blob_bound(m, k, dtype), m * k // 2 * jnp.dtype(dtype).itemsize + m * k // 8
      )


def _has_compiler() -> bool:
  try:
    return bool(build.compiler())
  except NotImplementedError:
    return False


@absltest.skipUnless(compiling.can_compile_for_gpu(), 'needs the CUDA plugin wheels')
@absltest.skipUnless(_has_compiler(), 'needs a C++ compiler')
class CompileTest(parameterized.TestCase):
  """The handlers are the real ones; the library behind them is a stand-in, since nothing is run."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    patch = mock.patch.dict(os.environ, {library.LIBRARY: str(stand_in.library())})
    patch.start()
    cls.addClassCleanup(patch.stop)
    build.load.cache_clear()
    library._open.cache_clear()

  def _hlo(self, f, *shapes):
    from jax.experimental import topologies

    text = compiling.description('sm_90a')
    topology = topologies.get_topology_desc(platform='cuda', target_config=text, topology='1x1x1')
    mesh = topologies.make_mesh(topology, (1,), ('x',))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    structs = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
    with mock.patch.object(_device, 'current', lambda: _H100):
      return jax.jit(f).lower(*structs).compile().as_text()

  def test_program_holds_both_calls_with_their_settings(self):
    def f(values, metadata, b, bias):
      return api.sparse_matmul(
        operand.SparseOperand(values, metadata), b, bias=bias, activation='gelu', out_layout='nm',
        implementation='cusparselt',
      )

    hlo = self._hlo(
      f, ((100, 34), jnp.bfloat16), (operand.metadata_shape(100, 68), jnp.uint32), ((130, 68), jnp.bfloat16),
      ((100,), jnp.float32),
    )
    calls = [x for x in hlo.splitlines() if 'custom_call_target=' in x]
    (compress,), (matmul,) = ([x for x in calls if f'"{name}"' in x] for name in (library.COMPRESS, library.MATMUL))
    self.assertIn('bf16[128,128]', compress)
    self.assertIn('bf16[160,128]', matmul)  # D [N, M], padded
    self.assertIn('API_VERSION_TYPED_FFI', matmul)
    for setting in ('algorithm = -1', 'b_layout = "nk"', 'out_layout = "nm"'):
      self.assertIn(setting, matmul)

  def test_a_prepared_operand_is_not_compressed_again(self):
    size = cusparselt.blob_bound(128, 128, 'bfloat16')

    def f(blob, b):
      a = cusparselt.CusparseltOperand(blob, 128, 128, jnp.dtype('bfloat16'))
      return cusparselt.sparse_matmul(
        a, b, Vectors(), Call(jnp.dtype('bfloat16'), 'kn', 'mn'),
        config=cusparselt.Config(algorithm=5, split_k=2, split_k_mode=1),
      )

    hlo = self._hlo(f, ((size,), jnp.uint8), ((128, 256), jnp.bfloat16))
    self.assertNotIn(library.COMPRESS, hlo)
    self.assertIn('algorithm = 5', hlo)
    self.assertIn('split_k = 2', hlo)


if __name__ == '__main__':
  absltest.main()
