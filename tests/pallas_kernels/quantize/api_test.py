"""Rounding to float8: scales, the reference against ml_dtypes, and what XLA makes of the dense matmul."""

import functools
import re
import unittest

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.quantize import api
from tests.draws import gaussian
from tests.pallas_kernels import compiling

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def compiled_for_hopper(f, *structs):
  """Optimised HLO of `f` for an H100, without autotuning, which needs the GPU."""
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(
    platform='cuda', target_config=compiling.description('sm_90a'), topology='1x1x1'
  )
  mesh = topologies.make_mesh(topology, (1,), ('x',))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  structs = [jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in structs]
  options = {'xla_gpu_autotune_level': 0, 'xla_gpu_enable_triton_gemm': False}
  return jax.jit(f).lower(*structs).compile(compiler_options=options).as_text()


class CurrentScaleTest(parameterized.TestCase):
  @parameterized.parameters(E4M3, E5M2)
  def test_brings_the_largest_entry_to_the_largest_value(self, dtype):
    amax = jnp.array([1e-30, 0.37, 1.0, 3e38], jnp.float32)
    scale = api.current_scale(amax, dtype)
    np.testing.assert_allclose(np.asarray(amax, np.float64) * np.asarray(scale), LARGEST[dtype], rtol=3e-7)

  @parameterized.parameters(0.0, 1e-45, 1e-39, 2e-38)
  def test_a_tiny_maximum_keeps_the_scale_and_its_inverse_normal(self, amax):
    for dtype in (E4M3, E5M2):
      scale = float(api.current_scale(jnp.float32(amax), dtype))
      self.assertTrue(1 < scale <= 2.0**126)

  def test_a_zero_tensor_stays_zero(self):
    scale = api.current_scale(api.amax(jnp.zeros((4, 4))), E4M3)
    q = api.quantize(jnp.zeros((4, 4)), scale, dtype=E4M3)
    np.testing.assert_array_equal(np.asarray(q).astype(np.float32) / np.asarray(scale), np.zeros((4, 4)))

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_an_overflow_shows(self, special):
    x = jnp.ones((4, 4)).at[1, 2].set(special)
    for dtype in (E4M3, E5M2):
      scale = api.current_scale(api.amax(x), dtype)
      q = api.quantize(x, scale, dtype=dtype)
      found = api.fp8_dot(q, jnp.ones((4, 4), E4M3), scale, jnp.float32(1), out_dtype=jnp.float32)
      self.assertTrue(np.isnan(found).all())

  def test_one_scale_a_matrix(self):
    x = gaussian(0, (3, 8, 12), jnp.bfloat16)
    found, largest = api.amax(x), np.abs(np.asarray(x).astype(np.float32)).max((1, 2))
    np.testing.assert_array_equal(found, largest)
    np.testing.assert_array_equal(api.current_scale(found, E4M3), np.float32(448) / largest)

  @parameterized.parameters(jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)
  def test_what_three_devices_have_stays_there(self, kind):
    mesh = jax.make_mesh((3,), ('d',), axis_types=(kind,), devices=jax.devices()[:3])
    x = jax.device_put(gaussian(0, (24, 8)), jax.sharding.NamedSharding(mesh, jax.P('d')))
    scale = jax.jit(lambda x: api.current_scale(api.amax(x), E4M3)).lower(x).compile()
    self.assertNotIn('all-gather', scale.as_text())
    np.testing.assert_array_equal(scale(x), np.float32(448) / np.abs(x).max())


class QuantizeTest(parameterized.TestCase):

  @parameterized.product(dtype=(E4M3, E5M2), source=(jnp.bfloat16, jnp.float16, jnp.float32))
  def test_rounds_once_saturates_and_keeps_nan(self, dtype, source):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((64, 96)) * np.exp2(rng.uniform(-12, 6, (64, 96)))).astype(np.float32)
    x[0, :6] = 0, -0.0, np.nan, np.inf, -np.inf, 6e4
    x = np.asarray(jnp.asarray(x).astype(source))
    scale = np.float32(LARGEST[dtype] / 37.7)
    plain, transposed = api.quantize(jnp.asarray(x), jnp.float32(scale), dtype=dtype, transpose='both')
    exact = np.clip(x.astype(np.float32) * scale, -LARGEST[dtype], LARGEST[dtype])
    expected = exact.astype(ml_dtypes.float8_e4m3fn if dtype == E4M3 else ml_dtypes.float8_e5m2)
    np.testing.assert_array_equal(np.asarray(plain).view(np.uint8), expected.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(transposed).view(np.uint8), expected.view(np.uint8).T)
    self.assertTrue(np.isnan(expected[0, 2].astype(np.float32)))

  def test_layouts_agree(self):
    x, scale = gaussian(0, (2, 12, 20)), jnp.array([100.0, 3.0], jnp.float32)
    call = functools.partial(api.quantize, x, scale, dtype=E5M2)
    plain, transposed = call(transpose='both')
    for found, expected in ((call(), plain), (call(transpose='only'), transposed), (transposed.swapaxes(1, 2), plain)):
      np.testing.assert_array_equal(np.asarray(found).view(np.uint8), np.asarray(expected).view(np.uint8))

  @parameterized.named_parameters(
    ('dtype', lambda x: api.quantize(x, 1.0, dtype=jnp.bfloat16), 'float8_e4m3fn or float8_e5m2'),
    ('source', lambda x: api.quantize(x.astype(jnp.int32), 1.0, dtype=E4M3), 'int32'),
    ('vector', lambda x: api.quantize(x[0], 1.0, dtype=E4M3), 'two axes'),
    ('transpose', lambda x: api.quantize(x, 1.0, dtype=E4M3, transpose='yes'), "'yes'"),
    ('scale', lambda x: api.quantize(x, jnp.ones(8), dtype=E4M3), 'one a matrix'),
    ('implementation', lambda x: api.quantize(x, 1.0, dtype=E4M3, implementation='cuda'), 'unknown'),
    ('amax', lambda x: api.current_scale(x, jnp.float16), 'float16'),
    ('dot_dtype', lambda x: api.fp8_dot(x, x, 1.0, 1.0), 'float32'),
    ('dot_shape', lambda x: api.fp8_dot(x.astype(E4M3), x[:, :4].astype(E4M3), 1.0, 1.0), 'same K'),
    ('dot_scale', lambda x: api.fp8_dot(x.astype(E4M3), x.astype(E4M3), jnp.ones(8), 1.0), 'scalars'),
  )
  def test_bad_arguments(self, call, message):
    with self.assertRaisesRegex(ValueError, message):
      call(jnp.ones((8, 8)))


class Fp8DotTest(parameterized.TestCase):

  @parameterized.parameters((E5M2, E4M3, jnp.bfloat16, 4e-3), (E4M3, E4M3, jnp.float32, 1e-6))
  def test_is_the_scaled_matmul(self, a_dtype, b_dtype, out_dtype, tolerance):
    a = gaussian(0, (48, 64)).astype(a_dtype)
    b = gaussian(1, (32, 64)).astype(b_dtype)
    found = np.asarray(api.fp8_dot(a, b, jnp.float32(3), jnp.float32(0.25), out_dtype=out_dtype))
    self.assertEqual(found.dtype, out_dtype)
    expected = (np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64).T) / 0.75
    self.assertLess(np.linalg.norm(found.astype(np.float64) - expected), tolerance * np.linalg.norm(expected))

  @unittest.skipUnless(compiling.can_compile_for_gpu(), 'the CUDA plug-in is not installed')
  @parameterized.parameters((E5M2, E4M3), (E4M3, E4M3))
  def test_is_one_float8_matmul_on_hopper(self, a_dtype, b_dtype):
    scalar = ((), jnp.float32)
    hlo = compiled_for_hopper(api.fp8_dot, ((1024, 2048), a_dtype), ((512, 2048), b_dtype), scalar, scalar)
    self.assertEqual(re.findall(r'custom_call_target="([^"]*)"', hlo), ['__cublas$lt$matmul$f8'])
    # No pass over a matrix beside it: every other result is a scalar.
    entry = hlo[hlo.index('ENTRY') :]
    self.assertEqual(re.findall(r'= \w+\[\d[\d,]*\]\S* (?:fusion|transpose|copy|convert|multiply)', entry), [])
    self.assertIn('bf16[1024,512]', entry)


if __name__ == '__main__':
  absltest.main()
