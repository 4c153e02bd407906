"""Equinox: weights [out, in] in modules that are trees themselves."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
import pytest

import sparse24_jax as s24
from tests.models.training import check_training, package

eqx = package('equinox')
pytestmark = pytest.mark.slow
OUT_IN = 'in 1, out 0'


class EquinoxTest(absltest.TestCase):

  def test_mlp(self):
    model = eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(0))
    x, y = jax.random.normal(jax.random.key(1), (2, 8, 16))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x, y):
      return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)

    bound = s24.bind(s24.recipes.ste('.*/weight'), loss, params, x, y)
    check_training(bound, loss, params, x, y, expected={f'layers/{i}/weight': OUT_IN for i in range(3)})

  def test_attention(self):
    model = eqx.nn.MultiheadAttention(4, 16, key=jax.random.key(0))
    x, y = jax.random.normal(jax.random.key(1), (2, 8, 16))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x, y):
      return jnp.mean((eqx.combine(params, static)(x, x, x) - y) ** 2)

    bound = s24.bind(s24.recipes.ste('.*/weight'), loss, params, x, y)
    names = ('query', 'key', 'value', 'output')
    check_training(bound, loss, params, x, y, expected={f'{name}_proj/weight': OUT_IN for name in names})


if __name__ == '__main__':
  absltest.main()
