"""Steps that are told to choose no masks: the same run to the last bit, without a loop; an error if one was to."""

import dataclasses
import math

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from tests import quick

RULE = 'mlp/.*'
RECIPES = {
  'transposable_srste': s24.recipes.transposable_srste(RULE, masked_decay=1e-3, refresh_every=3),
  's_ste': s24.recipes.s_ste(RULE, refresh_every=3),
  'rigl': s24.recipes.rigl(RULE, density=0.5, refresh_every=3, total_steps=100),
}


def _params():
  rng = np.random.default_rng(0)
  return {'mlp': {'up': jnp.asarray(rng.normal(size=(8, 12)), jnp.float32)}, 'head': jnp.ones((4, 4))}


def _grads(i):
  return jax.tree.map(lambda w: jnp.asarray(np.random.default_rng(i).normal(size=w.shape), w.dtype), _params())


def _stepper(recipe, phase='sparse'):
  tx = optax.chain(optax.clip_by_global_norm(1.0), s24.sparse_training(optax.adam(0.1), recipe, phase=phase))

  def step(refresh, params, state, grads):
    updates, state = tx.update(grads, state, params, refresh=refresh)
    return optax.apply_updates(params, updates), state

  return tx, step


class RefreshTest(parameterized.TestCase):

  @parameterized.product(name=tuple(RECIPES), phase=('sparse', 'dense'))
  @pytest.mark.few
  def test_two_programs_make_the_run_of_one(self, name, phase):
    recipe = RECIPES[name]
    tx, step = _stepper(recipe, phase)
    programs = {refresh: quick.jit(step, static_argnums=0) for refresh in (None, False)}
    ends = []
    for told in (False, True):
      params = _params()
      state = tx.init(params)
      for i in range(7):
        refresh = False if told and not s24.refresh_at(recipe, i) else None
        params, state = programs[refresh](refresh, params, state, _grads(i))
      s24.get_flip_rate(state)
      ends.append((params, state))
    jax.tree.map(np.testing.assert_array_equal, *ends)
    masks = jax.tree.leaves(tx.init(_params())[1].projections)
    changed = any((a != b).any() for a, b in zip(masks, jax.tree.leaves(ends[0][1][1].projections), strict=True))
    self.assertEqual(changed, name != 's_ste')  # whose state is a scale, and frozen

  @parameterized.product(name=tuple(RECIPES), phase=('sparse', 'dense'))
  def test_such_a_step_has_no_loop(self, name, phase):
    tx, step = _stepper(RECIPES[name], phase)
    params = _params()
    state = jax.eval_shape(tx.init, params)
    loops = [
      'while' in str(jax.make_jaxpr(step, static_argnums=0)(told, params, state, params)) for told in (None, False)
    ]
    self.assertEqual(loops, [True, False])

  def test_a_step_that_was_to_choose_masks_is_an_error(self):
    recipe = RECIPES['transposable_srste']
    tx, step = _stepper(recipe)
    params = _params()
    state = tx.init(params)
    step = quick.jit(step, static_argnums=0)
    for i in range(5):
      if i == 2:
        s24.get_flip_rate(state)
      params, state = step(False, params, state, _grads(i))
      self.assertEqual(math.isnan(state[1].flip_rate.overall), i >= 2)
    for ask in (lambda: s24.get_flip_rate(state), lambda: s24.project(params, jax.block_until_ready(state), recipe)):
      with self.assertRaisesRegex(ValueError, 'was told refresh=False'):
        ask()

  def test_soft_thresholds_have_nothing_to_choose(self):
    recipe = RECIPES['s_ste']
    tx, step = _stepper(recipe)
    programs = {refresh: quick.jit(step, static_argnums=0) for refresh in (None, False)}
    ends, rates = {}, []
    for told, program in programs.items():
      params = _params()
      state = tx.init(params)
      for i in range(5):  # the third would measure a flip rate
        params, state = program(told, params, state, _grads(i))
      ends[told] = params, s24.sparse_variables(params, jax.block_until_ready(state), recipe)
      rates.append(s24.get_flip_rate(state).overall.item())
    jax.tree.map(np.testing.assert_array_equal, ends[None], ends[False])
    np.testing.assert_equal([math.isnan(rate) for rate in rates], [False, True])
    params, state = programs[None](None, params, state, _grads(5))
    measured = s24.get_flip_rate(state).overall.item()
    for i in range(3):
      params, state = programs[False](False, params, state, _grads(i))
    self.assertEqual(s24.get_flip_rate(state).overall.item(), measured)

  def test_a_dense_end_that_begins_projected_measures_no_rate_of_soft_thresholds_out_of_turn(self):
    phases, params = (s24.Phase('sparse', 0.5), s24.Phase('dense', 0.5)), {'kernel': _params()['mlp']['up']}
    recipe = dataclasses.replace(s24.recipes.s_ste('kernel', refresh_every=3), phases=phases)
    sparse, dense = (s24.sparse_training(optax.sgd(0.1), recipe, phase=phase) for phase in ('sparse', 'dense'))
    state = sparse.init(params)
    params = s24.project(params, state, recipe)
    for rate_is_known in (False, False, True):
      updates, state = dense.update(params, state, params)
      params = optax.apply_updates(params, updates)
      self.assertEqual(not jnp.isnan(s24.get_flip_rate(state).overall), rate_is_known)

  def _refused(self, recipe):
    """A recipe must not go without its searches."""
    tx, step = _stepper(recipe)
    params = _params()
    state = tx.init(params)
    for i in range(3):
      params, state = step(False, params, state, _grads(i))
    with self.assertRaisesRegex(ValueError, 'was told refresh=False'):
      s24.get_flip_rate(state)

  def test_one_weight_with_a_mask_is_enough_for_an_error(self):
    soft, masked = s24.DotPolicy(s24.soft_threshold_projection()), s24.DotPolicy(s24.magnitude())
    recipe = s24.Recipe('both', (s24.Rule('mlp/.*', soft), s24.Rule('head', masked)), refresh_every=3)
    self._refused(recipe)

  def test_a_scale_that_is_chosen_anew_is_an_error_too(self):
    """The form of S-STE says how the forward reads a state, not that it rests."""
    soft = s24.soft_threshold_projection()
    moving = soft._replace(name='moving', refresh=lambda w, scale: soft.init(w))
    self._refused(s24.Recipe('own', (s24.Rule('.*', s24.DotPolicy(moving)),), refresh_every=3))

  @parameterized.parameters(1, 'no', np.True_)
  def test_what_is_no_python_value(self, refresh):
    tx, step = _stepper(RECIPES['s_ste'])
    with self.assertRaisesRegex(ValueError, 'must be True, False or None'):
      step(refresh, _params(), jax.eval_shape(tx.init, _params()), _params())


if __name__ == '__main__':
  absltest.main()
