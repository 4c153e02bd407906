from absl.testing import absltest, parameterized
import jax
from jax.experimental import checkify
import jax.numpy as jnp
import numpy as np

from pallas_kernels.two_of_four import mvue
import sparse24_jax as s24

X = jnp.asarray(np.random.default_rng(0).standard_normal((3, 8, 12)), jnp.bfloat16)
KEY = jax.random.key(0)


class MvueTest(parameterized.TestCase):
  @parameterized.parameters(-1, -2)
  def test_is_the_reference(self, axis):
    found = s24.mvue24(X, KEY, axis=axis)
    np.testing.assert_array_equal(found, mvue.mvue24(X, KEY, axis=axis))
    s24.verify24(found, axis=axis)

  def test_defaults(self):
    np.testing.assert_array_equal(s24.mvue24(X, KEY), mvue.mvue24(X, KEY, axis=2))

  def test_keys(self):
    mvue24 = jax.jit(s24.mvue24)
    raw = jax.random.key_data(KEY)
    np.testing.assert_array_equal(mvue24(X, KEY), mvue24(X, raw))
    batched = jax.jit(jax.vmap(s24.mvue24))(X, jax.random.split(KEY, 3))
    np.testing.assert_array_equal(batched[1], mvue24(X[1], jax.random.split(KEY, 3)[1]))
    self.assertTrue((mvue24(X, KEY) != mvue24(X, jax.random.key(1))).any())

  @parameterized.parameters(jnp.nan, jnp.inf, -jnp.inf)
  def test_what_is_not_finite_is_an_error_under_checkify(self, value):
    checked = checkify.checkify(jax.jit(s24.mvue24))
    error, _ = checked(X, KEY)
    self.assertIsNone(error.get())
    error, _ = checked(X.at[0, 0, 0].set(value), KEY)
    self.assertRegex(str(error.get()), 'x holds a NaN or an infinity')


if __name__ == '__main__':
  absltest.main()
