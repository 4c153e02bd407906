"""STEP's Adam against numpy: dense steps learn the second moment, sparse ones hold it."""

import contextlib
import itertools
import logging

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

from pallas_kernels import _dispatch
import sparse24_jax as s24
from tests.draws import gaussian

LR, B1, B2, EPS, WEIGHT_DECAY = 0.05, 0.8, 0.75, 1e-4, 0.1
WINDOW = 4  # 1 / (1 - B2)
DENSE, SPARSE = 6, 4


def params_and_grads():
  rng = np.random.default_rng(0)
  return rng.standard_normal((8, 4)), rng.standard_normal((DENSE + SPARSE, 8, 4))


def numpy_step(w, grads):
  """Yields weight, moments and the changes of the second one after each step (float64)."""
  m, v = np.zeros_like(w), np.zeros_like(w)
  changes = []
  for t, g in enumerate(grads, start=1):
    m = B1 * m + (1 - B1) * g
    m_hat = m / (1 - B1**t)
    if t <= DENSE:
      changes.append(np.abs((1 - B2) * (g**2 - v)).mean())
      v = v + (1 - B2) * (g**2 - v)
      direction = m_hat / (np.sqrt(v / (1 - B2**t)) + EPS)
    else:
      direction = m_hat / (np.sqrt(v) + EPS**0.75)
    w = w - LR * (direction + WEIGHT_DECAY * w)
    yield w, m, v, changes


class StepAdamTest(parameterized.TestCase):

  def test_against_numpy(self):
    start, grads = params_and_grads()
    recipe = s24.recipes.step('w')
    updates_of, tx = {}, {}
    for phase in ('dense', 'sparse'):
      inner = s24.step_adam(LR, B1, B2, EPS, phase=phase, weight_decay=WEIGHT_DECAY)
      tx[phase] = s24.sparse_training(inner, recipe, phase=phase)
      updates_of[phase] = jax.jit(tx[phase].update)
    params = {'w': jnp.asarray(start, jnp.float32)}
    state = tx['dense'].init(params)
    for t, (w, m, v, changes) in enumerate(numpy_step(start, grads)):
      phase = 'dense' if t < DENSE else 'sparse'
      updates, state = updates_of[phase]({'w': jnp.asarray(grads[t], jnp.float32)}, state, params)
      params = optax.apply_updates(params, updates)
      found = state.inner_state[0]
      with self.subTest(step=t, phase=phase):
        np.testing.assert_allclose(params['w'], w, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.mu['w'], m, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found.nu['w'], v, rtol=1e-4, atol=1e-6)
        none_yet = np.finfo(np.float32).max  # finite: a checkpoint with infinities is refused
        recent = np.sort(changes[-WINDOW:] + [none_yet] * (WINDOW - len(changes)))
        np.testing.assert_allclose(np.sort(found.changes), recent, rtol=1e-4)
        self.assertEqual(int(found.count), t + 1)
        np.testing.assert_array_equal(state.projections['w'], s24.magnitude_mask(params['w']))

  def test_dense_phase_is_adamw(self):
    params, grads = {'w': jnp.ones((4, 4))}, {'w': gaussian(0, (4, 4))}
    ours = s24.step_adam(LR, B1, B2, EPS, phase='dense', weight_decay=WEIGHT_DECAY)
    theirs = optax.adamw(LR, B1, B2, EPS, weight_decay=WEIGHT_DECAY)
    states = [ours.init(params), theirs.init(params)]
    for _ in range(3):
      found, states[0] = ours.update(grads, states[0], params)
      expected, states[1] = theirs.update(grads, states[1], params)
      np.testing.assert_allclose(found['w'], expected['w'], rtol=1e-6)

  def test_the_recipe_around_another_optimizer_is_logged(self):
    def logs_of(inner):
      _dispatch.log_once.cache_clear()
      with self.assertLogs('sparse24_jax') as logs:
        logging.getLogger('sparse24_jax').info('end')
        s24.sparse_training(inner, s24.recipes.step('w'), phase='sparse').init({'w': jnp.ones((4, 4))})
      return [record.getMessage() for record in logs.records if record.levelname == 'WARNING']

    self.assertLen(logs_of(optax.adamw(LR)), 1)
    self.assertEmpty(logs_of(optax.chain(optax.clip(1.0), s24.step_adam(LR, phase='sparse'))))

  def test_has_the_phase_of_the_recipe_around(self):
    params = {'w': jnp.ones((4, 4))}
    around = {
      'alone': lambda tx: tx,
      'chained': lambda tx: optax.chain(optax.clip(1.0), tx),
      'of a group': lambda tx: optax.multi_transform({'a': tx}, {'w': 'a'}),
      'skipped': lambda tx: optax.apply_if_finite(tx, 3),
    }
    for (name, put), of, inner in itertools.product(around.items(), ('dense', 'sparse'), ('dense', 'sparse')):
      tx = s24.sparse_training(put(s24.step_adam(LR, phase=inner)), s24.recipes.step('w'), phase=of)
      state = jax.eval_shape(tx.init, params)
      told = rf"phase='{inner}' of step_adam.* sparse_training with phase='{of}'.*: build both for each phase"
      refused = contextlib.nullcontext() if of == inner else self.assertRaisesRegex(ValueError, told)
      with self.subTest(name, of=of, inner=inner), refused:
        jax.eval_shape(tx.update, params, state, params)

  def test_has_any_phase_under_a_recipe_that_holds_nothing(self):
    params = {'w': jnp.ones((4, 4))}
    tx = s24.sparse_training(s24.step_adam(LR, phase='dense'), s24.recipes.ste('w'), phase='sparse')
    jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)

  def test_second_moment_is_held_to_the_bit(self):
    params, grads = params_and_grads()
    grads = jnp.asarray(grads, jnp.float32)
    dense, sparse = (s24.scale_by_step_adam(B1, B2, EPS, phase=phase) for phase in ('dense', 'sparse'))
    state = dense.init(jnp.asarray(params, jnp.float32))
    _, state = dense.update(grads[0], state)
    held = state
    for g in grads[1:]:
      _, state = sparse.update(g, state)
      np.testing.assert_array_equal(state.nu, held.nu)
      np.testing.assert_array_equal(state.changes, held.changes)
    self.assertTrue((state.mu != held.mu).all())

  def test_has_settled_when_the_window_is_full_of_small_changes(self):
    tx = s24.sparse_training(s24.step_adam(LR, B1, B2, EPS, phase='dense'), s24.recipes.step('w'), phase='dense')
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    params, grads = {'w': jnp.ones((4, 4))}, {'w': jnp.full((4, 4), 1e-2)}
    state, v, changes, settled, expected = tx.init(params), 0.0, [], [], []
    # Steady gradients: v approaches g^2 and its change shrinks by B2 each step.
    for _ in range(12):
      _, state = tx.update(grads, state, params)
      settled.append(bool(s24.step_has_settled(state, eps=1e-5)))
      changes.append((1 - B2) * (1e-4 - v))
      v += changes[-1]
      expected.append(len(changes) >= WINDOW and np.mean(changes[-WINDOW:]) < 1e-5)
    self.assertEqual(settled, expected)
    self.assertEqual((settled[0], settled[-1]), (False, True))

  def test_never_settles_while_the_window_is_open(self):
    tx = s24.step_adam(LR, B1, B2, EPS, phase='dense')
    params = {'w': jnp.zeros((4, 4))}
    state = tx.init(params)
    for i in range(WINDOW + 1):
      self.assertEqual(bool(s24.step_has_settled(state)), i >= WINDOW)
      _, state = tx.update(params, state, params)  # zero gradients: nothing ever changes

  @parameterized.parameters('float32', 'bfloat16')
  def test_keeps_dtypes_and_state_in_both_phases(self, dtype):
    params = {'w': jnp.ones((4, 4), dtype)}
    for phase in ('dense', 'sparse'):
      tx = s24.step_adam(lambda count: 0.1, phase=phase, weight_decay=0.1)
      state = tx.init(params)
      updates, after = jax.eval_shape(tx.update, params, state, params)
      self.assertEqual(updates['w'].dtype, dtype)
      self.assertEqual(*(jax.tree.map(lambda a: (a.shape, a.dtype), s) for s in (state, after)))

  def test_sparse_phase_from_scratch_is_finite(self):
    params = {'w': jnp.ones((4, 4))}
    tx = s24.step_adam(0.1, phase='sparse')
    updates, _ = tx.update(params, tx.init(params), params)
    self.assertTrue(np.isfinite(updates['w']).all())

  def test_refuses_a_decay_without_a_window(self):
    for b2 in (1.0, 1.5, -0.1):
      with self.assertRaisesRegex(ValueError, rf'b2={b2} must be at least 0 and less than 1'):
        s24.step_adam(0.1, b2=b2, phase='dense')


if __name__ == '__main__':
  absltest.main()
