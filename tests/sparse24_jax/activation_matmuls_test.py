"""The six matmuls of the squared-ReLU block: who makes them, and that each finds a sparse operand."""

import dataclasses
import functools
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _device, _dispatch
from pallas_kernels.sparse_matmul.api import sparse_matmul
from pallas_kernels.vnm import api as vnm
import sparse24_jax as s24
from sparse24_jax import _activation_kernels
from sparse24_jax import activation_sparsity as acts
from sparse24_jax.activation_patterns import feature_mask, token_mask
from sparse24_jax.neuron_plan import NeuronLevelPlan, plan_neurons
from sparse24_jax.neurons import spread
from sparse24_jax.policy import ActivationPolicy
from sparse24_jax.projections import projections_of
from sparse24_jax.steps import Matmul
from sparse24_jax.vnm import verify_vnm
from tests.sparse24_jax.activation_oracles import (
  D,
  draw,
  eager,
  forward_and_grads,
  HIDDEN,
  POLICIES,
  state_of,
  TOKENS,
  VNM,
)


class ChoiceTest(parameterized.TestCase):

  @parameterized.parameters(
    (VNM, True, 'SparseVNM'), (VNM, False, 'Reference'), (POLICIES['2:4'], False, 'Reference'),
    (POLICIES['two_of_four_tokens'], True, 'SparseVNMTwoOfFour'),
  )
  def test_sides(self, policy, kernels, kind):
    plan = NeuronLevelPlan(policy, TOKENS, D, HIDDEN, 'bfloat16', plain=None if kernels else 'a test')
    ops = acts.matmuls_of(plan)
    self.assertEqual(type(ops).__name__, kind)

  @parameterized.parameters((True, ()), (False, ()), (True, (2,)), (False, (2,)))
  def test_one_choice_for_forward_and_backward_and_all_experts(self, kernels, lead):
    inputs = draw(jnp.bfloat16, lead)
    plan = NeuronLevelPlan(VNM, TOKENS, D, HIDDEN, 'bfloat16', plain=None if kernels else 'a test')
    with (
      mock.patch.object(acts, 'plan_neurons', return_value=plan) as choice,
      mock.patch.object(acts, 'matmuls_of', wraps=acts.matmuls_of) as make,
    ):
      jax.eval_shape(functools.partial(eager, VNM), *inputs, state_of(VNM, *inputs[1:3]))
    choice.assert_called_once_with(VNM, TOKENS, D, HIDDEN, jnp.bfloat16)
    traced = 2 if lead and kernels else 1  # under vmap a block is traced once for all
    self.assertEqual([call.args[0] for call in make.call_args_list], [plan] * 2 * traced)


class PlanTest(parameterized.TestCase):

  @parameterized.parameters('vnm', 'two_of_four_tokens', 'two_of_four_tokens_and_dense')
  def test_names_the_problems_of_all_matmuls_in_their_order(self, name):
    policy, inputs = dataclasses.replace(POLICIES[name], implementation='sparse'), draw(jnp.bfloat16)
    ran = []

    def by_weight(a, b, *, b_layout, out_layout, implementation):
      m, k = a.shape
      key = dict(m=m, n=b.size // k, k=k, dtype=a.dtype.name, b_layout=b_layout, out_layout=out_layout)
      ran.append(('sparse_matmul', implementation, key | dict(out_dtype='bfloat16')))
      return sparse_matmul(a, b, b_layout=b_layout, out_layout=out_layout, implementation=implementation)

    def by_activations(a, b, *, implementation):
      v, m = policy.features.v, policy.features.m
      ran.append(('vnm_matmul', implementation, vnm.problem_key(*a.shape, b.shape[1], v, m, b.dtype)))
      return vnm.vnm_matmul(a, b, implementation=implementation)

    with mock.patch.multiple(_activation_kernels, sparse_matmul=by_weight, vnm_matmul=by_activations):
      jax.eval_shape(functools.partial(eager, policy), *inputs, state_of(policy, *inputs[1:3]))
    steps = plan_neurons(policy, TOKENS, D, HIDDEN, jnp.bfloat16).steps
    matmuls = [step for step in steps if isinstance(step, Matmul) and not step.name.endswith('dense neurons')]
    self.assertEqual(ran, [(timing.op, step.backend, dict(timing.key)) for step in matmuls for timing in step.timings])

  @parameterized.parameters('vnm', 'two_of_four_tokens_and_dense')
  def test_has_the_back_ends_of_all_passes(self, name):
    policy, inputs = dataclasses.replace(POLICIES[name], implementation='sparse'), draw(jnp.bfloat16)
    asked, dispatch = {}, _dispatch.dispatch

    def spy(op, backends, implementation, *args, **kwargs):
      asked.setdefault(op, set()).add(implementation)
      return dispatch(op, backends, implementation, *args, **kwargs)

    whole = mock.patch.object(_device, 'arrays_are_whole', lambda: True)
    with whole, mock.patch.object(_dispatch, 'dispatch', spy):
      jax.eval_shape(functools.partial(eager, policy), *inputs, state_of(policy, *inputs[1:3]))
    passes = asked.keys() - {'sparse_matmul', 'vnm_matmul'}
    transpose = 'transpose_pack' if name == 'vnm' else 'transpose_pack_24'
    self.assertEqual(passes, {'soft_threshold_pack', 'vnm_pack', 'expand', transpose, 'take_columns'})
    expected = plan_neurons(policy, TOKENS, D, HIDDEN, jnp.bfloat16).pass_backends
    self.assertEqual({asked_for for op in passes for asked_for in asked[op]}, {expected})


class SixMatmulsTest(parameterized.TestCase):
  """Every matmul finds a sparse operand; that is why neither transposable masks nor MVUE are needed."""

  def _operands(self, policy):
    """(kind, sparse operand with the contracted axis last) of each matmul, recorded in eager mode."""
    seen = []
    make = acts.matmuls_of

    def recording(*args):
      ops = make(*args)

      def by_weight(x, w):
        seen.append(('weight', np.asarray(w.dense)))
        return ops.by_weight(x, w)

      def over_neurons(a, b):
        seen.append(('neurons', np.asarray(a.entries)))
        return ops.over_neurons(a, b)

      def over_tokens(a, pattern, is_y, b):
        sparse = jnp.where(pattern.mask, a.entries, 0)
        apart = policy.tokens == policy.features
        in_order = spread(sparse, policy.tokens.group, 0) if apart else sparse
        seen.append(('tokens', np.asarray(in_order).T))
        self.dense = len(pattern.dense)
        return ops.over_tokens(a, pattern, is_y, b)

      changed = mock.Mock(wraps=ops)
      changed.configure_mock(by_weight=by_weight, over_neurons=over_neurons, over_tokens=over_tokens)
      return changed

    with mock.patch.object(acts, 'matmuls_of', recording):
      inputs = draw()
      eager(policy, *inputs, state_of(policy, *inputs[1:3]))
    return seen

  def test_two_four(self):
    seen = self._operands(POLICIES['2:4'])
    self.assertEqual([k for k, _ in seen], ['weight', 'neurons', 'weight', 'tokens', 'neurons', 'tokens'])
    for _, a in seen:
      s24.verify24(jnp.asarray(a), axis=-1)
    self.assertEqual(self.dense, 3)  # 5% of 64

  def test_vnm(self):
    seen = self._operands(VNM)
    self.assertEqual([k for k, _ in seen], ['weight', 'neurons', 'weight', 'tokens', 'neurons', 'tokens'])
    for kind, a in seen:
      if kind == 'weight':
        s24.verify24(jnp.asarray(a), axis=-1)
      else:
        verify_vnm(jnp.asarray(a), v=8, m=8)

  def test_two_of_four_tokens(self):
    seen = self._operands(POLICIES['two_of_four_tokens'])
    self.assertEqual([k for k, _ in seen], ['weight', 'neurons', 'weight', 'tokens', 'neurons', 'tokens'])
    for kind, a in seen:
      if kind == 'neurons':
        verify_vnm(jnp.asarray(a), v=8, m=8)
      else:
        s24.verify24(jnp.asarray(a), axis=-1)

  def test_two_of_four_tokens_lose_little_of_what_the_forward_kept(self):
    x, w_up, *_ = map(np.asarray, draw())
    y = jnp.asarray(np.square(np.maximum(x @ w_up, 0)))
    y = jnp.asarray(np.where(feature_mask(y, VNM), y, 0))
    lost = {
      name: np.sum(np.where(token_mask(y, POLICIES[name]), 0, y)) / np.sum(y)
      for name in ('vnm', 'two_of_four_tokens')
    }
    self.assertLess(3 * lost['two_of_four_tokens'], lost['vnm'])

  def test_no_weight_is_needed_sparse_both_ways(self):
    # Each weight is sparse in one matmul only, along that matmul's sum: W1 along its input, W2 along its output.
    # The other way round both are dense operands, and are not 2:4 there: the mask need not be transposable.
    _, w_up, w_down, _ = draw()
    up, down = (p.apply(w, p.init(w)) for p, w in zip(projections_of(VNM).values(), (w_up, w_down), strict=True))
    for w, axis in ((up, -2), (down, -1)):
      s24.verify24(w, axis=axis)
      with self.assertRaisesRegex(ValueError, 'not 2:4'):
        s24.verify24(w, axis=-3 - axis)

  def test_nothing_is_sampled(self):
    # The gradients' zeros are those of the activations, so no estimator: a key is taken, and draws nothing.
    inputs = draw()
    state = state_of(VNM, *inputs[1:3])
    traced = jax.make_jaxpr(lambda key: eager(VNM, *inputs, state, key=key))(jax.random.key(1))
    self.assertNotIn('random', str(traced))

  def test_what_the_forward_dropped_gets_no_gradient(self):
    policy = ActivationPolicy(VNM.features, sparse_weights=False, dense_features=1)
    x, w_up, w_down, dz = draw()
    h = np.asarray(x) @ np.asarray(w_up)
    mask = np.asarray(feature_mask(jnp.asarray(np.square(np.maximum(h, 0))), policy))
    dropped = np.argwhere((h > 0) & ~mask)
    token, neuron = dropped[0]
    alone = np.zeros_like(dz)
    alone[token] = np.asarray(dz)[token]
    *_, dw_up, dw_down = map(np.asarray, forward_and_grads(policy, x, w_up, w_down, alone))
    self.assertEqual(abs(dw_up[:, neuron]).max(), 0)
    self.assertEqual(abs(dw_down[neuron]).max(), 0)


if __name__ == '__main__':
  absltest.main()
