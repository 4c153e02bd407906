"""Gated activations' reference and argument checks, on the CPU."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.activations import ACTIVATIONS
from pallas_kernels.gated_activation import api
from pallas_kernels.pack import api as pack
from pallas_kernels.quantize import api as quantize
from tests.draws import gaussian

PLAIN = {
  'silu': jax.nn.silu,
  'gelu': lambda z: jax.nn.gelu(z, approximate=True),
  'gelu_exact': lambda z: jax.nn.gelu(z, approximate=False),
  'relu': jax.nn.relu,
  'squared_relu': lambda z: jnp.square(jax.nn.relu(z)),
}


# The derivatives cancel where they change sign: a few units in the last place of terms of size one.
CLOSE = dict(rtol=1e-5, atol=4e-6)
E5M2 = jnp.float8_e5m2


def backward(z, **options):
  return api.activation_backward_pack(z, z, None, gated=False, **options)


class GatedActivationTest(parameterized.TestCase):

  @parameterized.parameters(*ACTIVATIONS)
  def test_nan_passes_and_zero_is_zero(self, activation):
    known, z = ACTIVATIONS[activation], jnp.array([jnp.nan, 0.0, -0.0, -jnp.inf, 1.0, -1.0])
    in_kernel = known.in_kernel(z)
    self.assertTrue(jnp.isnan(in_kernel[0]))
    np.testing.assert_array_equal(in_kernel[1:3], 0)
    np.testing.assert_allclose(in_kernel[4:], known.function(z)[4:], rtol=1e-6)
    np.testing.assert_array_equal(jnp.isnan(in_kernel), jnp.isnan(known.value_and_slope(z)[0]))

  @parameterized.product(activation=list(PLAIN))
  @pytest.mark.few(3)
  def test_agrees_with_autodiff(self, activation):
    rng = np.random.default_rng(0)
    z = 2 * rng.standard_normal((12, 16), np.float32)
    dh, dz = rng.standard_normal((12, 8), np.float32), rng.standard_normal((12, 16), np.float32)

    def plain(z):
      gate, up = jnp.split(z, 2, axis=-1)
      return PLAIN[activation](gate) * up

    @jax.jit
    def ours(z, dh, dz):
      h = api.gated_activation(z, activation=activation)
      gated = api.activation_backward(dh, z, activation=activation)
      return h, gated, api.activation_backward(dz, z, activation=activation, gated=False)

    @jax.jit
    def autodiff(z, dh, dz):
      h, vjp = jax.vjp(plain, z)
      return h, *vjp(dh), *jax.vjp(PLAIN[activation], z)[1](dz)

    for found, expected in zip(ours(z, dh, dz), autodiff(z, dh, dz), strict=True):
      np.testing.assert_allclose(found, expected, **CLOSE)

  @parameterized.parameters((True, 'bfloat16'), (False, 'bfloat16'), (False, 'float32'))
  @pytest.mark.few
  def test_pack_samples_the_result(self, gated, dtype):
    features, tokens, key = 32, 64, jax.random.key(2)
    dh = gaussian(0, (tokens, features), dtype)
    z = gaussian(1, (tokens, features * (2 if gated else 1)), dtype)
    made = jax.jit(functools.partial(api.activation_backward_pack, gated=gated))(dh, z, key)
    dz = jax.jit(functools.partial(api.activation_backward, gated=gated))(dh, z)
    np.testing.assert_array_equal(made.dense, dz)
    expected = jax.jit(pack.mvue_pack)(dz, key).operand
    np.testing.assert_array_equal(made.operand.metadata, expected.metadata)
    np.testing.assert_array_equal(made.operand.values, expected.values)
    self.assertEqual((made.dense.dtype, made.operand.dtype), (dtype, 'bfloat16'))

  @parameterized.parameters(True, False)
  @pytest.mark.few
  def test_float8_pack_is_that_of_the_result(self, gated):
    features, tokens, key = 32, 64, jax.random.key(2)
    dh = gaussian(0, (tokens, features), jnp.bfloat16)
    z = gaussian(1, (tokens, features * (2 if gated else 1)), jnp.bfloat16)
    options = dict(gated=gated)
    dz = jax.jit(functools.partial(api.activation_backward, **options))(dh, z)
    largest = jax.jit(functools.partial(api.activation_backward_amax, **options))(dh, z)
    np.testing.assert_array_equal(largest, np.abs(np.asarray(dz).astype(np.float32)).max())
    scale = quantize.current_scale(largest, E5M2)
    made = jax.jit(functools.partial(api.activation_backward_pack, dtype=E5M2, **options))(dh, z, key, scale)
    expected = jax.jit(functools.partial(pack.mvue_pack, dtype=E5M2))(dz, key, scale)
    for found, wanted in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
      bits = f'u{wanted.dtype.itemsize}'
      np.testing.assert_array_equal(np.asarray(found).view(bits), np.asarray(wanted).view(bits))

  @parameterized.named_parameters(
    ('scale', lambda z: backward(z, scale=jnp.ones(2), dtype=E5M2), r'scale must have shape \(\), .* found \(2,\)'),
    ('no_scale', lambda z: backward(z, dtype=E5M2), 'dtype=float8_e5m2 needs a scale .* found None'),
    ('dtype8', lambda z: backward(z, scale=1.0, dtype=z.dtype), 'float8_e4m3fn or float8_e5m2, found bfloat16'),
    ('other_dtype', lambda z: backward(z, dtype=jnp.float16), 'float16 differs from the 16-bit z, bfloat16'),
    ('activation', lambda z: api.gated_activation(z, activation='tanh'), 'known are'),
    ('odd', lambda z: api.gated_activation(z[:, :3]), 'odd length'),
    ('shape', lambda z: api.activation_backward(z, z), r'\(8, 4\)'),
    ('dtype', lambda z: api.activation_backward(z.astype(jnp.float32), z, gated=False), 'bfloat16'),
    ('blocks', lambda z: backward(z[:6]), 'multiples of four'),
  )
  def test_bad_arguments(self, call, message):
    with self.assertRaisesRegex(ValueError, message):
      call(jnp.ones((8, 8), jnp.bfloat16))


if __name__ == '__main__':
  absltest.main()
