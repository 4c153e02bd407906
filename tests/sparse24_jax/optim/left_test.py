"""That a step is given the weights that the step before it left: who changes them is told, and nobody else."""

import dataclasses
import math
import re

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax.optim import _left
from tests.quick import jit
from tests.standard import project

RULE = 'mlp/.*'
STE = s24.recipes.ste(RULE)


def wrapped(recipe=STE, inner=None):
  return s24.sparse_training(optax.adam(1e-3) if inner is None else inner, recipe, learning_rate=1e-3)


def params_of(dtype=jnp.float32, shape=(64, 48)):
  rng = np.random.default_rng(0)
  mlp = {'up': rng.normal(size=shape), 'down': rng.normal(size=shape[::-1])}
  params = {'mlp': mlp, 'head': rng.normal(size=(8, 4))}
  return jax.tree.map(lambda w: jnp.asarray((0.02 * w).astype(np.float32).astype(dtype)), params)


def grads_of(params, i):
  rng = np.random.default_rng(i)
  return jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape).astype(np.float32).astype(w.dtype)), params)


def trained(tx, params, *, steps=4, between=lambda params, i: params, grads_of=grads_of):
  """The state after some jitted steps; `between` is what a trainer does to the weights besides."""
  state = jit(tx.init)(params)

  @jit
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for i in range(steps):
    params, state = step(params, state, grads_of(params, i))
    params = between(params, i)
  return params, state


class LeftTest(parameterized.TestCase):

  @parameterized.parameters((0.05, 0, 2), (0.07, 0, 12), (0.12, 130, 190), (0.2, 199, 200))
  def test_how_many_of_200_weights_are_others(self, share, fewest, most):
    weights, changes = np.random.default_rng(5).standard_normal((2, 200, 64, 48)).astype(np.float32)

    def is_another(w, change):
      left = _left.at_start([w])
      return _left.given(left, [w + share * change], True).missed[0] > 1

    found = int(jit(jax.vmap(is_another))(0.02 * weights, 0.02 * changes).sum())
    self.assertBetween(found, fewest, most)

  def test_updates_that_are_not_applied(self):
    tx, w = wrapped(s24.recipes.ste('.*/forgotten'), optax.sgd(0.1)), jnp.ones((8, 4))
    params = {'h_0': {'forgotten': w}, 'h_1': {'forgotten': 2 * w}}
    updates, state = tx.update(params, tx.init(params), params)
    with self.assertNoLogs('sparse24_jax', 'WARNING'):
      tx.update(params, state, optax.apply_updates(params, updates))
    with self.assertLogs('sparse24_jax', 'WARNING') as logged:
      tx.update(params, state, params)
    self.assertRegex(logged.output[0], r':2 of h_\*/forgotten: the second update .* = optax.apply_updates')

  @parameterized.named_parameters(
    ('scaled', lambda: optax.chain(wrapped(inner=optax.scale_by_adam()), optax.scale(-1e-3))),
    ('rate_a_layer', lambda: optax.chain(wrapped(), optax.masked(optax.scale(0.5), {'mlp': True, 'head': False}))),
    ('decayed', lambda: optax.chain(wrapped(), optax.add_decayed_weights(-0.1))),
    ('frozen_behind', lambda: optax.chain(wrapped(), optax.set_to_zero())),
    ('averaged_around', lambda: optax.contrib.schedule_free(wrapped(), learning_rate=1e-3, b1=0.9)),
  )  # fmt: skip
  @pytest.mark.few(2)
  def test_updates_that_are_changed_behind_the_wrapper(self, make):
    params, state = trained(make(), params_of())
    for ask in (
      lambda: s24.get_flip_rate(state), lambda: project(params, jax.block_until_ready(state), STE),
      lambda: s24.sparse_variables(params, state, STE),
    ):  # fmt: skip
      with self.assertRaisesRegex(
        ValueError, r'mlp/\w+: (?=.*carry_over\(tx.init).*given other weights than the update.*put it inside'
      ):
        ask()

  def test_updates_that_sum_to_zero(self):
    """Those of SGD in front of a softmax sum to zero over its features."""

    def centred(params, i):
      grads = jax.tree.map(np.asarray, grads_of(params, i))
      return jax.tree.map(lambda g: jnp.asarray(g - g.mean(-1, keepdims=True)), grads)

    tx = optax.chain(wrapped(inner=optax.sgd(0.01)), optax.scale(0.5))
    _, state = trained(tx, params_of(shape=(32, 16)), grads_of=centred)
    with self.assertRaisesRegex(ValueError, 'put it inside'):
      s24.get_flip_rate(state)

  def test_other_weights_between_steps(self):
    def normed(params, i):
      del i
      return jax.tree.map(lambda w: w / jnp.linalg.norm(w, axis=0, keepdims=True), params)

    _, state = trained(wrapped(), params_of(), between=normed)
    with self.assertRaisesRegex(ValueError, 'changes the parameters between steps'):
      s24.get_flip_rate(state)

  @parameterized.parameters(
    ('multi_steps', jnp.float32), ('plain', jnp.bfloat16), ('rigl', jnp.float32), ('rigl', jnp.bfloat16),
    ('plain', jnp.float32), ('multi_steps', jnp.bfloat16), ('chain', jnp.float32), ('chain', jnp.bfloat16),
    ('decay_on_weights', jnp.float32), ('decay_on_weights', jnp.bfloat16), ('s_ste', jnp.float32),
    ('s_ste', jnp.bfloat16), ('finite', jnp.float32),
  )  # fmt: skip
  @pytest.mark.few(2)
  def test_no_false_alarm(self, case, dtype):
    """Neither rounding nor wrappers that hold a step back raise one."""
    tx = {
      'plain': wrapped,
      'multi_steps': lambda: optax.MultiSteps(wrapped(), 2).gradient_transformation(),
      'chain': lambda: optax.chain(optax.clip_by_global_norm(1.0), wrapped(inner=optax.adamw(0.3))),
      'rigl': lambda: wrapped(s24.recipes.rigl(RULE, density=0.3, total_steps=100, refresh_every=2)),
      'decay_on_weights': lambda: wrapped(s24.recipes.sr_ste(RULE, masked_decay=0.1)),
      's_ste': lambda: wrapped(s24.recipes.s_ste(RULE, refresh_every=3)),
      'finite': lambda: optax.apply_if_finite(wrapped(), max_consecutive_errors=3),
    }[case]()
    params, state = trained(tx, params_of(dtype))
    s24.get_flip_rate(state)
    # An average beside the weights is read with the same masks.
    average = jax.tree.map(lambda w: (w * 0.9).astype(w.dtype), params)
    if case == 'plain':
      s24.sparse_variables(average, state, STE)

  def test_updates_of_one_sign_below_the_rounding(self):
    """They leave most weights as they are, where links move, too."""
    recipe = s24.recipes.rigl(RULE, density=0.5, total_steps=1000, refresh_every=50)
    tx = s24.sparse_training(optax.adam(2e-5), recipe)
    params = {'mlp': {'up': params_of(jnp.bfloat16)['mlp']['up']}}
    _, state = trained(tx, params, grads_of=lambda params, i: jax.tree.map(jnp.ones_like, params))
    s24.get_flip_rate(state)
    np.testing.assert_array_equal(state.left.missed, 0)

  def test_states_that_are_vmapped(self):
    params = {'mlp': dict.fromkeys('ab', np.ones((3, 8, 8), np.float32))}
    tx = wrapped(inner=optax.sgd(0.1))
    state = jit(jax.vmap(tx.init))(params)
    changed = {path: i for i, path in enumerate(_left.watched(['mlp/a', 'mlp/b']))}['mlp/b']
    state = state._replace(left=state.left._replace(missed=jnp.zeros((3, 2)).at[2, changed].set(2.0)))
    with self.assertRaisesRegex(ValueError, 'mlp/b: 2 steps'):
      s24.get_flip_rate(state)

  def test_weights_that_are_set_once(self):
    """In fewer bits, say: masks are chosen anew after the next step."""

    def between(params, i):
      return jax.tree.map(lambda w: w * (1 + 0.01 * (i == 2)), params)

    _, state = trained(wrapped(), params_of(), between=between)
    s24.get_flip_rate(state)
    np.testing.assert_array_equal(state.left.missed, [1, 1])

  @parameterized.parameters(
    (STE, 'sparse', 1, True), (s24.recipes.s_ste(RULE), 'sparse', 0, True), (STE, 'sparse', 0, False),
    (s24.recipes.transposable_srste(RULE, masked_decay=0.0), 'dense', 1, False),
  )  # fmt: skip
  @pytest.mark.few(2)
  def test_weights_that_are_others_altogether(self, recipe, phase, steps, refused):
    """Those of a checkpoint without its state, or a state without its weights: scales and moments are of others.

    Masks of the start are mended; and what `project` prunes for a dense end is meant.
    """
    tx, params = s24.sparse_training(optax.adam(0.01), recipe, phase=phase), params_of(shape=(16, 8))
    state, other = tx.init(params), jax.tree.map(lambda w: jnp.roll(w, 1, axis=0), params)
    for given in [params] * steps + [other]:
      _, state = tx.update(grads_of(given, 0), state, given)
    forward = jax.jit(lambda p, s: project(p, s, recipe, phase='sparse'))
    self.assertEqual(bool(jnp.isnan(forward(other, state)['mlp']['up']).all()), refused)
    host = jax.tree.map(np.asarray, state)
    if refused:
      for call in (
        lambda: s24.get_flip_rate(state), lambda: s24.get_flip_rate(host), lambda: project(other, host, recipe),
      ):  # fmt: skip
        with self.assertRaisesRegex(ValueError, r'mlp/\w+: update was given other .* restore .* tx.init'):
          call()
    else:
      s24.get_flip_rate(state)

  @parameterized.parameters((False, True), (True, False), (None, False))
  def test_weights_that_were_loaded_after_init(self, refresh, refused):
    """A first step that is told to choose no masks leaves those of the first weights, until the next refresh."""
    recipe = s24.recipes.transposable_srste(RULE, masked_decay=0.0)
    tx, params = s24.sparse_training(optax.adam(0.01), recipe, phase='sparse'), params_of(shape=(16, 8))
    state, loaded = tx.init(params), jax.tree.map(lambda w: jnp.roll(w, 1, axis=0), params)
    update = jax.jit(tx.update, static_argnames='refresh')
    _, new = update(grads_of(loaded, 0), state, loaded, refresh=refresh)
    if refused:
      with self.assertRaisesRegex(ValueError, r'mlp/\w+: update was given other .* or the init, .* tx.init\(params\)'):
        s24.get_flip_rate(new)
    else:
      s24.get_flip_rate(new)
    rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(w.dtype), params)
    _, new = update(grads_of(params, 0), state, rounded, refresh=refresh)
    s24.get_flip_rate(new)

  @parameterized.parameters((STE, False, True), (STE, None, False), (s24.recipes.s_ste(RULE), None, True))
  def test_weights_that_were_loaded_before_a_dense_start(self, base, refresh, refused):
    """The sparse step after it refuses a scale of others, and masks that no step between was to choose."""
    phases = s24.Phase('dense', 0.5), s24.Phase('sparse', 0.5)
    recipe = dataclasses.replace(base, phases=phases, refresh_every=40)
    dense, sparse = (s24.sparse_training(optax.sgd(0.0), recipe, phase=phase) for phase in ('dense', 'sparse'))
    params = params_of(shape=(16, 8))
    loaded = jax.tree.map(lambda w: 3 * jnp.roll(w, 1, axis=0), params)
    state, grads = dense.init(params), grads_of(loaded, 0)
    for _ in range(3):
      _, state = dense.update(grads, state, loaded, refresh=refresh)
    s24.get_flip_rate(state)
    _, state = sparse.update(grads, state, loaded, refresh=refresh)
    if refused:
      with self.assertRaisesRegex(ValueError, r'mlp/\w+: update was given other .* or the init, .* tx.init\(params\)'):
        s24.get_flip_rate(state)
    else:
      s24.get_flip_rate(state)

  def test_weights_of_another_step_of_the_run(self):
    """The differences are of both signs, and their sum is about none."""
    tx = wrapped()
    before, _ = trained(tx, params_of(), steps=4)
    _, state = trained(tx, params_of(), steps=12)
    _, state = jit(tx.update)(grads_of(before, 0), state, before)
    self.assertTrue(jnp.isnan(jax.jit(lambda p, s: project(p, s, STE))(before, state)['mlp']['up']).all())
    with self.assertRaisesRegex(ValueError, r'mlp/\w+: update was given other .* restore .* of one step'):
      s24.get_flip_rate(state)

  @parameterized.parameters(
    ('float8_e4m3fn', 0.05), ('bfloat16', 1), ('float16', 1), ('float8_e4m3fn', 1), ('float8_e5m2', 1),
    ('float8_e4m3fn', 0.1), ('float8_e4m3fn', 0.2),
  )  # fmt: skip
  @pytest.mark.few(2)
  def test_weights_that_were_stored_in_fewer_bits_are_those_of_the_step(self, dtype, size):
    """Below 0.005 e4m3 without a scale rounds off a tenth of a weight and more, at 0.001 half of it."""

    def between(params, i):
      return jax.tree.map(lambda w: w.astype(dtype).astype(w.dtype), params) if i == 3 else params

    tx = wrapped(inner=optax.sgd(1e-6))
    params, state = trained(tx, jax.tree.map(lambda w: size * w, params_of()), between=between)
    _, state = jit(tx.update)(grads_of(params, 0), state, params)
    s24.get_flip_rate(state)
    self.assertFalse(jnp.isnan(jax.jit(lambda p, s: project(p, s, STE))(params, state)['mlp']['up']).any())

  def test_other_weights_in_e4m3_are_others(self):
    tx = wrapped(inner=optax.sgd(1e-6))
    params, state = trained(tx, jax.tree.map(lambda w: 0.2 * w, params_of()))
    other = jax.tree.map(lambda w: jnp.roll(w, 1, axis=0).astype(jnp.float8_e4m3fn).astype(w.dtype), params)
    _, state = jit(tx.update)(grads_of(other, 0), state, other)
    with self.assertRaisesRegex(ValueError, r'mlp/\w+: update was given other'):
      s24.get_flip_rate(state)

  def test_zeros_are_no_small_weights_in_e4m3(self):
    tx = wrapped(inner=optax.sgd(1e-9))
    params, state = trained(tx, jax.tree.map(lambda w: 5e-4 * w, params_of()))
    zeros = jax.tree.map(jnp.zeros_like, params)
    _, state = jit(tx.update)(grads_of(zeros, 0), state, zeros)
    with self.assertRaisesRegex(ValueError, r'mlp/\w+: update was given other'):
      s24.get_flip_rate(state)

  def test_e4m3_costs_no_pass_of_its_own(self):
    """One pass over the entries of each weight, and two means over the sums."""
    sampled = [jnp.ones((32, 32))] * 8
    program = jax.make_jaxpr(lambda left: _left.given(left, sampled))(_left.at_start(sampled))
    self.assertLen(re.findall(r'= reduce_\w+', str(program)), 8 + 2)

  @parameterized.parameters((0.98, True, ''), (0.5, True, 'scales'), (0.98, False, 'masks'))
  def test_an_average_of_weights_is_warned_of_where_states_are_of_one_weight(self, share, scales, told):
    """A mask is; the scale of a soft threshold is frozen for the run, and its mask that of the average itself."""
    recipe = s24.recipes.s_ste(RULE) if scales else STE
    params, state = trained(wrapped(recipe), params_of())
    state, average = jax.block_until_ready((state, jax.tree.map(lambda w: share * w, params)))
    with self.assertLogs('sparse24_jax', 'WARNING') if told else self.assertNoLogs('sparse24_jax', 'WARNING') as logged:
      s24.sparse_variables(average, state, recipe)
    if told:
      self.assertRegex(logged.output[0], rf'mlp/up, mlp/down: params are not .* average .* the {told} of that step')
      self.assertEqual('opt_state=None' in logged.output[0], not scales)

  @parameterized.parameters(1, 3)
  def test_weights_that_are_loaded_after_the_start_do_not_wait_for_a_refresh(self, steps):
    """A pre-trained model was trained under the masks of random weights, 39 steps with FST."""
    recipe = dataclasses.replace(STE, refresh_every=100)
    tx, before, loaded = wrapped(recipe), params_of(), jax.tree.map(lambda w: jnp.roll(w, 1, axis=0), params_of())
    state, params = tx.init(before), loaded
    found = []
    for i in range(steps):
      updates, state = jax.jit(tx.update)(grads_of(params, i), state, params)
      params = optax.apply_updates(params, updates)
      found.append((params, state.projections))
    (after, masks), (_, last) = found[0], found[-1]
    chosen = tx.init(after).projections
    jax.tree.map(np.testing.assert_array_equal, masks, chosen)
    jax.tree.map(np.testing.assert_array_equal, last, chosen)  # and then they wait
    self.assertGreater(s24.get_flip_rate(state).overall, 0.3)

  def test_loaded_weights_do_not_wait_beside_links_that_come_and_go(self):
    moving = s24.Rule('mlp/up', s24.DotPolicy(s24.dynamic_sparse(0.25, drop_fraction=0.3)))
    tx = wrapped(dataclasses.replace(STE, rules=(moving, *STE.rules), refresh_every=100))
    before, loaded = params_of(), jax.tree.map(lambda w: jnp.roll(w, 1, axis=0), params_of())
    start = tx.init(before)
    updates, state = jax.jit(tx.update)(grads_of(loaded, 0), start, loaded)
    masks, chosen = state.projections['mlp'], tx.init(optax.apply_updates(loaded, updates)).projections['mlp']
    np.testing.assert_array_equal(masks['down'], chosen['down'])
    np.testing.assert_array_equal(masks['up'], start.projections['mlp']['up'])

  @parameterized.parameters(math.nan, math.inf)
  def test_a_number_of_steps_that_is_none(self, number):
    params = params_of()
    state = wrapped().init(params)
    bad = state._replace(left=state.left._replace(missed=jnp.full_like(state.left.missed, number)))
    with self.assertRaisesRegex(ValueError, 'a number of steps that is not finite: it is damaged'):
      s24.get_flip_rate(bad)

  @parameterized.product(kind=('Auto', 'Explicit'), spec=(('data',), (None, 'data')))
  @pytest.mark.slow
  def test_on_a_mesh(self, kind, spec):
    mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType[kind],))
    with jax.set_mesh(mesh):
      params = params_of(shape=(96, 320))['mlp']
      params = jax.tree.map(lambda w: jax.device_put(w, jax.NamedSharding(mesh, jax.P(*spec))), params)
      tx = wrapped(s24.recipes.transposable_srste('.*', masked_decay=0.0, refresh_every=100))
      state = tx.init(params)
      grads = jax.tree.map(lambda w: jax.device_put(jnp.ones_like(w), w.sharding), params)
      step = jax.jit(lambda params, state: tx.update(grads, state, params)).lower(params, state).compile()
      entry = (step.as_text() or '').partition('ENTRY')[2].partition('\n}')[0]
      # Sums of a number a weight; no weight is sent.
      self.assertEqual(set(re.findall(r'((?:all|collective)-[\w-]+)\(', entry)), {'all-reduce'})
      for _ in range(3):
        updates, state = step(params, state)
        params = optax.apply_updates(params, updates)
      s24.get_flip_rate(state)
      for _ in range(3):
        _, state = step(params, state)  # and the trainer does something else
        params = jax.tree.map(lambda w: 1.5 * w, params)
      with self.assertRaisesRegex(ValueError, 'given other weights than the update'):
        s24.get_flip_rate(state)

  def test_a_few_of_many_weights(self):
    params = {f'h_{i}': {'mlp': jnp.ones((40, 100))} for i in range(20)}
    left = s24.sparse_training(optax.sgd(0.1), s24.recipes.ste('.*')).init(params).left
    np.testing.assert_allclose(left.sums[:: _left.SUMS], [32 * 32] * 8, rtol=0.02)  # of factors about 1

  @parameterized.parameters(
    ((4096, 11008), 1024), ((32, 32, 64, 64), 1024), ((4099, 4099), 1024), ((12, 4099), 1024), ((8, 6), 48),
    ((8 * 4099, 64), 512), ((96, 320), 1024), ((2, 2, 4100, 4), 1024), ((1 << 20, 4), 1024),
  )  # fmt: skip
  def test_a_few_entries_of_any_shape(self, shape, entries):
    sampled = jax.eval_shape(lambda w: _left.sample(w, ()), jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    self.assertEqual(sampled.size, entries)

  @parameterized.parameters(((6, 64, 64), (0,)), ((64, 6, 64), (1,)), ((3, 7, 67, 64), (0, 1)), ((600, 64, 4), (0,)))
  def test_every_slice_of_a_stacked_axis_is_looked_at(self, shape, stacked):
    """Once only the first and the fourth of six experts were."""
    w = np.zeros(shape, np.float32)
    for axis in stacked:
      for i in range(shape[axis]):
        np.moveaxis(w, axis, 0)[i] += i + 1000.0 ** axis
    sampled = np.asarray(_left.sample(jnp.asarray(w), stacked))
    self.assertEqual(set(sampled.ravel()), set(w.ravel()))
    self.assertLessEqual(sampled.size, max(1024, 4 * math.prod(shape[axis] for axis in stacked)))

  def test_one_expert_of_six_that_is_changed_between_steps(self):
    def of_one(params, i):
      del i
      return jax.tree.map(lambda w: w.at[1].multiply(1.5) if w.ndim == 3 else w, params)

    params = {'mlp': {'up': jnp.asarray(np.random.default_rng(0).normal(size=(6, 64, 16)), jnp.float32)}}
    _, state = trained(wrapped(), params, between=of_one)
    with self.assertRaisesRegex(ValueError, 'mlp/up: .*given other weights than the update'):
      s24.get_flip_rate(state)


if __name__ == '__main__':
  absltest.main()
