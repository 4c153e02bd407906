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
    raw, keys, x = jax.random.key_data(KEY), jax.random.split(KEY, 3), np.asarray(X)
    of_one = np.asarray(mvue24(x[1], KEY))
    np.testing.assert_array_equal(of_one, mvue24(x[1], raw))
    batched = np.asarray(jax.jit(jax.vmap(s24.mvue24))(x, keys))
    np.testing.assert_array_equal(batched[1], mvue24(x[1], keys[1]))
    self.assertTrue((of_one != np.asarray(mvue24(x[1], jax.random.key(1)))).any())

  @parameterized.parameters(jnp.nan, jnp.inf, -jnp.inf)
  def test_what_is_not_finite_is_an_error_under_checkify(self, value):
    checked = checkify.checkify(jax.jit(s24.mvue24))
    error, _ = checked(X, KEY)
    self.assertIsNone(error.get())
    error, _ = checked(X.at[0, 0, 0].set(value), KEY)
    self.assertRegex(str(error.get()), 'x holds a NaN or an infinity')


if __name__ == '__main__':
  absltest.main()
