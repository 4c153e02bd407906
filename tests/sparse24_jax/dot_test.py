import functools
import io
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.test_util import check_grads
import ml_dtypes
import numpy as np
import pytest

import sparse24_jax as s24
from sparse24_jax import linear_layer
from sparse24_jax.weight_errors import errors_name
from tests import oracles
from tests.draws import gaussian
from tests.quick import jit
from tests.sparse24_jax import layers_alike

POLICIES = {
  'dense': s24.DotPolicy(),
  'dense_mvue': s24.DotPolicy(weight_grad='mvue'),
  'ste': s24.DotPolicy(s24.magnitude()),
  'fst': s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue'),
  's_ste': s24.DotPolicy(s24.soft_threshold_projection(), weight_grad='mvue'),
  's_ste_fp8': s24.DotPolicy(s24.soft_threshold_projection(), weight_grad='mvue', precision='fp8'),
}
FST = POLICIES['fst']
# Relative Frobenius error against float64 on the same operands. Sums are float32; what remains is one rounding of the
# result: 2^-9 at most in bfloat16, 2^-12 in float16.
TOLERANCE = {jnp.float32: 1e-6, jnp.bfloat16: 4e-3, jnp.float16: 5e-4}
KEY = jax.random.key(7)


def normal(*shape: int, seed: int, dtype=jnp.float32) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype))


@functools.partial(jax.jit, static_argnums=0)
def initial_state(policy, w):
  return None if policy.projection is None else policy.projection.init(w)


_mvue24 = jax.jit(functools.partial(s24.mvue24, axis=0))


@functools.partial(jax.jit, static_argnums=0)
def dot_and_gradients(policy, x, w, state, dz, key):
  z, vjp = jax.vjp(lambda x, w: s24.dot(x, w, state, policy=policy, key=key), x, w)
  return z, *vjp(dz)


def fp8(x: np.ndarray, dtype) -> np.ndarray:
  scale = np.float32(ml_dtypes.finfo(dtype).max) / abs(x.astype(np.float32)).max()
  return ((x.astype(np.float32) * scale).astype(dtype).astype(np.float32) / scale).astype(x.dtype)


def written_formulas(policy, x, w, state, dz, key) -> tuple[np.ndarray, ...]:
  """z = x W~, dx = dz W~^T, dw = x^T V(dz), in float64."""
  projected = w if policy.projection is None else jax.jit(policy.projection.apply)(w, state)
  x, projected, dz = np.asarray(x), np.asarray(projected), np.asarray(dz)
  tokens, sampled = x.reshape(-1, x.shape[-1]), dz.reshape(-1, dz.shape[-1])
  if policy.weight_grad == 'mvue':
    sampled = np.asarray(_mvue24(sampled, key))
  matmuls = [(x, projected), (dz, projected.T), (tokens.T, sampled)]
  if policy.precision == 'fp8':
    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    formats = ((e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2))
    matmuls = [tuple(map(fp8, pair, fmts)) for pair, fmts in zip(matmuls, formats, strict=True)]
  return tuple(oracles.wide(a) @ oracles.wide(b) for a, b in matmuls)


def loss(policy, w, x, state, key):
  """A loss that is not linear in the output, so that the output gradient differs from token to token."""
  return jnp.sum(jnp.sin(s24.dot(x, w, state, policy=policy, key=key)))



class LayersAlikeTest(parameterized.TestCase):

  @parameterized.parameters(('mvue', 44), ('dense', 45))
  def test_are_traced_once_whatever_they_are_called(self, weight_grad, tokens):
    """To be called, and to be differentiated with x and, for the first, without; samples and masks are their own."""
    policy = s24.DotPolicy(s24.transposable(), weight_grad=weight_grad)
    x, key = normal(tokens, 12, seed=0), KEY if weight_grad == 'mvue' else None
    weights = {name: normal(12, 12, seed=i) for i, name in enumerate('abcdef', 1)}
    states = {name: policy.projection.init(w) for name, w in weights.items()}

    def run(weights, of):
      y = x
      for i, (name, w) in enumerate(weights.items()):
        with errors_name(name):
          y = of(y, w, states[name], None if key is None else jax.random.fold_in(key, i))
      return (y**2).sum()

    with mock.patch.object(linear_layer, 'forward', side_effect=linear_layer.forward) as forward:
      found = jax.grad(run)(weights, lambda x, w, state, key: s24.dot(x, w, state, policy=policy, key=key))
    self.assertEqual(forward.call_count, 3)
    with layers_alike.traced_one_by_one():
      expected = jax.grad(run)(weights, lambda x, w, state, key: s24.dot(x, w, state, policy=policy, key=key))
    oracles.assert_close(found, expected, 1e-6)

  @parameterized.parameters(s24.soft_threshold_projection, s24.transposable, s24.magnitude)
  def test_a_program_that_packs_has_no_effects(self, projection):
    """With that of a check `jax.export` cannot serialise it."""
    policy = s24.DotPolicy(projection(), implementation='dense')
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 64), (64, 64)))
    state = jax.eval_shape(policy.projection.init, w)
    self.assertEmpty(jax.make_jaxpr(functools.partial(s24.dot, policy=policy))(x, w, state).effects)

class FormulaTest(parameterized.TestCase):
  @parameterized.product(dtype=oracles.DTYPES, policy=list(POLICIES))
  @pytest.mark.few(len(POLICIES))
  def test_three_matmuls(self, policy, dtype):
    policy = POLICIES[policy]
    x, w = normal(2, 6, 16, seed=0, dtype=dtype), normal(16, 12, seed=1, dtype=dtype)
    dz = normal(2, 6, 12, seed=2, dtype=dtype)
    state = initial_state(policy, w)
    found = dot_and_gradients(policy, x, w, state, dz, KEY)
    expected = written_formulas(policy, x, w, state, dz, KEY)
    for name, one, other, like in zip(('z', 'dx', 'dw'), found, expected, (dz, x, w), strict=True):
      self.assertEqual((one.shape, one.dtype), (like.shape, dtype), name)
      error = np.linalg.norm(oracles.wide(one) - other) / np.linalg.norm(other)
      self.assertLess(error, TOLERANCE[dtype], name)
    if policy.projection is not None:  # straight through: what is pruned has a gradient as well
      pruned = ~np.asarray(policy.projection.mask(w, state))
      self.assertEqual(pruned.mean(), 0.5)
      self.assertTrue((np.asarray(found[2])[pruned] != 0).all())
    if policy.weight_grad != 'dense':
      other = dot_and_gradients(policy, x, w, state, dz, jax.random.key(8))
      for index, same in enumerate((True, True, False)):  # only the weight gradient is sampled
        self.assertEqual(bool((found[index] == other[index]).all()), same)

  def test_weight_gradient_is_unbiased(self):
    x, w, dz = normal(12, 16, seed=0), normal(16, 8, seed=1), normal(12, 8, seed=2)
    state = initial_state(FST, w)
    keys = jax.random.split(KEY, 20_000)
    run = jax.jit(jax.vmap(lambda key: dot_and_gradients(FST, x, w, state, dz, key)[2]))
    samples = np.asarray(run(keys), np.float64)
    error = abs(samples.mean(0) - oracles.wide(x).T @ oracles.wide(dz))
    np.testing.assert_array_less(error, 4.5 * samples.std(0) / np.sqrt(len(keys)))

  @parameterized.parameters(jnp.bfloat16, jnp.float16)
  def test_sums_are_float32(self, dtype):
    x, w = np.ones((4, 4096), dtype), np.ones((4096, 4), dtype)
    for policy, total in ((POLICIES['ste'], 2048), (POLICIES['dense'], 4096)):
      z = jit(functools.partial(s24.dot, policy=policy))(x, w, initial_state(policy, w))
      np.testing.assert_array_equal(np.asarray(z, np.float32), total)
    # A CPU sums in float32 anyhow: see that each of the three matmuls asks for it.
    trace = functools.partial(dot_and_gradients, POLICIES['s_ste'])
    jaxpr = str(jax.make_jaxpr(trace)(x, w, jnp.float32(1), jnp.ones((4, 4), dtype), KEY))
    self.assertEqual(jaxpr.count('dot_general['), 3)
    self.assertEqual(jaxpr.count('preferred_element_type=float32'), 3)

  def test_true_derivatives(self):
    """The dense op has them, and so has the sparse one by its activations, without a straight-through estimator."""
    x, w = normal(4, 8, seed=0), normal(8, 8, seed=1)
    check_grads(jit(lambda x, w: s24.dot(x, w, policy=POLICIES['dense'])), (x, w), order=1, modes=['rev'])
    for policy in (POLICIES['ste'], FST):
      op = functools.partial(s24.dot, w=w, state=initial_state(policy, w), policy=policy, key=KEY)
      check_grads(jit(op), (x,), order=1, modes=['rev'])

  def test_evaluation_needs_no_key_and_takes_any_number_of_tokens(self):
    w = normal(16, 12, seed=1)
    state, dot = initial_state(FST, w), functools.partial(s24.dot, policy=FST)
    for tokens in (1, 3, 7):
      x = normal(tokens, 16, seed=2)
      expected = np.asarray(x) @ np.where(state, w, np.float32(0))
      np.testing.assert_allclose(jit(dot)(x, w, state), expected, rtol=1e-5, atol=1e-6)
    self.assertEqual(jax.eval_shape(dot, x[0], w, state).shape, (12,))

  @parameterized.parameters(*POLICIES)
  def test_no_tokens_give_zeros(self, name):
    policy, w = POLICIES[name], normal(16, 12, seed=1)
    found = dot_and_gradients(policy, jnp.zeros((2, 0, 16)), w, initial_state(policy, w), jnp.zeros((2, 0, 12)), None)
    self.assertEqual([a.shape for a in found], [(2, 0, 12), (2, 0, 16), (16, 12)])
    np.testing.assert_array_equal(found[2], 0)

  def test_token_axes_do_not_matter(self):
    x, w, dz = normal(2, 6, 16, seed=0), normal(16, 12, seed=1), normal(2, 6, 12, seed=2)
    state = initial_state(FST, w)
    dw = dot_and_gradients(FST, x, w, state, dz, KEY)[2]
    flat = dot_and_gradients(FST, x.reshape(12, 16), w, state, dz.reshape(12, 12), KEY)[2]
    np.testing.assert_array_equal(dw, flat)

  def test_gradient_bits_survive_saving_the_key(self):
    x, w, dz = normal(8, 16, seed=0), normal(16, 12, seed=1), normal(8, 12, seed=2)
    for key in (KEY, jax.random.PRNGKey(7)):
      file = io.BytesIO()
      np.save(file, jax.random.key_data(key))
      restored = jnp.asarray(np.load(io.BytesIO(file.getvalue())))
      for again in (restored, jax.random.wrap_key_data(restored)):
        for one, other in zip(
          dot_and_gradients(FST, x, w, initial_state(FST, w), dz, key),
          dot_and_gradients(FST, x, w, initial_state(FST, w), dz, again),
          strict=True,
        ):
          np.testing.assert_array_equal(one, other)


class TransformationTest(parameterized.TestCase):
  """The op under each transformation gives what plain calls give."""

  def setUp(self):
    super().setUp()
    self.x, self.w = normal(8, 16, seed=0), normal(3, 16, 16, seed=1)
    self.state, self.keys = initial_state(FST, self.w), jax.random.split(KEY, 3)

  def assert_trees_close(self, found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)

  def layers(self, layer, w, x):
    for i in range(3):
      x = layer(x, (w[i], self.state[i], self.keys[i]))[0]
    return jnp.sum(jnp.sin(x))

  def layer(self, x, weights):
    w, state, key = weights
    return jnp.tanh(s24.dot(x, w, state, policy=FST, key=key)), None

  @pytest.mark.slow
  def test_remat_and_scan_over_layers(self):
    expected = jax.jit(jax.value_and_grad(functools.partial(self.layers, self.layer), argnums=(0, 1)))(self.w, self.x)

    def scanned(w, x):
      return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(self.layer), x, (w, self.state, self.keys))[0]))

    self.assert_trees_close(jax.jit(jax.value_and_grad(scanned, argnums=(0, 1)))(self.w, self.x), expected)
    rematted = functools.partial(self.layers, jax.checkpoint(self.layer))
    self.assert_trees_close(jax.jit(jax.value_and_grad(rematted, argnums=(0, 1)))(self.w, self.x), expected)

  @parameterized.parameters('fst', 's_ste')
  @pytest.mark.few
  def test_vmap(self, name):
    policy = POLICIES[name]
    x, dz = normal(3, 8, 16, seed=2), normal(3, 8, 16, seed=3)
    state = initial_state(policy, self.w)
    found = jax.vmap(functools.partial(dot_and_gradients, policy))(x, self.w, state, dz, self.keys)
    for i in range(3):
      one = dot_and_gradients(policy, x[i], self.w[i], state[i], dz[i], self.keys[i])
      self.assert_trees_close(jax.tree.map(lambda a, i=i: a[i], found), one)

  @parameterized.parameters('inside', 'outside')
  @pytest.mark.few
  def test_shard_map_over_tokens(self, where):
    """Data parallel over eight devices, a key a shard; the gradient is the sum over the shards."""
    mesh = Mesh(np.array(jax.devices()), ('data',))
    x, w, state = normal(64, 16, seed=4), self.w[0], self.state[0]

    def local_loss(w, x):
      key = jax.random.fold_in(KEY, jax.lax.axis_index('data'))
      return jax.lax.psum(loss(FST, w, x, state, key), 'data')

    gradient = jax.value_and_grad(local_loss, argnums=(0, 1))
    plain, split = PartitionSpec(), PartitionSpec('data')
    if where == 'inside':
      mapped = jax.shard_map(gradient, mesh=mesh, in_specs=(plain, split), out_specs=(plain, (plain, split)))
    else:
      mapped = jax.value_and_grad(
        jax.shard_map(local_loss, mesh=mesh, in_specs=(plain, split), out_specs=plain), argnums=(0, 1)
      )
    value, (dw, dx) = jax.jit(mapped)(w, x)
    one = jax.jit(jax.value_and_grad(functools.partial(loss, FST), argnums=(0, 1)))
    parts = [
      one(w, part, state, jax.random.fold_in(KEY, i))
      for i, part in enumerate(x.reshape(8, 8, 16))
    ]
    self.assertAlmostEqual(float(value), float(sum(v for v, _ in parts)), places=3)
    self.assert_trees_close(dw, sum(g[0] for _, g in parts))
    self.assert_trees_close(dx, jnp.concatenate([g[1] for _, g in parts]))

  @pytest.mark.slow
  def test_shard_map_over_columns_and_rows_of_the_weight(self):
    """Tensor parallel: whole 4x4 blocks a shard, so local masks are parts of the global mask."""
    mesh = Mesh(np.array(jax.devices()[:4]), ('model',))
    x, w = normal(8, 16, seed=4), normal(16, 32, seed=5)
    plain, columns, rows = PartitionSpec(), PartitionSpec(None, 'model'), PartitionSpec('model', None)
    up = jax.shard_map(
      lambda x, w: s24.dot(x, w, FST.projection.init(w), policy=FST),
      mesh=mesh, in_specs=(plain, columns), out_specs=columns,
    )
    down = jax.shard_map(
      lambda x, w: jax.lax.psum(s24.dot(x, w, FST.projection.init(w), policy=FST), 'model'),
      mesh=mesh, in_specs=(columns, rows), out_specs=plain,
    )
    for mapped, weight in ((up, w), (down, normal(16, 12, seed=6))):
      expected = s24.dot(x, weight, FST.projection.init(weight), policy=FST)
      np.testing.assert_allclose(jax.jit(mapped)(x, weight), expected, rtol=1e-5, atol=1e-5)


class DotGeneralTest(parameterized.TestCase):
  @parameterized.parameters(((2,), (0,)), ((-1,), (-2,)))
  def test_of_a_matrix(self, lhs_contract, rhs_contract):
    x, w = normal(2, 4, 16, seed=0), normal(16, 12, seed=1)
    state = initial_state(FST, w)
    numbers = ((lhs_contract, rhs_contract), ((), ()))
    op = functools.partial(s24.dot_general, policy=FST, key=KEY)
    gradient = jit(jax.grad(lambda x, w: jnp.sin(op(x, w, numbers, state)).sum(), argnums=(0, 1)))
    expected = jit(jax.grad(lambda x, w: loss(FST, w, x, state, KEY), argnums=(0, 1)))(x, w)
    jax.tree.map(np.testing.assert_array_equal, gradient(x, w), expected)

  def test_other_contracted_axis_of_the_activations(self):
    x, w = normal(16, 4, 2, seed=0), normal(16, 12, seed=1)
    numbers = (((0,), (0,)), ((), ()))
    found = jit(lambda x, w: s24.dot_general(x, w, numbers, policy=s24.DotPolicy()))(x, w)
    np.testing.assert_allclose(found, jax.lax.dot_general(x, w, numbers), rtol=1e-5, atol=1e-5)

  @parameterized.parameters('dense', 'fst', 's_ste')
  @pytest.mark.few
  def test_batch_axes(self, name):
    policy = POLICIES[name]
    x, w = normal(2, 3, 4, 5, 16, seed=0), normal(2, 3, 16, 8, seed=1)
    state = initial_state(policy, w)
    numbers = (((4,), (2,)), ((0, 1), (0, 1)))

    def total(x, w):
      return jnp.sin(s24.dot_general(x, w, numbers, state, policy=policy, key=KEY)).sum()

    projected = w if state is None else policy.projection.apply(w, state)
    found = s24.dot_general(x, w, numbers, state, policy=policy)
    np.testing.assert_allclose(found, jax.lax.dot_general(x, projected, numbers), rtol=1e-5, atol=1e-5)
    dx, dw = jax.jit(jax.grad(total, argnums=(0, 1)))(x, w)
    for index, at in enumerate(np.ndindex(2, 3)):  # each expert has its own key
      own = None if state is None else state[at]
      key = jax.random.fold_in(KEY, index)
      expected = jax.jit(jax.grad(functools.partial(loss, policy), argnums=(0, 1)))(w[at], x[at], own, key)
      np.testing.assert_allclose(dw[at], expected[0], rtol=1e-5, atol=1e-5)
      np.testing.assert_allclose(dx[at], expected[1], rtol=1e-5, atol=1e-5)

  @parameterized.parameters(
    *(('dot', name, wrt) for name in ('reference', 'dense') for wrt in (0, 1)),
    *(('ffn', name, wrt) for name in ('reference', 'dense') for wrt in (0, 1)), ('neurons', None, 1),
  )
  def test_second_derivatives_are_an_error(self, op, implementation, wrt):
    policy = s24.DotPolicy(s24.transposable(), 'sparse', 'mvue', implementation=implementation)
    x, up, down = (gaussian(i, shape).astype(jnp.bfloat16) for i, shape in enumerate(((16, 16), (16, 32), (32, 16))))
    states, key = {'up': s24.transposable_mask(up), 'down': s24.transposable_mask(down)}, jax.random.key(0)

    def f(x, up):
      if op == 'dot':
        y = s24.dot(x, up, states['up'], policy=policy, key=key)
      elif op == 'ffn':
        y = s24.ffn(x, up, down, states, policy=policy, activation='relu', key=key)
      else:
        y = s24.neuron_level_ffn(x, up, down, {}, policy=s24.ActivationPolicy(s24.VNM(16, 8), sparse_weights=False))
      return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    for of in (f, jax.jit(f)):
      with self.assertRaisesRegex(ValueError, 'differentiated again, .* s24.project'):
        jax.eval_shape(jax.grad(lambda *args, of=of: jnp.sum(jax.grad(of)(*args)), wrt), x, up)
    jax.eval_shape(jax.grad(f, wrt), x, up)


class DotPolicyTest(absltest.TestCase):
  def test_is_a_static_argument(self):
    projection = s24.transposable()
    one, other = (s24.DotPolicy(projection, input_grad='sparse') for _ in range(2))
    self.assertEqual((one, hash(one)), (other, hash(other)))
    self.assertNotEqual(one, s24.DotPolicy(projection))

if __name__ == '__main__':
  absltest.main()
