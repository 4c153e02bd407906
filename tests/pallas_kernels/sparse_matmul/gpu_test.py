"""The contract of `sparse_matmul` on a GPU: run by hand with `pytest -m gpu`, its log kept as a record."""

import dataclasses

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _device, _tuning
from pallas_kernels.arch import WGMMA
from pallas_kernels.sparse_matmul import _prepared, api, arg_specs, mosaic_gpu, verify
from pallas_kernels.sparse_matmul.call import Call, Vectors

pytestmark = pytest.mark.gpu


def _in_16_bits(seed):
  return verify.random_problem(np.random.default_rng(seed), 'mosaic_gpu_sm80')


@absltest.skipUnless(WGMMA in _device.current().arch.kernels, 'needs compute capability 9.0')
class GpuTest(parameterized.TestCase):

  def test_random_problems(self):
    self.assertEqual(verify.verify(40), 0)

  # Less than half of a tile, and about a whole one.
  @parameterized.product(n=(*range(8, 73, 8), *range(184, 201)), out_layout=('mn', 'nm'))
  def test_columns_about_the_edges_of_tiles(self, n, out_layout):
    case = verify.random_problem(np.random.default_rng(n)) | dict(n=n, out_layout=out_layout, b_layout='nk')
    config = mosaic_gpu.Config(bk=128 if case['a_dtype'].startswith('float8') else 64)
    self.assertEqual(config.bn, 192)
    case |= dict(config=dataclasses.asdict(config))
    self.assertIsNone(verify.check(case)[1])

  @parameterized.product(bn=(24, 40), n=(24, 40, 88, 200), out_layout=('mn', 'nm'))
  def test_tiles_of_an_odd_number_of_eight_columns(self, bn, n, out_layout):
    config = mosaic_gpu.Config(rows=64, bn=bn, cluster=2, along='n', epilogue_n=8)
    case = _in_16_bits(n) | dict(
      n=n, out_layout=out_layout, out_dtype='float32', b_layout='nk', config=dataclasses.asdict(config)
    )
    self.assertIsNone(verify.check(case)[1])

  @parameterized.product(
    tile=((128, 160), (64, 96), (64, 224)), n=(96, 200, 1600), out_layout=('mn', 'nm'), along=('m', 'n'),
    dtype=('bfloat16', 'float16'),
  )  # fmt: skip
  def test_tiles_of_half_a_box_of_columns(self, tile, n, out_layout, along, dtype):
    rows, bn = tile
    config = mosaic_gpu.Config(rows=rows, bn=bn, along=along, epilogue_n=32 if out_layout == 'mn' else bn // 2)
    case = _in_16_bits(n) | dict(
      n=n, a_dtype=dtype, b_dtype=dtype, out_dtype='bfloat16', b_layout='kn', out_layout=out_layout,
      config=dataclasses.asdict(config),
    )
    self.assertIsNone(verify.check(case)[1])

  @parameterized.parameters(64, 68, 124, 128, 132, 192, 196, 260)
  def test_k_tail(self, k):
    self.assertIsNone(verify.check(verify.random_problem(np.random.default_rng(k)) | dict(k=k))[1])

  @parameterized.product(
    k=(320, 448, 1600, 4800), b_dtype=('float8_e4m3fn', 'float8_e5m2'),
    change=(
      {}, dict(delay=0), dict(along='n'), dict(slots=2, split=4), dict(rows=64, bn=256),
    ),
  )  # fmt: skip
  def test_the_last_step_of_8_bits_is_half_a_one(self, k, b_dtype, change):
    self._check_half_steps(k, b_dtype, change)

  @parameterized.product(k=(448, 4800), b_dtype=('float8_e4m3fn', 'float8_e5m2'))
  def test_the_last_step_is_half_a_one_where_consumers_share_the_steps(self, k, b_dtype):
    change = dict(rows=64, bn=16, stages=6, cluster=1, epilogue_n=16, halves='k')
    self._check_half_steps(k, b_dtype, change)

  def _check_half_steps(self, k, b_dtype, change):
    case = verify.random_problem(np.random.default_rng(k)) | dict(
      k=k, a_dtype='float8_e4m3fn', b_dtype=b_dtype, b_layout='nk', out_layout='nm', out_dtype='bfloat16',
      config=dataclasses.asdict(mosaic_gpu.Config(**dict(bk=128) | change)),
    )
    self.assertIsNone(verify.check(case)[1])

  def test_changing_inputs_between_launches(self):
    """A missing fence would let one launch read what another left in shared memory."""
    spec = arg_specs.Spec(1024, 2048, 1024)
    p = _prepared.problem(spec)
    f = jax.jit(lambda a, b: mosaic_gpu.sparse_matmul(
      a, b, Vectors(), Call(p.out_dtype, 'nk', 'mn')))
    inputs = [_prepared.inputs(p, jax.random.key(i)) for i in range(8)]
    results = [f(x.a, x.b) for x in inputs]
    for x, d in zip(inputs, results, strict=True):
      self.assertLessEqual(_tuning.relative_error(d, _prepared.expected(p, x.a_dense, x.b)), _tuning.TOLERANCE)

  @parameterized.parameters(
    {}, dict(split=4, slots=2), dict(cluster=2, along='n'),
    dict(rows=64, bn=16, bk=128, stages=16, cluster=1, epilogue_n=16, halves='k'),
  )  # fmt: skip
  def test_the_largest_magnitude_whatever_came_before(self, **change):
    spec = arg_specs.Spec(512, 1024, 2048)
    x = _prepared.inputs(_prepared.problem(spec), jax.random.key(0))
    call = Call(jnp.dtype('bfloat16'), 'nk', 'nm', amax=True)
    f = jax.jit(lambda b: mosaic_gpu.sparse_matmul(x.a, b, Vectors(), call, config=mosaic_gpu.Config(**change)))
    for special in (jnp.nan, jnp.inf, -jnp.inf, None):
      d, largest = f(x.b if special is None else x.b.at[5, 7].set(special))
      np.testing.assert_array_equal(largest, np.abs(np.asarray(d, np.float32)).max())
      self.assertEqual(bool(jnp.isfinite(largest)), special is None)
    self.assertEqual(f(jnp.zeros_like(x.b))[1], 0)

  def test_a_small_largest_magnitude_in_float16(self):
    spec = arg_specs.Spec(512, 1024, 2048, dtype=jnp.dtype('float16'))
    x = _prepared.inputs(_prepared.problem(spec), jax.random.key(0))
    call = Call(jnp.dtype('float16'), 'nk', 'nm', amax=True, alpha=1e-7)
    d, largest = jax.jit(lambda b: mosaic_gpu.sparse_matmul(x.a, b, Vectors(), call))(x.b)
    np.testing.assert_array_equal(largest, np.abs(np.asarray(d, np.float32)).max())
    self.assertBetween(float(largest), 1e-7, 6e-5)

  def test_training_step_runs_the_kernel(self):
    spec = arg_specs.Spec(2048, 4096, 4096)
    x = _prepared.inputs(_prepared.problem(spec), jax.random.key(0))
    f = jax.jit(lambda a, b: api.sparse_matmul(a, b, implementation='mosaic_gpu'))
    self.assertIn('mosaic_gpu', f.lower(x.a, x.b).compile().as_text())

  def test_derivative(self):
    spec = arg_specs.Spec(256, 512, 384)
    x = _prepared.inputs(_prepared.problem(spec), jax.random.key(0))

    def loss(b, implementation):
      return jnp.sum(jnp.square(api.sparse_matmul(x.a, b, implementation=implementation).astype(jnp.float32)))

    found, expected = (jax.grad(loss)(x.b, i) for i in ('mosaic_gpu', 'reference'))
    self.assertLessEqual(_tuning.relative_error(found, expected), 2 * _tuning.TOLERANCE)


@absltest.skipUnless((8, 0) <= _device.current().capability <= (9, 0), 'needs compute capability 8.0 to 9.0')
class MmaSpTest(parameterized.TestCase):

  @parameterized.product(
    size=((1, 1, 4), (130, 70, 68), (512, 384, 1024)), dtype=('bfloat16', 'float16'), b_layout=('nk', 'kn'),
    out_layout=('mn', 'nm'),
  )
  def test_mma_sp(self, size, dtype, b_layout, out_layout):
    case = _in_16_bits(sum(size)) | dict(zip('mnk', size, strict=True), b_layout=b_layout, out_layout=out_layout)
    self.assertIsNone(verify.check(case | dict(a_dtype=dtype, b_dtype=dtype), 'mosaic_gpu_sm80')[1])

  @parameterized.product(
    activation=(None, 'gelu', 'silu', 'relu', 'squared_relu'), bias=(True, False), out_dtype=('bfloat16', 'float32')
  )
  def test_mma_sp_and_what_follows_the_matmul(self, **meaning):
    case = _in_16_bits(0) | dict(m=130, n=70, k=132, keep_preactivation=meaning['activation'] is not None) | meaning
    self.assertIsNone(verify.check(case, 'mosaic_gpu_sm80')[1])


if __name__ == '__main__':
  absltest.main()
