"""The feed-forward block: on the kernels' path and composed of `dot`s, against formulas in float64."""

import dataclasses
import functools
import importlib
import re
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.two_of_four.philox import two_keys
import sparse24_jax as s24
from sparse24_jax import linear_layer
from sparse24_jax.ffn import _sparse24_ffn, ffn_at
from tests import oracles
from tests.oracles import activation_and_slope, assert_close
from tests.sparse24_jax import layers_alike

BF16, F32 = jnp.bfloat16, jnp.float32
D, HIDDEN, OUT = 16, 64, 24
TOKENS = (2, 8)
KEY = jax.random.key(7)
FST = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue')
POLICIES = {
  'kernels': dataclasses.replace(FST, implementation='dense'),  # their path, multiplied decompressed
  'reference': dataclasses.replace(FST, implementation='reference'),
  'dense': s24.DotPolicy(),
  's_ste_kernels': s24.DotPolicy(s24.soft_threshold_projection(), weight_grad='mvue', implementation='dense'),
}
SHAPES = {'up': (D, HIDDEN), 'down': (HIDDEN, OUT), 'gate': (D, HIDDEN)}
jit = jax.jit


def problem(*, gated: bool, biased: bool, dtype, tokens=TOKENS, draw=None):
  """(x, weights, biases, states, cotangent of y)."""
  rng = np.random.default_rng(0)
  draw = draw or (lambda rng, shape: rng.standard_normal(shape) / 2)
  roles = ('up', 'down', 'gate') if gated else ('up', 'down')
  def make(shape):
    return jnp.asarray(draw(rng, shape), dtype)
  weights = {role: make(SHAPES[role]) for role in roles}
  biases = {role: make(SHAPES[role][1:]) for role in roles} if biased else {}
  states = {role: jnp.asarray(oracles.random_transposable_mask(rng, SHAPES[role])) for role in roles}
  return make((*tokens, D)), weights, biases, states, make((*tokens, OUT))


def block(policy, activation, x, weights, biases, states, key):
  return s24.ffn(
    x, weights['up'], weights['down'], states, policy=policy, activation=activation, w_gate=weights.get('gate'),
    key=key, **{f'b_{role}': b for role, b in biases.items()},
  )  # fmt: skip


def value_and_cotangents(policy, activation, x, weights, biases, states, dy, key):
  y, vjp = jax.vjp(lambda x, w, b: block(policy, activation, x, w, b, states, key), x, weights, biases)
  return y, *vjp(dy)


jitted = jit(value_and_cotangents, static_argnums=(0, 1))


def integers(rng, shape):
  """So few and small that sums of products are exact in bfloat16."""
  return rng.integers(-1, 2, shape) * rng.integers(0, 2, shape)


def written_formulas(policy, activation, x, weights, biases, states, dy, key):
  """y, dx, dW and db in float64; what a step would write to memory is rounded to the dtype of x."""
  dtype = x.dtype
  def rounded(a):
    return a.astype(dtype).astype(np.float64)
  x, dy = (oracles.wide(a).reshape(-1, a.shape[-1]) for a in (x, dy))
  w = {role: oracles.wide(a) for role, a in weights.items()}
  if policy.projection is not None:
    w = {role: a * np.asarray(states[role]) for role, a in w.items()}
  def bias(role):
    return oracles.wide(biases[role]) if biases else 0.0
  up = rounded(x @ w['up'] + bias('up'))
  if 'gate' in w:
    gate = rounded(x @ w['gate'] + bias('gate'))
    value, slope = activation_and_slope(activation, gate)
    h = rounded(value * up)
  else:
    value, slope = activation_and_slope(activation, up)
    h = rounded(value)
  dh = rounded(dy @ w['down'].T)
  # Columns of gate and up stand side by side, also for the sample.
  parts = [dh * up * slope, dh * value] if 'gate' in w else [dh * slope]
  dz = rounded(np.concatenate(parts, axis=1))
  first = [w['gate'], w['up']] if 'gate' in w else [w['up']]
  sampled = (dz, dy)
  if policy.weight_grad == 'mvue':
    keys = two_keys(key)
    sampled = (s24.mvue24(jnp.asarray(a, dtype), k, axis=0) for a, k in zip(sampled, keys, strict=True))
  sampled_z, sampled_y = map(oracles.wide, sampled)
  names = ('gate', 'up') if 'gate' in w else ('up',)
  dw = dict(zip(names, np.split(x.T @ sampled_z, len(names), axis=1), strict=True)) | {'down': h.T @ sampled_y}
  db = dict(zip(names, np.split(dz.sum(0), len(names)), strict=True)) | {'down': dy.sum(0)} if biases else {}
  return h @ w['down'] + bias('down'), dz @ np.concatenate(first, axis=1).T, dw, db


class FormulaTest(parameterized.TestCase):

  @parameterized.parameters(
    *((('gelu', False), policy) for policy in ('kernels', 'reference')),  # that of dots: dot_test
    *((('silu', True), policy) for policy in ('kernels', 'reference')),
    (('squared_relu', False), 'kernels'), (('gelu_exact', True), 'kernels'), (('relu', False), 'kernels'),
  )
  @pytest.mark.few
  def test_sparse(self, case, policy):
    (activation, gated), policy = case, POLICIES[policy]
    # Composed of dots the activation rounds inside in bfloat16, so it is held to the formulas in float32.
    dtype, tolerance = (BF16, 8e-3) if policy.implementation == 'dense' else (F32, 1e-4)
    x, weights, biases, states, dy = problem(gated=gated, biased=True, dtype=dtype)
    found = jitted(policy, activation, x, weights, biases, states, dy, KEY)
    self.assertEqual((found[0].shape, found[0].dtype), (dy.shape, dtype))
    self.assertEqual(jax.tree.map(jnp.shape, found[1:]), jax.tree.map(jnp.shape, (x, weights, biases)))
    self.assertEqual({a.dtype for a in jax.tree.leaves(found)}, {jnp.dtype(dtype)})
    assert_close(found, written_formulas(policy, activation, x, weights, biases, states, dy, KEY), tolerance)

  @parameterized.parameters(('kernels', False), ('kernels', True), ('reference', False))
  @pytest.mark.few
  def test_the_gradient_of_the_last_weight_alone_is_exact(self, policy, gated):
    activation, policy = 'silu' if gated else 'gelu', POLICIES[policy]
    dtype, tolerance = (BF16, 8e-3) if policy.implementation == 'dense' else (F32, 1e-4)
    x, weights, biases, states, dy = problem(gated=gated, biased=True, dtype=dtype)
    down = dataclasses.replace(policy, weight_grad='dense')

    def run(x, weights, biases):
      return ffn_at(
        x, weights, biases, states, policy=policy, down=down, activation=activation, key=KEY, precision=None,
        hidden_sharding=None,
      )  # fmt: skip

    fused = mock.patch.object(importlib.import_module('sparse24_jax.ffn'), '_sparse24_ffn', wraps=_sparse24_ffn)
    with fused as fused, layers_alike.traced_one_by_one():
      y, vjp = jax.vjp(run, x, weights, biases)
    self.assertEqual(fused.called, policy.implementation == 'dense')
    given = policy, activation, x, weights, biases, states, dy
    y, dx, dw, db = (y, *vjp(dy))
    sampled, exact = (written_formulas(p, *given[1:], KEY) for p in (policy, down))
    expected = {role: (exact if role == 'down' else sampled)[2][role] for role in weights}
    assert_close((y, dx, dw, db), (*sampled[:2], expected, sampled[3]), tolerance)
    self.assertFalse(np.allclose(oracles.wide(dw['down']), sampled[2]['down'], atol=0.1))

  @parameterized.parameters(('relu', True), ('gelu_exact', False))
  def test_dense(self, activation, gated):
    x, weights, biases, _, dy = problem(gated=gated, biased=True, dtype=F32)
    found = jitted(POLICIES['dense'], activation, x, weights, biases, None, dy, None)
    expected = written_formulas(POLICIES['dense'], activation, x, weights, biases, None, dy, None)
    assert_close(found, expected, 1e-5)

  @parameterized.parameters(('relu', True, True), ('squared_relu', False, False))
  @pytest.mark.slow
  def test_both_paths_draw_the_same_samples(self, activation, gated, biased):
    """On numbers that both compute exactly, all that differs is the order of sums of samples."""
    given = problem(gated=gated, biased=biased, dtype=BF16, draw=integers)
    fused, composed = (jitted(POLICIES[p], activation, *given, KEY) for p in ('kernels', 'reference'))
    assert_close(fused[:2] + fused[3:], composed[:2] + composed[3:], 0.0)
    assert_close(fused[2], composed[2], 3e-3)
    self.assertGreater(float(jnp.abs(fused[2]['up']).sum()), 0)

  @parameterized.parameters('default', 'fp8')
  def test_gate_and_up_composed_are_columns_of_one_sample(self, precision):
    """Else they draw the same bits: their gradients are equal where gate and up are."""
    policy = dataclasses.replace(POLICIES['reference'], precision=precision)
    x, weights, _, states, dy = problem(gated=True, biased=False, dtype=F32)
    drawn = []
    draw = mock.patch.object(linear_layer, 'mvue24', lambda dz, key, **where: drawn.append((key, where)) or dz)
    with draw, layers_alike.traced_one_by_one():
      jax.make_jaxpr(lambda key: value_and_cotangents(policy, 'relu', x, weights, {}, states, dy, key))(KEY)
    down, *hidden = drawn
    self.assertLen({id(key) for key, _ in drawn}, 2)
    self.assertLen({id(key) for key, _ in hidden}, 1)
    self.assertEqual(down[1], dict(axis=-2, origin=(0, 0, 0)))
    self.assertCountEqual([where['origin'] for _, where in hidden], [(0, 0, 0), (0, 0, HIDDEN)])

  @parameterized.parameters('kernels', 'reference')
  @pytest.mark.slow
  def test_weight_gradients_are_unbiased(self, policy):
    dtype = BF16 if policy == 'kernels' else F32
    x, weights, _, states, dy = problem(gated=True, biased=False, dtype=dtype, tokens=(4,))
    policy, count = POLICIES[policy], 1000

    def gradients(key):
      return value_and_cotangents(policy, 'silu', x, weights, {}, states, dy, key)[2]

    samples = jit(lambda keys: jax.lax.map(gradients, keys))(jax.random.split(KEY, count))
    without = dataclasses.replace(FST, weight_grad='dense')
    expected = written_formulas(without, 'silu', x, weights, {}, states, dy, None)[2]
    for role, drawn in samples.items():
      sample = oracles.wide(drawn)
      # Rounding to bfloat16 is no sampling error: a bit of the gradient's size.
      bound = 4.5 * sample.std(0) / np.sqrt(count) + 2**-7 * abs(expected[role]).mean()
      np.testing.assert_array_less(abs(sample.mean(0) - expected[role]), bound)

  def test_evaluation_needs_no_key_and_takes_any_number_of_tokens(self):
    x, *rest, _ = problem(gated=True, biased=True, dtype=BF16, tokens=(3,))
    blocks = [functools.partial(block, POLICIES[p], 'silu') for p in ('kernels', 'reference')]
    assert_close(*(jit(f)(x, *rest, None) for f in blocks), 2e-2)
    self.assertEqual({jax.eval_shape(f, x[0], *rest, None).shape for f in blocks}, {(OUT,)})

  @parameterized.parameters('kernels', 'reference')
  def test_no_tokens_give_zeros(self, name):
    *problem_, dy = problem(gated=True, biased=True, dtype=BF16, tokens=(0,))
    y, dx, *rest = jitted(POLICIES[name], 'silu', *problem_, dy, None)
    self.assertEqual((y.shape, dx.shape), ((0, OUT), (0, D)))
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), rest)

  @pytest.mark.slow
  def test_biases_of_another_dtype(self):
    """float32 biases of bfloat16 maps, one of them left out; their gradients are float32."""
    x, weights, biases, states, dy = problem(gated=True, biased=True, dtype=BF16)
    biases = {role: biases[role].astype(F32) for role in ('up', 'down')}
    found, expected = (
      jitted(POLICIES[p], 'relu', x, weights, biases, states, dy, KEY) for p in ('kernels', 'reference')
    )
    self.assertEqual({a.dtype for a in found[3].values()}, {jnp.dtype(F32)})
    assert_close((*found[:2], found[3]), (*expected[:2], expected[3]), 2e-2)


class PathTest(parameterized.TestCase):
  """Which inputs take the fused path: the one that samples and packs dz as it makes it."""

  @parameterized.parameters(
    ('kernels', {}, True),
    ('kernels', dict(gated=True), True),
    ('reference', {}, False),
    ('dense', {}, False),
    ('s_ste_kernels', {}, False),  # its input gradient runs dense
  )
  def test_path(self, policy, kwargs, fused):
    x, weights, _, states, dy = problem(gated=kwargs.get('gated', False), biased=False, dtype=BF16)
    if policy == 's_ste_kernels':
      states = dict.fromkeys(states, jnp.float32(1))
    wraps = linear_layer.activation_and_weight_grad
    with mock.patch.object(linear_layer, 'activation_and_weight_grad', wraps=wraps) as spy:
      jax.eval_shape(
        functools.partial(value_and_cotangents, POLICIES[policy], 'gelu'), x, weights, {}, states, dy, KEY
      )
    self.assertEqual(spy.called, fused)

  @pytest.mark.slow
  def test_a_gate_that_does_not_fill_tiles_of_positions_is_composed(self):
    """Two operands cannot be joined inside a tile of 64 rows; numbers are those of the reference."""
    x, weights, biases, states, dy = problem(gated=True, biased=True, dtype=BF16, draw=integers)
    def cut(tree):
      return {role: a[:32] if role == 'down' and a.ndim == 2 else a[..., :32] if role != 'down' else a
                            for role, a in tree.items()}  # fmt: skip
    weights, biases, states = cut(weights), cut(biases), cut(states)
    wraps = linear_layer.activation_and_weight_grad
    with mock.patch.object(linear_layer, 'activation_and_weight_grad', wraps=wraps) as spy:
      found, expected = (
        jitted(POLICIES[p], 'relu', x, weights, biases, states, dy, KEY) for p in ('kernels', 'reference')
      )
    self.assertFalse(spy.called)
    assert_close(found, expected, 3e-3)


def zeros(shape, dtype):
  """Without a program, which importing this file would compile."""
  return jnp.asarray(np.zeros(shape, dtype))


class RefusalTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('no_state', dict(state=None), r"state must be a dict with the keys \['down', 'up'\], found NoneType"),
    ('a_key_too_few', dict(state={'up': 0}), r"keys \['down', 'up'\], found \['up'\]"),
    ('a_key_too_many', dict(state=dict.fromkeys(('up', 'down', 'gate'))), r"found \['down', 'gate', 'up'\]"),
    ('a_tuple', dict(state=(0, 0)), 'found tuple'),
    ('gate_without_state', dict(w_gate=zeros((D, HIDDEN), BF16)), r"keys \['down', 'gate', 'up'\]"),
    ('bias_of_no_gate', dict(b_gate=zeros(HIDDEN, BF16)), 'b_gate is given and w_gate is not'),
    ('activation', dict(activation='tanh'), r"activation='tanh': known are .'gelu', 'gelu_exact', .*'squared_relu'."),
    ('weights', dict(w_down=zeros((HIDDEN + 4, OUT), BF16)), r'must be \[d, h\] and \[h, d_out\].*\(68, 24\)'),
    ('matrix', dict(w_up=zeros((1, D, HIDDEN), BF16)), r'must be \[d, h\] and \[h, d_out\], found \(1, 16, 64\)'),
    ('tokens', dict(x=zeros((8, D + 4), BF16)), r'x of shape \(8, 20\) does not fit w of shape \(16, 64\)'),
    ('dtype', dict(x=zeros((8, D), F32)), 'x is float32 and w is bfloat16'),
    ('bias', dict(b_up=zeros(OUT, BF16)), r'b_up must have shape \(64,\), found \(24,\)'),
    ('bias_out', dict(b_down=zeros(HIDDEN, BF16)), r'b_down must have shape \(24,\), found \(64,\)'),
  )
  def test_refuses(self, change, message):
    x, weights, _, states, _ = problem(gated=False, biased=False, dtype=BF16)
    given = dict(x=x, w_up=weights['up'], w_down=weights['down'], state=states) | change
    for policy in ('kernels', 'reference'):
      with self.assertRaisesRegex(ValueError, message):
        s24.ffn(policy=POLICIES[policy], **given)

  def test_gate_of_another_shape(self):
    x, weights, _, states, _ = problem(gated=True, biased=False, dtype=BF16)
    with self.assertRaisesRegex(ValueError, r'w_gate and w_up must have one shape, found \(16, 32\) and \(16, 64\)'):
      s24.ffn(x, weights['up'], weights['down'], states, policy=FST, w_gate=weights['gate'][:, :32])

  @parameterized.product(
    policy=('kernels', 'reference'),
    case=((TOKENS, None, 'needs a random key'), ((6,), KEY, 'groups tokens in fours')),
  )
  def test_a_gradient_needs_a_key_and_tokens_in_fours(self, policy, case):
    tokens, key, message = case
    x, weights, _, states, _ = problem(gated=False, biased=False, dtype=BF16, tokens=tokens)

    def loss(w):
      return block(POLICIES[policy], 'gelu', x, w, {}, states, key).astype(F32).sum()

    with self.assertRaisesRegex(ValueError, message):
      jax.eval_shape(jax.grad(loss), weights)

  @parameterized.parameters('dense', 'kernels')
  def test_the_sharding_of_the_hidden_layer_keeps_its_kind_of_memory(self, policy):
    x, weights, _, states, _ = problem(gated=True, biased=False, dtype=BF16)
    mesh = jax.make_mesh((1,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P('data'), memory_kind='pinned_host')
    roles = {'w_up': weights['up'], 'w_down': weights['down'], 'w_gate': weights['gate']}
    traced = jax.make_jaxpr(functools.partial(s24.ffn, policy=POLICIES[policy], hidden_sharding=sharding))(
      x, state=states, **roles
    )
    self.assertEqual(set(re.findall(r'memory_kind=(\w+)', str(traced))), {'pinned_host'})

  def test_a_named_kernel_does_not_take_float32(self):
    x, weights, _, states, _ = problem(gated=False, biased=False, dtype=F32)
    with self.assertRaisesRegex(ValueError, "implementation='dense' cannot serve this layer: activations are float32"):
      block(POLICIES['kernels'], 'gelu', x, weights, {}, states, KEY)


if __name__ == '__main__':
  absltest.main()
