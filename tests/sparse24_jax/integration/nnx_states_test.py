"""States of sparsified nnx models that nobody brings in, that are of other weights, or of another model."""

import dataclasses
from unittest import mock

from absl.testing import absltest, parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pallas_kernels import _dispatch
import sparse24_jax as s24
from sparse24_jax.binding import origin
from sparse24_jax.fingerprint import fingerprint, was_changed
from tests.draws import gaussian

X, Y = (np.random.default_rng(i).standard_normal((8, n)) for i, n in enumerate((16, 8)))
STE = s24.recipes.ste('kernel')
WAITING = dataclasses.replace(STE, refresh_every=2)
PACKED = s24.Recipe('packed', (s24.Rule('kernel', s24.DotPolicy(
  s24.transposable(), input_grad='sparse', implementation='dense')),))  # fmt: skip


class Transposed(nnx.Module):
  """A kernel [out, in]."""

  def __init__(self, rngs):
    self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, 16)))

  def __call__(self, x):
    return x @ self.kernel[...].T


def linear(rngs, dtype=jnp.float32):
  return nnx.Linear(16, 8, use_bias=False, param_dtype=dtype, rngs=rngs)


def kept(w):
  """The larger two of each four along the first axis, in NumPy."""
  groups = np.asarray(w, np.float64).reshape(4, 4, -1)
  return (groups * (np.argsort(np.argsort(-np.abs(groups), axis=1), axis=1) < 2)).reshape(w.shape)


def pruned(w):
  return kept(w) == 0


def loss_fn(model):
  dtype = jnp.bfloat16 if model.kernel[...].dtype == jnp.bfloat16 else jnp.float32
  return ((model(jnp.asarray(X, dtype)) - jnp.asarray(Y, dtype)) ** 2).mean()


def conditionals(model):
  """How many conditionals its forward holds, but for those by which a matmul differs between platforms."""
  graph, state = nnx.split(model)
  x = jnp.asarray(X, jnp.bfloat16)
  text = str(jax.make_jaxpr(lambda state: nnx.merge(graph, state)(x))(state))
  return text.count('cond[') - text.count('platform_index[')


class Sampler(nnx.Module):
  """Tokens by argmax, and a cache of what they were chosen from."""

  def __init__(self, rngs):
    self.up = linear(rngs)
    self.cache, self.calls = nnx.Variable(jnp.zeros((8, 8))), nnx.Variable(jnp.int32(0))

  def sample(self, x):
    self.cache[...] = y = self.up(x)
    self.calls[...] += 1
    return y.argmax(1), y.argmax(1).astype(jnp.uint32), y > 0


class StatesTest(parameterized.TestCase):

  @parameterized.parameters(Transposed, linear)
  @pytest.mark.few
  def test_a_trainer_that_owns_its_step_and_brings_nothing_in(self, make):
    """The row 'nnx without nnx.update': it trained on its first masks, without a word."""
    model = make(nnx.Rngs(0))
    recipe = s24.bind(STE, loss_fn, model)
    model = s24.sparsify(model, recipe)
    optimizer = nnx.Optimizer(model, s24.sparse_training(optax.sgd(1.0), recipe), wrt=nnx.Param)
    w = np.asarray(model.kernel[...], np.float64)
    w = first = w if make is linear else w.T

    @nnx.jit
    def step(model, optimizer):
      loss, grads = nnx.value_and_grad(loss_fn)(model)
      optimizer.update(model, grads)
      return loss

    for _ in range(4):
      expected = ((X @ kept(w) - Y) ** 2).mean()
      np.testing.assert_allclose(step(model, optimizer), expected, rtol=1e-4)
      w = w - 2 * X.T @ (X @ kept(w) - Y) / Y.size  # straight through
    found = model.kernel[...] if make is linear else model.kernel[...].T
    np.testing.assert_allclose(found, w, rtol=1e-3, atol=1e-4)
    self.assertTrue((pruned(w) != pruned(first)).any())

  def test_other_weights_than_those_of_the_masks(self):
    """A checkpoint that is loaded into a sparsified model brings such weights."""
    model = s24.sparsify(linear(nnx.Rngs(0)), STE)
    other = linear(nnx.Rngs(1)).kernel[...]
    model.kernel[...] = other
    _dispatch.log_once.cache_clear()
    with self.assertLogs('sparse24_jax', 'WARNING') as logged:
      np.testing.assert_allclose(model(X.astype(np.float32)), X @ kept(other), rtol=1e-4, atol=1e-5)
    self.assertRegex(logged.output[0], r'kernel: the masks that the model holds are those of other weights.*nnx.update')

  def test_a_change_that_sums_to_zero(self):
    """The steps of SGD sum to zero, row by row, on a layer in front of a softmax or a layer norm."""
    model = s24.sparsify(linear(nnx.Rngs(0)), STE)
    change = np.asarray(linear(nnx.Rngs(1)).kernel[...])
    other = np.asarray(model.kernel[...]) + change - change.mean(axis=1, keepdims=True)
    model.kernel[...] = jnp.asarray(other)
    np.testing.assert_allclose(model(X.astype(np.float32)), X @ kept(other), rtol=1e-4, atol=1e-5)

  def test_weights_of_16_bits(self):
    """One entry of a thousand tells, and a cast does not."""
    w = gaussian(0, (32, 32))
    changed, stored = jax.jit(lambda w, known: was_changed(w, (32, 32), known)), (w, w.astype(jnp.bfloat16))
    for known in (fingerprint(a, (32, 32)) for a in stored):
      for a in stored:
        self.assertFalse(changed(a, known))
        self.assertTrue(changed(a.at[3, 5].multiply(1.125), known))

  def test_weights_that_are_divided_after_their_masks_were_chosen(self):
    mesh = jax.make_mesh((1,), ('d',), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
      model = s24.sparsify(linear(nnx.Rngs(0)), STE)
      other = linear(nnx.Rngs(1)).kernel[...]
      model.kernel.set_value(jax.device_put(other, jax.NamedSharding(mesh, jax.P(None, 'd'))))
      for forward in (lambda model, x: model(x), nnx.jit(lambda model, x: model(x))):
        y = forward(model, X.astype(np.float32))
        np.testing.assert_allclose(y, X @ kept(other), rtol=1e-4, atol=1e-5)

  def test_states_that_are_brought_in_are_used_as_they_are(self):
    """A mask waits for its refresh."""
    model = s24.sparsify(linear(nnx.Rngs(0)), STE)
    model.kernel[...] = linear(nnx.Rngs(1)).kernel[...]
    params = nnx.state(model, nnx.Param)
    state = s24.sparse_training(optax.sgd(0.1), STE).init(params)
    state = state._replace(projections=jax.tree.map(jnp.logical_not, state.projections))
    nnx.update(model, s24.sparse_variables(params, state, STE))
    w = np.asarray(model.kernel[...])
    with self.assertNoLogs('sparse24_jax', 'WARNING'):
      np.testing.assert_allclose(model(X.astype(np.float32)), X @ (w - kept(w)), rtol=1e-4, atol=1e-5)

  @parameterized.parameters(dict, nnx.State)
  def test_masks_of_other_weights_than_those_they_are_brought_in_with(self, kind):
    """Fingerprints of the loaded weights vouched for the masks of those before."""
    first, other = (jnp.asarray(linear(nnx.Rngs(seed)).kernel[...]) for seed in (0, 1))
    params, loaded = (kind({'kernel': nnx.Param(w) if kind is nnx.State else w}) for w in (first, other))
    state = jax.block_until_ready(s24.sparse_training(optax.sgd(0.1), STE).init(params))
    _dispatch.log_once.cache_clear()
    with self.assertNoLogs('sparse24_jax', 'WARNING'):
      s24.sparse_variables(params, state, STE)
      jax.jit(lambda params: s24.sparse_variables(params, state, STE))(loaded)
      s24.sparse_variables(loaded, None, STE)
    with self.assertLogs('sparse24_jax', 'WARNING'):  # where no mask is read, moments are of other weights all the same
      s24.sparse_variables(loaded, state, STE, phase='dense')
    with self.assertLogs('sparse24_jax', 'WARNING') as logged:
      for _ in range(2):
        s24.sparse_variables(loaded, state, STE)
    self.assertLen(logged.output, 1)
    said = r'kernel: params are not the weights of the last step .* right for an average .* of the same step'
    self.assertRegex(logged.output[0], said)

  def test_masks_in_the_boxes_of_an_optimizer_of_nnx(self):
    model, other = (linear(nnx.Rngs(seed)) for seed in (0, 1))
    optimizer = nnx.Optimizer(model, s24.sparse_training(optax.sgd(1.0), STE), wrt=nnx.Param)
    # Nothing is said of arrays that are not there yet.
    jax.block_until_ready([nnx.state(each) for each in (model, other, optimizer)])
    with self.assertNoLogs('sparse24_jax', 'WARNING'):
      s24.sparse_variables(nnx.state(model, nnx.Param), optimizer.opt_state, STE)
    with self.assertLogs('sparse24_jax', 'WARNING') as logged:
      s24.sparse_variables(nnx.state(other, nnx.Param), optimizer.opt_state, STE)
    self.assertRegex(logged.output[0], r'kernel: params are not the weights of the last step')

  @parameterized.parameters(
    (PACKED, None, None), (PACKED, True, None), (WAITING, True, False),
    (s24.recipes.rigl('kernel', density=0.5, total_steps=1000), True, False),
  )  # fmt: skip
  def test_states_that_are_brought_in_once_and_never_again(self, recipe, of_optimizer, pack):
    """A GPU went on with the packed weights of that step; masks that wait for a refresh were others than trained."""
    model = s24.sparsify(linear(nnx.Rngs(0), jnp.bfloat16), recipe)
    params = nnx.state(model, nnx.Param)
    state = s24.sparse_training(optax.sgd(0.1), recipe).init(params) if of_optimizer else None
    nnx.update(model, s24.sparse_variables(params, state, recipe, pack=pack))
    step = nnx.jit(lambda model: (nnx.value_and_grad(loss_fn)(model), model(jnp.asarray(X, jnp.bfloat16))))
    results = jax.tree.leaves(step(model))
    self.assertTrue(all(np.isfinite(result).all() for result in results))
    model.kernel[...] += 0.01
    for result in jax.tree.leaves(step(model)):
      self.assertTrue(np.isnan(result).all())
    with self.assertRaisesRegex(ValueError, '^kernel: the states that nnx.update .* other weights.*nnx.update'):
      model(jnp.asarray(X, jnp.bfloat16))
    nnx.update(model, s24.sparse_variables(nnx.state(model, nnx.Param), state, recipe, pack=pack))
    self.assertTrue(all(np.isfinite(result).all() for result in jax.tree.leaves(step(model))))

  def test_tokens_and_caches_of_stale_states(self):
    """NaN does not reach an argmax: tokens stayed plausible, and so did what was cached for the next ones."""
    recipe = dataclasses.replace(s24.recipes.ste('up/kernel'), refresh_every=2)
    model = s24.sparsify(Sampler(nnx.Rngs(0)), recipe)
    nnx.update(model, s24.sparse_variables(nnx.state(model, nnx.Param), None, recipe))
    model.sparse24.brought_in[...] = jnp.asarray(True)
    sample, x = nnx.jit(lambda model, x: model.sample(x)), X.astype(np.float32)
    expected = (X @ kept(model.up.kernel[...])).argmax(1)
    for found in sample(model, x)[:2]:
      np.testing.assert_array_equal(found, expected)
    model.up.kernel[...] += 0.01
    tokens, unsigned, positive = sample(model, x)
    self.assertTrue((tokens == np.iinfo(np.int32).min).all())
    self.assertTrue((np.asarray(unsigned) == 2**32 - 1).all())
    self.assertEqual(positive.dtype, bool)
    self.assertTrue(np.isnan(model.cache[...]).all())
    self.assertEqual(int(model.calls[...]), 2)

  @parameterized.parameters(PACKED, WAITING)
  def test_a_step_that_brings_states_in_computes_nothing_of_this(self, recipe):
    """It is traced with the very arrays that the fingerprints are of."""
    model = s24.sparsify(linear(nnx.Rngs(0), jnp.bfloat16), recipe)

    def step(state, bring_in):
      model = nnx.merge(graph, state)
      if bring_in:
        nnx.update(model, s24.sparse_variables(nnx.state(model, nnx.Param), None, recipe, pack=recipe is PACKED))
      return nnx.value_and_grad(loss_fn)(model)

    graph, state = nnx.split(model)
    texts = [str(jax.make_jaxpr(lambda state, b=b: step(state, b))(state)) for b in (False, True)]
    self.assertNotIn(' nan', texts[1])
    self.assertEqual([text.count('cond[') - text.count('platform_index[') for text in texts], [1, 0])

  def test_links_that_only_the_optimizer_knows(self):
    """Weights tell nothing of a topology that moves: with another optimizer the model would be dense, unsaid."""
    with self.assertLogs('sparse24_jax', 'WARNING') as logged:
      s24.sparsify(linear(nnx.Rngs(0)), s24.recipes.rigl('kernel', density=0.3, total_steps=1000))
    self.assertRegex(logged.output[0], r'kernel: .* Until nnx.update.*all entries count: .* train dense')

  def test_states_of_weights_that_the_model_does_not_have(self):
    model, other = s24.sparsify(linear(nnx.Rngs(0)), STE), nnx.Sequential(linear(nnx.Rngs(0)))
    recipe = s24.recipes.ste('.*kernel')
    nnx.update(model, s24.sparse_variables(nnx.state(other, nnx.Param), None, recipe))
    with self.assertRaisesRegex(ValueError, 'layers/0/kernel: nnx.update brought in states .* has kernel'):
      model(X)

  @parameterized.parameters(
    ('sparse', 'dense', r"^phase: .* of a dense phase, .* and would stay sparse: .*phase='dense'\), and train"),
    ('dense', 'sparse', r"^phase: .* not sparsified in this phase, 'dense', .* phase of the model"),
    ('sparse', 'sparse', None),
    ('dense', 'dense', None),
    (None, 'dense', None),
  )
  def test_variables_of_another_phase(self, of_model, brought, message):
    """A loop that goes on to the dense phase with the model of the sparse one trained on sparse, without a word."""
    model = linear(nnx.Rngs(0))
    w = np.asarray(model.kernel[...])
    model = model if of_model is None else s24.sparsify(model, STE, phase=of_model)

    @nnx.jit
    def forward(model):
      nnx.update(model, s24.sparse_variables(nnx.state(model, nnx.Param), None, STE, phase=brought))
      return model(X.astype(np.float32))

    if message is not None:
      with self.assertRaisesRegex(ValueError, message):
        forward(model)
      return
    expected = X @ (w if brought == 'dense' else kept(w))
    for _ in range(2):
      np.testing.assert_allclose(forward(model), expected, rtol=1e-4, atol=1e-5)
    self.assertLen(jax.tree.leaves(nnx.state(model)), 1 if brought == 'dense' else 6)

  def test_weights_are_compared_in_their_order(self):
    """That of a set of strings is another in each process, and JAX's cache knows a program by its text."""
    model = nnx.Sequential(*(nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(i)) for i in range(8)))
    sparse = s24.sparsify(model, s24.recipes.set_('.*', density=0.5))
    graph, state = nnx.split(sparse)
    with mock.patch.object(origin, 'changed', wraps=origin.changed) as changed:
      jax.eval_shape(lambda state: nnx.merge(graph, state)(jnp.asarray(X)), state)
    self.assertEqual(list(changed.call_args.args[0]), [f'layers/{i}/kernel' for i in range(8)])

  def test_where_nothing_can_be_stale_nothing_is_computed(self):
    """A frozen scale, and weights that the step packs, as on a GPU with kernels."""
    plain = nnx.Linear(16, 8, use_bias=False, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    self.assertEqual(conditionals(s24.sparsify(plain, STE)), 1)
    self.assertEqual(conditionals(s24.sparsify(plain, s24.recipes.s_ste('kernel'))), 0)
    model = s24.sparsify(plain, PACKED)
    nnx.update(model, s24.sparse_variables(nnx.state(model, nnx.Param), None, PACKED))
    self.assertEqual(conditionals(model), 0)


if __name__ == '__main__':
  absltest.main()
