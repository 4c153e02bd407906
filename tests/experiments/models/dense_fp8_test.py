"""The dense FP8 baseline is near the exact matmul, and its gradients are."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from experiments.models import dense_fp8
from pallas_kernels import _tuning
from tests.draws import gaussian


class DenseFp8Test(absltest.TestCase):
  def test_quantised_both_ways(self):
    x = gaussian(0, (8, 12)) * 7
    plain, turned, factor = dense_fp8.both_ways(x, dense_fp8.E4M3)
    np.testing.assert_array_equal(plain.astype(jnp.float32).T, turned.astype(jnp.float32))
    self.assertEqual(float(jnp.abs(plain.astype(jnp.float32)).max()), 448.0)
    np.testing.assert_allclose(plain.astype(jnp.float32) * factor, x, rtol=1 / 16, atol=1e-3)

  def test_matmul_and_gradients_are_near(self):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dz = (jax.random.normal(k, s) for k, s in zip(keys, ((64, 32), (32, 48), (64, 48)), strict=True))
    found = jax.vjp(dense_fp8.fp8_dot, x, w)
    expected = jax.vjp(jnp.dot, x, w)
    self.assertBetween(_tuning.relative_error(found[0], expected[0]), 0.005, 0.05)
    for a, b in zip(found[1](dz), expected[1](dz), strict=True):
      self.assertBetween(_tuning.relative_error(a, b), 0.005, 0.1)


if __name__ == '__main__':
  absltest.main()
