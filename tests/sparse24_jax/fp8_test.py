"""FP8 products on the kernels' path, against the written formulas in NumPy and ml_dtypes, and against the simulation."""

import dataclasses
import functools
import logging
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from pallas_kernels import formats
from pallas_kernels.pack import api as pack
from pallas_kernels.sparse_matmul.operand import from_operand
import sparse24_jax as s24
from sparse24_jax import fp8, products
from tests import oracles

BF16, F32 = jnp.bfloat16, jnp.float32
D, HIDDEN, OUT, TOKENS = 16, 64, 24, (2, 8)
SHAPES = {'up': (D, HIDDEN), 'down': (HIDDEN, OUT), 'gate': (D, HIDDEN)}
KEY = jax.random.key(7)
PROJECTION = s24.soft_threshold_projection()
SIMULATED = s24.DotPolicy(PROJECTION, weight_grad='mvue', precision='fp8', implementation='reference')
KERNELS = dataclasses.replace(SIMULATED, implementation='dense')  # their path, multiplied decompressed
CHOOSES = dataclasses.replace(SIMULATED, implementation=None)
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
# One rounding of the result to bfloat16, and here and there a rounding that turned with the order of a sum.
TOLERANCE = 5e-3
# Three bits of mantissa in e4m3, two in e5m2, after scales that are not those of the simulation.
NOISE = 0.15


def draw(seed: int, *shape: int, dtype=BF16):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def draw_weight(seed: int, *shape: int, dtype=BF16):
  """Of few bits, so that the soft threshold's differences are exact."""
  return jnp.asarray(np.random.default_rng(seed).integers(-120, 121, shape) / 64, dtype)


def scale_of(largest, dtype):
  """(scale, what undoes it) for a tensor with this largest magnitude."""
  top = np.float32(ml_dtypes.finfo(dtype).max)
  return top / np.float32(largest), np.float32(largest) / top


def rounded(a, scale, dtype):
  """float64 of float32 `a` times `scale` in an 8-bit format."""
  top = np.float32(ml_dtypes.finfo(dtype).max)
  return np.clip(a.astype(np.float32) * np.float32(scale), -top, top).astype(dtype).astype(np.float64)


def f8(a, dtype, largest=None):
  """`a` in FP8 and back."""
  scale, factor = scale_of(abs(a).max() if largest is None else largest, dtype)
  return rounded(a, scale, dtype) * factor


def f8_weights(weights, states):
  """beta S(w) in e4m3 and back, under the common bound beta |w| of all of them."""
  betas = [np.float32(s) for s in states]
  largest = max(abs(b) * np.float32(abs(oracles.wide(w)).max()) for w, b in zip(weights, betas, strict=True))
  scale, factor = scale_of(largest, E4M3)
  soft = [oracles.soft_threshold(w) for w in weights]
  return [rounded(s, scale * b, E4M3) * factor for s, b in zip(soft, betas, strict=True)]


def f8_sample(a, key):
  """V(a) in e5m2, its scale leaving room for twice the largest entry of `a`."""
  sample = oracles.wide(s24.mvue24(jnp.asarray(a, F32), key, axis=0))
  return f8(sample, E5M2, 2 * abs(a).max())


def bf16(a):
  return np.asarray(a).astype(ml_dtypes.bfloat16).astype(np.float64)


def wide(a):
  return oracles.wide(a).reshape(-1, a.shape[-1])


def written_dot(x, w, state, dz, key):
  """z, dx, dw."""
  x, dz = wide(x), wide(dz)
  (projected,) = f8_weights([w], [state])
  return f8(x, E4M3) @ projected, f8(dz, E5M2) @ projected.T, f8(x, E4M3).T @ f8_sample(dz, key)


def activation_and_slope(name: str, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  if name == 'relu':
    return np.maximum(a, 0), (a > 0).astype(np.float64)
  if name == 'squared_relu':
    return np.maximum(a, 0) ** 2, 2 * np.maximum(a, 0)
  if name == 'silu':
    sigmoid = 1 / (1 + np.exp(-a))
    return a * sigmoid, sigmoid * (1 + a * (1 - sigmoid))
  tanh = np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3))
  inner = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * a**2)
  return a * (1 + tanh) / 2, (1 + tanh) / 2 + a * inner * (1 - tanh**2) / 2


def written_ffn(activation, x, weights, biases, states, dy, key):
  """y, dx, dW, db; what a step writes in bfloat16 is rounded to it."""
  x, dy = wide(x), wide(dy)
  hidden_key, down_key = jax.random.split(key)
  names = ('gate', 'up') if 'gate' in weights else ('up',)
  first = np.concatenate(f8_weights([weights[n] for n in names], [states[n] for n in names]), axis=1)
  (down,) = f8_weights([weights['down']], [states['down']])
  b_first = np.concatenate([wide(biases[n])[0] for n in names]) if biases else 0.0
  z = f8(x, E4M3) @ first + b_first
  if 'gate' in weights:  # the product is written, then read
    gate, up = np.split(bf16(z), 2, axis=1)
    value, slope = activation_and_slope(activation, gate)
    h = bf16(value * up)
  else:
    h = bf16(activation_and_slope(activation, z)[0])
    slope = activation_and_slope(activation, bf16(z))[1]
  dh = bf16(f8(dy, E5M2) @ down.T)
  dz = bf16(np.concatenate([dh * up * slope, dh * value], axis=1) if 'gate' in weights else dh * slope)
  bounded = 'gate' not in weights and activation in fp8.STEEPEST
  largest = fp8.STEEPEST[activation] * abs(dh).max() if bounded else abs(dz).max()
  dz8 = f8(dz, E5M2, largest)
  sample = oracles.wide(s24.mvue24(jnp.asarray(dz, F32), hidden_key, axis=0))
  dw_first = f8(x, E4M3).T @ f8(sample, E5M2, 2 * largest)
  dw = dict(zip(names, np.split(dw_first, len(names), axis=1), strict=True))
  dw['down'] = f8(h, E4M3).T @ f8_sample(dy, down_key)
  db = dict(zip(names, np.split(dz8.sum(0), len(names)), strict=True)) | {'down': dy.sum(0)} if biases else {}
  return f8(h, E4M3) @ down + (wide(biases['down'])[0] if biases else 0.0), dz8 @ first.T, dw, db


def block(policy, activation, x, weights, biases, states, key):
  return s24.ffn(
    x, weights['up'], weights['down'], states, policy=policy, activation=activation, w_gate=weights.get('gate'),
    key=key, **{f'b_{role}': b for role, b in biases.items()},
  )  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0, 1))
def ffn_and_gradients(policy, activation, x, weights, biases, states, dy, key):
  y, vjp = jax.vjp(lambda x, w, b: block(policy, activation, x, w, b, states, key), x, weights, biases)
  return y, *vjp(dy)


@functools.partial(jax.jit, static_argnums=0)
def dot_and_gradients(policy, x, w, state, dz, key):
  z, vjp = jax.vjp(lambda x, w: s24.dot(x, w, state, policy=policy, key=key), x, w)
  return z, *vjp(dz)


def problem(*, gated: bool, biased: bool, tokens=TOKENS):
  """(x, weights, biases, states, cotangent of y)."""
  roles = ('up', 'down', 'gate') if gated else ('up', 'down')
  weights = {role: draw_weight(i, *SHAPES[role]) for i, role in enumerate(roles)}
  biases = {role: draw(10 + i, SHAPES[role][1]) for i, role in enumerate(roles)} if biased else {}
  states = {role: PROJECTION.init(w) for role, w in weights.items()}
  return draw(20, *tokens, D), weights, biases, states, draw(21, *tokens, OUT)


def assert_close(found, expected, tolerance: float) -> None:
  """Relative Frobenius error of every leaf."""
  found, expected = (jax.tree_util.tree_leaves_with_path(tree) for tree in (found, expected))
  for (path, a), (other_path, b) in zip(found, expected, strict=True):
    assert path == other_path, (path, other_path)
    right = oracles.wide(b).reshape(a.shape)
    error = np.linalg.norm(oracles.wide(a) - right) / np.linalg.norm(right)
    assert error <= tolerance, f'{jax.tree_util.keystr(path)}: {error}'


def unpacked(packed: fp8.PackedWeight8) -> np.ndarray:
  """The weight that the forward reads, float64 `[in, out]`."""
  return oracles.wide(formats.decompress(from_operand(packed.forward))).T * float(packed.factor)


class DotTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.w = draw_weight(1, D, OUT)
    self.x, self.dz, self.state = draw(0, *TOKENS, D), draw(2, *TOKENS, OUT), PROJECTION.init(self.w)
    self.given = self.x, self.w, self.state, self.dz, KEY

  def test_formulas(self):
    found = dot_and_gradients(KERNELS, *self.given)
    self.assertEqual([(a.shape, a.dtype) for a in found], [(a.shape, BF16) for a in (self.dz, self.x, self.w)])
    assert_close(found, written_dot(*self.given), TOLERANCE)

  def test_is_the_simulation_up_to_rounding(self):
    found, expected = (dot_and_gradients(policy, *self.given) for policy in (KERNELS, SIMULATED))
    assert_close(found, expected, NOISE)
    plain = dataclasses.replace(SIMULATED, precision='default')
    for a, b in zip(found, dot_and_gradients(plain, *self.given), strict=True):
      self.assertGreater(np.linalg.norm(oracles.wide(a) - oracles.wide(b)) / np.linalg.norm(oracles.wide(b)), 0.01)

  def test_float16(self):
    x, w, dz = (a.astype(jnp.float16) for a in (self.x, self.w, self.dz))
    found = dot_and_gradients(KERNELS, x, w, self.state, dz, KEY)
    self.assertEqual({a.dtype for a in found}, {jnp.dtype(jnp.float16)})
    assert_close(found, written_dot(x, w, self.state, dz, KEY), TOLERANCE)

  def test_weight_gradient_is_unbiased(self):
    exact = oracles.wide(self.x).reshape(-1, D).T @ oracles.wide(self.dz).reshape(-1, OUT)
    keys = jax.random.split(KEY, 64)
    samples = jax.jit(lambda keys: jax.lax.map(lambda k: dot_and_gradients(KERNELS, *self.given[:4], k)[2], keys))(keys)
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
    packed = jax.jit(functools.partial(products.pack_weight, KERNELS, dtype=BF16))(self.w, self.state)
    self.assertIsInstance(packed, fp8.PackedWeight8)
    np.testing.assert_allclose(unpacked(packed), f8_weights([self.w], [self.state])[0], rtol=1e-6)
    np.testing.assert_array_equal(oracles.wide(packed.dense) * float(packed.factor), unpacked(packed))
    with mock.patch.object(pack, 'soft_threshold_pack8', side_effect=AssertionError('packed again')):
      found = jax.eval_shape(functools.partial(dot_and_gradients.__wrapped__, KERNELS), self.x, self.w, packed,
                             self.dz, KEY)  # fmt: skip
    self.assertEqual(found[0].shape, self.dz.shape)
    given = self.x, self.w, packed, self.dz, KEY
    assert_close(dot_and_gradients(KERNELS, *given), dot_and_gradients(KERNELS, *self.given), 0.0)
    # The simulation takes it too, for its state.
    assert_close(dot_and_gradients(SIMULATED, *given), dot_and_gradients(SIMULATED, *self.given), 0.0)

  def test_vmap_and_stacked_layers(self):
    count = 3
    w = draw_weight(3, count, D, OUT) * (8.0 ** jnp.arange(count, dtype=BF16)).reshape(-1, 1, 1)
    x, dz, state = draw(4, count, 8, D), draw(5, count, 8, OUT), PROJECTION.init(w)
    keys = jax.random.split(KEY, count)
    packed = jax.jit(functools.partial(products.pack_weight, KERNELS, dtype=BF16))(w, state)
    self.assertEqual((packed.dense.shape, packed.factor.shape), (w.shape, (count,)))
    mapped = jax.jit(jax.vmap(functools.partial(dot_and_gradients, KERNELS)))
    for given in (state, packed):
      found = mapped(x, w, given, dz, keys)
      for i in range(count):
        one = dot_and_gradients(KERNELS, x[i], w[i], state[i], dz[i], keys[i])
        assert_close(jax.tree.map(lambda a, i=i: a[i], found), one, TOLERANCE)

  def test_scan_and_remat(self):
    w = draw_weight(3, 2, D, D)
    state, keys = PROJECTION.init(w), jax.random.split(KEY, 2)

    def layer(x, given):
      return s24.dot(x, given[0], given[1], policy=KERNELS, key=given[2]), None

    def scanned(x, w):
      packed = products.pack_weight(KERNELS, w, state, BF16)
      return jax.lax.scan(jax.checkpoint(layer), x, (w, packed, keys))[0].astype(F32).sum()

    def looped(x, w):
      for i in range(2):
        x = layer(x, (w[i], state[i], keys[i]))[0]
      return x.astype(F32).sum()

    one, other = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(self.x, w) for f in (scanned, looped))
    assert_close(one, other, TOLERANCE)

  def test_evaluation_needs_no_key_and_takes_any_number_of_tokens(self):
    run = jax.jit(lambda x: s24.dot(x, self.w, self.state, policy=KERNELS))
    for tokens in ((), (3,)):
      x = draw(0, *tokens, D)
      found = run(x)
      self.assertEqual(found.shape, (*tokens, OUT))
      assert_close(found, f8(wide(x), E4M3) @ f8_weights([self.w], [self.state])[0], TOLERANCE)


class FfnTest(parameterized.TestCase):

  @parameterized.parameters(
    ('gelu', False, True), ('silu', False, False), ('relu', False, False), ('squared_relu', False, True),
    ('silu', True, False), ('gelu', True, True),
  )  # fmt: skip
  def test_formulas(self, activation, gated, biased):
    given = problem(gated=gated, biased=biased)
    found = ffn_and_gradients(KERNELS, activation, *given, KEY)
    self.assertEqual(jax.tree.map(jnp.shape, found[1:]), jax.tree.map(jnp.shape, given[:3]))
    self.assertEqual({a.dtype for a in jax.tree.leaves(found)}, {jnp.dtype(BF16)})
    assert_close(found, written_ffn(activation, *given, KEY), 2 * TOLERANCE)
    assert_close(found, ffn_and_gradients(SIMULATED, activation, *given, KEY), 2 * NOISE)


  def test_gate_and_up_of_very_different_size(self):
    """One scale for both; the smaller keeps what the range of e4m3 leaves it."""
    x, weights, biases, states, dy = problem(gated=True, biased=True)
    weights['up'] = weights['up'] / 256
    given = x, weights, biases, states, dy
    found = ffn_and_gradients(KERNELS, 'silu', *given, KEY)
    assert_close(found, written_ffn('silu', *given, KEY), 2 * TOLERANCE)
    assert_close(found[0], ffn_and_gradients(SIMULATED, 'silu', *given, KEY)[0], 2 * NOISE)

  def test_packed_weights_are_taken_over_and_gates_packed_again(self):
    for gated in (False, True):
      x, weights, biases, states, dy = problem(gated=gated, biased=False)
      packed = {role: products.pack_weight(KERNELS, w, states[role], BF16) for role, w in weights.items()}
      one, other = (ffn_and_gradients(KERNELS, 'silu', x, weights, biases, s, dy, KEY) for s in (packed, states))
      assert_close(one, other, 0.0)

  def test_jit_inside_of_grad_and_remat(self):
    x, weights, biases, states, dy = problem(gated=True, biased=True)
    expected = ffn_and_gradients(KERNELS, 'gelu', x, weights, biases, states, dy, KEY)
    inner = functools.partial(block, KERNELS, 'gelu', states=states, key=KEY)
    for run in (jax.jit(inner), jax.jit(jax.checkpoint(inner))):
      y, vjp = jax.vjp(run, x, weights, biases)
      assert_close((y, *vjp(dy)), expected, TOLERANCE)

  @parameterized.parameters(False, True)
  def test_vmap(self, gated):
    """Over experts, each with its own scales."""
    count = 2
    given = problem(gated=gated, biased=True, tokens=(8,))
    many = jax.tree.map(lambda a: jnp.stack([a, a * 3]), given)
    many = (*many[:3], jax.tree.map(jax.vmap(PROJECTION.init), many[1]), many[4])
    keys = jax.random.split(KEY, count)
    found = jax.vmap(functools.partial(ffn_and_gradients, KERNELS, 'silu'))(*many, keys)
    for i in range(count):
      own = jax.tree.map(lambda a, i=i: a[i], (found, many, keys))
      assert_close(own[0], ffn_and_gradients(KERNELS, 'silu', *own[1], own[2]), TOLERANCE)

  @parameterized.parameters(np.nan, np.inf)
  def test_what_is_not_finite_shows(self, bad):
    x, weights, biases, states, dy = problem(gated=True, biased=False)
    y, dx, dw, _ = ffn_and_gradients(KERNELS, 'silu', x.at[0, 0, 0].set(bad), weights, biases, states, dy, KEY)
    for a in jax.tree.leaves((y, dx, dw)):
      self.assertTrue(bool(jnp.isnan(a).all()))
    y, dx, dw, _ = ffn_and_gradients(KERNELS, 'silu', x, weights, biases, states, dy.at[0, 0, 0].set(bad), KEY)
    self.assertTrue(bool(jnp.isfinite(y).all()))
    for a in jax.tree.leaves((dx, dw)):
      self.assertTrue(bool(jnp.isnan(a).all()))

  def test_zeros_stay_zeros(self):
    x, weights, biases, states, dy = problem(gated=False, biased=False)
    for activation in ('gelu', 'squared_relu'):
      found = ffn_and_gradients(KERNELS, activation, jnp.zeros_like(x), weights, biases, states, dy, KEY)
      self.assertTrue(all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(found)))
      self.assertEqual(float(jnp.abs(found[0]).max()), 0)

  def test_no_derivative_exceeds_its_bound(self):
    z = np.linspace(-20, 20, 400_001)
    for name, bound in fp8.STEEPEST.items():
      steepest = abs(activation_and_slope(name, z)[1]).max()
      self.assertLessEqual(steepest, bound, name)
      self.assertGreater(steepest, 0.99 * bound, name)
    self.assertNotIn('squared_relu', fp8.STEEPEST)  # grows without bound


class FlaxTest(absltest.TestCase):

  def test_float32_parameters_of_a_bfloat16_layer(self):
    """Packed from float32 by `sparse_variables`; the layer's gradients are float32."""
    recipe = s24.Recipe('fp8', (s24.Rule('.*kernel', KERNELS),))
    mlp = s24.linen.Sparse24MLP(HIDDEN, activation='silu', dtype=BF16)
    x = draw(0, *TOKENS, D)
    params = mlp.init(KEY, x)['params']
    opt_state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
    packed, bare = (s24.sparse_variables(params, opt_state, recipe, pack=p) for p in (None, False))
    up = params['up']['kernel']
    self.assertEqual((up.dtype, packed['up']['kernel'].dtype), (F32, jnp.float8_e4m3fn))
    found, fine = unpacked(packed['up']['kernel']), f8_weights([up], [bare['up']['kernel']])[0]
    coarse = f8_weights([up.astype(BF16)], [bare['up']['kernel']])[0]
    self.assertLess((abs(found - fine) > 1e-6).mean(), 0.005)  # but for a tie
    self.assertGreater((abs(found - coarse) > 1e-6).mean(), 0.005)
    sparse = s24.sparsify(mlp, recipe)

    @jax.jit
    def gradient(params, states):
      def loss(params):
        y = sparse.apply({'params': params, 'sparse24': states}, x, rngs={'mvue': KEY})
        return jnp.sum(jnp.sin(y.astype(F32)))
      return jax.value_and_grad(loss)(params)

    one, other = gradient(params, packed), gradient(params, bare)
    self.assertEqual({a.dtype for a in jax.tree.leaves(one[1])}, {jnp.dtype(F32)})
    assert_close(one[1], other[1], NOISE)


class RefusalTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('projection', dict(projection=s24.magnitude()), BF16, "only the soft threshold is packed in FP8, found 'magnitude"),
    ('along_out', dict(projection=s24.soft_threshold_projection(axis=-1)), BF16, "found 'soft_threshold along out'"),
    ('no_projection', dict(projection=None), BF16, 'only the soft threshold is packed in FP8, found None'),
    ('dense_weight_grad', dict(weight_grad='dense'), BF16, "FP8 kernels take weight_grad='mvue', found 'dense'"),
    ('sampler', dict(weight_grad='mvue_approximate'), BF16, "take weight_grad='mvue', found 'mvue_approximate'"),
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
    self.assertEqual(s24.ffn(x, weights['up'], weights['down'], states, policy=simulated).shape, (*TOKENS, OUT))

  @parameterized.parameters('mosaic_gpu', 'cusparselt')
  def test_a_named_kernel_is_not_replaced_off_the_gpu(self, backend):
    x, weights, _, states, _ = problem(gated=False, biased=False)
    policy = dataclasses.replace(KERNELS, implementation=backend)
    with self.assertRaisesRegex(ValueError, backend):
      s24.dot(x, weights['up'], states['up'], policy=policy)

  @parameterized.product(
    policy=('KERNELS', 'SIMULATED'), case=((TOKENS, None, 'needs a random key'), ((6,), KEY, 'groups tokens in fours'))
  )
  def test_a_gradient_needs_a_key_and_tokens_in_fours(self, policy, case):
    policy, (tokens, key, message) = globals()[policy], case
    x, weights, _, states, _ = problem(gated=False, biased=False, tokens=tokens)

    def dot_loss(w):
      return s24.dot(x, w, states['up'], policy=policy, key=key).astype(F32).sum()

    def ffn_loss(w):
      return block(policy, 'gelu', x, w, {}, states, key).astype(F32).sum()

    for loss, w in ((dot_loss, weights['up']), (ffn_loss, weights)):
      with self.assertRaisesRegex(ValueError, message):
        jax.eval_shape(jax.grad(loss), w)

  def test_the_simulation_is_said_once(self):
    products._log_once.cache_clear()
    x, weights, _, states, _ = problem(gated=False, biased=False)
    with self.assertLogs('sparse24_jax', logging.INFO) as logs:
      for _ in range(2):
        s24.dot(x, weights['up'], states['up'], policy=CHOOSES)
        s24.ffn(x, weights['up'], weights['down'], states, policy=CHOOSES)
    self.assertLen(logs.output, 1)
    self.assertIn('FP8 is simulated: its kernels need one Hopper GPU and the extra sparse24-jax[cuda]', logs.output[0])


if __name__ == '__main__':
  absltest.main()
