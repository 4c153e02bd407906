"""Clusters of neurons, tokens routed by them, and the order of tokens in which a pattern sees them."""

import dataclasses
import functools
from unittest import mock

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import numpy as np
import pytest

import sparse24_jax as s24
from sparse24_jax import activation_sparsity as acts
from sparse24_jax.activation_patterns import feature_mask
from sparse24_jax.neurons import cluster_neurons, route_tokens, spread, unspread
from sparse24_jax.policy import ActivationPolicy, Clusters
from tests import oracles
from tests.quick import jit
from tests.sparse24_jax.activation_oracles import (
  apart,
  draw,
  eager,
  forward_and_grads,
  state_of,
  TOKENS,
  VNM,
)


def clusters_by_loops(w, clusters):
  """float64: k-means of directions until no neuron moves, then places in clusters of equal size, the surest first."""
  x = oracles.wide(w).T
  x = x / np.linalg.norm(x, axis=1, keepdims=True)
  starts = [0]
  while len(starts) < clusters:  # the next is the neuron that is least like any that was taken
    starts.append(min(range(len(x)), key=lambda i: max(x[i] @ x[j] for j in starts)))
  centres, nearest, before = x[starts], (x @ x[starts].T).argmax(1), None
  while not np.array_equal(nearest, before):
    means = np.array([x[nearest == cluster].mean(0) for cluster in range(clusters)])
    centres = means / np.linalg.norm(means, axis=1, keepdims=True)
    nearest, before = (x @ centres.T).argmax(1), nearest
  ids = [-1] * len(x)
  for i in sorted(range(len(x)), key=lambda i: -max(centres @ x[i])):
    with_room = [cluster for cluster in range(clusters) if ids.count(cluster) < len(x) // clusters]
    ids[i] = max(with_room, key=lambda cluster: centres[cluster] @ x[i])
  return ids


class RoutingTest(parameterized.TestCase):

  def test_finds_planted_clusters(self):
    rng = np.random.default_rng(0)
    centres = np.linalg.qr(rng.standard_normal((16, 4)))[0]
    label = rng.permutation(np.repeat(np.arange(4), 16))
    w = jnp.asarray(centres[:, label] + 0.05 * rng.standard_normal((16, 64)), jnp.float32)
    ids = np.asarray(cluster_neurons(w, clusters=4))
    self.assertLen({(a, b) for a, b in zip(ids.tolist(), label.tolist(), strict=True)}, 4)

  @parameterized.parameters(1, 2)
  def test_overlapping_clusters(self, seed):
    # Columns of all lengths and directions: where k-means starts, that it goes on, that its centres have length one and
    # who comes first where a cluster is full, each decides where some neurons go. With these seeds neurons stop moving
    # within ten steps, and no decision is closer than 1e-4, hundreds of times what float32 rounds.
    w = np.random.default_rng(seed).standard_normal((8, 64)).astype(np.float32)
    np.testing.assert_array_equal(cluster_neurons(jnp.asarray(w), clusters=4), clusters_by_loops(w, 4))

  def test_clusters_of_experts(self):
    w = draw(lead=(2,))[1]
    np.testing.assert_array_equal(
      cluster_neurons(w, clusters=4), jnp.stack([cluster_neurons(x, clusters=4) for x in w])
    )

  @parameterized.parameters(3, 128)
  def test_number_of_clusters(self, clusters):
    with self.assertRaisesRegex(ValueError, f'clusters={clusters} must divide the 64'):
      cluster_neurons(jnp.ones((8, 64)), clusters=clusters)

  def test_spread(self):
    np.testing.assert_array_equal(spread(jnp.arange(24), 8, 0), apart(24, 8))
    x = jnp.arange(48).reshape(2, 24)
    np.testing.assert_array_equal(unspread(spread(x, 8, 1), 8, 1), x)

  @pytest.mark.slow
  def test_permuted_and_permuted_back(self):
    policy = dataclasses.replace(VNM, clusters=Clusters(4))
    x, w_up, w_down, dz = draw()
    state = state_of(policy, w_up, w_down)
    order = np.asarray(jit(functools.partial(route_tokens, clusters=4))(x, w_up, state['neurons']))
    self.assertFalse((order == np.arange(TOKENS)).all())
    columns = np.argsort(state['neurons'], stable=True)
    inverse = [np.argsort(places) for places in (order, columns)]
    x, w_up, w_down, dz = map(np.asarray, (x, w_up, w_down, dz))
    sorted_state = state | {'neurons': np.asarray(state['neurons'])[columns]}
    with mock.patch.object(acts, 'route_tokens', lambda x, *_, **__: jnp.arange(x.shape[0])):
      z, dx, dw_up, dw_down = jit(functools.partial(eager, policy))(
        x[order], w_up[:, columns], w_down[columns], dz[order], sorted_state
      )
    z, dx, dw_up, dw_down = map(np.asarray, (z, dx, dw_up, dw_down))
    expected = (z[inverse[0]], dx[inverse[0]], dw_up[:, inverse[1]], dw_down[inverse[1]])
    for found, other in zip(forward_and_grads(policy, x, w_up, w_down, dz, state), expected, strict=True):
      np.testing.assert_allclose(found, other, rtol=1e-6, atol=1e-5)

  def test_routing_keeps_more_of_clustered_activations(self):
    # Eight kinds of tokens, each using its own eighth of the neurons, in random order: blocks of eight unsorted tokens
    # need all neurons of a group, sorted ones one. What is lost falls from a quarter to nearly nothing.
    rng = np.random.default_rng(0)
    centres = np.linalg.qr(rng.standard_normal((16, 8)))[0]
    label, kind = rng.permutation(np.repeat(np.arange(8), 16)), rng.permutation(np.repeat(np.arange(8), 16))
    w_up = (centres[:, label] + 0.1 * rng.standard_normal((16, 128))).astype(np.float32)
    x = (3 * centres[:, kind].T + 0.1 * rng.standard_normal((128, 16))).astype(np.float32)

    y = np.square(np.maximum(x @ w_up, 0))

    def lost(y, clusters=None):
      policy = ActivationPolicy(s24.VNM(8, 8), s24.VNM(8, 8), clusters=clusters)
      kept = jit(functools.partial(feature_mask, policy=policy))(y)
      return np.linalg.norm(np.where(kept, 0, y).sum(1)) / np.linalg.norm(y.sum(1))

    neurons = jit(functools.partial(cluster_neurons, clusters=8))(w_up)
    order = np.asarray(jit(functools.partial(route_tokens, clusters=8))(x, w_up, neurons))
    columns = np.argsort(neurons, kind='stable')
    self.assertLess(lost(y[order][:, columns], Clusters(8)), 0.2 * lost(y))


if __name__ == '__main__':
  absltest.main()
