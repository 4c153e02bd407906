"""Sparsified linen models in a loop, with remat, in a scan, and both: parameters, outputs, gradients."""

import functools
import itertools
import tempfile

from absl.testing import absltest, parameterized
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import sparse24_jax as s24
from tests.sparse24_jax.integration.linen_models import (
  apply,
  at_start,
  FST,
  init,
  KEY,
  LAYERS,
  Loop,
  MODELS,
  prepared,
  RECIPES,
  RULE,
  variables,
  X,
  Y,
)  # fmt: skip


@functools.cache
def gradient(name, recipe_name, seed=2):
  """Gradient of a squared error, for the parameters."""
  *_, params, v, _ = prepared(name, recipe_name)
  return _gradient(name, recipe_name)(params, v['sparse24'], jax.random.key(seed))


@functools.cache
def _gradient(name, recipe_name):
  sparse = s24.sparsify(MODELS[name], RECIPES[recipe_name])

  def loss(params, states, key):
    return ((sparse.apply({'params': params, 'sparse24': states}, X, rngs={'mvue': key}) - Y) ** 2).mean()

  return jax.jit(jax.grad(loss))


def assert_trees_equal(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def assert_trees_close(found, expected):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)

# Each model once, and each recipe; then the others.
_RECIPES = ('fst', 's_ste', 'ste')
_ONCE = tuple(zip(MODELS, itertools.cycle(_RECIPES), strict=False))
MODELS_AND_RECIPES = (*_ONCE, *(pair for pair in itertools.product(MODELS, _RECIPES) if pair not in _ONCE))


class SameModelTest(parameterized.TestCase):

  @parameterized.parameters(*MODELS)
  def test_same_parameters_to_the_bit(self, name):
    assert_trees_equal(init(s24.sparsify(MODELS[name], FST)), init(MODELS[name]))

  @parameterized.parameters(*MODELS_AND_RECIPES)
  @pytest.mark.few(len(MODELS))
  def test_output_is_that_of_the_projected_parameters(self, name, recipe):
    model, recipe, params, v, projected = prepared(name, recipe)
    found, expected, dense = jax.jit(
      lambda v, *p: (s24.sparsify(model, recipe).apply(v, X), *(model.apply({'params': q}, X) for q in p))
    )(v, projected, params)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    self.assertGreater(np.abs(np.asarray(found) - np.asarray(dense)).max(), 1e-3)

  def test_one_layer_by_hand(self):
    model, recipe = nn.Dense(4), s24.recipes.ste('kernel')
    params = init(model)
    w = np.asarray(params['kernel'])
    kept = np.argsort(np.argsort(-np.abs(w).reshape(4, 4, 4), axis=1), axis=1).reshape(16, 4) < 2
    found = apply(s24.sparsify(model, recipe), variables(params, recipe))
    np.testing.assert_allclose(found, np.asarray(X) @ np.where(kept, w, 0), rtol=1e-5, atol=1e-6)  # no bias yet

  def test_keeping_all_is_the_plain_model(self):
    recipe = s24.Recipe('all', (s24.Rule(RULE, s24.DotPolicy(s24.magnitude(n=4))),))
    params = init(Loop())
    found = apply(s24.sparsify(Loop(), recipe), variables(params, recipe))
    np.testing.assert_allclose(found, apply(Loop(), {'params': params}), rtol=1e-6, atol=1e-6)

  def test_dense_phase_is_the_plain_model_itself(self):
    sparse = s24.sparsify(Loop(), FST)
    self.assertEqual(s24.sparsify(sparse, FST, phase='dense'), Loop())
    self.assertEqual(s24.sparsify(Loop(), FST, phase='dense'), Loop())
    self.assertEqual(s24.sparsify(sparse, FST), sparse)

  @parameterized.parameters('loop', 'scan')
  @pytest.mark.few
  def test_checkpoint_of_a_sparse_run_loads_into_the_plain_model(self, name):
    model, recipe, params, _, _ = prepared(name, 'ste')
    tx = s24.sparse_training(optax.sgd(0.1), recipe)

    @jax.jit
    def step(params, gradients):
      return optax.apply_updates(params, tx.update(gradients, tx.init(params), params)[0])

    params = step(params, gradient(name, 'ste'))
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(f'{folder}/checkpoint', params)
      checkpointer.wait_until_finished()
      abstract = jax.eval_shape(model.init, jax.random.key(0), X)['params']
      loaded = checkpointer.restore(f'{folder}/checkpoint', abstract)
    assert_trees_equal(loaded, params)
    self.assertEqual(apply(model, {'params': loaded}).shape, (8, 4))

  def test_other_methods_and_wide_weights(self):
    class TwoDoors(nn.Module):
      def setup(self):
        self.up = nn.Dense(8, dtype=jnp.bfloat16)

      def __call__(self, x):
        return self.encode(x)

      def encode(self, x, scale=1.0):
        return self.up(x) * scale

    recipe = s24.recipes.ste('up/kernel')
    params = init(TwoDoors())
    self.assertEqual(params['up']['kernel'].dtype, jnp.float32)
    sparse = s24.sparsify(TwoDoors(), recipe)
    plain = apply(sparse, variables(params, recipe))
    self.assertEqual(plain.dtype, jnp.bfloat16)
    v = variables(params, recipe)
    for method in ('encode', TwoDoors.encode, TwoDoors().encode, sparse.encode, lambda m, *a, **k: m.encode(*a, **k)):
      with self.subTest(str(method)):
        twice = sparse.apply(v, X, scale=2.0, method=method)
        np.testing.assert_array_equal(twice, 2 * np.asarray(plain))
    np.testing.assert_array_equal(sparse.bind(v).encode(X), plain)

  def test_the_same_key_makes_the_weights_of_the_model(self):
    class Around(nn.Module):
      inside: nn.Module

      def __call__(self, x):
        return self.inside(x)

      def door(self, x):
        return self.inside(x)

    for model in (nn.Sequential((nn.Dense(8), nn.Dense(4))), Around(nn.Sequential((nn.Dense(8), nn.Dense(4))))):
      sparse, key = s24.sparsify(model, s24.recipes.ste('.*kernel')), jax.random.key(0)
      params = model.init(key, X)['params']
      jax.tree.map(np.testing.assert_array_equal, sparse.init(key, X)['params'], params)
    for method in (Around.door, 'door', sparse.door, sparse.__call__, lambda module, x: module.door(x)):
      found = sparse.init(key, X, method=method)['params']
      jax.tree.map(np.testing.assert_array_equal, found, params)
    with self.assertRaisesRegex(ValueError, 'for no weight'):
      s24.sparsify(model, s24.recipes.ste('elsewhere/.*')).init(key, X)

  def test_intermediates_are_captured_once(self):
    model, recipe = nn.Sequential((nn.Dense(8), nn.relu, nn.Dense(4))), s24.recipes.ste('.*kernel')
    params = init(model)
    how = dict(capture_intermediates=True, mutable=['intermediates'])
    _, plain = model.apply({'params': params}, X, **how)
    _, sparse = s24.sparsify(model, recipe).apply(variables(params, recipe), X, **how)
    self.assertEqual(jax.tree.structure(sparse), jax.tree.structure(plain))
    how['capture_intermediates'] = lambda module, name: isinstance(module, nn.Sequential)
    for each in (model, s24.sparsify(model, recipe)):
      _, found = each.apply(variables(params, recipe), X, **how)
      self.assertLen(found['intermediates']['__call__'], 1)

  def test_dense_general(self):
    class General(nn.Module):
      @nn.compact
      def __call__(self, x):
        x = nn.DenseGeneral(8, name='last')(x)
        return nn.DenseGeneral(4, axis=-2, name='first')(x)

    recipe = s24.recipes.ste('(last|first)/kernel')
    x = np.random.default_rng(0).standard_normal((3, 12, 16), np.float32)
    params = init(General(), x.shape)
    v, projected = at_start(params, recipe)
    found = apply(s24.sparsify(General(), recipe), v, x)
    np.testing.assert_allclose(found, apply(General(), {'params': projected}, x), rtol=1e-5, atol=1e-6)

  def test_experts_as_batch_axis(self):
    model = nn.DenseGeneral(8, batch_dims=(0,))
    recipe = s24.recipes.s_ste('kernel')
    x = np.random.default_rng(0).standard_normal((3, 12, 16), np.float32)
    params = init(model, x.shape)
    self.assertEqual(params['kernel'].shape, (3, 16, 8))
    v, projected = at_start(params, recipe)
    found = apply(s24.sparsify(model, recipe), v, x)
    np.testing.assert_allclose(found, apply(model, {'params': projected}, x), rtol=1e-5, atol=1e-6)


class GradientTest(parameterized.TestCase):

  @parameterized.parameters(*MODELS)
  @pytest.mark.few(2)
  def test_straight_through(self, name):
    """The gradient is that of the plain model at the projected weights, for kept and pruned weights alike."""
    model, _, _, v, projected = prepared(name, 'ste')
    found = gradient(name, 'ste')
    expected = jax.jit(jax.grad(lambda p: ((model.apply({'params': p}, X) - Y) ** 2).mean()))(projected)
    assert_trees_close(found, expected)
    masks = s24.states_of(v['sparse24'])
    for mask, g in zip(*map(jax.tree.leaves, (masks, sparse_part(found))), strict=True):
      self.assertGreater(np.abs(np.where(mask, 0, g)).mean(), 1e-5)

  @parameterized.parameters(('loop', 'remat'), ('scan', 'scan_remat'))
  @pytest.mark.slow
  def test_remat_draws_the_same_samples(self, plain, remat):
    assert_trees_close(gradient(plain, 'fst'), gradient(remat, 'fst'))

  @parameterized.parameters('loop', 'scan')
  @pytest.mark.few
  def test_samples_belong_to_the_key(self, name):
    first, other, dense = gradient(name, 'fst'), gradient(name, 'fst', seed=9), gradient(name, 'fst_without_mvue')
    *_, params, v, _ = prepared(name, 'fst')
    assert_trees_equal(first, _gradient(name, 'fst')(params, v['sparse24'], jax.random.key(2)))
    for a, b, c in zip(*(jax.tree.leaves(sparse_part(g)) for g in (first, other, dense)), strict=True):
      self.assertTrue((np.asarray(a) != np.asarray(b)).any())
      self.assertTrue((np.asarray(a) != np.asarray(c)).any())
    # MVUE touches weight gradients alone.
    biases = jax.tree_util.tree_leaves_with_path(first)
    for (path, a), b in zip(biases, jax.tree.leaves(dense), strict=True):
      if path[-1].key == 'bias':
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)

  @parameterized.named_parameters(('scan', True), ('loop', False))
  @pytest.mark.few
  def test_layers_draw_differently(self, scan):
    """Equal weights, inputs and output gradients in each layer: only the randomness tells them apart."""

    class Layer(nn.Module):
      @nn.compact
      def __call__(self, x, total):
        return x, total + nn.Dense(8, name='up')(x)

    class Parallel(nn.Module):
      @nn.compact
      def __call__(self, x):
        total = jnp.zeros((8, 8))
        if not scan:
          for i in range(LAYERS):
            x, total = Layer(name=f'h_{i}')(x, total)
          return total
        scanned = nn.scan(
          lambda module, carry, _: (Layer(name='h')(*carry), None),
          variable_axes={'params': 0, 'sparse24': 0}, split_rngs={'params': True, 'mvue': True}, length=LAYERS,
        )  # fmt: skip
        return scanned(self, (x, total), None)[0][1]

    recipe = s24.Recipe('r', (s24.Rule('h.*/up/kernel', s24.DotPolicy(s24.magnitude(), weight_grad='mvue')),))
    params = init(Parallel())
    if scan:
      params = jax.tree.map(lambda a: np.broadcast_to(np.asarray(a)[:1], a.shape), params)
    else:
      params = dict.fromkeys(params, params['h_0'])

    def loss(p):
      v = variables(params, recipe)
      out = s24.sparsify(Parallel(), recipe).apply({**v, 'params': p}, X, rngs={'mvue': KEY})
      return (out * jax.random.normal(KEY, (8, 8))).sum()

    grads = jax.jit(jax.grad(loss))(params)
    kernels = grads['h']['up']['kernel'] if scan else [grads[f'h_{i}']['up']['kernel'] for i in range(LAYERS)]
    for i in range(LAYERS):
      self.assertTrue((np.asarray(kernels[i]) != np.asarray(kernels[i - 1])).any())

  @parameterized.parameters('loop', 'scan')
  def test_evaluation_needs_no_key_and_takes_any_number_of_tokens(self, name):
    model, recipe, _, v, _ = prepared(name, 'fst')
    self.assertEqual(apply(s24.sparsify(model, recipe), v, np.ones((7, 16), np.float32)).shape, (7, 4))

  def test_forward_moves_nothing(self):
    model, recipe, _, v, _ = prepared('loop', 'fst')
    _, mutated = s24.sparsify(model, recipe).apply(v, X, rngs={'mvue': KEY}, mutable=True)
    assert_trees_equal(mutated, v)


def sparse_part(grads):
  """The leaves that the rule takes, in the tree's order."""
  return {
    k: {n: v[n]['kernel'] for n in ('down', 'up')} if 'up' in v else {n: v['mlp'][n]['kernel'] for n in ('down', 'up')}
    for k, v in grads.items()
    if k != 'head'
  }


if __name__ == '__main__':
  absltest.main()
