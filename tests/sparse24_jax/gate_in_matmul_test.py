"""A gated feed-forward block whose first matmul makes h itself: the same numbers, one pass less."""

import dataclasses
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gated_activation import api as activations
from sparse24_jax import block_plan, linear_layer
from sparse24_jax.block_plan import plan_block
from tests.oracles import assert_close
from tests.sparse24_jax import block_plan_test as planning
from tests.sparse24_jax import ffn_test as wide
from tests.sparse24_jax import fp8_ffn_test as narrow
from tests.sparse24_jax import fp8_oracles, fp8_problems, layers_alike
from tests.sparse24_jax import mesh_test as meshes

HIDDEN = 128
# h is made of sums that were not rounded to 16 bits, so more of its roundings to 8 bits turn.
FLIPS = 3 * fp8_problems.FLIPS


class GateInMatmulTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(block_plan, '_MAKE_GATED', ('dense', 'mosaic_gpu')))
    made = mock.patch.object(linear_layer, 'multiply_gated', side_effect=linear_layer.multiply_gated)
    self.made = self.enter_context(made)
    self.passes = self.enter_context(
      mock.patch.object(activations, 'gated_activation', side_effect=activations.gated_activation)
    )

  def _made_by_the_matmul(self):
    self.made.assert_called()
    self.passes.assert_not_called()

  @parameterized.parameters(('silu', True), ('gelu_exact', False))
  @pytest.mark.few
  def test_formulas(self, activation, biased):
    policy = wide.POLICIES['kernels']
    with mock.patch.dict(wide.SHAPES, up=(wide.D, HIDDEN), gate=(wide.D, HIDDEN), down=(HIDDEN, wide.OUT)):
      given = wide.problem(gated=True, biased=biased, dtype=wide.BF16)
    found = wide.jitted(policy, activation, *given, wide.KEY)
    self._made_by_the_matmul()
    assert_close(found, wide.written_formulas(policy, activation, *given, wide.KEY), 8e-3)

  @pytest.mark.few
  def test_recomputed_and_over_a_batch(self):
    policy = wide.POLICIES['kernels']
    with mock.patch.dict(wide.SHAPES, up=(wide.D, HIDDEN), gate=(wide.D, HIDDEN), down=(HIDDEN, wide.OUT)):
      x, weights, _, states, dy = wide.problem(gated=True, biased=False, dtype=wide.BF16)

    def loss(x, weights):
      y = jax.checkpoint(lambda x, w: wide.block(policy, 'silu', x, w, {}, states, wide.KEY))(x, weights)
      return jnp.sum((y * dy).astype(jnp.float32))

    gradients = jax.jit(jax.grad(loss, (0, 1)))
    plain = wide.jitted(policy, 'silu', x, weights, {}, states, dy, wide.KEY)
    assert_close(gradients(x, weights), plain[1:3], 1e-6)
    stacked = jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (0, None)))(jnp.stack([x, x]), weights)
    assert_close(jax.tree.map(lambda a: a[1], stacked), plain[1:3], 1e-6)
    self._made_by_the_matmul()

  @parameterized.parameters((fp8_problems.KERNELS, True), (fp8_problems.MASKED, False))
  @pytest.mark.few
  def test_formulas_in_fp8(self, policy, biased):
    init = {'init': fp8_problems.init_masks} if policy is fp8_problems.MASKED else {}
    d, out = fp8_problems.SHAPES['up'][0], fp8_problems.SHAPES['down'][1]
    with mock.patch.dict(fp8_problems.SHAPES, up=(d, HIDDEN), gate=(d, HIDDEN), down=(HIDDEN, out)):
      given = fp8_problems.problem(gated=True, biased=biased, **init)
      found = narrow.ffn_and_gradients(policy, 'silu', *given, fp8_problems.KEY)
      self._made_by_the_matmul()
      self.made.reset_mock()
      if policy is fp8_problems.KERNELS:
        assert_close(found, fp8_oracles.written_ffn('silu', *given, fp8_problems.KEY), FLIPS)
      with mock.patch.object(block_plan, '_MAKE_GATED', ()), layers_alike.traced_one_by_one():
        program = fp8_problems.jit(lambda *args: narrow.ffn_and_gradients.__wrapped__(policy, 'silu', *args))
        expected = program(*given, fp8_problems.KEY)
      self.made.assert_not_called()
      assert_close(found, expected, FLIPS)

  @pytest.mark.few
  def test_divided_weights(self):
    self._check_divided(meshes.FST, 'Explicit', 't', (2, 2))

  @parameterized.parameters((meshes.FST_FP8, 'Auto', 't', (1, 2)), (meshes.FP8, 'Explicit', 'd', (2, 1)))
  @pytest.mark.slow
  def test_divided_weights_in_fp8(self, *case):
    self._check_divided(*case)

  def _check_divided(self, policy, kind, axis, shape):
    d, hidden = meshes.D, 2 * HIDDEN
    weights = {role: meshes.normal(i, d, hidden) for i, role in enumerate(('up', 'gate'))}
    weights['down'] = meshes.normal(2, hidden, d)
    states, on = meshes.states_of(policy, weights), meshes.mesh(kind, shape)
    x, dy = meshes.normal(4, meshes.TOKENS, d), meshes.normal(5, meshes.TOKENS, d)
    expected = meshes.jit(lambda *args: meshes.step(policy, True, *args))(x, weights, states, dy)
    specs = {'up': (None, axis), 'gate': (None, axis), 'down': (axis, None)}
    weights = {role: meshes.put(weights[role], on, *specs[role]) for role in specs}
    states = {role: meshes.put(states[role], on, *(specs[role] if states[role].ndim else ())) for role in specs}
    args = meshes.put(x, on, 'd', None), weights, states, meshes.put(dy, on, 'd', None)
    found = meshes.jit(lambda *args: meshes.step(policy, True, *args))(*args)
    self._made_by_the_matmul()
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      self.assertLess(meshes.error(f, e), 0.05 if policy.precision == 'fp8' else 5e-3)

  @pytest.mark.slow
  def test_a_divided_sum_gates_what_was_added(self):
    weights = {role: meshes.normal(i, meshes.D, 2 * HIDDEN) for i, role in enumerate(('up', 'gate'))}
    weights['down'] = meshes.normal(2, 2 * HIDDEN, meshes.D)
    states, on = meshes.states_of(meshes.FST, weights), meshes.mesh('Auto', (2, 1))
    x, dy = meshes.normal(4, meshes.TOKENS, meshes.D), meshes.normal(5, meshes.TOKENS, meshes.D)
    f = meshes.jit(lambda *args: meshes.step(meshes.FST, True, *args))
    expected = f(x, weights, states, dy)
    parts = {role: meshes.put(w, on, 'd', None) for role, w in weights.items()}
    found = f(meshes.put(x, on, None, 'd'), parts, meshes.put(states, on), meshes.put(dy, on))
    self.made.assert_called()
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      self.assertLess(meshes.error(f, e), 5e-3)


class PlanTest(parameterized.TestCase):

  @parameterized.parameters((planning.FST, 'mvue'), (planning.FST_FP8, 'mvue'), (planning.FP8, 'dense'))
  def test_steps_are_what_runs_and_a_gate_is_none(self, policy, last):
    self.enter_context(mock.patch.object(block_plan, '_MAKE_GATED', ('dense',)))
    self.enter_context(mock.patch.object(planning, 'HIDDEN', 2 * HIDDEN))
    down = dataclasses.replace(policy, weight_grad=last)
    plan = plan_block(policy, planning.TOKENS, planning.sides(True), jnp.bfloat16, down=down)
    self.assertTrue(plan.gate_in_matmul)
    self.assertNotIn('h', [step.name for step in plan.steps])
    ran, _, kept = planning.StepsTest._traced(self, policy, True, down)
    self.assertEqual(ran, planning.planned(plan.steps, plan.precision.pass_backends))
    x = 0 if plan.precision.scales else planning.TOKENS * planning.D * 2  # which no step makes
    found = planning.size_of(a for a in kept if planning.TOKENS in a.shape)
    self.assertEqual(found, sum(step.kept for step in plan.steps) + x)


if __name__ == '__main__':
  absltest.main()
