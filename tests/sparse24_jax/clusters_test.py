"""Tests for clusters in a projection's state, and for the layers that read them there."""

import dataclasses

from absl.testing import absltest, parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax.activation_sparsity import neuron_level_ffn
from sparse24_jax.clusters import clustered, split_clusters
from sparse24_jax.neurons import cluster_neurons, route_tokens
from sparse24_jax.optim import regroup_neurons
from tests.draws import gaussian

D, HIDDEN, TOKENS, CLUSTERS = 8, 32, 16, 4
BLOCKS = s24.ActivationPolicy(s24.VNM(4, 8), s24.VNM(4, 8), dense_features=0.05)
POLICY = dataclasses.replace(BLOCKS, clusters=s24.Clusters(CLUSTERS))
UP, DOWN = '(.*/)?up/kernel', '(.*/)?down/kernel'


def random(seed, *shape):
  return gaussian(seed, shape)


def setting(policy=POLICY, layers=()):
  """A linen layer, its parameters, the recipe and an optimizer state."""
  params = {'up': {'kernel': random(0, *layers, D, HIDDEN)}, 'down': {'kernel': random(1, *layers, HIDDEN, D)}}
  recipe = s24.recipes.neuron_level(UP, DOWN, policy=policy)
  opt_state = s24.sparse_training(optax.adam(1e-2), recipe, phase='sparse').init(params)
  return s24.linen.Sparse24MLP(HIDDEN, activation='squared_relu'), params, recipe, opt_state


class StateTest(parameterized.TestCase):
  @parameterized.parameters((), (3,))
  def test_state_is_one_array_with_clusters_and_scale(self, *layers):
    w = random(0, *layers, D, HIDDEN)
    projection, plain = clustered(s24.soft_threshold_projection(), CLUSTERS), s24.soft_threshold_projection()
    scale, neurons = split_clusters(projection.init(w))
    np.testing.assert_array_equal(neurons, cluster_neurons(w, clusters=CLUSTERS))
    np.testing.assert_array_equal(scale, plain.init(w))
    np.testing.assert_array_equal(projection.apply(w, projection.init(w)), plain.apply(w, plain.init(w)))
    np.testing.assert_array_equal(projection.mask(w, projection.init(w)), plain.mask(w, plain.init(w)))

  def test_a_refresh_moves_no_neuron(self):
    projection = clustered(s24.soft_threshold_projection(), CLUSTERS)
    state = projection.init(random(0, D, HIDDEN))
    np.testing.assert_array_equal(projection.refresh(random(5, D, HIDDEN), state), state)

  def test_a_dense_weight_can_have_clusters(self):
    w = random(0, D, HIDDEN)
    projection = clustered(None, CLUSTERS)
    np.testing.assert_array_equal(projection.apply(w, projection.init(w)), w)
    self.assertTrue(projection.mask(w, projection.init(w)).all())

  def test_masks_do_not_go_with_clusters(self):
    with self.assertRaisesRegex(ValueError, r'has a state of shape \(8, 32\)'):
      clustered(s24.magnitude(), CLUSTERS).init(random(0, D, HIDDEN))

  @parameterized.parameters((), (2,))
  @pytest.mark.few
  def test_regrouping_follows_the_weights_of_now(self, *layers):
    _, params, recipe, opt_state = setting(layers=layers)
    later = jax.tree.map(lambda w: w + 2 * random(7, *w.shape), params)
    new = regroup_neurons(later, opt_state, recipe)
    scale, neurons = split_clusters(new.projections['up']['kernel'])
    np.testing.assert_array_equal(neurons, cluster_neurons(later['up']['kernel'], clusters=CLUSTERS))
    old_scale, old_neurons = split_clusters(opt_state.projections['up']['kernel'])
    np.testing.assert_array_equal(scale, old_scale)
    self.assertFalse((neurons == old_neurons).all())
    np.testing.assert_array_equal(new.projections['down']['kernel'], opt_state.projections['down']['kernel'])

  def test_a_weight_that_is_not_finite_keeps_its_clusters(self):
    _, params, recipe, opt_state = setting()
    later = jax.tree.map(lambda w: w + 2 * random(7, *w.shape), params)
    later['up']['kernel'] = later['up']['kernel'].at[..., 0, 0].set(np.nan)
    new = regroup_neurons(later, opt_state, recipe)
    np.testing.assert_array_equal(new.projections['up']['kernel'], opt_state.projections['up']['kernel'])

  def test_without_clusters_the_state_is_left_alone(self):
    _, params, recipe, opt_state = setting(BLOCKS)
    self.assertIs(regroup_neurons(params, opt_state, recipe), opt_state)

  @parameterized.parameters(BLOCKS, POLICY)
  def test_a_state_of_another_optimizer_is_refused(self, policy):
    _, params, recipe, _ = setting(policy)
    with self.assertRaisesRegex(ValueError, 'holds 0 states of sparse_training'):
      regroup_neurons(params, optax.adam(0.1).init(params), recipe)

  def test_steps_without_a_refresh_leave_states_that_were_not_searched_anyway(self):
    _, params, _, _ = setting()
    recipe = s24.recipes.neuron_level(UP, DOWN, policy=POLICY, refresh_every=2)
    tx = s24.sparse_training(optax.sgd(0.1), recipe, phase='sparse')
    state = tx.init(params)
    for _ in range(2):
      _, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params, refresh=False)
    self.assertTrue(np.isnan(s24.get_flip_rate(state).overall))  # none was counted; it was refused


class LayersTest(parameterized.TestCase):
  def expected(self, params, opt_state, x, policy=POLICY):
    scale, neurons = split_clusters(opt_state.projections['up']['kernel'])
    state = {'up': scale, 'down': opt_state.projections['down']['kernel'], 'neurons': neurons}
    return neuron_level_ffn(x, params['up']['kernel'], params['down']['kernel'], state, policy=policy)

  @parameterized.parameters(8, 0)
  @pytest.mark.few
  def test_linen(self, within):
    policy = dataclasses.replace(BLOCKS, clusters=s24.Clusters(CLUSTERS, within))
    mlp, params, recipe, opt_state = setting(policy)
    x = random(2, TOKENS, D)
    variables = {'params': params, 'sparse24': s24.sparse_variables(params, opt_state, recipe, phase='sparse')}
    found = s24.sparsify(mlp, recipe, phase='sparse').apply(variables, x)
    np.testing.assert_allclose(found, self.expected(params, opt_state, x, policy), rtol=1e-6, atol=1e-6)
    # The clusters matter: without them other neurons are kept.
    self.assertGreater(np.abs(found - self.expected(params, opt_state, x, BLOCKS)).max(), 1e-2)

  @pytest.mark.slow
  def test_nnx(self):
    _, params, recipe, opt_state = setting()
    model = s24.nnx.Sparse24MLP(D, HIDDEN, activation='squared_relu', rngs=nnx.Rngs(0))
    model.up.kernel[...], model.down.kernel[...] = params['up']['kernel'], params['down']['kernel']
    model = s24.sparsify(model, recipe, phase='sparse', rngs=nnx.Rngs(mvue=0))
    optimizer = nnx.Optimizer(model, s24.sparse_training(optax.adam(1e-2), recipe, phase='sparse'), wrt=nnx.Param)
    x = random(2, TOKENS, D)

    @nnx.jit
    def step(model, optimizer, x):
      variables = s24.sparse_variables(nnx.state(model, nnx.Param), optimizer.opt_state, recipe, phase='sparse')
      nnx.update(model, variables)
      y = model(x)
      grads = nnx.grad(lambda model: jnp.square(model(x)).mean())(model)
      optimizer.update(model, grads)
      return y

    np.testing.assert_allclose(step(model, optimizer, x), self.expected(params, opt_state, x), rtol=1e-5, atol=1e-5)
    self.assertFalse((model.up.kernel[...] == params['up']['kernel']).all())

  def test_routing_stays_within_windows(self):
    x, w = random(3, TOKENS, D), random(4, D, HIDDEN)
    neurons = cluster_neurons(w, clusters=CLUSTERS)
    order = route_tokens(x, w, neurons, clusters=CLUSTERS, within=8)
    np.testing.assert_array_equal(np.sort(order[:8]), np.arange(8))
    # Each window by itself gives the same order.
    for start in (0, 8):
      alone = route_tokens(x[start : start + 8], w, neurons, clusters=CLUSTERS)
      np.testing.assert_array_equal(order[start : start + 8] - start, alone)

  def test_what_does_not_fit_is_refused(self):
    _, params, _, opt_state = setting()
    policy = dataclasses.replace(BLOCKS, clusters=s24.Clusters(CLUSTERS, 12))
    with self.assertRaisesRegex(ValueError, 'x has 16 tokens; within=12'):
      self.expected(params, opt_state, random(2, TOKENS, D), policy)


if __name__ == '__main__':
  absltest.main()
