"""Blocks whose hidden layer has its axes in another order, as `vmap` over an axis and `einsum` make them.

Whichever order that is, sparse activations choose for tokens in a row of what the first matmul is given.
"""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from tests.quick import jit
from tests.sparse24_jax.activation_oracles import D, draw, HIDDEN, TOKENS, written_all_dense

SEQUENCES, POSITIONS = 2, TOKENS // 2
POLICY = s24.ActivationPolicy(s24.VNM(8, 8), dense_features=1, sparse_weights=False)


def squared_relu(z):
  return jnp.square(jax.nn.relu(z))


def plus(z, bias):
  return z + jnp.expand_dims(bias, range(z.ndim - 1))


def mlp(p, x):
  return plus(squared_relu(plus(x @ p['up'], p['b_up'])) @ p['down'], p['b_down'])


def mapped_over_positions(p, x):
  return jax.vmap(lambda x: mlp(p, x), in_axes=1, out_axes=1)(x)


def without_biases(p, x):
  return jax.vmap(lambda x: squared_relu(x @ p['up']) @ p['down'], in_axes=1, out_axes=1)(x)


def mapped_over_positions_first(p, x):
  return jax.vmap(lambda x: mlp(p, x))(x.swapaxes(0, 1)).swapaxes(0, 1)


def mapped_over_parts_of_a_sequence(p, x):
  """The third of four axes."""
  x = x.reshape(SEQUENCES, 4, -1, D)
  return jax.vmap(lambda x: mlp(p, x), in_axes=2, out_axes=2)(x).reshape(SEQUENCES, POSITIONS, D)


def each_token(p, x):
  """`w @ x` under `vmap`, twice, without biases."""
  return jax.vmap(jax.vmap(lambda x: p['down'].T @ squared_relu(p['up'].T @ x)))(x)


def hidden_first(p, x):
  h = squared_relu(p['b_up'][:, None, None] + jnp.einsum('bsd,dh->hsb', x, p['up']))
  return plus(jnp.einsum('hsb,hd->bsd', h, p['down']), p['b_down'])


def transposed_in_front_of_the_bias(p, x):
  h = squared_relu(plus((x @ p['up']).swapaxes(0, 1), p['b_up']))
  return plus(h @ p['down'], p['b_down']).swapaxes(0, 1)


# Whether positions come first in what the first matmul is given, and whether it has biases.
CASES = {
  'mapped_over_positions': (mapped_over_positions, False, True),
  'hidden_first': (hidden_first, False, True),
  'without_biases': (without_biases, False, False),
  'mapped_over_positions_first': (mapped_over_positions_first, True, True),
  'mapped_over_parts_of_a_sequence': (mapped_over_parts_of_a_sequence, False, True),
  'each_token': (each_token, False, False),
  'transposed_in_front_of_the_bias': (transposed_in_front_of_the_bias, False, True),
}


def arguments():
  x, up, down, dz = draw()
  b_up, b_down = (jnp.linspace(-1, 1, n) for n in (HIDDEN, D))
  params = {'up': up, 'down': down, 'b_up': b_up, 'b_down': b_down}
  return params, *(a.reshape(SEQUENCES, POSITIONS, D) for a in (x, dz))


def value_and_gradients(f, params, x, dz):
  z, pull_back = jax.vjp(f, params, x)
  return z, *pull_back(dz)


def _sparse(g, states, p, x):
  return g(p, states, None, x)


class BlockOrderTest(parameterized.TestCase):

  @parameterized.parameters(*CASES)
  @pytest.mark.few(3)
  def test_neighbours_are_those_of_what_the_block_is_given(self, name):
    f, positions_first, biased = CASES[name]
    params, x, dz = arguments()
    recipe = s24.bind(s24.recipes.neuron_level('up', 'down', policy=POLICY), f, params, x)
    state = s24.sparse_training(optax.sgd(0.1), recipe, phase='sparse').init(params)
    states = s24.sparse_variables(params, state, recipe, phase='sparse')
    sparse = functools.partial(_sparse, s24.sparsify(f, recipe, phase='sparse'), states)
    z, grads, dx = jit(functools.partial(value_and_gradients, sparse))(params, x, dz)

    def rows(a):
      return (a.swapaxes(0, 1) if positions_first else a).reshape(TOKENS, D)

    b_up, b_down = (np.asarray(params[b]) * biased for b in ('b_up', 'b_down'))
    y, *expected = written_all_dense(POLICY, rows(x), params['up'], params['down'], rows(dz), b_up)
    found = [rows(z), rows(dx), *(grads[name] for name in ('up', 'down', 'b_up', 'b_down'))]
    of_biases = np.array(expected.pop()) * biased, np.sum(rows(dz), 0) * biased
    for a, b in zip(found, [y + b_down, *expected, *of_biases], strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)

  @parameterized.parameters(*CASES)
  @pytest.mark.few
  def test_with_weights_alone_sparse_it_is_the_model_of_the_projected_ones(self, name):
    f, (params, x, dz), ste = CASES[name][0], arguments(), s24.recipes.ste('up|down')
    recipe = s24.bind(ste, f, params, x)
    self.assertEqual([weight.uses[0].block for weight in recipe.weights], ['squared_relu'] * 2)
    sparse = functools.partial(_sparse, s24.sparsify(f, recipe), s24.sparse_variables(params, None, recipe))
    found = jit(functools.partial(value_and_gradients, sparse))(params, x, dz)
    expected = jit(functools.partial(value_and_gradients, f))(s24.project(params, None, recipe), x, dz)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


if __name__ == '__main__':
  absltest.main()
