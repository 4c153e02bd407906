"""Functions of an nnx model: any layers, against the weights of `project`, and what the call changes of the model."""

import functools

from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24

X, Y = map(jnp.asarray, np.random.default_rng(0).standard_normal((2, 2, 4, 16), np.float32))
STE = s24.recipes.ste('.*kernel')
SAMPLED = s24.Recipe('sampled', (s24.Rule('.*kernel', s24.DotPolicy(s24.magnitude(), weight_grad='mvue')),))


class Layer(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.LinearGeneral(16, (2, 8), rngs=rngs)
    self.mix = nnx.Einsum('bthk,hkd->btd', (2, 8, 16), rngs=rngs)

  def __call__(self, x):
    return x + self.mix(self.up(x))


class Stacked(nnx.Module):
  def __init__(self, rngs):
    self.h = nnx.split_rngs(splits=2)(nnx.vmap(Layer))(rngs)

  def __call__(self, x):
    return nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.h, x)


class Rematted(Stacked):
  """Each layer hands its variables back from a checkpoint, and the scan stacks them again."""

  def __call__(self, x):
    layer = nnx.remat(lambda layer, x: layer(x))
    return nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.h, x)


class Stateful(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(16, 16, rngs=rngs)
    self.norm, self.drop = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.drop(self.norm(self.linear(x)))


def bridged(rngs):
  return nnx.bridge.lazy_init(nnx.bridge.ToNNX(nn.Dense(16), rngs=rngs), X)


def attention(rngs):
  return nnx.MultiHeadAttention(num_heads=2, in_features=16, decode=False, rngs=rngs)


def loss(model, x, y):
  return jnp.mean((model(x) - y) ** 2)


def variables_of(model, recipe, weights=None):
  params = nnx.state(model, nnx.Param) if weights is None else weights
  init = s24.sparse_training(optax.sgd(0.1), recipe).init
  return jax.jit(lambda params: s24.sparse_variables(params, init(params), recipe))(params)


def project(params, bound):
  init = s24.sparse_training(optax.sgd(0.1), bound).init
  return jax.jit(lambda params: s24.project(params, init(params), bound))(params)


LAYOUTS = {
  'linear': (lambda rngs: nnx.Linear(16, 16, rngs=rngs), {'kernel': 'in 0, out 1'}),
  'layer': (Layer, {'mix/kernel': 'in 0 1, out 2', 'up/kernel': 'in 0, out 1 2'}),
  'stacked': (Stacked, {'h/mix/kernel': 'stacked 0, in 1 2, out 3', 'h/up/kernel': 'stacked 0, in 1, out 2 3'}),
  'rematted': (Rematted, {'h/mix/kernel': 'stacked 0, in 1 2, out 3', 'h/up/kernel': 'stacked 0, in 1, out 2 3'}),
  'bridged': (bridged, {'kernel': 'in 0, out 1'}),
  'attention': (
    attention, {'out/kernel': 'in 0 1, out 2'} | {f'{n}/kernel': 'in 0, out 1 2' for n in ('key', 'query', 'value')},
  ),
}  # fmt: skip


class AnyLayerTest(parameterized.TestCase):

  @parameterized.parameters('layer', 'rematted', 'bridged', 'attention', 'stacked', 'linear')
  @pytest.mark.few(2)
  def test_values_and_gradients_are_those_of_projected_weights(self, name):
    make, layouts = LAYOUTS[name]
    model = make(nnx.Rngs(0))
    bound = s24.bind(STE, loss, model, X, Y)
    self.assertEqual({w.path: w.layout.describe() for w in bound.weights}, layouts)
    found = nnx.jit(nnx.value_and_grad(s24.sparsify(loss, bound)))(model, variables_of(model, bound), None, X, Y)
    projected, params = nnx.clone(model), nnx.state(model, nnx.Param)
    nnx.update(projected, project(params, bound))
    value = nnx.jit(nnx.value_and_grad(loss))
    expected = value(projected, X, Y)
    self.assertGreater(abs(float(found[0]) - float(value(model, X, Y)[0])), 1e-4)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)

  def test_samples_belong_to_the_key(self):
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    bound = s24.bind(SAMPLED, loss, model, X, Y)
    grad, variables = nnx.jit(nnx.grad(s24.sparsify(loss, bound))), variables_of(model, bound)
    one, again, other = (grad(model, variables, jax.random.key(i), X, Y)['kernel'][...] for i in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    self.assertTrue((one != other).any())


class StateTest(parameterized.TestCase):

  def test_the_model_changes_as_by_a_call_of_the_function(self):
    model = Stateful(nnx.Rngs(0))
    bound = s24.bind(STE, loss, model, X, Y)
    self.assertEqual(int(model.drop.rngs.count[...]), 0)  # binding computes nothing
    # The same dense model, with projected weights.
    params = nnx.state(model, nnx.Param)
    expected = nnx.clone(model)
    nnx.update(expected, project(params, bound))
    sparse, variables = s24.sparsify(loss, bound), variables_of(model, bound)
    for _ in range(2):
      np.testing.assert_allclose(sparse(model, variables, None, X, Y), loss(expected, X, Y), rtol=1e-5)
    self.assertEqual(int(model.drop.rngs.count[...]), 2)
    np.testing.assert_allclose(model.norm.mean[...], expected.norm.mean[...], rtol=1e-5, atol=1e-7)
    self.assertTrue((model.norm.mean[...] != 0).all())

  def test_masks_are_those_of_the_optimizer(self):
    """The function takes no masks that are older than its weights, and holds none of its own."""
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    bound = s24.bind(STE, lambda m, x: m(x), model, X)
    old = variables_of(model, bound)
    sparse = s24.sparsify(lambda m, x: m(x), bound)
    model.kernel[...] = jnp.roll(model.kernel[...], 1, axis=0)
    w = np.asarray(model.kernel[...])
    kept = np.where(s24.magnitude_mask(w), w, 0)
    np.testing.assert_allclose(sparse(model, variables_of(model, bound), None, X), X @ kept, rtol=1e-4, atol=1e-5)
    with self.assertRaisesRegex(ValueError, 'kernel: variables were made of other weights than params'):
      sparse(model, old, None, X)


class Counts(nnx.Module):
  """What it draws and counts, it is given."""

  def __init__(self, rngs):
    self.linear, self.drop = nnx.Linear(16, 16, rngs=rngs), nnx.Dropout(0.5)

  def __call__(self, x, *, rngs, seen):
    seen[...] += x.shape[0]
    return self.drop(self.linear(x), rngs=rngs)


def beside():
  return dict(rngs=nnx.Rngs(dropout=3), seen=nnx.Cache(jnp.zeros((), jnp.int32)))


class BesideTest(parameterized.TestCase):
  """Variables in arguments beside the model change as by a call of the function itself."""

  def check(self, expected, found, run):
    """Twice, since a second call starts from what the first one left."""
    own, other = beside(), beside()
    for _ in range(2):
      np.testing.assert_allclose(run(found, own), run(expected, other), rtol=1e-5, atol=1e-6)
    for arguments in (own, other):
      self.assertEqual((int(arguments['rngs'].dropout.count[...]), int(arguments['seen'][...])), (2, 4))

  def test_of_a_model(self):
    model = Counts(nnx.Rngs(0))
    projected = nnx.clone(model)
    nnx.update(projected, project(nnx.state(model, nnx.Param), s24.bind(STE, lambda m, x: m.linear(x), model, X)))
    sparse = s24.sparsify(model, STE)
    for jit in (lambda f: f, nnx.jit):
      self.check(projected, sparse, jit(lambda model, arguments: model(X, **arguments)))

  def test_of_a_function_of_a_model_or_of_arrays(self):
    model, dropout = Counts(nnx.Rngs(0)), nnx.Dropout(0.5)

    def of_arrays(params, x, rngs, seen):
      seen[...] += x.shape[0]
      return dropout(x @ params['kernel'], rngs=rngs)

    def of_model(model, x, rngs, seen):
      return model(x, rngs=rngs, seen=seen)

    for f, params in ((of_model, model), (of_arrays, {'kernel': model.linear.kernel[...]})):
      bound = s24.bind(STE, f, params, X, **beside())
      sparse = s24.sparsify(f, bound)
      weights = nnx.state(params, nnx.Param) if f is of_model else params
      variables = variables_of(None, bound, weights)
      projected = nnx.clone(params) if f is of_model else project(params, bound)
      if f is of_model:
        nnx.update(projected, project(weights, bound))
      self.check(
        functools.partial(f, projected, X), functools.partial(sparse, params, variables, None, X),
        lambda call, arguments: call(**arguments),
      )  # fmt: skip

  def test_in_any_container_and_shared(self):
    """A variable in two arguments, or twice in one, is one. States change too; what is only read may be anything."""

    class Two(nnx.Module):
      def __init__(self, seen):
        self.a, self.b, self.scale = seen, seen, nnx.data(jnp.ones(()))

    def f(w, x, two, state, again, teacher):
      two.a[...] += 1
      two.b[...] += 1
      again[...] += 1
      state['n'][...] += 1
      return teacher(x @ w['kernel'] * two.scale)

    seen, teacher = nnx.Cache(jnp.zeros(())), nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    state, w = nnx.State({'n': nnx.Cache(jnp.zeros(()))}), {'kernel': jnp.ones((16, 16))}
    arguments = (X, Two(seen), state, seen, teacher)
    bound = s24.bind(STE, f, w, *arguments)
    s24.sparsify(f, bound)(w, variables_of(None, bound, w), None, *arguments)
    self.assertEqual((float(seen[...]), float(state['n'][...])), (3, 1))

  def test_of_a_linen_module(self):
    class Noisy(nn.Module):
      @nn.compact
      def __call__(self, x, rngs):
        return nn.Dense(16)(x) + jax.random.normal(rngs.noise(), x.shape)

    model, rngs = Noisy(), nnx.Rngs(noise=0)
    params = model.init(jax.random.key(0), X, nnx.Rngs(noise=0))['params']
    sparse, variables = s24.sparsify(model, STE), {'params': params, 'sparse24': variables_of(None, STE, params)}
    one, two = (sparse.apply(variables, X, rngs) for _ in range(2))
    self.assertEqual(int(rngs.noise.count[...]), 2)
    self.assertTrue((one != two).any())

  def test_counters_go_on_where_stale_weights_spoil_the_result(self):
    def f(w, x, rngs, mean):
      mean[...] = jnp.mean(x @ w['kernel'])
      return jax.random.normal(rngs.noise(), x.shape) + x @ w['kernel']

    w, rngs, mean = {'kernel': jnp.eye(16)}, nnx.Rngs(noise=0), nnx.Cache(jnp.zeros(()))
    bound = s24.bind(STE, f, w, X, rngs, mean)
    states = variables_of(None, bound, w)
    run = nnx.jit(lambda w, rngs, mean: s24.sparsify(f, bound)(w, states, None, X, rngs, mean))
    self.assertTrue(np.isnan(run({'kernel': 2 * jnp.eye(16) + 1}, rngs, mean)).all())
    self.assertEqual(int(rngs.noise.count[...]), 1)
    self.assertTrue(np.isnan(mean[...]))


class RefusalTest(parameterized.TestCase):

  def test_parameters_beside_the_model(self):
    model, other = (nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in (0, 1))
    with self.assertRaisesRegex(ValueError, 'an argument beside the model holds parameters'):
      s24.bind(STE, lambda m, x, other: m(x) + other(x), model, X, other)

  def test_a_variable_of_the_model_beside_it(self):
    model = Stateful(nnx.Rngs(0))
    with self.assertRaisesRegex(ValueError, 'an argument holds a BatchStat of the model'):
      s24.bind(STE, lambda m, x, mean: m(x), model, X, model.norm.mean)

  def test_an_attribute_of_an_argument_that_changes(self):
    class Scale(nnx.Module):
      def __init__(self):
        self.by, self.calls = nnx.data(jnp.ones(())), 0

    def counts(w, x, scale):
      scale.calls += 1
      return x @ w['kernel'] * scale.by

    def grows(w, x, scale):
      scale.by = scale.by * 2
      return x @ w['kernel'] * scale.by

    for f in (counts, grows):
      with self.assertRaisesRegex(ValueError, 'changes more of an argument, Scale, than the values of its variables'):
        s24.bind(STE, f, {'kernel': jnp.ones((16, 16))}, X, Scale())

  def test_a_function_that_changes_attributes(self):
    model = Stateful(nnx.Rngs(0))

    def evaluate(model, x):
      model.eval()
      return model(x)

    with self.assertRaisesRegex(ValueError, 'changes more of the model.*model.eval'):
      s24.bind(STE, evaluate, model, X)

  def test_a_recipe_by_itself_for_several_axes(self):
    with self.assertRaisesRegex(ValueError, r'up/kernel of shape \(16, 2, 8\) has length 2 .*24_jax.bind\(recipe'):
      s24.sparsify(Layer(nnx.Rngs(0)), s24.recipes.ste('up/kernel'))


if __name__ == '__main__':
  absltest.main()
