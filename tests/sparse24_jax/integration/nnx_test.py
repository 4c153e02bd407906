"""Sparsified nnx models: same tree, values and gradients of projected weights, states brought in after each step."""

import functools

from absl.testing import absltest, parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from tests.draws import gaussian
from tests.standard import project

LAYERS = 2


class MLP(nnx.Module):
  def __init__(self, rngs):
    self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

  def __call__(self, x):
    return x + self.down(nnx.relu(self.up(x)))


class Loop(nnx.Module):
  def __init__(self, rngs, layers=LAYERS):
    self.h = nnx.List([MLP(rngs) for _ in range(layers)])
    self.head = nnx.Linear(16, 4, rngs=rngs)

  def __call__(self, x):
    for layer in self.h:
      x = layer(x)
    return self.head(x)


class Stacked(nnx.Module):
  def __init__(self, rngs):
    make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(MLP))
    self.h = make(rngs)
    self.head = nnx.Linear(16, 4, rngs=rngs)

  def __call__(self, x):
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
      return layer(x)

    return self.head(run(self.h, x))


MODELS = {'loop': Loop, 'stacked': Stacked}
RULE = 'h/.*'
X = gaussian(0, (8, 16))
Y = gaussian(1, (8, 4))
FST = s24.recipes.transposable_srste(RULE, masked_decay=1e-3, refresh_every=2)
STE = s24.recipes.ste(RULE)
SAMPLED = s24.Recipe('sampled', (s24.Rule(RULE, s24.DotPolicy(s24.magnitude(), weight_grad='mvue')),))


def params_of(model):
  return nnx.state(model, nnx.Param)


def projected(model, recipe):
  """A copy of the model whose weights are projected."""
  state = jax.jit(s24.sparse_training(optax.sgd(0.1), recipe).init)(params_of(model))
  model = nnx.clone(model)
  nnx.update(model, project(params_of(model), state, recipe))
  return model


@functools.cache
def plain(name):
  return MODELS[name](nnx.Rngs(0))


@nnx.jit
def grads_of(model):
  return nnx.grad(lambda m: ((m(X) - Y) ** 2).mean(), argnums=nnx.DiffState(0, nnx.Param))(model)


def assert_trees_equal(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def assert_trees_close(found, expected):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


class SameModelTest(parameterized.TestCase):

  @parameterized.parameters(*MODELS)
  def test_parameters_stay_and_the_original_is_untouched(self, name):
    model = plain(name)
    before = nnx.graphdef(model)
    sparse = s24.sparsify(model, FST, rngs=nnx.Rngs(mvue=1))
    assert_trees_equal(params_of(sparse), params_of(model))
    self.assertEqual(nnx.graphdef(model), before)

  @parameterized.product(name=list(MODELS), recipe=(STE, FST, s24.recipes.s_ste(RULE)))
  @pytest.mark.few(2)
  def test_output_is_that_of_the_projected_parameters(self, name, recipe):
    model = plain(name)
    found = nnx.jit(lambda m: m(X))(s24.sparsify(model, recipe))  # no rngs: evaluation needs none
    np.testing.assert_allclose(found, nnx.jit(lambda m: m(X))(projected(model, recipe)), rtol=1e-5, atol=1e-6)
    self.assertGreater(float(jnp.abs(found - model(X)).max()), 1e-3)

  def test_from_recipe_to_recipe_and_back(self):
    model = plain('loop')
    sparse = s24.sparsify(model, FST, rngs=nnx.Rngs(mvue=1))
    again = s24.sparsify(sparse, STE)
    dense = s24.sparsify(again, STE, phase='dense')
    np.testing.assert_allclose(again(X), projected(model, STE)(X), rtol=1e-5, atol=1e-6)
    assert_trees_equal(nnx.state(dense), nnx.state(model))
    np.testing.assert_array_equal(dense(X), model(X))
    del dense.sparse24  # by which it refuses states of a sparse phase
    self.assertEqual(nnx.graphdef(dense), nnx.graphdef(model))

  @parameterized.named_parameters(('scale', s24.recipes.s_ste(RULE)), ('mask', FST))
  def test_a_second_sparsify_keeps_the_states(self, recipe):
    """A scale is frozen, a mask waits for its refresh, whatever the weights have become."""
    sparse = s24.sparsify(plain('loop'), recipe, rngs=nnx.Rngs(mvue=1))
    before = nnx.state(sparse, s24.SparseVariable)
    nnx.update(sparse, jax.tree.map(lambda w: jnp.roll(w, 1, axis=0), params_of(sparse)))
    again = s24.sparsify(sparse, recipe, rngs=nnx.Rngs(mvue=1))
    assert_trees_equal(nnx.state(again, s24.SparseVariable), before)
    fresh = s24.sparsify(s24.sparsify(sparse, recipe, phase='dense'), recipe)
    held = [jax.tree.leaves((m.sparse24.read(), m.sparse24.read_fingerprints())) for m in (again, fresh)]
    for ours, new in zip(*held, strict=True):
      self.assertTrue((ours != new).any())

  def test_a_layer_with_its_own_dot_general(self):
    def own(*args, **kwargs):
      return 2 * jax.lax.dot_general(*args, **kwargs)

    model, recipe = nnx.Linear(16, 8, dot_general=own, rngs=nnx.Rngs(0)), s24.recipes.ste('kernel')
    np.testing.assert_allclose(s24.sparsify(model, recipe)(X), projected(model, recipe)(X), rtol=1e-5, atol=1e-6)

  def test_layers_that_share_a_kernel(self):
    class Tied(nnx.Module):
      def __init__(self):
        self.a, self.b = (nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(i)) for i in range(2))
        self.b.kernel = self.a.kernel

      def __call__(self, x):
        return self.b(self.a(x))

    recipe = s24.recipes.transposable_srste('.*', masked_decay=0.0)
    model = Tied()
    sparse = s24.sparsify(model, recipe, rngs=nnx.Rngs(mvue=0))
    w = np.asarray(model.a.kernel[...])
    kept = np.where(s24.transposable_mask(w), w, 0)
    np.testing.assert_allclose(sparse(X), np.asarray(X) @ kept @ kept, rtol=1e-5, atol=1e-5)
    # New states reach both layers.
    state = s24.sparse_training(optax.sgd(0.1), recipe).init(params_of(sparse))
    state = state._replace(projections=jax.tree.map(jnp.logical_not, state.projections))
    nnx.update(sparse, s24.sparse_variables(params_of(sparse), state, recipe))
    np.testing.assert_allclose(sparse(X), np.asarray(X) @ (w - kept) @ (w - kept), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(s24.sparsify(sparse, recipe, phase='dense')(X), model(X))

  def test_layers_that_reach_their_parent_in_their_own_ways(self):
    class Scaled(nnx.Linear):
      def __call__(self, x):
        return 2 * super().__call__(x)

    class Helped(nnx.Linear):
      def __call__(self, x):
        return self.twice(x)

      def twice(self, x):
        return 2 * nnx.Linear.__call__(self, x)

    class Recomputed(nnx.Linear):
      def __call__(self, x):
        return 2 * jax.checkpoint(lambda x: super(Recomputed, self).__call__(x))(x)

    for kind in (Scaled, Helped, Recomputed):
      model, recipe = kind(16, 8, rngs=nnx.Rngs(0)), s24.recipes.ste('kernel')
      np.testing.assert_allclose(s24.sparsify(model, recipe)(X), projected(model, recipe)(X), rtol=1e-5, atol=1e-6)

  @parameterized.parameters(nnx.jit, nnx.remat)
  def test_a_decorated_method(self, decorator):
    class Own(nnx.Module):
      def __init__(self):
        self.kernel = nnx.Param(gaussian(2, (16, 16)))

      @decorator
      def __call__(self, x):
        return x @ self.kernel[...]

    class Parent(nnx.Module):
      def __init__(self):
        self.own = Own()

      def __call__(self, x):
        return self.own(x) + self.own(-2 * x)  # remat hands the weight back, which is then read again

    model, recipe = Parent(), s24.recipes.ste('.*kernel')
    w = np.asarray(model.own.kernel[...])
    expected = -X @ np.where(s24.magnitude_mask(w), w, 0)
    np.testing.assert_allclose(s24.sparsify(model, recipe)(X), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(s24.sparsify(Own(), recipe)(X), -expected, rtol=1e-4, atol=1e-4)
    with self.assertRaisesRegex(ValueError, 'Own.__call__ of a sparsified model was called from outside'):
      s24.sparsify(model, recipe).own(X)


class GradientTest(parameterized.TestCase):

  @parameterized.parameters(*MODELS)
  @pytest.mark.few
  def test_straight_through(self, name):
    found = grads_of(s24.sparsify(plain(name), STE))
    assert_trees_close(found, grads_of(projected(plain(name), STE)))
    layer = found['h'] if name == 'stacked' else found['h'][0]
    self.assertTrue((layer['down']['kernel'][...] != 0).mean() > 0.9)

  @parameterized.parameters(*MODELS)
  @pytest.mark.few
  def test_samples_differ_between_calls_and_are_reproducible(self, name):
    first, again = (s24.sparsify(plain(name), SAMPLED, rngs=nnx.Rngs(mvue=1)) for _ in range(2))
    one, two = grads_of(first), grads_of(first)
    assert_trees_equal(one, grads_of(again))
    layers = [g['h'] if name == 'stacked' else g['h'][0] for g in (one, two)]
    for weight in ('up', 'down'):
      self.assertTrue((layers[0][weight]['kernel'][...] != layers[1][weight]['kernel'][...]).any())

  def test_layers_draw_differently(self):
    """Equal weights, inputs and output gradients in each layer: only the keys tell them apart."""

    class Parallel(nnx.Module):
      def __init__(self):
        self.h = nnx.List([nnx.Linear(16, 4, rngs=nnx.Rngs(0)) for _ in range(3)])

      def __call__(self, x):
        return sum(layer(x) for layer in self.h)

    model = s24.sparsify(Parallel(), SAMPLED, rngs=nnx.Rngs(mvue=1))
    for one_key in (False, True):
      if one_key:  # Flax would give each stream a key of its own
        nnx.reseed(model, policy=lambda *_: jax.random.key(1), mvue=0)
      grads = grads_of(model)
      kernels = [grads['h'][i]['kernel'][...] for i in range(3)]
      for i in range(3):
        self.assertTrue((kernels[i] != kernels[i - 1]).any(), one_key)

  @pytest.mark.slow
  def test_stacked_layers_draw_differently(self):
    class Parallel(nnx.Module):
      def __init__(self):
        self.h = nnx.vmap(lambda _: nnx.Linear(16, 4, rngs=nnx.Rngs(0)))(jnp.arange(3))

      def __call__(self, x):
        return nnx.vmap(lambda layer, x: layer(x))(self.h, jnp.broadcast_to(x, (3, *x.shape))).sum(0)

    grads = grads_of(s24.sparsify(Parallel(), SAMPLED, rngs=nnx.Rngs(mvue=1)))
    kernels = grads['h']['kernel'][...]
    for i in range(3):
      self.assertTrue((kernels[i] != kernels[i - 1]).any())


  @pytest.mark.slow
  def test_experts_as_batch_axis(self):
    model = nnx.LinearGeneral(16, 8, batch_axis={0: 3}, rngs=nnx.Rngs(0))
    recipe = s24.Recipe('r', (s24.Rule('kernel', SAMPLED.rules[0].policy),))
    sparse = s24.sparsify(model, recipe, rngs=nnx.Rngs(mvue=1))
    x = jnp.broadcast_to(X, (3, *X.shape))
    np.testing.assert_allclose(sparse(x), projected(model, recipe)(x), rtol=1e-5, atol=1e-6)
    weights = gaussian(3, X.shape[:1] + (8,))
    cotangent = jnp.broadcast_to(weights, (3, *weights.shape))
    grads = nnx.grad(lambda m: (m(x) * cotangent).sum(), argnums=nnx.DiffState(0, nnx.Param))(sparse)['kernel'][...]
    for i in range(3):
      self.assertTrue((grads[i] != grads[i - 1]).any())


class TrainingTest(parameterized.TestCase):

  @parameterized.named_parameters(('fst', FST), ('s_ste', s24.recipes.s_ste(RULE)))
  @pytest.mark.few
  def test_optimizer_loop_through_the_phases(self, recipe):
    inner = optax.sgd(0.1, momentum=0.9)
    tx = {phase: s24.sparse_training(inner, recipe, phase=phase) for phase in ('dense', 'sparse')}
    sparse = s24.sparsify(Loop(nnx.Rngs(0), layers=1), recipe, rngs=nnx.Rngs(mvue=1))
    optimizer = nnx.Optimizer(sparse, tx['sparse'], wrt=nnx.Param)
    traces = []

    @nnx.jit
    def step(model, optimizer):
      traces.append(None)
      loss, grads = nnx.value_and_grad(lambda m: ((m(X) - Y) ** 2).mean(), argnums=nnx.DiffState(0, nnx.Param))(model)
      optimizer.update(model, grads)
      nnx.update(model, s24.sparse_variables(params_of(model), optimizer.opt_state, recipe))
      return loss

    losses = [float(step(sparse, optimizer)) for _ in range(8)]
    self.assertLess(losses[-1], losses[0] / 2)
    self.assertLen(traces, 1)
    states = s24.sparse_variables(params_of(sparse), optimizer.opt_state, recipe)
    assert_trees_equal(nnx.state(sparse, s24.SparseVariable), states)
    if recipe is FST:
      np.testing.assert_array_equal(
        sparse.sparse24.states['h/0/up/kernel'][...], s24.transposable_mask(sparse.h[0].up.kernel[...])
      )
    # The dense phase: the plain model, the same optimizer state carried on.
    dense = s24.sparsify(sparse, recipe, phase='dense')
    follow = nnx.Optimizer(dense, tx['dense'], wrt=nnx.Param)
    nnx.update(follow, nnx.state(optimizer))
    grads = jax.tree.map(jnp.zeros_like, nnx.eval_shape(grads_of, dense))
    nnx.jit(lambda model, optimizer: optimizer.update(model, grads))(dense, follow)
    self.assertEqual(int(optimizer.opt_state.count[...]) + 1, int(follow.opt_state.count[...]))

  @parameterized.parameters(*MODELS)
  @pytest.mark.slow
  def test_functional_loop(self, name):
    tx = s24.sparse_training(optax.adam(0.05), FST)
    graph, params, rest = nnx.split(s24.sparsify(plain(name), FST, rngs=nnx.Rngs(mvue=1)), nnx.Param, ...)
    state = tx.init(params)

    @jax.jit
    def step(params, rest, state):
      def loss(params):
        model = nnx.merge(graph, params, rest, copy=True)
        value = ((model(X) - Y) ** 2).mean()
        return value, nnx.split(model, nnx.Param, ...)[2]

      (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
      model = nnx.merge(graph, params, rest, copy=True)
      nnx.update(model, s24.sparse_variables(params, state, FST))
      return params, nnx.split(model, nnx.Param, ...)[2], state, value

    losses = []
    for _ in range(6):
      params, rest, state, value = step(params, rest, state)
      losses.append(float(value))
    self.assertLess(losses[-1], losses[0])
    self.assertEqual(step._cache_size(), 1)
    rates = s24.get_flip_rate(state).per_weight
    expected = ['h/down/kernel', 'h/up/kernel'] if name == 'stacked' else [
      f'h/{i}/{w}/kernel' for i in range(LAYERS) for w in ('down', 'up')]  # fmt: skip
    self.assertEqual(sorted(rates), expected)
    self.assertEqual({r.shape for r in rates.values()}, {(LAYERS,) if name == 'stacked' else ()})


if __name__ == '__main__':
  absltest.main()
