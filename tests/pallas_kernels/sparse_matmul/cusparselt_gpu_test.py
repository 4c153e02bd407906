"""The contract of `sparse_matmul` by cuSPARSELt on a GPU: run by hand with `pytest -m gpu`."""

import concurrent.futures
import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _device, _tuning, formats
from pallas_kernels.ffi import cusparselt as library
from pallas_kernels.sparse_matmul import api, arg_specs, cusparselt, reference, verify
from pallas_kernels.sparse_matmul.call import Call, Vectors
from tests.pallas_kernels.sparse_matmul.cusparselt_test import zeros_of_both_signs


def _absent() -> str | None:
  """Why cuSPARSELt cannot be used here."""
  if _device.current().capability < (8, 0):
    return 'needs an NVIDIA GPU from sm_80 on'
  try:
    library.library()
  except NotImplementedError as e:
    return str(e)
  return None


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_absent()), reason=_absent() or '')]


def _problem(m, n, k, dtype, b_layout='nk', seed=0):
  """A compressed, B, and their matmul by NumPy."""
  rng = np.random.default_rng(seed)
  keep = np.argsort(rng.random((m, k // 4, 4)), axis=-1) < 2
  w = jnp.asarray(rng.standard_normal((m, k)), jnp.float32).astype(dtype)
  b = jnp.asarray(rng.standard_normal((n, k)), jnp.float32).astype(dtype)
  d = np.where(keep.reshape(m, k), np.asarray(w, np.float32), 0) @ np.asarray(b, np.float32).T
  return formats.compress(w, jnp.asarray(keep.reshape(m, k)), axis=-1), (b if b_layout == 'nk' else b.T), d


class CusparseltGpuTest(parameterized.TestCase):

  def _check(self, found, expected, out_layout='mn', tolerance=_tuning.TOLERANCE):
    self.assertLessEqual(_tuning.relative_error(found, expected if out_layout == 'mn' else expected.T), tolerance)

  @parameterized.product(size=(*arg_specs.RAGGED, (512, 384, 1024)), b_layout=('nk', 'kn'), out_layout=('mn', 'nm'))
  def test_sizes_and_layouts(self, size, b_layout, out_layout):
    a, b, d = _problem(*size, 'bfloat16', b_layout)
    f = jax.jit(functools.partial(
      api.sparse_matmul, b_layout=b_layout, out_layout=out_layout, implementation='cusparselt'))
    first = f(a, b)
    self._check(first, jnp.asarray(d), out_layout)
    for _ in range(_tuning.REPEATS):
      self.assertTrue(_tuning.same_bits(first, f(a, b)))

  @parameterized.parameters(*range(12))
  def test_random_problems(self, seed):
    """Whatever the op takes; what cuSPARSELt does not take is refused with a reason, not computed wrongly."""
    case = verify.random_problem(np.random.default_rng(seed))
    case['out_dtype'] = case['a_dtype'] if case['a_dtype'] in ('bfloat16', 'float16') else case['out_dtype']
    if case['a_dtype'] != case['b_dtype']:
      case['b_dtype'] = case['a_dtype']
    m, n, k = case['m'], case['n'], case['k']
    if case['a_dtype'].startswith('float8') and _device.current().capability < (8, 9):
      self.skipTest('float8 needs sm_89')
    a, b, d = _problem(m, n, k, case['a_dtype'], case['b_layout'], seed)
    rng = np.random.default_rng(case['seed'])
    bias, a_scale, b_scale = (verify._vector(rng, case[x], s) for x, s in (('bias', m), ('a_scale', m), ('b_scale', n)))
    found = api.sparse_matmul(
      a, b, bias=bias, a_scale=a_scale, b_scale=b_scale, activation=case['activation'],
      out_dtype=jnp.dtype(case['out_dtype']), b_layout=case['b_layout'], out_layout=case['out_layout'],
      implementation='cusparselt',
    )
    z = reference.preactivation(jnp.asarray(d), Vectors(bias, a_scale, b_scale))
    expected = reference.activate(z, case['activation'])
    self._check(found, expected, case['out_layout'])

  def test_threads_get_what_one_thread_gets(self):
    a, b, _ = _problem(1024, 1024, 1024, 'bfloat16')
    prepared = jax.jit(cusparselt.prepare)(a)
    f = jax.jit(functools.partial(
      cusparselt.matmul, out_dtype=jnp.bfloat16, b_layout='nk', out_layout='mn', config=cusparselt.Config()))
    expected = f(prepared, b)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      found = list(pool.map(lambda _: _tuning.same_bits(f(prepared, b), expected), range(160)))
    self.assertTrue(all(found))

  def test_every_device_has_its_plans(self):
    a, b, d = _problem(256, 192, 512, 'bfloat16')
    f = jax.jit(functools.partial(api.sparse_matmul, implementation='cusparselt'))
    for device in jax.devices():
      found = f(*jax.device_put((a, b), device))
      self.assertEqual(found.devices(), {device})
      self._check(np.asarray(found), d)

  def test_a_second_call_makes_no_plan(self):
    a, b, _ = _problem(64, 64, 128, 'float16')
    f = jax.jit(functools.partial(api.sparse_matmul, implementation='cusparselt'))
    jax.block_until_ready(f(a, b))
    made = library.library().sparse24_cusparselt_plans_made(0)
    jax.block_until_ready(f(a, b))
    self.assertEqual(library.library().sparse24_cusparselt_plans_made(0), made)

  @parameterized.parameters(((128, 128), 'bfloat16'), ((4128, 1088), 'float16'), ((4096, 4096), 'bfloat16'))
  def test_the_blob_fits(self, shape, dtype):
    """The handler asks the library how large it is, and refuses a smaller one."""
    jax.block_until_ready(cusparselt.prepare(jnp.zeros(shape, dtype)))

  @parameterized.parameters('bfloat16', 'float8_e4m3fn')
  def test_negative_zeros_push_out_no_value(self, dtype):
    if dtype == 'float8_e4m3fn' and _device.current().capability < (8, 9):
      self.skipTest('float8 needs sm_89')
    w = jnp.asarray(zeros_of_both_signs(np.resize([1, -2, 3.5], 64)), dtype)
    b = jnp.asarray(np.random.default_rng(0).standard_normal((96, w.shape[1])), dtype)
    found = jax.jit(functools.partial(
      cusparselt.sparse_matmul, vectors=Vectors(), call=Call(jnp.dtype('bfloat16'), 'nk', 'mn')
    ))(jax.jit(cusparselt.prepare)(w), b)
    self._check(found, jnp.asarray(np.asarray(w, np.float32) @ np.asarray(b, np.float32).T))


if __name__ == '__main__':
  absltest.main()
