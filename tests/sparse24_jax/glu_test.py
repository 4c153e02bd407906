import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.two_of_four.philox import two_keys
import sparse24_jax as s24
from tests import oracles

FST = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue')
KEY = jax.random.key(0)


def activation_and_derivative(name: str, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """SiLU, and GELU in its tanh form, in float64."""
  if name == 'silu':
    sigmoid = 1 / (1 + np.exp(-a))
    return a * sigmoid, sigmoid * (1 + a * (1 - sigmoid))
  inner = np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)
  slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * a**2)
  return a * (1 + np.tanh(inner)) / 2, (1 + np.tanh(inner)) / 2 + a * slope / np.cosh(inner) ** 2 / 2


class GatedLinearUnitTest(parameterized.TestCase):
  @parameterized.product(activation=('silu', 'gelu'), weight_grad=('dense', 'mvue'))
  def test_against_the_formula(self, activation, weight_grad):
    policy = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad=weight_grad)
    rng = np.random.default_rng(0)
    x, gate, up = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((8, 16), (16, 12), (16, 12)))
    out = jnp.asarray(rng.standard_normal((8, 12)), jnp.float32)
    state = (policy.projection.init(gate), policy.projection.init(up))
    op = functools.partial(s24.gated_linear_unit, policy=policy, activation=activation, key=KEY)
    y, vjp = jax.vjp(lambda x, gate, up: op(x, gate, up, state), x, gate, up)
    dx, dgate, dup = vjp(out)

    wide_x, dy = oracles.wide(x), oracles.wide(out)
    masked = [np.where(mask, oracles.wide(w), 0) for w, mask in zip((gate, up), state, strict=True)]
    value, slope = activation_and_derivative(activation, wide_x @ masked[0])
    da, db = dy * (wide_x @ masked[1]) * slope, dy * value
    np.testing.assert_allclose(y, value * (wide_x @ masked[1]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, da @ masked[0].T + db @ masked[1].T, rtol=1e-4, atol=1e-5)
    sampled = [da, db]
    if weight_grad == 'mvue':
      keys = two_keys(KEY)
      sampled = [s24.mvue24(jnp.asarray(d, jnp.float32), k, axis=0) for d, k in zip(sampled, keys, strict=True)]
    np.testing.assert_allclose(dgate, wide_x.T @ oracles.wide(sampled[0]), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dup, wide_x.T @ oracles.wide(sampled[1]), rtol=1e-4, atol=1e-4)

  def test_the_two_weights_draw_independently(self):
    x = jnp.eye(8, 16)
    w = jnp.ones((16, 256))
    policy = s24.DotPolicy(weight_grad='mvue')
    gradients = jax.grad(lambda g, u: s24.gated_linear_unit(x, g, u, policy=policy, key=KEY).sum(), argnums=(0, 1))
    kept = [np.asarray(g)[:8] != 0 for g in gradients(w, w)]
    self.assertEqual([k.mean() for k in kept], [0.5, 0.5])
    self.assertAlmostEqual((kept[0] == kept[1]).mean(), 0.5, delta=4 * 0.5 / np.sqrt(512))

  def test_dtype_and_token_axes(self):
    w = jnp.ones((8, 4), jnp.bfloat16)
    state = (FST.projection.init(w), FST.projection.init(w))
    y = s24.gated_linear_unit(jnp.ones((2, 3, 8), jnp.bfloat16), w, w, state, policy=FST)
    self.assertEqual((y.shape, y.dtype), ((2, 3, 4), jnp.bfloat16))


if __name__ == '__main__':
  absltest.main()
