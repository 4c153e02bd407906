"""The feed-forward block in FP8, against formulas written in NumPy and ml_dtypes, and against the simulation."""

import dataclasses
import functools
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.activations import ACTIVATIONS
from pallas_kernels.pack import api as pack
from pallas_kernels.quantize import api as quantize
import sparse24_jax as s24
from sparse24_jax import block_plan, fp8, matmuls, plan
from sparse24_jax.layer_plan import Backends, LayerPlan
from tests import oracles
from tests.oracles import assert_close
from tests.sparse24_jax import fp8_oracles, layers_alike
from tests.sparse24_jax.ffn_transformations_test import equations
from tests.sparse24_jax.fp8_problems import (
  BF16,
  block,
  CHOOSES,
  ffn_and_gradients,
  FLIPS,
  init_masks,
  jit,
  KERNELS,
  KEY,
  MASKED,
  NOISE,
  pack_weight,
  problem,
  PROJECTION,
  SHAPES,
  SIMULATED,
  TOLERANCE,
)


class FfnTest(parameterized.TestCase):

  @parameterized.parameters(('silu', True, True), ('gelu', False, True), ('squared_relu', False, False))
  @pytest.mark.few
  def test_formulas(self, activation, gated, biased):
    given = problem(gated=gated, biased=biased)
    found = ffn_and_gradients(KERNELS, activation, *given, KEY)
    self.assertEqual(jax.tree.map(jnp.shape, found[1:]), jax.tree.map(jnp.shape, given[:3]))
    self.assertEqual({a.dtype for a in jax.tree.leaves(found)}, {jnp.dtype(BF16)})
    assert_close(found, fp8_oracles.written_ffn(activation, *given, KEY), FLIPS)

  @parameterized.parameters(
    (KERNELS, 'gelu', False, 1, 1), (MASKED, 'gelu', False, 2, 2), (MASKED, 'silu', True, 0, 0),
    (MASKED, 'squared_relu', False, 1, 1),
  )  # fmt: skip
  def test_matmuls_that_note_what_is_largest(self, policy, activation, gated, fewer, noting):
    """Without a gate there is no pass over h, nor over dh where the input gradient is sparse.

    Squared ReLU has no bounded derivative: dh alone does not tell a bound of dz, and no matmul is asked for it.
    """
    (passes, none, _), (found_passes, asked, _) = self.without_and_with_notes(policy, activation, gated)
    self.assertEqual((passes - found_passes, none, asked), (fewer, 0, noting))

  @parameterized.parameters(
    (MASKED, 'gelu', False), (MASKED, 'silu', True), (MASKED, 'squared_relu', False), (KERNELS, 'gelu', False)
  )
  @pytest.mark.slow
  def test_notes_of_what_is_largest_leave_all_as_it_was(self, policy, activation, gated):
    expected, found = (program() for _, _, program in self.without_and_with_notes(policy, activation, gated))
    for one, other in zip(found, expected, strict=True):
      np.testing.assert_array_equal(one, other)

  def without_and_with_notes(self, policy, activation, gated):
    """Passes that look for maxima, matmuls that are asked for one, and what runs the program, of either precision."""
    given = problem(gated=gated, biased=True, **({'init': init_masks} if policy is MASKED else {}))
    for precision in (dataclasses.replace(fp8.FP8, notes_amax=False), fp8.FP8):
      with (
        mock.patch.dict(plan.PRECISIONS, fp8=precision),
        mock.patch.object(quantize, 'amax', side_effect=quantize.amax) as amax,
        mock.patch.object(matmuls.api, 'sparse_matmul', side_effect=matmuls.api.sparse_matmul) as sparse_matmul,
        layers_alike.traced_one_by_one(),
      ):
        traced = jit(lambda *args: ffn_and_gradients.__wrapped__(policy, activation, *args)).trace(*given, KEY)
      asked = sum(bool(call.kwargs['amax']) for call in sparse_matmul.call_args_list)
      yield amax.call_count, asked, lambda traced=traced: jax.tree.leaves(traced.lower().compile()(*given, KEY))

  @parameterized.parameters(('gelu', False, 'up'), ('silu', True, 'down'))
  @pytest.mark.slow
  def test_a_dense_forward_of_either_matmul_leaves_the_block_as_it_is(self, activation, gated, dense):
    def plan(policy, tokens, d_in, d_out, *_, **__):
      loses = (d_in, d_out) == SHAPES[dense]
      backends = Backends(None if loses else 'dense', None, 'dense')
      return LayerPlan(tokens, d_in, d_out, 'bfloat16', backends, fp8.FP8, sampled=True)

    given = problem(gated=gated, biased=True)
    with (
      mock.patch.object(block_plan, 'plan_layer', plan),
      mock.patch.object(fp8, '_dense_forward', side_effect=fp8._dense_forward) as matmuls_by_xla,
      layers_alike.traced_one_by_one(),
    ):
      found = jit(lambda *args: ffn_and_gradients.__wrapped__(CHOOSES, activation, *args))(*given, KEY)
    matmuls_by_xla.assert_called_once()
    assert_close(found, fp8_oracles.written_ffn(activation, *given, KEY, dense=dense), FLIPS)

  @pytest.mark.slow
  def test_is_the_simulation_up_to_rounding(self):
    given = problem(gated=True, biased=True)
    found, expected = (ffn_and_gradients(policy, 'silu', *given, KEY) for policy in (KERNELS, SIMULATED))
    assert_close(found, expected, 2 * NOISE)

  @pytest.mark.slow
  def test_gate_and_up_of_very_different_size(self):
    """One scale for both; the smaller keeps what the range of e4m3 leaves it."""
    x, weights, biases, states, dy = problem(gated=True, biased=True)
    weights['up'] = weights['up'] / 256
    given = x, weights, biases, states, dy
    found = ffn_and_gradients(KERNELS, 'silu', *given, KEY)
    assert_close(found, fp8_oracles.written_ffn('silu', *given, KEY), FLIPS)
    assert_close(found[0], ffn_and_gradients(SIMULATED, 'silu', *given, KEY)[0], 2 * NOISE)

  @parameterized.parameters(False, True)
  @pytest.mark.few
  def test_packed_weights_are_taken_over(self, gated):
    x, weights, biases, states, _ = problem(gated=gated, biased=True)
    packed = {role: pack_weight(w, states[role]) for role, w in weights.items()}
    run = lambda states: block(KERNELS, 'silu', x, weights, biases, states, None)  # noqa: E731
    expected = jit(run)(states)
    with mock.patch.object(pack, 'soft_threshold_pack', side_effect=AssertionError('packed again')):
      assert_close(jit(run)(packed), expected, 0.0)

  @pytest.mark.slow
  def test_jit_and_remat_inside_of_grad(self):
    """A gate is packed inside the layer, so a checkpoint around it holds the packed weight."""
    x, weights, biases, states, dy = problem(gated=True, biased=True)
    expected = ffn_and_gradients(KERNELS, 'silu', x, weights, biases, states, dy, KEY)
    run = jax.jit(jax.checkpoint(functools.partial(block, KERNELS, 'silu', states=states, key=KEY)))

    @jit
    def gradient(x, weights, biases):
      y, vjp = jax.vjp(run, x, weights, biases)
      return y, *vjp(dy)

    assert_close(gradient(x, weights, biases), expected, TOLERANCE)

  @parameterized.parameters('dot', 'block', 'gated block')
  def test_a_forward_that_is_recomputed_writes_no_transposes_before(self, what):
    """What it rounds, x and h, it rounds one way first, and both ways for the backward."""
    gated, rounded = what == 'gated block', fp8.Fp8.rounded
    x, weights, biases, states, _ = problem(gated=gated, biased=False)

    def spy(self, x, *, keep, amax=None):
      del amax

      def one_way(x):
        return rounded(self, x, keep=False)

      def both_ways(x):
        return rounded(self, x, keep=True)

      return jax.jit(both_ways if keep else one_way)(x)

    @jax.checkpoint
    def run(x, weights):
      if what == 'dot':
        return s24.dot(x, weights['up'], states['up'], policy=KERNELS, key=KEY)
      return block(KERNELS, 'silu', x, weights, biases, states, KEY)

    with mock.patch.object(fp8.Fp8, 'rounded', spy):
      jaxpr = jax.make_jaxpr(jax.grad(lambda *args: run(*args).astype(jnp.float32).sum(), (0, 1)))(x, weights)
    names = [eqn.params.get('name') for eqn, _ in equations(jaxpr.jaxpr)]
    each = 1 if what == 'dot' else 2
    self.assertEqual((names.count('one_way'), names.count('both_ways')), (each, each))

  @pytest.mark.slow
  def test_vmap(self):
    """Over experts, each with its own scales."""
    given = problem(gated=True, biased=True)
    many = jax.tree.map(lambda a: jnp.stack([a, a * 3]), given)
    many = (*many[:3], jax.tree.map(jax.vmap(PROJECTION.init), many[1]), many[4])
    keys = jax.random.split(KEY, 2)
    found = jit(jax.vmap(functools.partial(ffn_and_gradients.__wrapped__, KERNELS, 'silu')))(*many, keys)
    for i in range(2):
      own = jax.tree.map(lambda a, i=i: a[i], (found, many, keys))
      assert_close(own[0], ffn_and_gradients(KERNELS, 'silu', *own[1], own[2]), TOLERANCE)

  @parameterized.parameters(np.nan, np.inf)
  def test_what_is_not_finite_shows(self, bad):
    x, weights, biases, states, dy = problem(gated=True, biased=True)
    y, dx, dw, _ = ffn_and_gradients(KERNELS, 'silu', x.at[0, 0, 0].set(bad), weights, biases, states, dy, KEY)
    for a in jax.tree.leaves((y, dx, dw['up'], dw['gate'])):
      self.assertTrue(bool(jnp.isnan(a).all()))
    y, dx, dw, _ = ffn_and_gradients(KERNELS, 'silu', x, weights, biases, states, dy.at[0, 0, 0].set(bad), KEY)
    self.assertTrue(bool(jnp.isfinite(y).all()))
    for a in jax.tree.leaves((dx, dw)):
      self.assertTrue(bool(jnp.isnan(a).all()))

  def test_zeros_stay_zeros(self):
    x, weights, _, states, dy = problem(gated=True, biased=True)
    biases = {role: jnp.zeros(SHAPES[role][1], BF16) for role in weights}
    for zero_x in (True, False):
      given = (x * 0, dy) if zero_x else (x, dy * 0)
      y, dx, dw, _ = ffn_and_gradients(KERNELS, 'silu', given[0], weights, biases, states, given[1], KEY)
      self.assertTrue(all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves((y, dx, dw))))
      self.assertEqual(float(jnp.abs(y).max()) == 0, zero_x)
      self.assertEqual(float(jnp.abs(dx).max()), 0)
      self.assertEqual(float(jnp.abs(dw['up']).max()), 0)

  def test_no_derivative_exceeds_its_bound(self):
    z = np.linspace(-20, 20, 400_001)
    for name, known in ACTIVATIONS.items():
      steepest = abs(oracles.activation_and_slope(name, z)[1]).max()
      if known.steepest is None:
        self.assertGreater(steepest, 2)  # grows without bound
      else:
        self.assertLessEqual(steepest, known.steepest, name)
        self.assertGreater(steepest, 0.99 * known.steepest, name)


if __name__ == '__main__':
  absltest.main()
