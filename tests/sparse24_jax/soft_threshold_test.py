from absl.testing import absltest, parameterized
import jax.numpy as jnp
import numpy as np

import sparse24_jax as s24
from tests import oracles
from tests.draws import gaussian


class SoftThresholdTest(parameterized.TestCase):
  @parameterized.parameters(-1, -2)
  def test_against_the_definition(self, axis):
    w = gaussian(0, (3, 16, 8))
    np.testing.assert_array_equal(s24.soft_threshold(w, axis=axis), oracles.soft_threshold(w, axis=axis).astype('f4'))
    np.testing.assert_allclose(
      s24.soft_threshold_scale(w, axis=axis), oracles.soft_threshold_scale(w, axis=axis), rtol=1e-6
    )

  @parameterized.parameters(0.02, 1.0, 7.0)
  def test_scale_of_a_gaussian(self, spread):
    w = spread * gaussian(1, (1024, 1024))
    self.assertAlmostEqual(float(s24.soft_threshold_scale(w)), 1.483, delta=0.005)
    self.assertAlmostEqual(float(s24.soft_threshold_scale(w.astype(jnp.bfloat16))), 1.483, delta=0.005)

  def test_scale_is_one_a_matrix(self):
    w = jnp.stack([gaussian(2, (16, 8)), jnp.zeros((16, 8))])
    self.assertEqual((s24.soft_threshold_scale(w).shape, s24.soft_threshold_scale(w[0]).shape), ((2,), ()))
    self.assertAlmostEqual(float(s24.soft_threshold_scale(w)[1]), 1.4837)


if __name__ == '__main__':
  absltest.main()
