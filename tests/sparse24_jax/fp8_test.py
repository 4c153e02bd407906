"""FP8 matmuls on the kernels' path, against formulas written in NumPy and ml_dtypes, and against the simulation."""

import dataclasses
import functools
import importlib
import logging
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pallas_kernels.pack import api as pack
import sparse24_jax as s24
from sparse24_jax import fp8, linear_layer
from sparse24_jax.block_plan import plan_block
from sparse24_jax.layer_plan import Backends, LayerPlan
from tests import oracles
from tests.draws import parameters
from tests.oracles import assert_close
from tests.sparse24_jax import fp8_oracles, layers_alike
from tests.sparse24_jax.fp8_problems import (
  BF16,
  block,
  CHOOSES,
  D,
  dot_and_gradients,
  draw,
  draw_weight,
  F32,
  HIDDEN,
  init,
  jit,
  KERNELS,
  KEY,
  NOISE,
  OUT,
  pack_weight,
  problem,
  PROJECTION,
  SIMULATED,
  TOKENS,
  TOLERANCE,
  unpacked,
)


class DotTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.w = draw_weight(1, D, OUT)
    self.x, self.dz, self.state = draw(0, *TOKENS, D), draw(2, *TOKENS, OUT), init(self.w)
    self.given = self.x, self.w, self.state, self.dz, KEY

  @parameterized.parameters(BF16, jnp.float16)
  @pytest.mark.few
  def test_formulas(self, dtype):
    x, w, dz = (a.astype(dtype) for a in (self.x, self.w, self.dz))
    found = dot_and_gradients(KERNELS, x, w, self.state, dz, KEY)
    self.assertEqual([(a.shape, a.dtype) for a in found], [(a.shape, dtype) for a in (dz, x, w)])
    assert_close(found, fp8_oracles.written_dot(x, w, self.state, dz, KEY), TOLERANCE)

  def test_is_the_simulation_up_to_rounding(self):
    found, expected = (dot_and_gradients(policy, *self.given) for policy in (KERNELS, SIMULATED))
    assert_close(found, expected, NOISE)
    exact = fp8_oracles.wide(self.x) @ (oracles.soft_threshold(self.w) * float(self.state))
    self.assertGreater(np.linalg.norm(fp8_oracles.wide(found[0]) - exact) / np.linalg.norm(exact), 0.01)

  @parameterized.parameters(BF16, jnp.float16)
  @pytest.mark.few
  def test_a_dense_forward_is_the_same_matmul(self, dtype):
    x, w, dz = (a.astype(dtype) for a in (self.x, self.w, self.dz))

    def dense_forward(policy, tokens, d_in, d_out, *_, **__):
      return LayerPlan(
        tokens, d_in, d_out, jnp.dtype(dtype).name, Backends(None, None, 'dense'), fp8.FP8, sampled=True
      )

    with mock.patch.object(importlib.import_module('sparse24_jax.dot'), 'plan_layer', dense_forward):
      found = jit(lambda *args: dot_and_gradients.__wrapped__(CHOOSES, *args))(x, w, self.state, dz, KEY)
    self.assertEqual({a.dtype for a in found}, {jnp.dtype(dtype)})
    assert_close(found, fp8_oracles.written_dot(x, w, self.state, dz, KEY), TOLERANCE)

  @parameterized.parameters(BF16, jnp.float16)
  @pytest.mark.few
  def test_exact_weight_gradients(self, dtype):
    x, w, dz = (a.astype(dtype) for a in (self.x, self.w, self.dz))
    policy = dataclasses.replace(KERNELS, weight_grad='dense')
    found = dot_and_gradients(policy, x, w, self.state, dz, None)
    assert_close(found, fp8_oracles.written_dot(x, w, self.state, dz, None), TOLERANCE)
    # A key that other layers need samples nothing here.
    assert_close(dot_and_gradients(policy, x, w, self.state, dz, KEY), found, 0.0)
    simulated = dataclasses.replace(SIMULATED, weight_grad='dense')
    assert_close(found, dot_and_gradients(simulated, x, w, self.state, dz, None), NOISE)

  @parameterized.parameters('mvue', 'dense')
  @pytest.mark.few
  def test_output_gradients_in_e4m3(self, sampled):
    key = KEY if sampled == 'mvue' else None
    kernels, simulated, of_5_2 = (
      dataclasses.replace(p, precision=precision, weight_grad=sampled)
      for p, precision in ((KERNELS, 'fp8_e4m3'), (SIMULATED, 'fp8_e4m3'), (KERNELS, 'fp8'))
    )
    given = self.x, self.w, self.state, self.dz, key
    found = dot_and_gradients(kernels, *given)
    with mock.patch.object(fp8_oracles, 'E5M2', fp8_oracles.E4M3):
      assert_close(found, fp8_oracles.written_dot(*given), TOLERANCE)
    assert_close(found, dot_and_gradients(simulated, *given), NOISE)
    # Errors of rounding are half as large.
    z, dx, _ = dot_and_gradients(of_5_2, *given)
    assert_close(found[0], z, 0.0)
    exact = oracles.wide(self.dz).reshape(-1, OUT) @ oracles.wide(PROJECTION.apply(self.w, self.state)).T
    errors = [np.linalg.norm(oracles.wide(a).reshape(-1, D) - exact) for a in (found[1], dx)]
    self.assertLess(errors[0], 0.75 * errors[1])

  def test_what_recipes_call_it(self):
    for make in (s24.recipes.s_ste, functools.partial(s24.recipes.transposable_srste, masked_decay=0.0)):
      self.assertEqual(make('.*', fp8='e4m3').rules[0].policy.precision, 'fp8_e4m3')
      self.assertEqual(make('.*', fp8='e4m3').name, make('.*', fp8=True).name)
      with self.assertRaisesRegex(ValueError, "fp8='e5m2' must be False, True or 'e4m3'"):
        make('.*', fp8='e5m2')

  @parameterized.parameters(BF16, jnp.float16)
  @pytest.mark.few
  def test_a_dense_layer(self, dtype):
    x, w, dz = (a.astype(dtype) for a in (self.x, self.w, self.dz))
    policy = s24.DotPolicy(precision='fp8', implementation='dense')
    found = dot_and_gradients(policy, x, w, None, dz, None)
    self.assertEqual([(a.shape, a.dtype) for a in found], [(a.shape, dtype) for a in (dz, x, w)])
    assert_close(found, fp8_oracles.written_dense_dot(x, w, dz), TOLERANCE)
    simulated = s24.DotPolicy(precision='fp8', implementation='reference')
    assert_close(found, dot_and_gradients(simulated, x, w, None, dz, None), NOISE)

  def test_a_rule_without_a_projection_is_a_dense_layer_in_fp8(self):
    dense = s24.DotPolicy(precision='fp8', implementation='dense')
    recipe = s24.Recipe('dense_fp8', (s24.Rule('mix', dense),))

    def loss(params, x):
      return ((jnp.tanh(x @ params['mix']) @ params['head']).astype(F32) ** 2).mean()

    def expected(params, x):
      return ((jnp.tanh(s24.dot(x, params['mix'], policy=dense)) @ params['head']).astype(F32) ** 2).mean()

    params = {'mix': self.w, 'head': draw_weight(3, OUT, D)}
    state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
    variables = s24.sparse_variables(params, state, recipe)
    found = jit(jax.value_and_grad(s24.sparsify(loss, recipe)))(params, variables, None, self.x)
    assert_close(found, jit(jax.value_and_grad(expected))(params, self.x), 0.0)
    plain = jit(jax.value_and_grad(loss))(params, self.x)
    self.assertGreater(float(jnp.abs(found[1]['mix'] - plain[1]['mix']).max()), 0)

  @pytest.mark.slow
  def test_a_block_with_exact_weight_gradients_is_its_layers(self):
    x, weights, biases, states, dy = problem(gated=False, biased=True)
    kernels, simulated = (dataclasses.replace(p, weight_grad='dense') for p in (KERNELS, SIMULATED))

    def run(policy, x, weights):
      y, vjp = jax.vjp(lambda x, weights: block(policy, 'gelu', x, weights, biases, states, None), x, weights)
      return y, *vjp(dy)

    (y, dx, dw), (sim_y, sim_dx, sim_dw) = (jit(run, static_argnums=0)(p, x, weights) for p in (kernels, simulated))
    assert_close((y, dx, dw['up'], dw['down']), (sim_y, sim_dx, sim_dw['up'], sim_dw['down']), NOISE)
    plan = plan_block(kernels, x.size // D, {role: w.shape for role, w in weights.items()}, BF16)
    self.assertFalse(plan.fused)  # the pass that makes dz samples it
    self.assertIn('dz of up rounded', [step.name for step in plan.steps])

  def test_weight_gradient_is_unbiased(self):
    exact = oracles.wide(self.x).reshape(-1, D).T @ oracles.wide(self.dz).reshape(-1, OUT)
    keys = jax.random.split(KEY, 64)
    gradient = functools.partial(dot_and_gradients.__wrapped__, KERNELS, *self.given[:4])
    samples = jit(lambda keys: jax.lax.map(lambda key: gradient(key)[2], keys))(keys)
    samples = oracles.wide(samples)
    one = np.mean([np.linalg.norm(s - exact) for s in samples]) / np.linalg.norm(exact)
    mean = samples.mean(0)
    self.assertGreater(one, 0.3)  # it does sample
    # Independent errors shrink with the root of their number; the rounding of x is the same in all.
    self.assertLess(np.linalg.norm(mean - exact) / np.linalg.norm(exact), one / 8 + 0.04)
    self.assertAlmostEqual((mean * exact).sum() / (exact * exact).sum(), 1, delta=0.03)

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_what_is_not_finite_shows(self, bad):
    at = (0, 3)
    cases = {
      'x': (self.x.at[0, 3, 5].set(bad), self.w, self.dz, (0, 2)),
      'w': (self.x, self.w.at[at].set(bad), self.dz, (0, 1)),
      'dz': (self.x, self.w, self.dz.at[0, 3, 5].set(bad), (1, 2)),
    }
    for name, (x, w, dz, spoilt) in cases.items():
      found = dot_and_gradients(KERNELS, x, w, self.state, dz, KEY)
      for i, a in enumerate(found):
        self.assertEqual(bool(jnp.isnan(a).all()), i in spoilt, (name, i))
        self.assertEqual(bool(jnp.isfinite(a).all()), i not in spoilt, (name, i))

  def test_zeros_stay_zeros(self):
    for zeroed, zero in (('x', (0, 2)), ('w', (0, 1)), ('dz', (1, 2))):
      x, w, dz = (jnp.zeros_like(a) if zeroed == n else a for n, a in (('x', self.x), ('w', self.w), ('dz', self.dz)))
      found = dot_and_gradients(KERNELS, x, w, PROJECTION.init(w), dz, KEY)
      for i, a in enumerate(found):
        self.assertTrue(bool(jnp.isfinite(a).all()))
        self.assertEqual(bool((a == 0).all()), i in zero, (zeroed, i))

  def test_small_and_large_numbers_are_scaled(self):
    """The range of the input does not matter, only what bfloat16 holds."""
    expected = dot_and_gradients(KERNELS, *self.given)
    by = {'x': 2.0**-60, 'w': 2.0**40, 'dz': 2.0**50}
    found = dot_and_gradients(KERNELS, self.x * by['x'], self.w * by['w'], self.state, self.dz * by['dz'], KEY)
    factors = by['x'] * by['w'], by['w'] * by['dz'], by['x'] * by['dz']
    assert_close([a / f for a, f in zip(found, factors, strict=True)], expected, TOLERANCE)

  def test_packed_here_or_there(self):
    packed = pack_weight(self.w, self.state)
    self.assertIsInstance(packed, s24.PackedWeight)
    values, factor = fp8_oracles.f8_weights([self.w], [self.state])
    np.testing.assert_array_equal(unpacked(packed), values)
    np.testing.assert_array_equal(oracles.wide(packed.matrix), values)
    self.assertAlmostEqual(1 / float(packed.scale), float(factor), places=8)
    self.assertGreater(abs(values).max(), 240)  # beyond an e4m3 with infinities
    with mock.patch.object(pack, 'soft_threshold_pack', side_effect=AssertionError('packed again')):
      found = jax.eval_shape(functools.partial(dot_and_gradients.__wrapped__, KERNELS), self.x, self.w, packed,
                             self.dz, KEY)  # fmt: skip
    self.assertEqual(found[0].shape, self.dz.shape)
    given = self.x, self.w, packed, self.dz, KEY
    assert_close(dot_and_gradients(KERNELS, *given), dot_and_gradients(KERNELS, *self.given), 0.0)

  @pytest.mark.slow
  def test_vmap_and_stacked_layers(self):
    count = 3
    w = draw_weight(3, count, D, OUT) * (8.0 ** jnp.arange(count, dtype=BF16)).reshape(-1, 1, 1)
    x, dz, state = draw(4, count, 8, D), draw(5, count, 8, OUT), init(w)
    keys = jax.random.split(KEY, count)
    packed = pack_weight(w, state)
    self.assertEqual((packed.dense.shape, packed.scale.shape), (w.shape, (count,)))
    found = jit(jax.vmap(functools.partial(dot_and_gradients.__wrapped__, KERNELS)))(x, w, state, dz, keys)
    for i in range(count):
      own = jax.tree.map(lambda a, i=i: a[i], packed)
      one = dot_and_gradients(KERNELS, x[i], w[i], own, dz[i], keys[i])
      assert_close(jax.tree.map(lambda a, i=i: a[i], found), one, TOLERANCE)

  @parameterized.parameters('packed', 'bare')
  @pytest.mark.slow
  def test_scan_and_remat(self, how):
    """A checkpoint keeps what was packed inside it, rounded to what JAX takes for e4m3: numbers must not be lost."""
    w = draw_weight(3, 2, D, D)
    state, keys = init(w), jax.random.split(KEY, 2)
    dz = draw(4, *TOKENS, D)

    def layer(x, given):
      return s24.dot(x, given[0], given[1], policy=KERNELS, key=given[2]), None

    @jit
    def scanned(x, w):
      states = linear_layer.pack_weight(KERNELS, w, state, BF16) if how == 'packed' else state
      z, vjp = jax.vjp(lambda x, w: jax.lax.scan(jax.checkpoint(layer), x, (w, states, keys))[0], x, w)
      return z, vjp(dz)

    z, (dx, dw) = scanned(self.x, w)
    middle = dot_and_gradients(KERNELS, self.x, w[0], state[0], dz, keys[0])[0]
    expected, cotangent, second = dot_and_gradients(KERNELS, middle, w[1], state[1], dz, keys[1])
    _, *first = dot_and_gradients(KERNELS, self.x, w[0], state[0], cotangent, keys[0])
    assert_close((z, dx, dw[0], dw[1]), (expected, *first, second), TOLERANCE)

  def test_transposes_are_written_for_a_backward_only(self):
    w, x = draw_weight(0, D, HIDDEN), draw(1, *TOKENS, D)
    state, asked, quantize = PROJECTION.init(w), [], fp8.quantize.quantize

    def spy(x, scale, *, transpose='no', **options):
      asked.append(transpose)
      return quantize(x, scale, transpose=transpose, **options)

    with mock.patch.object(fp8.quantize, 'quantize', spy), layers_alike.traced_one_by_one():
      plain = s24.dot(x, w, state, policy=KERNELS)
      kept, _ = jax.vjp(lambda x: s24.dot(x, w, state, policy=KERNELS, key=KEY), x)
    self.assertEqual(asked, ['no', 'both'])
    np.testing.assert_array_equal(plain, kept)

  def test_evaluation_needs_no_key_and_takes_any_number_of_tokens(self):
    x = draw(0, 3, D)
    found = jit(lambda x: s24.dot(x, self.w, self.state, policy=KERNELS))(x)
    x8 = fp8_oracles.f8(fp8_oracles.wide(x), fp8_oracles.E4M3)
    expected = fp8_oracles.sparse_matmul(x8, fp8_oracles.f8_weights([self.w], [self.state]))
    assert_close(found, expected, TOLERANCE)
    self.assertEqual(jax.eval_shape(lambda x: s24.dot(x, self.w, self.state, policy=KERNELS), x[0]).shape, (OUT,))


class FlaxTest(absltest.TestCase):

  @pytest.mark.slow
  def test_float32_parameters_of_a_bfloat16_layer(self):
    """Packed from float32 by `sparse_variables`; the layer's gradients are float32."""
    recipe = s24.Recipe('fp8', (s24.Rule('.*kernel', KERNELS),))
    mlp = s24.linen.Sparse24MLP(HIDDEN, activation='silu', dtype=BF16)
    x = draw(0, *TOKENS, D)
    params = parameters(mlp, x)
    opt_state = jax.jit(s24.sparse_training(optax.sgd(0.1), recipe).init)(params)
    packed = jit(lambda params, opt_state: s24.sparse_variables(params, opt_state, recipe))(params, opt_state)
    bare = s24.sparse_variables(params, opt_state, recipe, pack=False)
    up = params['up']['kernel']
    self.assertEqual((up.dtype, packed['up']['kernel'].dtype), (F32, jnp.float8_e4m3fn))
    found, fine = unpacked(packed['up']['kernel']), fp8_oracles.f8_weights([up], [bare['up']['kernel']])[0]
    coarse = fp8_oracles.f8_weights([up.astype(BF16)], [bare['up']['kernel']])[0]
    self.assertLess((found != fine).mean(), 0.005)  # but for a tie
    self.assertGreater((found != coarse).mean(), 0.01)
    def apply(params):
      return s24.sparsify(mlp, recipe).apply({'params': params, 'sparse24': packed}, x, rngs={'mvue': KEY})

    weights = jax.tree.map(lambda a: a.astype(BF16), {role: p['kernel'] for role, p in params.items()})
    held = {role: packed[role]['kernel'] for role in params}
    expected = jit(lambda w: block(KERNELS, 'silu', x, w, {}, held, KEY))(weights)
    assert_close(jit(apply)(params), expected, 0.0)
    grads = jax.eval_shape(jax.grad(lambda params: apply(params).astype(F32).sum()), params)
    self.assertEqual({a.dtype for a in jax.tree.leaves(grads)}, {jnp.dtype(F32)})


class RefusalTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('projection', dict(projection=s24.magnitude()), BF16, "FP8 packs by .* transposable masks, found 'magnitude 2:4'"),
    ('along_out', dict(projection=s24.soft_threshold_projection(axis=-1)), BF16, "found 'soft_threshold along out'"),
    ('dtype', {}, F32, 'activations are float32'),
  )
  def test_a_named_kernel_serves_or_raises(self, change, dtype, message):
    policy = dataclasses.replace(KERNELS, **change)
    x, weights, _, _, _ = problem(gated=False, biased=False)
    x, weights = x.astype(dtype), {role: w.astype(dtype) for role, w in weights.items()}
    states = {role: None if policy.projection is None else policy.projection.init(w) for role, w in weights.items()}
    with self.assertRaisesRegex(ValueError, f"implementation='dense' cannot serve this layer: .*{message}"):
      s24.dot(x, weights['up'], states['up'], policy=policy)
    with self.assertRaisesRegex(ValueError, message):
      s24.ffn(x, weights['up'], weights['down'], states, policy=policy)
    simulated = dataclasses.replace(policy, implementation='reference')
    run = functools.partial(s24.ffn, policy=simulated)
    self.assertEqual(jax.eval_shape(run, x, weights['up'], weights['down'], states).shape, (*TOKENS, OUT))

  @parameterized.parameters('sparse', 'cusparselt')
  def test_a_named_kernel_is_not_replaced_off_the_gpu(self, backend):
    x, weights, _, states, _ = problem(gated=False, biased=False)
    policy = dataclasses.replace(KERNELS, implementation=backend)
    with self.assertRaisesRegex(ValueError, backend):
      jax.eval_shape(functools.partial(s24.dot, policy=policy), x, weights['up'], states['up'])

  @parameterized.product(
    policy=(KERNELS, SIMULATED), case=((TOKENS, None, 'needs a random key'), ((6,), KEY, 'groups tokens in fours'))
  )
  def test_a_gradient_needs_a_key_and_tokens_in_fours(self, policy, case):
    tokens, key, message = case
    x, weights, _, states, _ = problem(gated=False, biased=False, tokens=tokens)

    def dot_loss(w):
      return s24.dot(x, w, states['up'], policy=policy, key=key).astype(F32).sum()

    def ffn_loss(w):
      return block(policy, 'gelu', x, w, {}, states, key).astype(F32).sum()

    for loss, w in ((dot_loss, weights['up']), (ffn_loss, weights)):
      with self.assertRaisesRegex(ValueError, message):
        jax.eval_shape(jax.grad(loss), w)

  def test_the_simulation_is_said_once(self):
    x, weights, _, states, _ = problem(gated=False, biased=False)
    with self.assertLogs('sparse24_jax', logging.INFO) as logs:
      for _ in range(2):
        jax.eval_shape(functools.partial(s24.dot, policy=CHOOSES), x, weights['up'], states['up'])
        jax.eval_shape(functools.partial(s24.ffn, policy=CHOOSES), x, weights['up'], weights['down'], states)
    (line,) = logs.output
    self.assertIn(f"precision='fp8' is simulated: cpu has {fp8.FP8.lacks}", line)


if __name__ == '__main__':
  absltest.main()
