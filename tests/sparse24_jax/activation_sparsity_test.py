"""The squared-ReLU block against NumPy in float64, autodiff, and each other's implementations."""

import dataclasses
import functools
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _dispatch
import sparse24_jax as s24
from sparse24_jax import activation_sparsity as acts
from sparse24_jax.activation_sparsity import neuron_level_ffn
from sparse24_jax.policy import ActivationPolicy, Clusters, TwoOfFour
from tests.draws import gaussian
from tests.quick import jit
from tests.sparse24_jax.activation_oracles import (
  D,
  draw,
  eager,
  forward_and_grads,
  HIDDEN,
  jitted,
  POLICIES,
  relative_error,
  state_of,
  TOKENS,
  VNM,
  written_all_dense,
  written_block,
)


class NumericsTest(parameterized.TestCase):

  # Of 64 neurons, 0.12 are 7.68.
  @parameterized.named_parameters(
    *POLICIES.items(), ('more_dense', dataclasses.replace(VNM, dense_features=0.12)),
    ('wide', ActivationPolicy(s24.VNM(4, 16), s24.VNM(4, 16))),
  )  # fmt: skip
  @pytest.mark.few
  def test_against_float64(self, policy):
    inputs = draw()
    for found, expected in zip(forward_and_grads(policy, *inputs), written_block(policy, *inputs), strict=True):
      np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-4)

  @parameterized.parameters('vnm', 'no_dense', 'two_of_four_tokens', 'two_of_four_tokens_and_dense')
  @pytest.mark.few
  def test_kernels_compute_the_same(self, name):
    # On a CPU the ops answer with their references, through the formats and the index of the gathered rows.
    policy = POLICIES[name]
    inputs = draw(jnp.bfloat16)
    expected = forward_and_grads(policy, *inputs)
    policy = dataclasses.replace(policy, implementation='sparse')
    for found, other in zip(forward_and_grads(policy, *inputs), expected, strict=True):
      self.assertEqual(found.dtype, jnp.bfloat16)
      self.assertLess(relative_error(found, other), 4e-3)

  @parameterized.parameters('vnm', 'two_of_four_tokens', '2:4')
  @pytest.mark.few
  def test_with_all_features_dense_it_is_the_derivative(self, name):
    policy = dataclasses.replace(POLICIES[name], dense_features=1, sparse_weights=False)
    inputs = draw()
    for found, expected in zip(forward_and_grads(policy, *inputs), written_all_dense(policy, *inputs)[:4], strict=True):
      np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)

  def test_biases(self):
    policy = ActivationPolicy(s24.VNM(8, 8), dense_features=1, sparse_weights=False)
    x, w_up, w_down, dz = draw()
    b_up, b_down = (np.linspace(-1, 1, n, dtype=np.float32) for n in (HIDDEN, D))

    @jit
    def gradients(b_up, b_down):
      block = functools.partial(neuron_level_ffn, x, w_up, w_down, {}, policy=policy)
      return jax.vjp(lambda b_up, b_down: block(b_up=b_up, b_down=b_down), b_up, b_down)[1](dz)

    *_, of_up = written_all_dense(policy, x, w_up, w_down, dz, b_up)
    for found, expected in zip(gradients(b_up, b_down), (of_up, np.sum(dz, 0)), strict=True):
      np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)

  def test_2_4_forward_treats_each_token_by_itself(self):
    policy = POLICIES['2:4']
    x, w_up, w_down, _ = draw()
    state = state_of(policy, w_up, w_down)
    f = jit(functools.partial(neuron_level_ffn, policy=policy))
    np.testing.assert_allclose(
      f(x[:5], w_up, w_down, state), f(x, w_up, w_down, state)[:5], rtol=1e-5, atol=1e-5
    )

  @parameterized.parameters(((2, 16, 16), True), ((1, 32, 16), False), ((32, 16), False))
  def test_neighbours_of_several_axes_are_told(self, shape, told):
    """What a token gets depends on those behind it, which no causal model may have."""
    policy = s24.ActivationPolicy(s24.VNM(16, 8), sparse_weights=False)
    x, w_up, w_down = gaussian(0, shape), gaussian(1, (16, 64)), gaussian(2, (64, 16))
    block = jax.jit(lambda x: s24.neuron_level_ffn(x, w_up, w_down, {}, policy=policy))
    _dispatch.log_once.cache_clear()
    with self.assertLogs('sparse24_jax', 'WARNING') if told else self.assertNoLogs('sparse24_jax', 'WARNING') as logs:
      y = block(x)
    if told:
      self.assertIn('16 tokens in a row of x [2, 16, 16]', logs.output[0])
    other = np.array(x)
    other[..., -1, :] *= -3
    self.assertTrue(np.any(np.asarray(y)[..., :-1, :] != np.asarray(block(other))[..., :-1, :]))

  def test_nan_passes(self):
    x, w_up, w_down, _ = map(np.array, draw())
    x[3, 1] = np.nan
    for policy in (VNM, POLICIES['2:4']):
      block = jit(functools.partial(neuron_level_ffn, policy=policy))
      z = np.asarray(block(x, w_up, w_down, state_of(policy, w_up, w_down)))
      self.assertTrue(np.isnan(z[3]).all())


class ExpertsTest(parameterized.TestCase):

  @parameterized.parameters('vnm', 'two_of_four_tokens', '2:4')
  @pytest.mark.slow
  def test_experts_are_blocks_of_their_own(self, name):
    policy = dataclasses.replace(POLICIES[name], clusters=Clusters(4) if name == 'vnm' else None)
    x, w_up, w_down, dz = draw(lead=(2,))
    together = forward_and_grads(policy, x, w_up, w_down, dz)
    for i in range(2):
      alone = forward_and_grads(policy, x[i], w_up[i], w_down[i], dz[i])
      for found, expected in zip(together, alone, strict=True):
        np.testing.assert_allclose(found[i], expected, rtol=1e-5, atol=1e-4)

  @parameterized.parameters('vnm', 'two_of_four_tokens')
  @pytest.mark.slow
  def test_the_kernels_serve_experts_one_by_one_and_vmap_too(self, name):
    policy, inputs = POLICIES[name], draw(jnp.bfloat16, lead=(2,))
    state = state_of(policy, *inputs[1:3])
    block = functools.partial(eager, dataclasses.replace(policy, implementation='sparse'))
    with mock.patch.object(acts, 'matmuls_of', wraps=acts.matmuls_of) as make:
      jax.eval_shape(block, *inputs, state)
    self.assertEqual(make.call_count, 2 * 2)  # forward and backward of each expert
    self.assertEqual({call.args[0].tokens for call in make.call_args_list}, {TOKENS})
    found = jit(jax.vmap(block))(*inputs, state)
    for a, b in zip(found, forward_and_grads(policy, *inputs, state), strict=True):
      self.assertLess(relative_error(a, b), 4e-3)

  def test_unequal_numbers_of_experts(self):
    x, w_up, w_down, _ = draw(lead=(2,))
    with self.assertRaisesRegex(ValueError, 'differ in their experts'):
      neuron_level_ffn(x[:1], w_up, w_down, {}, policy=VNM)


class DescriptionTest(parameterized.TestCase):

  @parameterized.parameters(
    (ActivationPolicy(), dict(features='64:2:8', tokens='2:4', dense_features=0.0, clusters=None, sparse_weights=True)),
    (ActivationPolicy(s24.VNM(128, 16), s24.VNM(128, 16), 0.05, Clusters(4, 256)),
     dict(features='128:2:16', tokens='128:2:16', dense_features=0.05, clusters=dict(number=4, within=256),
          sparse_weights=True)),
    (ActivationPolicy(TwoOfFour(), sparse_weights=False, implementation='reference'),
     dict(features='2:4', tokens='2:4', dense_features=0.0, clusters=None, sparse_weights=False)),
  )  # fmt: skip
  def test_says_all_but_what_runs_it(self, policy, described):
    self.assertEqual(policy.describe(), described)


def ones(shape, dtype=np.float32):
  """Without a program, which importing this file would compile."""
  return jnp.asarray(np.ones(shape, dtype))


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
    (lambda: ActivationPolicy('2:4'), r"features='2:4' must be TwoOfFour\(\) or VNM\(v, m\)"),
    (lambda: ActivationPolicy(tokens=None), 'tokens=None must be TwoOfFour'),
    (lambda: ActivationPolicy(implementation='triton'), "implementation='triton'"),
    (lambda: ActivationPolicy(TwoOfFour(), implementation='sparse'), 'no kernels for 2:4 features'),
    (lambda: dataclasses.replace(VNM, clusters=Clusters(4), implementation='sparse'), 'no kernels for Clusters'),
    (lambda: s24.VNM(0, 8), 'v=0'), (lambda: s24.VNM(8, 2), 'm=2'), (lambda: s24.VNM(8, 8.0), 'm=8.0 must be a whole'),
    (lambda: s24.VNM(True, 8), 'v=True'), (lambda: ActivationPolicy(dense_features=1.5), 'dense_features=1.5'),
    (lambda: ActivationPolicy(TwoOfFour(), s24.VNM(8, 8)), r'tokens=8:2:8 must be TwoOfFour\(\) or features, .* 2:4'),
    (lambda: ActivationPolicy(s24.VNM(4, 8), s24.VNM(8, 8)), 'tokens=8:2:8 must be .* features, which are 4:2:8'),
    (lambda: ActivationPolicy(clusters=Clusters(4)), 'side by side that use the same neurons, which takes VNM'),
    (lambda: ActivationPolicy(TwoOfFour(), clusters=Clusters(4)), 'clusters of 2:4 features with tokens=2:4'),
    (lambda: Clusters(-1), 'number=-1'), (lambda: ActivationPolicy(clusters=4), r'clusters=4 must be Clusters'),
    (lambda: ActivationPolicy(s24.VNM(4, 8), s24.VNM(4, 8), clusters=Clusters(4, 6)), 'within=6 in multiples of v'),
  )
  def test_policies(self, make, message):
    with self.assertRaisesRegex(ValueError, message):
      make()

  @parameterized.parameters(
    (dict(x=ones((30, D))), '30 tokens, not a multiple of the 8 rows of a block'),
    (dict(x=ones((TOKENS, D + 1))), 'axis -1 must be 8'),
    (dict(x=ones((TOKENS, D), jnp.bfloat16)), 'cast them to one'),
    (dict(w_down=ones((HIDDEN + 4, D))), r'w_down \[h, d\]'),
    (dict(b_up=ones(D)), r'b_up must be of shape \(64,\), found \(8,\)'),
    (dict(b_down=ones((1, D))), r'b_down must be of shape \(8,\)'),
    (dict(w_up=ones((2, D, HIDDEN)), b_up=ones(HIDDEN)), r'b_up must be of shape \(2, 64\)'),
    (dict(state={}), "state of projection 'soft_threshold'"),
    (dict(policy=lambda: dataclasses.replace(VNM, clusters=Clusters(4))), r"state\['neurons'\] must be int32"),
    (dict(w_up=ones((D, 60)), w_down=ones((60, D))), '60 neurons, not a multiple of the 8 columns of a group'),
  )
  def test_calls(self, change, message):
    x, w_up, w_down, _ = draw()
    call = dict(x=x, w_up=w_up, w_down=w_down, policy=VNM) | change
    call['policy'] = call['policy']() if callable(call['policy']) else call['policy']
    call.setdefault('state', state_of(VNM, call['w_up'], call['w_down']))
    with self.assertRaisesRegex(ValueError, message):
      neuron_level_ffn(call.pop('x'), call.pop('w_up'), call.pop('w_down'), call.pop('state'), **call)

  @parameterized.parameters('vnm', '2:4', 'two_of_four_tokens', 'clusters', 'experts')
  def test_no_tokens(self, name):
    policy = POLICIES.get(name, VNM)
    policy = dataclasses.replace(policy, clusters=Clusters(4)) if name == 'clusters' else policy
    x, w_up, w_down, _ = draw(lead=(2,) if name == 'experts' else ())
    state, bias = state_of(policy, w_up, w_down), ones((*w_up.shape[:-2], D))
    x = np.asarray(x)[..., :0, :]
    z, *grads = jitted(policy, x, w_up, w_down, x, state, b_down=bias)
    self.assertEqual([a.shape for a in (z, *grads)], [x.shape, x.shape, w_up.shape, w_down.shape])
    for grad in grads:
      np.testing.assert_array_equal(grad, 0)

  def test_gradients_need_whole_groups_of_tokens(self):
    policy = dataclasses.replace(VNM, features=s24.VNM(4, 8), tokens=s24.VNM(4, 8))
    x, w_up, w_down, dz = draw()
    state = state_of(policy, w_up, w_down)
    x, dz = (np.asarray(a)[:12] for a in (x, dz))
    jax.eval_shape(functools.partial(neuron_level_ffn, policy=policy), x, w_up, w_down, state)
    with self.assertRaisesRegex(ValueError, 'found 12 tokens'):
      forward_and_grads(policy, x, w_up, w_down, dz, state)

  def test_two_of_four_tokens_need_groups_of_four(self):
    policy = dataclasses.replace(POLICIES['two_of_four_tokens'], features=s24.VNM(2, 8))
    x, w_up, w_down, dz = map(np.asarray, draw())
    state, run = state_of(policy, w_up, w_down), functools.partial(eager, policy)
    self.assertEqual(jax.eval_shape(run, x[:12], w_up, w_down, dz[:12], state)[0].shape, (12, D))
    with self.assertRaisesRegex(ValueError, 'group tokens by 4 .* found 10 tokens'):
      jax.eval_shape(run, x[:10], w_up, w_down, dz[:10], state)


if __name__ == '__main__':
  absltest.main()
