"""`sparse_variables` of other weights than a forward is given: an error, or NaN under jit. Its own cost nothing."""

import dataclasses
import functools

from absl.testing import absltest, parameterized
from flax import core, nnx, serialization, traverse_util
from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import optax

import sparse24_jax as s24
from tests.quick import jit
from tests.standard import project

STE = s24.recipes.ste('.*kernel')
FST = s24.recipes.transposable_srste('.*kernel', masked_decay=1e-4)
PACKED = s24.Recipe('own', (s24.Rule('.*kernel', s24.DotPolicy(s24.transposable(), 'sparse', implementation='dense')),))
X = np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32)
ANOTHER = 'kernel: variables were made of other weights than params, .* call sparse_variables.*perturbed'


def loss(params, x):
  return (x.astype(params['a_kernel'].dtype) @ params['a_kernel'] @ params['b_kernel']).astype(jnp.float32).sum()


@functools.cache
def trained(recipe, dtype=jnp.float32):
  """Parameters and optimizer state before and after a step."""
  rng = np.random.default_rng(0)
  params = {name: rng.normal(size=(64, 64)).astype(np.float32) for name in ('a_kernel', 'b_kernel')}
  params = {name: jnp.asarray(w.astype(dtype)) for name, w in params.items()}
  tx = s24.sparse_training(optax.adam(0.01), recipe)

  @jit
  def step(params, state):
    grads = jax.grad(loss)(project(params, state, recipe), X)
    updates, after = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), after

  state = jit(tx.init)(params)
  return (params, state), step(params, state)


class StaleVariablesTest(parameterized.TestCase):

  @parameterized.parameters((STE, jnp.float32), (PACKED, jnp.bfloat16))
  def test_variables_made_once_and_used_for_ever(self, recipe, dtype):
    """Packed, the values of the first step hide those of the second."""
    (params, state), (newer, after) = trained(recipe, dtype)
    sparse = s24.sparsify(loss, recipe)
    v, w = (s24.sparse_variables(p, s, recipe) for p, s in ((params, state), (newer, after)))
    with self.assertRaisesRegex(ValueError, ANOTHER):
      sparse(newer, v, None, X)
    with self.assertRaisesRegex(ValueError, ANOTHER):
      jax.grad(sparse)(newer, v, None, X)
    step = jax.jit(jax.value_and_grad(sparse) if recipe is STE else lambda *args: (sparse(*args), ()))
    for given, variables, fine in ((params, v, True), (newer, w, True), (newer, v, False)):
      value, grads = step(given, variables, None, X)
      self.assertEqual({bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((value, grads))}, {fine})
      if fine:
        expected = loss(project(given, state if given is params else after, recipe), X)
        np.testing.assert_allclose(value, expected, rtol=1e-5 if dtype == jnp.float32 else 2e-2)

  @parameterized.parameters((STE, jnp.float32), (PACKED, jnp.bfloat16))
  def test_a_step_that_makes_its_own_computes_nothing_of_this(self, recipe, dtype):
    (params, state), _ = trained(recipe, dtype)
    sparse = s24.sparsify(loss, recipe)

    def step(params, state):
      variables = s24.sparse_variables(params, state, recipe)
      return jax.value_and_grad(sparse)(params, variables, None, X)

    self.assertNotIn(' nan', str(jax.make_jaxpr(lambda params: step(params, state))(params)))
    # But by which projections a state that is traced was made.
    self.assertEqual(str(jax.make_jaxpr(step)(params, state)).count(' nan'), 1)
    given = params, s24.sparse_variables(params, state, recipe), None, X
    self.assertIn(' nan', str(jax.make_jaxpr(sparse)(*given)))

  def test_an_average_has_masks_and_values_of_its_own(self):
    """Its masks are those of the last step; those that go with the parameters are refused."""
    (params, _), (newer, after) = trained(STE)
    average = jax.tree.map(lambda a, b: (a + b) / 2, params, newer)
    sparse = s24.sparsify(loss, STE)
    found = sparse(average, s24.sparse_variables(average, after, STE), None, X)
    masked = jax.tree.map(lambda w, mask: jnp.where(mask, w, 0), average, after.projections)
    np.testing.assert_allclose(found, loss(masked, X), rtol=1e-5)
    with self.assertRaisesRegex(ValueError, ANOTHER):
      sparse(average, s24.sparse_variables(newer, after, STE), None, X)

  def test_perturbed_weights_as_sam_has_them(self):
    """Refused with the variables of the step; with their own they are right, by the masks of the step."""
    (params, state), _ = trained(STE)
    sparse = s24.sparsify(loss, STE)

    @jax.jit
    def step(params, state):
      variables = s24.sparse_variables(params, state, STE)
      grads = jax.grad(sparse)(params, variables, None, X)
      perturbed = jax.tree.map(lambda w, g: w + 0.3 * g / optax.tree.norm(grads), params, grads)
      own = s24.sparse_variables(perturbed, state, STE)
      found = jax.value_and_grad(sparse)(perturbed, own, None, X)
      return perturbed, found, sparse(perturbed, variables, None, X)

    perturbed, found, refused = step(params, state)
    masked = jax.tree.map(lambda w, mask: jnp.where(mask, w, 0), perturbed, state.projections)
    value, grads = jax.value_and_grad(loss)(masked, X)
    np.testing.assert_allclose(found[0], value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), found[1], grads)
    self.assertTrue(jnp.isnan(refused))

  @parameterized.parameters(((None, None), ('d', None)), (('d', None), (None, None)))
  def test_weights_that_are_divided_otherwise(self, made, given):
    """Into six: other entries are read of 96, all of them by the first count."""
    mesh = jax.make_mesh((6,), ('d',), axis_types=(AxisType.Explicit,), devices=jax.devices()[:6])
    sparse = s24.sparsify(lambda params, x: (x @ params['kernel']).sum(), STE)
    w = np.random.default_rng(0).normal(size=(96, 96)).astype(np.float32)
    x = np.ones((1, 96), np.float32)

    @jax.jit
    def forward(params, scale, x):
      variables = s24.sparse_variables(params, None, STE)
      params = jax.tree.map(lambda w: jax.sharding.reshard(w * scale, jax.P(*given)), params)
      return sparse(params, variables, None, x)

    with jax.set_mesh(mesh):
      params = {'kernel': jax.device_put(w, jax.P(*made))}
      found = [forward(params, scale, x) for scale in (1.0, 1.01)]
    np.testing.assert_allclose(found[0], (x @ np.where(s24.magnitude_mask(w), w, 0)).sum(), rtol=1e-4)
    self.assertTrue(np.isnan(found[1]))

  @parameterized.parameters((False, False), (True, False), (False, True))
  def test_shards_of_an_nnx_model(self, is_model, pure):
    """The fingerprint of a whole weight says nothing of a shard; nor does a bare array of a pure dictionary."""
    recipe = dataclasses.replace(STE, refresh_every=2) if is_model else STE
    model = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    variables = s24.sparse_variables(params, s24.sparse_training(optax.sgd(0.1), recipe).init(params), recipe)
    if is_model:
      model = s24.sparsify(model, recipe)
      nnx.update(model, variables)
    if pure:
      variables = nnx.to_pure_dict(variables)
    graph = nnx.graphdef(model)
    given = (nnx.state(model),) if is_model else (params, variables)
    sparse = s24.sparsify(lambda params, x: nnx.merge(graph, params)(x), recipe)

    def forward(params, *rest):
      return nnx.merge(graph, params)(*rest) if is_model else sparse(params, rest[0], None, rest[1])

    mesh = jax.make_mesh((2,), ('d',), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = jax.tree.map(lambda a: jax.P(None, 'd') if a.shape == (64, 64) else jax.P(), given)
    divided = jax.shard_map(forward, mesh=mesh, in_specs=(*specs, jax.P()), out_specs=jax.P(None, 'd'))
    w = np.asarray(params['kernel'][...])
    expected = X @ np.where(s24.magnitude_mask(w), w, 0)
    np.testing.assert_allclose(jax.jit(divided)(*given, X), expected, rtol=1e-4, atol=1e-5)
    if pure:
      with self.assertRaisesRegex(ValueError, ANOTHER):
        sparse(jax.tree.map(lambda w: 1.1 * w, params), variables, None, X)

  def test_variables_are_arrays_for_other_code(self):
    """To save them, to look at each, to map them with parameters."""
    (params, state), (newer, _) = trained(STE)
    sparse, v = s24.sparsify(loss, STE), s24.sparse_variables(params, state, STE)
    self.assertTrue(all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(v)))
    saved = serialization.from_bytes(v, serialization.to_bytes(v))
    flat = traverse_util.flatten_dict(v, sep='/')
    for found in (saved, traverse_util.unflatten_dict(flat, sep='/'), core.freeze(v)):
      np.testing.assert_allclose(sparse(params, found, None, X), sparse(params, v, None, X))
      with self.assertRaisesRegex(ValueError, ANOTHER):
        sparse(newer, found, None, X)
    model = s24.sparsify(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), STE)
    held = nnx.state(model)
    pure = nnx.to_pure_dict(held)
    nnx.replace_by_pure_dict(held, serialization.from_bytes(pure, serialization.to_bytes(pure)))
    nnx.update(model, held)
    shares = jax.tree.map(lambda mask, w: float(jnp.mean(mask * (w != 0))), s24.states_of(v), params)
    self.assertEqual(shares, dict.fromkeys(params, 0.5))

  @parameterized.parameters(
    (FST, STE),
    (STE, FST),
    (FST, s24.recipes.transposable_srste('.*kernel', masked_decay=1e-4, fp8=True)),
    (s24.recipes.s_ste('.*kernel'), s24.recipes.s_ste('.*kernel', fp8=True)),
  )
  def test_variables_of_another_recipe(self, made_for, recipe):
    """Whose masks, or scales, look alike."""
    phase = made_for.phases[0].name if made_for.phases else None
    params = {name: jnp.eye(64) for name in ('a_kernel', 'b_kernel')}
    state = s24.sparse_training(optax.sgd(0.1), made_for, phase=phase).init(params)
    v = s24.sparse_variables(params, state, made_for, phase=phase)
    sparse = s24.sparsify(loss, recipe, phase=recipe.phases[0].name if recipe.phases else None)
    message = r'(?s)kernel: variables were made for DotPolicy\(.*, and the recipe has DotPolicy\(.* one recipe'
    with self.assertRaisesRegex(ValueError, message):
      sparse(params, v, jax.random.key(0), X)
    with self.assertRaisesRegex(ValueError, message):  # in the trace that makes them, before anything runs
      jax.eval_shape(
        lambda p, s: sparse(p, s24.sparse_variables(p, s, made_for, phase=phase), jax.random.key(0), X), params, state
      )
    self.assertTrue(jnp.isnan(jax.jit(sparse)(params, v, jax.random.key(0), X)))
    own = s24.sparsify(loss, made_for, phase=phase)
    self.assertFalse(jnp.isnan(jax.jit(own)(params, v, jax.random.key(0), X)))

  def test_what_runs_a_policy_is_no_other_recipe(self):
    (params, state), _ = trained(STE)
    v = s24.sparse_variables(params, state, STE)
    policy = dataclasses.replace(STE.rules[0].policy, implementation='reference')
    named = s24.Recipe('own', (s24.Rule('.*kernel', policy),))
    found, expected = (s24.sparsify(loss, recipe)(params, v, None, X) for recipe in (named, STE))
    np.testing.assert_array_equal(found, expected)

  def test_an_nnx_model_of_another_recipe(self):
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    made_for, recipe = s24.recipes.s_ste('kernel'), s24.recipes.s_ste('kernel', fp8=True)
    params = nnx.state(model, nnx.Param)
    v = s24.sparse_variables(params, s24.sparse_training(optax.sgd(0.1), made_for).init(params), made_for)
    sparse = s24.sparsify(model, recipe, rngs=nnx.Rngs(mvue=0))
    nnx.update(sparse, v)
    with self.assertRaisesRegex(ValueError, "kernel: variables were made for .*, and the recipe has .*precision='fp8'"):
      sparse(X)
    again = s24.sparsify(model, made_for, rngs=nnx.Rngs(mvue=0))
    nnx.update(again, v)
    self.assertFalse(jnp.isnan(again(X)).any())

  @parameterized.parameters(
    '', 'float32', 'float32 64x64 of', 'float32 64x64 of 0x1', 'float32 64x64 of 99x1', 'float32 64x64 of 4',
    f'float32 64x64 of {"9" * 5000}x1', 'float32 64x64 of 8x8\n',
  )  # fmt: skip
  def test_fingerprints_that_nobody_makes(self, text):
    """Out of a file that somebody changed: an error that says so, before anything is read by them."""
    (params, state), _ = trained(STE)
    sparse, v = s24.sparsify(loss, STE), s24.sparse_variables(params, state, STE)
    sums = jnp.zeros(3)
    with self.assertRaisesRegex(ValueError, "under 'made of', which is no fingerprint .* sparse_variables"):
      sparse(params, {**v, 'made of': {**v['made of'], 'a_kernel': {text: sums}}}, None, X)

  @parameterized.parameters(jnp.bfloat16, jnp.float16)
  def test_a_cast_is_no_other_weight(self, dtype):
    (params, state), (newer, _) = trained(STE)
    sparse, v = jax.jit(s24.sparsify(loss, STE)), s24.sparse_variables(params, state, STE)
    cast, other = (jax.tree.map(lambda w: w.astype(dtype), p) for p in (params, newer))
    expected = loss(jax.tree.map(lambda w: w.astype(dtype), project(params, state, STE)), X)
    np.testing.assert_allclose(sparse(cast, v, None, X), expected, rtol=2e-2)
    self.assertEqual(bool(jnp.isnan(sparse(other, v, None, X))), dtype == jnp.bfloat16)
    self.assertTrue(jnp.isfinite(sparse(params, s24.sparse_variables(cast, state, STE), None, X)))

  def test_an_ensemble_and_micro_batches_in_a_scan(self):
    (params, state), (newer, after) = trained(STE)
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), (params, state), (newer, after))
    sparse = s24.sparsify(loss, STE)
    make = functools.partial(s24.sparse_variables, recipe=STE)

    def of_micro_batches(params, state):
      variables = make(params, state)
      return jax.lax.scan(lambda sum, x: (sum + sparse(params, variables, None, x), None), 0.0, X.reshape(2, 4, 64))[0]

    expected = [loss(project(p, s, STE), X) for p, s in trained(STE)]
    np.testing.assert_allclose(jax.jit(jax.vmap(of_micro_batches))(*both), expected, rtol=1e-5)
    # One of the two with the masks of the other step.
    mixed = jax.tree.map(lambda *leaves: jnp.stack(leaves), params, params)
    values = jax.jit(jax.vmap(lambda p, v: sparse(p, v, None, X)))(mixed, jax.vmap(make)(*both))
    self.assertEqual(jnp.isnan(values).tolist(), [False, True])

  def test_linen_and_a_function_of_an_nnx_model(self):
    model = s24.sparsify(nn.Dense(64), STE)
    params = nn.Dense(64).init(jax.random.key(0), X)['params']
    tx = s24.sparse_training(optax.sgd(1.0), STE)
    v = s24.sparse_variables(params, tx.init(params), STE)
    other = jax.tree.map(lambda w: w * 1.1, params)
    self.assertTrue(jnp.isfinite(jax.jit(model.apply)({'params': params, 'sparse24': v}, X)).all())
    with self.assertRaisesRegex(ValueError, ANOTHER):
      model.apply({'params': other, 'sparse24': v}, X)
    self.assertTrue(jnp.isnan(jax.jit(model.apply)({'params': other, 'sparse24': v}, X)).all())

    module = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    sparse = s24.sparsify(lambda model, x: model(x).sum(), STE)
    v = s24.sparse_variables(nnx.state(module, nnx.Param), None, STE)
    self.assertTrue(jnp.isfinite(sparse(module, v, None, X)))
    module.kernel[...] *= 1.1
    with self.assertRaisesRegex(ValueError, ANOTHER):
      sparse(module, v, None, X)


if __name__ == '__main__':
  absltest.main()
