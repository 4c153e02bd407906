"""A state says by what it was made, in arrays that a checkpoint keeps: another recipe, or phase, is an error or NaN."""

import dataclasses
import functools
import importlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
from flax import nnx, serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import sparse24_jax as s24

FST = s24.recipes.transposable_srste('.*', masked_decay=0.0)
SR_STE = s24.recipes.sr_ste('.*', masked_decay=0.0)
STEP = s24.recipes.step('.*')
X = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)
ANOTHER = r"^kernel: its state was made by projection 'transposable exact', .* 'magnitude 2:4'\. To go on .*tx.init"


def params_of(*shape):
  return {'kernel': jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)}


def loss(params, x):
  return ((x @ params['kernel']) ** 2).sum()


def optimizer(recipe, **kwargs):
  return s24.sparse_training(optax.adam(0.01), recipe, **kwargs)


@functools.cache
def read_into(recipe, other, *shape):
  """The state of one recipe, as Orbax reads it into the tree of another."""
  tree = optimizer(other, learning_rate=0.01).init(params_of(*shape))
  with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(f'{folder}/state', optimizer(recipe).init(params_of(*shape)))
    checkpointer.wait_until_finished()
    return jax.block_until_ready(checkpointer.restore(f'{folder}/state', jax.eval_shape(lambda: tree)))


def step_of(recipe, tx, phase):
  """A step as a user writes it, its model in one phase."""
  sparse = s24.sparsify(loss, recipe, phase=phase)

  def step(params, state):
    variables = s24.sparse_variables(params, state, recipe, phase=phase)
    value, grads = jax.value_and_grad(sparse)(params, variables, jax.random.key(0), X)
    updates, state = tx.update(grads, state, params)
    return value, optax.apply_updates(params, updates), state

  return jax.jit(step)


class OtherProjectionTest(absltest.TestCase):

  def test_a_state_that_is_read_into_the_tree_of_another_recipe(self):
    """Its masks have the shapes of the others, and all that is static is the tree's."""
    params, state, tx = params_of(16, 16), read_into(FST, SR_STE, 16, 16), optimizer(SR_STE, learning_rate=0.01)
    for call in (
      lambda: s24.sparse_variables(params, state, SR_STE), lambda: s24.project(params, state, SR_STE),
      lambda: tx.update(params, state, params),
    ):  # fmt: skip
      with self.assertRaisesRegex(ValueError, ANOTHER):
        call()
    self.assertTrue(jnp.isnan(jax.jit(tx.update)(params, state, params)[0]['kernel']).all())
    own = tx.init(params)
    step = step_of(SR_STE, tx, 'sparse')
    for given, fine in ((own, True), (state, False)):
      value, after, _ = step(params, given)
      self.assertEqual((bool(jnp.isfinite(value)), bool(jnp.isfinite(after['kernel']).all())), (fine, fine))
      projected = jax.jit(lambda p, s: s24.project(p, s, SR_STE))(params, given)['kernel']
      self.assertEqual(bool(jnp.isfinite(projected).all()), fine)
    np.testing.assert_allclose(step(params, own)[0], loss(s24.project(params, own, SR_STE), X), rtol=1e-5)

  def test_a_mask_along_other_axes(self):
    """The weight is square and stored as `[out, in]`."""
    bound = s24.bind(SR_STE, lambda p, x: x @ p['kernel'].T, params_of(16, 16), X)
    state = optimizer(SR_STE, learning_rate=0.01).init(params_of(16, 16))
    tree = optimizer(bound, learning_rate=0.01).init(params_of(16, 16))
    read = jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(state))
    with self.assertRaisesRegex(ValueError, "'magnitude 2:4', and .* 'magnitude 2:4, in 1, out 0'"):
      s24.project(params_of(16, 16), read, bound)

  def test_an_nnx_model_and_variables_that_a_program_made(self):
    module = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))
    params, state = nnx.state(module, nnx.Param), read_into(FST, SR_STE, 16, 16)
    boxed = jax.tree.unflatten(
      jax.tree.structure(optimizer(SR_STE, learning_rate=0.01).init(params)), jax.tree.leaves(state)
    )
    variables = jax.jit(lambda p, s: s24.sparse_variables(p, s, SR_STE))(params, boxed)
    model = s24.sparsify(module, SR_STE)
    nnx.update(model, variables)
    self.assertTrue(jnp.isnan(nnx.jit(lambda model, x: model(x))(model, X)).all())
    with self.assertRaisesRegex(ValueError, 'an optimizer state that does not serve this recipe.* outside of jit'):
      model(X)


class RestoredTest(absltest.TestCase):

  def test_what_may_change(self):
    """Back end, decay, period and share of the phases, the words of a pattern, the phase, and the mesh."""
    params = params_of(16, 16)
    expected = s24.project(params, optimizer(FST).init(params), FST)['kernel']
    (rule,) = FST.rules
    policy = dataclasses.replace(rule.policy, implementation='reference', weight_grad='dense')
    for recipe in (
      dataclasses.replace(FST, rules=(s24.Rule('ker.*', policy),)),
      s24.recipes.transposable_srste('.*', masked_decay=0.1, refresh_every=7, dense_fraction=0.5),
    ):
      state = read_into(FST, recipe, 16, 16)
      np.testing.assert_array_equal(s24.project(params, state, recipe)['kernel'], expected)
    tx = optimizer(FST, phase='dense')
    _, state = tx.update(params, read_into(FST, FST, 16, 16), params)
    self.assertEqual(int(state.count), 1)
    mesh = jax.make_mesh((2,), ('d',))

    def on_mesh(leaf):
      spec = jax.P('d') if leaf.shape == (16, 16) else jax.P()
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec))

    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
      saved = optimizer(FST).init(params)
      checkpointer.save(f'{folder}/state', saved)
      checkpointer.wait_until_finished()
      state = checkpointer.restore(f'{folder}/state', jax.tree.map(on_mesh, jax.eval_shape(lambda: saved)))
    self.assertLen(state.projections['kernel'].sharding.device_set, 2)
    np.testing.assert_array_equal(s24.project(params, state, FST)['kernel'], expected)

  def test_a_module_that_is_reloaded_is_no_error(self):
    module = importlib.import_module('sparse24_jax.integration.sparsify')
    with mock.patch.dict(vars(module)):  # others hold what it had
      importlib.reload(module)

  def test_by_the_serialization_of_flax_in_modules_of_equinox(self):
    eqx = pytest.importorskip('equinox')
    model = eqx.nn.MLP(16, 16, 16, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    recipe = s24.bind(s24.recipes.ste('.*weight'), lambda p, x: eqx.combine(p, static)(x), params, jnp.ones(16))
    tx = s24.sparse_training(optax.sgd(0.1), recipe)
    state = tx.init(params)
    with self.assertRaisesRegex(TypeError, "can not serialize 'MLP' object"):
      serialization.to_bytes(state)
    saved = serialization.to_bytes(jax.tree.leaves((params, state)))
    target, structure = jax.tree.flatten((params, tx.init(jax.tree.map(jnp.zeros_like, params))))
    found = jax.tree.unflatten(structure, serialization.from_bytes(target, saved))
    jax.tree.map(np.testing.assert_array_equal, found, (params, state))
    s24.sparse_variables(*found, recipe)

  def test_by_the_serialization_of_flax(self):
    """It knows no static nodes by itself."""
    params, tx = params_of(16, 16), optax.chain(optax.clip_by_global_norm(1.0), optimizer(FST))
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    found = serialization.from_bytes(tx.init(params), serialization.to_bytes(state))
    self.assertEqual(jax.tree.structure(found), jax.tree.structure(state))
    jax.tree.map(np.testing.assert_array_equal, found, state)
    s24.project(params, found, FST)
    tree = optimizer(SR_STE, learning_rate=0.01).init(params)
    other = serialization.from_bytes(tree, serialization.to_bytes(state[1]))
    with self.assertRaisesRegex(ValueError, ANOTHER):
      s24.project(params, other, SR_STE)


class OtherPhaseTest(parameterized.TestCase):

  @parameterized.product(recipe=(FST, STEP), phases=(('dense', 'sparse'), ('sparse', 'dense')))
  def test_optimizer_and_model_of_two_phases(self, recipe, phases):
    params, tx = params_of(16, 16), optimizer(recipe, phase=phases[0])
    message = f'updates in phase {phases[0]!r}, and reads the masks of its optimizer in phase {phases[1]!r}: give'
    with self.assertRaisesRegex(ValueError, message):
      jax.eval_shape(step_of(recipe, tx, phases[1]), params, tx.init(params))

  def test_branches_for_two_phases_close_over_one_state(self):
    """What a branch reads is nothing to the other; within one, also in the loss, two phases are an error."""
    params, sparse, dense = params_of(16, 16), *(optimizer(FST, phase=phase) for phase in ('sparse', 'dense'))
    read = lambda p, s: s24.project(p, s, FST)  # noqa: E731

    def updated(tx, seen, params, state):
      grads = jax.grad(lambda p: loss(seen(p, state), X))(params)
      return tx.update(grads, state, params)

    def step(params, state, of_dense):
      return jax.lax.cond(
        state.count < 2, lambda: updated(sparse, read, params, state), lambda: updated(dense, of_dense, params, state)
      )

    given = jax.eval_shape(lambda: (params, sparse.init(params)))
    jax.eval_shape(functools.partial(step, of_dense=lambda p, s: p), *given)
    with self.assertRaisesRegex(ValueError, "updates in phase 'dense', and reads .* in phase 'sparse'"):
      jax.eval_shape(functools.partial(step, of_dense=read), *given)

  def test_where_one_trace_does_not_show_both(self):
    """`optax.MultiSteps` updates in a branch of its own: the next step reads of which phase the last one was."""
    params = params_of(16, 16)
    tx = optax.MultiSteps(optimizer(FST, phase='dense'), 1).gradient_transformation()
    step, state = step_of(FST, tx, 'sparse'), tx.init(params)
    values = []
    for _ in range(2):
      value, params, state = step(params, state)
      values.append(bool(jnp.isfinite(value)))
    self.assertEqual(values, [True, False])
    with self.assertRaisesRegex(ValueError, "last step .* 'dense', after which .* none of phase 'sparse'"):
      s24.sparse_variables(params, jax.block_until_ready(state), FST, phase='sparse')

  @parameterized.parameters('sparse', 'dense')
  def test_a_dense_model_and_a_sparse_step_in_a_branch(self, phase):
    """A dense model reads no masks, so no state tells its phase: the trace of the branch sees what is around it."""
    params, tx = params_of(16, 16), optax.MultiSteps(optimizer(FST, phase=phase), 2).gradient_transformation()
    given = jax.eval_shape(lambda: (params, tx.init(params)))
    jax.eval_shape(step_of(FST, tx, phase), *given)
    if phase == 'sparse':
      with self.assertRaisesRegex(ValueError, "updates in phase 'sparse', and reads .* in phase 'dense'"):
        jax.eval_shape(step_of(FST, tx, 'dense'), *given)

  def test_a_dense_start_of_a_recipe_that_has_none(self):
    params, tx = params_of(16, 16), optimizer(FST, phase='dense')
    _, state = jax.block_until_ready(tx.update(params, tx.init(params), params))
    with self.assertRaisesRegex(ValueError, r"a first dense phase, .*phases=\(Phase\('dense', 0.1\), \.\.\.\)\)"):
      s24.sparse_variables(params, state, FST, phase='sparse')
    # What the message says to do.
    warmed = dataclasses.replace(FST, phases=(s24.Phase('dense', 0.1), s24.Phase('sparse', 0.9)))
    s24.sparse_variables(params, state, warmed, phase='sparse')

  def test_a_dense_end_is_no_dense_start(self):
    """A run that is finished, and goes on with more steps in all."""
    dense, sparse = s24.Phase('dense', 0.2), s24.Phase('sparse', 0.3)
    recipe = dataclasses.replace(FST, phases=(dense, sparse, sparse, dense))
    again = dataclasses.replace(FST, phases=(dense, sparse, dense, sparse))
    params = params_of(16, 16)
    state, steps = optimizer(recipe, phase='dense').init(params), {}
    for phase in ('dense', 'sparse', 'dense', 'dense', 'sparse'):
      before = params, state
      steps[phase] = steps.get(phase) or step_of(recipe, optimizer(recipe, phase=phase), phase)
      value, params, state = steps[phase](params, state)
    self.assertTrue(jnp.isnan(value))
    told = "of phase 'dense', after sparse ones .*, after which .* none of phase 's.*, or the recipe further phases"
    with self.assertRaisesRegex(ValueError, told):
      s24.sparse_variables(*before, recipe, phase='sparse')
    s24.sparse_variables(*before, again, phase='sparse')
    # In the dense phase between sparse ones a state that was carried over knows of no step before it.
    carried = s24.carry_over(optimizer(again, phase='dense').init(params), before[1])
    _, params, state = steps['dense'](before[0], carried)
    s24.sparse_variables(params, state, again, phase='sparse')

  def test_a_model_that_was_finished_dense(self):
    """`project` pruned it: the first phase is that of none given."""
    params, tx = params_of(16, 16), optimizer(FST, phase='dense')
    _, state = tx.update(params, tx.init(params), params)
    told = "phase 'dense', .* export params as they are; .* say so, project\\(..., phase='sparse'\\)"
    with self.assertRaisesRegex(ValueError, told):
      s24.project(params, state, FST)
    self.assertTrue(jnp.isnan(jax.jit(lambda p, s: s24.project(p, s, FST))(params, state)['kernel']).all())
    dense = s24.project(params, state, FST, phase='dense')
    self.assertIs(dense, params)
    with self.assertRaisesRegex(ValueError, "phase='dense'\\) are .*; .* project\\(..., phase='sparse'\\) have"):
      s24.verify_weights(dense, FST)
    s24.verify24(s24.project(params, state, FST, phase='sparse')['kernel'])

  def test_what_pruning_would_cost_beside_a_dense_step(self):
    params, tx = params_of(16, 16), optimizer(FST, phase='dense')

    def step(params, state, **kwargs):
      pruned = loss(s24.project(params, state, FST, **kwargs), X)
      return pruned, tx.update(jax.grad(loss)(params, X), state, params)

    given = jax.eval_shape(lambda: (params, tx.init(params)))
    jax.eval_shape(functools.partial(step, phase='sparse'), *given)
    with self.assertRaisesRegex(ValueError, "updates in phase 'dense', and reads .* project\\(..., phase='sparse'\\)"):
      jax.eval_shape(step, *given)

  def test_a_state_that_is_still_computed(self):
    """An error says why after a long step, too."""
    params, tx = params_of(16, 16), optimizer(FST, phase='dense')
    _, state = tx.update(params, tx.init(params), params)

    @jax.jit
    def long(phase, m):
      return phase + jax.lax.fori_loop(0, 20, lambda _, m: m @ m, m).sum().astype(phase.dtype)

    given = state.identity.phase, jnp.zeros((512, 512))
    jax.block_until_ready(long(*given))
    with self.assertRaisesRegex(ValueError, "phase 'dense', .* say so, project"):
      s24.project(params, state._replace(identity=state.identity._replace(phase=long(*given))), FST)

  def test_phases_that_are_none(self):
    """Such numbers come from a file from elsewhere."""
    params = params_of(16, 16)
    state = optimizer(FST).init(params)
    for number in (99, -3, -1):
      identity = state.identity._replace(phase=jnp.int32(number))
      with self.assertRaisesRegex(ValueError, f'one of phase number {number}, and there are 2'):
        s24.project(params, state._replace(identity=identity), FST)
    identity = state.identity._replace(made_by=jnp.uint8(0))
    with self.assertRaisesRegex(ValueError, 'states of 0 weights were made, and holds those of 1'):
      s24.project(params, state._replace(identity=identity), FST)

  def test_phases_in_their_order(self):
    """A dense start and the first sparse step after it, and a sparse phase and its dense end."""
    for recipe, phases in ((STEP, ('dense', 'sparse', 'sparse')), (FST, ('sparse', 'dense', 'dense'))):
      params = params_of(16, 16)
      state = optimizer(recipe, phase=phases[0]).init(params)
      steps = {phase: step_of(recipe, optimizer(recipe, phase=phase), phase) for phase in phases}
      for phase in phases:
        value, params, state = steps[phase](params, state)
        self.assertTrue(jnp.isfinite(value))


if __name__ == '__main__':
  absltest.main()
