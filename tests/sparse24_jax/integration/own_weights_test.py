"""Weights that a forward reads itself, beside layers with hooks: the model is given the recipe without their rule."""

from absl.testing import absltest
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparse24_jax as s24
from tests.draws import parameters

WHOLE, HOOKED = s24.recipes.ste('up/kernel|own'), s24.recipes.ste('up/kernel')
POLICY = WHOLE.rules[0].policy
X = jnp.asarray(np.random.default_rng(0).standard_normal((6, 16), np.float32))


class Linen(nn.Module):
  @nn.compact
  def __call__(self, x):
    own = self.param('own', nn.initializers.normal(), (16, 8))
    mask = self.get_variable('sparse24', 'own', jnp.ones((16, 8), bool))
    return s24.dot(nn.Dense(16, use_bias=False, name='up')(x), own, mask, policy=POLICY)


class Nnx(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
    self.own = nnx.Param(jax.random.normal(rngs.params(), (16, 8)))

  def __call__(self, x, mask):
    return s24.dot(self.up(x), self.own[...], mask, policy=POLICY)


def opt_state(params):
  return s24.sparse_training(optax.sgd(0.1), WHOLE).init(params)


def expected(up, own):
  """X by both, the larger two of each four along the first axis kept, in NumPy."""
  found = np.asarray(X, np.float64)
  for w in (up, own):
    groups = np.asarray(w, np.float64).reshape(4, 4, -1)
    kept = np.argsort(np.argsort(-np.abs(groups), axis=1), axis=1) < 2
    found = found @ (groups * kept).reshape(w.shape)
  return found


class OwnWeightsTest(absltest.TestCase):

  def test_linen(self):
    model = Linen()
    params = parameters(model, X)
    variables = {'params': params, 'sparse24': s24.sparse_variables(params, opt_state(params), WHOLE)}
    found = s24.sparsify(model, HOOKED).apply(variables, X)
    np.testing.assert_allclose(found, expected(params['up']['kernel'], params['own']), rtol=1e-4, atol=1e-6)
    with self.assertRaisesRegex(ValueError, r'own of .*custom_vjp_call.*give bind and sparsify recipe.with_dense'):
      s24.sparsify(model, WHOLE).apply(variables, X)

  def test_nnx(self):
    model = s24.sparsify(Nnx(nnx.Rngs(0)), WHOLE.with_dense('own'))
    params = nnx.state(model, nnx.Param)
    state = opt_state(params)
    model.sparse24.states['up/kernel'][...] = jnp.zeros((16, 16), bool)
    nnx.update(model, s24.sparse_variables(params, state, WHOLE))
    own = s24.sparse_variables(nnx.to_pure_dict(params), state, WHOLE)['own']
    for _ in range(2):
      np.testing.assert_allclose(model(X, own), expected(model.up.kernel[...], model.own[...]), rtol=1e-4, atol=1e-6)
      model.own[...] = model.own[...] * jnp.linspace(1, 9, 16)[:, None]  # the forward brings its own mask
      own = s24.magnitude_mask(model.own[...])


if __name__ == '__main__':
  absltest.main()
