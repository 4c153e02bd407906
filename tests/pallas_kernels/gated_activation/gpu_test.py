"""Gated activations on a GPU: `pytest -m gpu`.

Exponentials round otherwise than XLA's, so values are held to a rounding; what is picked from them is exact.
"""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from pallas_kernels import _device, _tuning
from pallas_kernels.gated_activation import api
from pallas_kernels.pack import api as pack
from tests.pallas_kernels.on_a_gpu import assert_same_bits, check_default, compiled, marks, REPEATS

pytestmark = marks(8, 0)

KEY, E5M2 = jax.random.key(2), jnp.float8_e5m2
# Features and tokens: tiles that are not full, and many that are.
SIZES = (576, 260), (2048, 4096)
KINDS = ('silu', True), ('gelu', True), ('gelu', False), ('squared_relu', False)


def problem(size, kind, dtype=jnp.bfloat16):
  """(dh, z, options)."""
  (features, tokens), (activation, gated) = size, kind
  wide = features * (2 if gated else 1)
  dh, z = (jax.random.normal(jax.random.key(i), (tokens, f), dtype) for i, f in enumerate((features, wide)))
  return dh, 2 * z, dict(activation=activation, gated=gated)


class GatedActivationTest(parameterized.TestCase):

  @parameterized.parameters(*((SIZES[0], kind) for kind in KINDS), (SIZES[1], KINDS[0]), (SIZES[1], KINDS[2]))
  def test_backward_and_its_sample(self, size, kind):
    dh, z, options = problem(size, kind, jnp.float16 if kind == KINDS[2] else jnp.bfloat16)
    f = compiled(api.activation_backward_pack, 'triton', **options)
    found = f(dh, z, KEY)
    dz = found.dense
    near = jax.jit(functools.partial(api.activation_backward, **options))(dh, z)
    self.assertLessEqual(_tuning.relative_error(dz, near), _tuning.TOLERANCE)
    assert_same_bits(found.operand, compiled(pack.mvue_pack, 'reference')(dz, KEY).operand)
    for _ in range(REPEATS if (size, kind) == (SIZES[1], KINDS[0]) else 0):
      assert_same_bits(f(dh, z, KEY), found)

  @parameterized.parameters((SIZES[0], KINDS[1]), (SIZES[0], KINDS[2]), (SIZES[1], KINDS[0]))
  def test_backward_and_its_sample_in_float8(self, size, kind):
    if _device.current().capability < (8, 9):
      self.skipTest('needs compute capability 8.9')
    dh, z, options = problem(size, kind)
    dz = compiled(api.activation_backward_pack, 'triton', **options)(dh, z, KEY).dense
    scale = jnp.float32(5000)
    found = compiled(api.activation_backward_pack, 'triton', dtype=E5M2, **options)(dh, z, KEY, scale)
    assert_same_bits(found, compiled(pack.mvue_pack, 'reference', dtype=E5M2)(dz, KEY, scale))
    amax = jax.jit(functools.partial(api.activation_backward_amax, **options))(dh, z)
    self.assertLessEqual(_tuning.relative_error(amax, jnp.max(jnp.abs(dz))), _tuning.TOLERANCE)

  def test_default(self):
    dh, z, options = problem(SIZES[0], KINDS[0])
    check_default(api.activation_backward_pack, dh, z, KEY, **options)
    if _device.current().capability >= (8, 9):
      check_default(api.activation_backward_pack, dh, z, KEY, jnp.float32(5000), dtype=E5M2, **options)


if __name__ == '__main__':
  absltest.main()
