"""The recipe of the neuron-level paper: phases as data, one projection a direction, state in the optimizer."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax.activation_sparsity import neuron_level_ffn
from sparse24_jax.policy import ActivationPolicy, VNM
from sparse24_jax.recipes.neuron_level import neuron_level
from tests.draws import gaussian

UP, DOWN = '.*/c_fc/kernel', '.*/c_proj/kernel'
SMALL = ActivationPolicy(VNM(4, 8))
PUBLISHED = ActivationPolicy(VNM(4, 8), VNM(4, 8), dense_features=0.05)


def _params(lead=()):
  keys = jax.random.split(jax.random.key(0), 2)
  shapes = {'c_fc': (*lead, 8, 32), 'c_proj': (*lead, 32, 8)}
  return {'h_0': {n: {'kernel': jax.random.normal(k, s) / 4} for k, (n, s) in zip(keys, shapes.items(), strict=True)}}


class ScheduleTest(parameterized.TestCase):

  def test_dense_sparse_dense(self):
    recipe = neuron_level(UP, DOWN, warmup_fraction=0.1, dense_fraction=0.3)
    names = [s24.phase_at(recipe, step, 1000) for step in range(1000)]
    self.assertEqual(names, ['dense'] * 100 + ['sparse'] * 600 + ['dense'] * 300)

  @parameterized.parameters(
    (dict(warmup_fraction=0.0), ['sparse', 'dense']), (dict(dense_fraction=0.0), ['dense', 'sparse']),
    (dict(warmup_fraction=0.0, dense_fraction=0.0), ['sparse']),
  )
  def test_a_phase_of_no_steps_is_left_out(self, fractions, names):
    self.assertEqual([p.name for p in neuron_level(UP, DOWN, **fractions).phases], names)

  @parameterized.parameters(
    (dict(warmup_fraction=-0.1), 'warmup_fraction=-0.1'), (dict(dense_fraction=1.0), 'dense_fraction=1.0'),
    (dict(warmup_fraction=0.5, dense_fraction=0.5), 'leave no sparse steps'),
  )
  def test_refusals(self, fractions, message):
    with self.assertRaisesRegex(ValueError, message):
      neuron_level(UP, DOWN, **fractions)

  def test_describes_what_changes_training(self):
    rule = neuron_level(UP, DOWN, policy=SMALL).describe()['rules'][0]
    self.assertEqual(rule['activation']['features'], '4:2:8')
    self.assertNotEqual(neuron_level(UP, DOWN, policy=PUBLISHED).describe()['rules'][0], rule)
    named = ActivationPolicy(VNM(4, 8), implementation='sparse')
    self.assertEqual(neuron_level(UP, DOWN, policy=named).describe()['rules'][0], rule)
    self.assertNotIn('activation', s24.recipes.s_ste(UP).describe()['rules'][0])

  def test_by_default_weight_gradients_keep_two_of_four_tokens(self):
    described = neuron_level(UP, DOWN).describe()['rules'][0]['activation']
    found = [described[name] for name in ('features', 'tokens', 'dense_features')]
    self.assertEqual(found, ['64:2:8', '2:4', 0])
    self.assertEqual(neuron_level(UP, DOWN, policy=ActivationPolicy()).rules[0].activation.describe(), described)

  def test_rule_takes_a_policy_only(self):
    with self.assertRaisesRegex(ValueError, 'must be an ActivationPolicy'):
      s24.Rule(UP, s24.DotPolicy(), '2:4')


class TrainingTest(parameterized.TestCase):

  @parameterized.parameters(SMALL, PUBLISHED)
  @pytest.mark.slow
  def test_trains_experts_through_the_three_phases(self, policy):
    lead = (2,)
    recipe = neuron_level(UP, DOWN, policy=policy, warmup_fraction=0.25, dense_fraction=0.25)
    params = _params(lead)
    x = gaussian(1, (*lead, 16, 8))
    target = jnp.roll(x, 1, axis=-1)

    def loss(params, states):
      w = params['h_0']['c_fc']['kernel'], params['h_0']['c_proj']['kernel']
      if states is None:
        z = jnp.square(jax.nn.relu(x @ w[0])) @ w[1]
      else:
        state = {'up': states['h_0']['c_fc']['kernel'], 'down': states['h_0']['c_proj']['kernel']}
        z = neuron_level_ffn(x, *w, state, policy=recipe.rules[0].activation)
      return jnp.mean(jnp.square(z - target))

    transforms = {p: s24.sparse_training(optax.adam(0.02), recipe, phase=p) for p in ('dense', 'sparse')}
    update = {p: jax.jit(tx.update) for p, tx in transforms.items()}
    grads_of = jax.jit(jax.value_and_grad(loss))
    losses, state = [], None
    for step in range(16):
      phase = s24.phase_at(recipe, step, 16)
      tx = transforms[phase]
      state = tx.init(params) if state is None else state
      states = s24.sparse_variables(params, state, recipe, phase=phase) if phase == 'sparse' else None
      value, grads = grads_of(params, states)
      updates, state = update[phase](grads, state, params)
      params = optax.apply_updates(params, updates)
      losses.append(float(value))
    self.assertLess(losses[-1], 0.7 * losses[0])
    self.assertTrue(np.isfinite(losses).all())

  def test_weights_are_sparse_in_one_direction_each(self):
    recipe = neuron_level(UP, DOWN, policy=SMALL)
    params = _params()
    state = s24.sparse_training(optax.sgd(0.1), recipe, phase='sparse').init(params)
    projected = s24.project(params, state, recipe, phase='sparse')
    s24.verify24(projected['h_0']['c_fc']['kernel'], axis=-2)
    s24.verify24(projected['h_0']['c_proj']['kernel'], axis=-1)


if __name__ == '__main__':
  absltest.main()
