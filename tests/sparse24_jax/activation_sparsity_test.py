"""The squared-ReLU block: its six products against NumPy in float64, autodiff, and each other's implementations."""

import dataclasses
import functools
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

import sparse24_jax as s24
from sparse24_jax import _activation_products as products
from sparse24_jax import activation_sparsity as acts
from sparse24_jax.activation_sparsity import ActivationPolicy, neuron_level_ffn
from sparse24_jax.neurons import cluster_neurons, invert, route_tokens, spread, unspread
from sparse24_jax.vnm import verify_vnm
from tests import oracles

TOKENS, D, HIDDEN = 32, 8, 64
VNM = ActivationPolicy(v=8, m=8)
POLICIES = {
  'vnm': VNM, '2:4': ActivationPolicy(pattern='2:4'), 'no_dense': ActivationPolicy(v=4, m=16, dense_features=0)
}


def _inputs(dtype=jnp.float32, lead=(), seed=0):
  keys = jax.random.split(jax.random.key(seed), 4)
  shapes = ((*lead, TOKENS, D), (*lead, D, HIDDEN), (*lead, HIDDEN, D), (*lead, TOKENS, D))
  return [jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes, strict=True)]


@functools.partial(jax.jit, static_argnums=0)
def _init(projection, w):
  return projection.init(w)


def _state(policy, w_up, w_down):
  state = {}
  if policy.up is not None:
    state['up'] = _init(policy.up, w_up)
  if policy.down is not None:
    state['down'] = _init(policy.down, w_down)
  if policy.clusters:
    state['neurons'] = cluster_neurons(w_up, clusters=policy.clusters)
  return state


def _relative(found, expected):
  norm = np.linalg.norm(np.asarray(expected, np.float64))
  return np.linalg.norm(np.asarray(found - expected, np.float64)) / norm


def _forward_and_grads(policy, x, w_up, w_down, dz, state=None, **kwargs):
  state = _state(policy, w_up, w_down) if state is None else state
  return _jitted(policy, x, w_up, w_down, dz, state, **kwargs)


def _eager(policy, x, w_up, w_down, dz, state, **kwargs):
  f = functools.partial(neuron_level_ffn, policy=policy, **kwargs)
  z, vjp = jax.vjp(lambda x, w_up, w_down: f(x, w_up, w_down, state), x, w_up, w_down)
  return [z, *vjp(dz)]


_jitted = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
)(_eager, static_argnums=0)


def _top(a, n):
  """Places of the n largest of each row, ties to the left, by Python's sort."""
  out = np.zeros(a.shape, bool)
  for i, row in enumerate(a):
    for j in sorted(range(len(row)), key=lambda j: (-row[j], j))[:n]:
      out[i, j] = True
  return out


def _block_mask(y, v, m, columns=4):
  """V:2:M of non-negative y by loops over blocks; v=1 and m=4 give 2:4."""
  mask = np.zeros(y.shape, bool)
  for top in range(0, y.shape[0], v):
    for left in range(0, y.shape[1], m):
      block = y[top : top + v, left : left + m]
      used = _top(block.sum(0)[None], columns)
      mask[top : top + v, left : left + m] = _top(np.where(used, block, -1), 2)
  return mask


def _apart(n, m):
  """Order in which entries n / m apart are neighbours."""
  return np.array([i + j * (n // m) for i in range(n // m) for j in range(m)])


def _oracle(policy, x, w_up, w_down, dz):
  """Values and gradients by the written formulas, in float64."""
  x, w1, w2, dz = (np.asarray(a, np.float64) for a in (x, w_up, w_down, dz))
  state = _state(policy, w_up, w_down)
  w1 = oracles.soft_threshold(w1, axis=-2) * float(state['up'])
  w2 = oracles.soft_threshold(w2, axis=-1) * float(state['down'])
  v, m = (1, 4) if policy.pattern == '2:4' else (policy.v, policy.m)
  h = x @ w1
  r = np.maximum(h, 0)
  features = _block_mask(r * r, v, m)
  y = np.where(features, r * r, 0)
  count = round(policy.dense_features * HIDDEN)
  dense = _top((y != 0).sum(0)[None], count)[0]
  rest = np.where(dense, 0, y)
  tokens = _apart(TOKENS, m)
  mask = np.zeros(y.shape, bool)
  mask[tokens] = _block_mask(rest[tokens].T, v, m).T
  keep = mask | dense
  dh = np.where(features, 2 * (dz @ w2.T) * r, 0)
  return [y @ w2, dh @ w1.T, x.T @ np.where(keep, dh, 0), np.where(keep, y, 0).T @ dz]


class NumericsTest(parameterized.TestCase):

  @parameterized.named_parameters(*POLICIES.items())
  def test_against_float64(self, policy):
    inputs = _inputs()
    for found, expected in zip(_forward_and_grads(policy, *inputs), _oracle(policy, *inputs), strict=True):
      np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-4)

  @parameterized.parameters(('vnm', 4), ('2:4', 0), ('no_dense', 0))
  def test_kernels_compute_the_same(self, name, clusters):
    # On a CPU the ops answer with their references, through the formats and the index of the gathered rows.
    policy = dataclasses.replace(POLICIES[name], clusters=clusters)
    inputs = _inputs(jnp.bfloat16)
    expected = _forward_and_grads(policy, *inputs)
    policy = dataclasses.replace(policy, implementation='kernels')
    for found, other in zip(_forward_and_grads(policy, *inputs), expected, strict=True):
      self.assertEqual(found.dtype, jnp.bfloat16)
      norm = np.linalg.norm(np.asarray(other, np.float64))
      self.assertLess(np.linalg.norm(np.asarray(found - other, np.float64)), 4e-3 * norm)

  @parameterized.parameters('v:n:m', '2:4')
  def test_with_all_features_dense_it_is_the_derivative(self, pattern):
    policy = ActivationPolicy(pattern=pattern, v=8, m=8, dense_features=1, up=None, down=None)
    x, w_up, w_down, dz = _inputs()
    mask = acts.feature_mask(jnp.square(jax.nn.relu(x @ w_up)), policy)

    def f(x, w_up, w_down):
      return jnp.where(mask, jnp.square(jax.nn.relu(x @ w_up)), 0) @ w_down

    z, vjp = jax.vjp(f, x, w_up, w_down)
    for found, expected in zip(_forward_and_grads(policy, x, w_up, w_down, dz), [z, *vjp(dz)], strict=True):
      np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)

  def test_biases(self):
    policy = ActivationPolicy(v=8, m=8, dense_features=1, up=None, down=None)
    x, w_up, w_down, dz = _inputs()
    b_up, b_down = jnp.linspace(-1, 1, HIDDEN), jnp.linspace(-1, 1, D)
    mask = acts.feature_mask(jnp.square(jax.nn.relu(x @ w_up + b_up[None])), policy)
    _, vjp = jax.vjp(
      lambda b_up, b_down: jnp.where(mask, jnp.square(jax.nn.relu(x @ w_up + b_up[None])), 0) @ w_down + b_down[None],
      b_up, b_down,
    )
    _, ours = jax.vjp(
      lambda b_up, b_down: neuron_level_ffn(x, w_up, w_down, {}, policy=policy, b_up=b_up, b_down=b_down), b_up, b_down
    )
    for found, expected in zip(ours(dz), vjp(dz), strict=True):
      np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)

  def test_2_4_forward_treats_each_token_by_itself(self):
    policy = POLICIES['2:4']
    x, w_up, w_down, _ = _inputs()
    state = _state(policy, w_up, w_down)
    f = jax.jit(functools.partial(neuron_level_ffn, policy=policy))
    np.testing.assert_allclose(
      f(x[:5], w_up, w_down, state), f(x, w_up, w_down, state)[:5], rtol=1e-5, atol=1e-5
    )

  def test_nan_passes(self):
    x, w_up, w_down, _ = _inputs()
    for policy in (VNM, POLICIES['2:4']):
      z = neuron_level_ffn(x.at[3, 1].set(jnp.nan), w_up, w_down, _state(policy, w_up, w_down), policy=policy)
      self.assertTrue(jnp.isnan(z[3]).all())


class ChoiceTest(parameterized.TestCase):

  @parameterized.parameters(
    (VNM, True, 'SparseVNM'), (VNM, False, 'Reference'), (POLICIES['2:4'], True, 'Sparse24'),
    (dataclasses.replace(VNM, clusters=4), True, 'SpreadVNM'),
  )
  def test_sides(self, policy, kernels, kind):
    ops = products.make(policy, kernels, acts.feature_mask, acts.token_mask)
    self.assertEqual(type(ops.activate.__self__).__name__, kind)

  @parameterized.parameters(True, False)
  def test_one_choice_for_forward_and_backward(self, kernels):
    inputs = _inputs(jnp.bfloat16)
    with (
      mock.patch.object(products, 'takes_kernels', return_value=kernels) as choice,
      mock.patch.object(products, 'make', wraps=products.make) as make,
    ):
      jax.eval_shape(functools.partial(_eager, VNM), *inputs, _state(VNM, *inputs[1:3]))
    choice.assert_called_once_with(VNM, TOKENS, (D, HIDDEN), jnp.bfloat16)
    self.assertEqual([call.args[1] for call in make.call_args_list], [kernels] * 2)

  def test_the_kernels_side_computes_the_same(self):
    # The kernels' path by the ops' own choice of back ends, which on a CPU are the references.
    inputs = _inputs(jnp.bfloat16)
    expected = _forward_and_grads(VNM, *inputs)
    with mock.patch.object(products, 'takes_kernels', lambda *_: True):
      # Another share, the same three neurons: not the program compiled before.
      found = _forward_and_grads(dataclasses.replace(VNM, dense_features=0.051), *inputs)
    for a, b in zip(found, expected, strict=True):
      self.assertLess(_relative(a, b), 4e-3)


class SixProductsTest(parameterized.TestCase):
  """Every product finds a sparse operand; that is why neither transposable masks nor MVUE are needed."""

  def _operands(self, policy):
    """(kind, sparse operand with the contracted axis last) of each product, recorded in eager mode."""
    seen = []
    make = products.make

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
        seen.append(('tokens', np.asarray(spread(sparse, policy.group, 0)).T))
        self.dense = len(pattern.dense)
        return ops.over_tokens(a, pattern, is_y, b)

      return ops._replace(by_weight=by_weight, over_neurons=over_neurons, over_tokens=over_tokens)

    with mock.patch.object(products, 'make', recording):
      inputs = _inputs()
      _eager(policy, *inputs, _state(policy, *inputs[1:3]))
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

  def test_no_weight_is_needed_sparse_both_ways(self):
    # Each weight is sparse in one product only, along that product's sum: W1 along its input, W2 along its output.
    # The other way round both are dense operands, and are not 2:4 there: the mask need not be transposable.
    _, w_up, w_down, _ = _inputs()
    up, down = (p.apply(w, p.init(w)) for p, w in ((VNM.up, w_up), (VNM.down, w_down)))
    for w, axis in ((up, -2), (down, -1)):
      s24.verify24(w, axis=axis)
      with self.assertRaisesRegex(ValueError, 'not 2:4'):
        s24.verify24(w, axis=-3 - axis)

  def test_nothing_is_sampled(self):
    # The gradients' zeros are those of the activations, so no estimator: no key, and twice the same bits.
    inputs = _inputs()
    for first, second in zip(_forward_and_grads(VNM, *inputs), _forward_and_grads(VNM, *inputs, key=jax.random.key(1)),
                             strict=True):
      np.testing.assert_array_equal(first, second)

  def test_what_the_forward_dropped_gets_no_gradient(self):
    policy = ActivationPolicy(v=8, m=8, up=None, down=None, dense_features=1)
    x, w_up, w_down, dz = _inputs()
    h = x @ w_up
    mask = acts.feature_mask(jnp.square(jax.nn.relu(h)), policy)
    dropped = np.argwhere(np.asarray((h > 0) & ~mask))
    token, neuron = dropped[0]
    alone = jnp.zeros_like(dz).at[token].set(dz[token])
    *_, dw_up, dw_down = _forward_and_grads(policy, x, w_up, w_down, alone)
    self.assertEqual(float(jnp.abs(dw_up[:, neuron]).max()), 0)
    self.assertEqual(float(jnp.abs(dw_down[neuron]).max()), 0)


class RoutingTest(parameterized.TestCase):

  def test_finds_planted_clusters(self):
    rng = np.random.default_rng(0)
    centres = np.linalg.qr(rng.standard_normal((16, 4)))[0]
    label = rng.permutation(np.repeat(np.arange(4), 16))
    w = jnp.asarray(centres[:, label] + 0.05 * rng.standard_normal((16, 64)), jnp.float32)
    ids = np.asarray(cluster_neurons(w, clusters=4))
    self.assertLen({(a, b) for a, b in zip(ids.tolist(), label.tolist(), strict=True)}, 4)

  def test_clusters_of_experts(self):
    w = _inputs(lead=(2,))[1]
    np.testing.assert_array_equal(
      cluster_neurons(w, clusters=4), jnp.stack([cluster_neurons(x, clusters=4) for x in w])
    )

  @parameterized.parameters(3, 128)
  def test_number_of_clusters(self, clusters):
    with self.assertRaisesRegex(ValueError, f'clusters={clusters} must divide the 64'):
      cluster_neurons(jnp.ones((8, 64)), clusters=clusters)

  def test_spread(self):
    np.testing.assert_array_equal(spread(jnp.arange(24), 8, 0), _apart(24, 8))
    x = jnp.arange(48).reshape(2, 24)
    np.testing.assert_array_equal(unspread(spread(x, 8, 1), 8, 1), x)

  def test_permuted_and_permuted_back(self):
    policy = dataclasses.replace(VNM, clusters=4)
    x, w_up, w_down, dz = _inputs()
    state = _state(policy, w_up, w_down)
    order = route_tokens(x, w_up, state['neurons'], clusters=4)
    self.assertFalse((order == jnp.arange(TOKENS)).all())
    columns = jnp.argsort(state['neurons'], stable=True)
    with mock.patch.object(acts, 'route_tokens', lambda x, *_, **__: jnp.arange(x.shape[0])):
      z, dx, dw_up, dw_down = _eager(
        policy, x[order], w_up[:, columns], w_down[columns], dz[order],
        state | {'neurons': state['neurons'][columns]},
      )
    expected = (z[invert(order)], dx[invert(order)], dw_up[:, invert(columns)], dw_down[invert(columns)])
    for found, other in zip(_forward_and_grads(policy, x, w_up, w_down, dz, state), expected, strict=True):
      np.testing.assert_allclose(found, other, rtol=1e-6, atol=1e-5)

  @parameterized.parameters((s24.magnitude(), None), (s24.transposable(), s24.transposable()))
  def test_masks_move_with_their_weights(self, up, down):
    policy = dataclasses.replace(VNM, v=1, clusters=4, dense_features=0, up=up, down=down)
    x, w_up, w_down, _ = _inputs()
    state = _state(policy, w_up, w_down)
    self.assertFalse((jnp.argsort(state['neurons'], stable=True) == jnp.arange(HIDDEN)).all())
    # In blocks of one token the order of tokens decides nothing, so routing by the projected weight is all the same.
    masked_down = w_down if down is None else down.apply(w_down, state['down'])
    expected = neuron_level_ffn(
      x, up.apply(w_up, state['up']), masked_down, {'neurons': state['neurons']},
      policy=dataclasses.replace(policy, up=None, down=None),
    )
    found = neuron_level_ffn(x, w_up, w_down, state, policy=policy)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)

  def test_routing_keeps_more_of_clustered_activations(self):
    # Eight kinds of tokens, each using its own eighth of the neurons, in random order: blocks of eight unsorted tokens
    # need all neurons of a group, sorted ones one. What is lost falls from a half to nearly nothing.
    rng = np.random.default_rng(0)
    centres = np.linalg.qr(rng.standard_normal((16, 8)))[0]
    label, kind = rng.permutation(np.repeat(np.arange(8), 16)), rng.permutation(np.repeat(np.arange(8), 16))
    w_up = jnp.asarray(centres[:, label] + 0.1 * rng.standard_normal((16, 128)), jnp.float32)
    x = jnp.asarray(3 * centres[:, kind].T + 0.1 * rng.standard_normal((128, 16)), jnp.float32)
    w_down = jnp.ones((128, 4))

    def lost(clusters):
      policy = ActivationPolicy(v=8, m=16, clusters=clusters, up=None, down=None)
      z = jax.jit(functools.partial(neuron_level_ffn, policy=policy))(x, w_up, w_down, _state(policy, w_up, w_down))
      exact = jnp.square(jax.nn.relu(x @ w_up)) @ w_down
      return float(jnp.linalg.norm(z - exact) / jnp.linalg.norm(exact))

    self.assertLess(lost(8), 0.2 * lost(0))


class ExpertsTest(parameterized.TestCase):

  @parameterized.parameters('vnm', '2:4')
  def test_experts_are_blocks_of_their_own(self, name):
    policy = dataclasses.replace(POLICIES[name], clusters=4 if name == 'vnm' else 0)
    x, w_up, w_down, dz = _inputs(lead=(2,))
    together = _forward_and_grads(policy, x, w_up, w_down, dz)
    for i in range(2):
      alone = _forward_and_grads(policy, x[i], w_up[i], w_down[i], dz[i])
      for found, expected in zip(together, alone, strict=True):
        np.testing.assert_allclose(found[i], expected, rtol=1e-5, atol=1e-4)

  def test_the_kernels_serve_experts_one_by_one_and_vmap_too(self):
    inputs = _inputs(jnp.bfloat16, lead=(2,))
    state = _state(VNM, *inputs[1:3])
    block = functools.partial(_eager, VNM)
    with mock.patch.object(products, 'takes_kernels', return_value=True) as choice:
      with mock.patch.object(products, 'make', wraps=products.make) as make:
        jax.eval_shape(block, *inputs, state)
      found = jax.jit(jax.vmap(block))(*inputs, state)
    choice.assert_called_with(VNM, TOKENS, (D, HIDDEN), jnp.bfloat16)  # of one expert
    self.assertEqual(make.call_count, 2 * 2)  # forward and backward of each
    for a, b in zip(found, _forward_and_grads(VNM, *inputs, state), strict=True):
      self.assertLess(_relative(a, b), 4e-3)

  def test_unequal_numbers_of_experts(self):
    x, w_up, w_down, _ = _inputs(lead=(2,))
    with self.assertRaisesRegex(ValueError, 'differ in their experts'):
      neuron_level_ffn(x[:1], w_up, w_down, _state(VNM, w_up, w_down), policy=VNM)


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
    (dict(pattern='4:8'), "pattern='4:8'"), (dict(implementation='triton'), "implementation='triton'"),
    (dict(v=0), 'v=0'), (dict(m=2), 'm=2'), (dict(m=8.0), 'm=8.0 must be a whole'), (dict(v=True), 'v=True'),
    (dict(dense_features=1.5), 'dense_features=1.5'),
    (dict(clusters=-1), 'clusters=-1'), (dict(clusters=4, pattern='2:4'), 'treats each token by itself'),
    (dict(down=s24.soft_threshold_projection()), '2:4 along the output'),
    (dict(up=s24.soft_threshold_projection(axis=-1)), '2:4 along the input'),
  )
  def test_policies(self, change, message):
    with self.assertRaisesRegex(ValueError, message):
      ActivationPolicy(**change)

  @parameterized.parameters(
    (dict(x=jnp.ones((30, D))), '30 tokens; 8 are the rows of a block'),
    (dict(x=jnp.ones((TOKENS, D + 1))), 'axis -1 must be 8'),
    (dict(x=jnp.ones((TOKENS, D), jnp.bfloat16)), 'cast them to one'),
    (dict(w_down=jnp.ones((HIDDEN + 4, D))), r'w_down \[h, d\]'),
    (dict(b_up=jnp.ones(D)), r'b_up must be of shape \(64,\), found \(8,\)'),
    (dict(b_down=jnp.ones((1, D))), r'b_down must be of shape \(8,\)'),
    (dict(w_up=jnp.ones((2, D, HIDDEN)), b_up=jnp.ones(HIDDEN)), r'b_up must be of shape \(2, 64\)'),
    (dict(state={}), "state of projection 'soft_threshold'"),
    (dict(policy=lambda: dataclasses.replace(VNM, clusters=4)), r"state\['neurons'\] must be int32"),
    (dict(w_up=jnp.ones((D, 60)), w_down=jnp.ones((60, D))), '60 neurons; 8 are the columns of a group'),
  )
  def test_calls(self, change, message):
    x, w_up, w_down, _ = _inputs()
    call = dict(x=x, w_up=w_up, w_down=w_down, policy=VNM) | change
    call['policy'] = call['policy']() if callable(call['policy']) else call['policy']
    call.setdefault('state', _state(VNM, call['w_up'], call['w_down']))
    with self.assertRaisesRegex(ValueError, message):
      neuron_level_ffn(call.pop('x'), call.pop('w_up'), call.pop('w_down'), call.pop('state'), **call)

  @parameterized.parameters('vnm', '2:4', 'clusters', 'experts')
  def test_no_tokens(self, name):
    policy = POLICIES.get(name, VNM)
    policy = dataclasses.replace(policy, clusters=4) if name == 'clusters' else policy
    x, w_up, w_down, _ = _inputs(lead=(2,) if name == 'experts' else ())
    state, bias = _state(policy, w_up, w_down), jnp.ones((*w_up.shape[:-2], D))
    x = x[..., :0, :]
    z, *grads = _eager(policy, x, w_up, w_down, x, state, b_down=bias)
    self.assertEqual([a.shape for a in (z, *grads)], [x.shape, x.shape, w_up.shape, w_down.shape])
    for grad in grads:
      np.testing.assert_array_equal(grad, jnp.zeros_like(grad))

  def test_gradients_need_whole_groups_of_tokens(self):
    policy = dataclasses.replace(VNM, v=4)
    x, w_up, w_down, dz = _inputs()
    state = _state(policy, w_up, w_down)
    neuron_level_ffn(x[:12], w_up, w_down, state, policy=policy)
    with self.assertRaisesRegex(ValueError, 'found 12 tokens'):
      _forward_and_grads(policy, x[:12], w_up, w_down, dz[:12], state)


if __name__ == '__main__':
  absltest.main()
