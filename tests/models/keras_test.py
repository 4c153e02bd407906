"""Keras 3 on JAX: a functional model, by `stateless_call`."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
import pytest

import sparse24_jax as s24
from tests.models.training import check_training, package, random_like

keras = package('keras')
pytestmark = pytest.mark.slow


class KerasTest(absltest.TestCase):

  def test_transformer_layer(self):
    self.assertEqual(keras.backend.backend(), 'jax')
    self.enterContext(jax.numpy_rank_promotion('allow'))  # Keras adds biases so
    inputs = keras.Input((8, 16))
    h = inputs + keras.layers.MultiHeadAttention(2, 8, name='mha')(inputs, inputs)
    h = h + keras.layers.Dense(16, name='down')(keras.layers.Dense(32, activation='gelu', name='up')(h))
    model = keras.Model(inputs, h)
    params = random_like({v.path: v.value for v in model.trainable_variables})
    x, y = jax.random.normal(jax.random.key(1), (2, 2, 8, 16))

    def loss(params, x, y):
      weights = [params[v.path] for v in model.trainable_variables]
      out, _ = model.stateless_call(weights, [v.value for v in model.non_trainable_variables], x)
      return jnp.mean((out - y) ** 2)

    bound = s24.bind(s24.recipes.ste('.*/kernel'), loss, params, x, y)
    expected = {f'mha/{name}/kernel': 'in 0, out 1 2' for name in ('key', 'query', 'value')}
    expected |= {f'{name}/kernel': 'in 0, out 1' for name in ('up', 'down')}
    expected['mha/attention_output/kernel'] = 'in 0 1, out 2'
    self.assertEqual(bound['up/kernel'].uses[0].block, 'gelu_exact')
    check_training(bound, loss, params, x, y, expected=expected)


if __name__ == '__main__':
  absltest.main()
