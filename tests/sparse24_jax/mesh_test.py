"""Training on a mesh, by the kernels' path: one device's numbers, local matmuls, one sum a weight gradient."""

import dataclasses
import functools
import logging
import re
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from pallas_kernels import _dispatch
import sparse24_jax as s24
from sparse24_jax import linear_layer
from sparse24_jax.binding import transform
from sparse24_jax.fingerprint import sample
from sparse24_jax.fp8 import FP8 as FP8_PRECISION
from sparse24_jax.packing import PackedWeight
from sparse24_jax.precision import NATIVE, Rounded
from tests import oracles
from tests.quick import jit

BF16 = jnp.bfloat16
TOKENS, D, HIDDEN = 192, 64, 128
KEY = jax.random.key(3)
FST = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue', implementation='dense')
FP8 = s24.DotPolicy(s24.soft_threshold_projection(), weight_grad='mvue', precision='fp8', implementation='dense')
FST_FP8 = dataclasses.replace(FST, precision='fp8')
EXACT_FP8 = dataclasses.replace(FP8, weight_grad='dense')
DENSE_FP8 = s24.DotPolicy(precision='fp8', implementation='dense')


def mesh(kind: str = 'Auto', shape=(4, 2)) -> Mesh:
  devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
  return Mesh(devices, ('d', 't'), axis_types=(getattr(AxisType, kind),) * 2)


def put(tree, on: Mesh, *spec):
  """From NumPy: what is on a device already is divided by a program."""
  return jax.device_put(jax.tree.map(np.asarray, tree), NamedSharding(on, PartitionSpec(*spec)))


def normal(seed: int, *shape: int):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(BF16))


def exchanged(hlo: str) -> dict[str, list[tuple[int, ...]]]:
  """Shapes of what devices exchange, by the kind of exchange; XLA joins exchanges of one kind."""
  found: dict[str, list[tuple[int, ...]]] = {}
  pattern = r'= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\('
  for results, kind in re.findall(pattern, hlo):
    sides = re.findall(r'\w+\[([\d,]*)\]', results)
    found.setdefault(kind, []).extend(tuple(map(int, filter(None, s.split(',')))) for s in sides)
  return found


def error(found, expected) -> float:
  found, expected = (np.asarray(a, np.float32) for a in (found, expected))
  return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@jax.jit
def _sampled(dz, x):
  return linear_layer.kernel_weight_grad(dz, KEY, Rounded(None, x), backend='dense', column=8)[1]


_packed = jit(functools.partial(linear_layer.pack_weight, FST, dtype=BF16))
_mvue24 = jax.jit(functools.partial(s24.mvue24, axis=-2))


def states_of(policy, weights):
  return jax.jit(lambda weights: jax.tree.map(policy.projection.init, weights))(weights)


class SampleTest(parameterized.TestCase):
  """The sample itself, bit for bit: a weight gradient with the identity for tokens."""

  @parameterized.parameters(
    ('Auto', (('d', 't'), None)), ('Explicit', ('d', 't')), ('Auto', ('d', 't')), ('Auto', ('t', None)),
    ('Auto', (None, 'd')), ('Explicit', (('d', 't'), None)),
  )  # fmt: skip
  @pytest.mark.few
  def test_is_that_of_one_device(self, kind, spec):
    dz, x, on = normal(0, TOKENS, D), jnp.asarray(np.eye(TOKENS, dtype=BF16)), mesh(kind)
    found = np.asarray(_sampled(put(dz, on, *spec), put(x, on, spec[0], None)))
    np.testing.assert_array_equal(found, np.asarray(_sampled(dz, x)))
    expected = _mvue24(np.pad(np.asarray(dz), ((0, 0), (8, 0))), KEY)
    np.testing.assert_array_equal(found, np.asarray(expected)[:, 8:])

  @parameterized.parameters(('Auto', ('d', 't')), ('Explicit', (('d', 't'), None)))
  @pytest.mark.few
  def test_exact_gradients_in_fp8_are_those_of_one_device(self, kind, spec):
    dz, x, on = normal(0, TOKENS, D), normal(1, TOKENS, 2 * D), mesh(kind)

    @jax.jit
    def exact(dz, x):
      rows = FP8_PRECISION.rounded(x, keep=True)
      return linear_layer.kernel_weight_grad(dz, None, rows, backend=None, precision=FP8_PRECISION)

    (rounded, dw), (one_rounded, one_dw) = exact(put(dz, on, *spec), put(x, on, spec[0], None)), exact(dz, x)
    np.testing.assert_array_equal(np.asarray(rounded.values), np.asarray(one_rounded.values))
    # Each device rounds its part of the sum to bfloat16.
    self.assertLess(error(dw, one_dw), 0.01)

  @parameterized.parameters(('Explicit', ('d', 't')), ('Auto', ('d', 't')))
  def test_exact_gradients_in_16_bits(self, kind, spec):
    """On an explicit mesh a matmul of shards and one sum; elsewhere XLA's own."""
    given = [a.astype(jnp.float16) for a in (normal(0, TOKENS, D), normal(1, TOKENS, 2 * D))]  # as CPUs divide bfloat16
    dz, x, on = *given, mesh(kind)

    @jax.jit
    def exact(dz, x):
      return linear_layer.kernel_weight_grad(dz, None, Rounded(None, x), backend='dense')

    same, dw = exact(put(dz, on, *spec), put(x, on, spec[0], None))
    np.testing.assert_array_equal(np.asarray(same.values), np.asarray(dz))
    self.assertLess(error(dw, np.asarray(x, np.float64).T @ np.asarray(dz, np.float64)), 2e-3)

  @parameterized.parameters((EXACT_FP8, 't'), (DENSE_FP8, None))
  @pytest.mark.few
  def test_a_weight_that_is_divided_with_exact_gradients_in_fp8(self, policy, columns):
    x, w, dz = normal(0, TOKENS, D), normal(1, D, HIDDEN), normal(2, TOKENS, HIDDEN)
    state = None if policy.projection is None else policy.projection.init(w)

    @jax.jit
    def gradients(x, w, state, dz):
      z, vjp = jax.vjp(lambda x, w: s24.dot(x, w, state, policy=policy), x, w)
      return z, *vjp(dz)

    on = mesh('Explicit')
    found = gradients(put(x, on, 'd'), put(w, on, None, 't'), put(state, on), put(dz, on, 'd', columns))
    for one, expected in zip(found, gradients(x, w, state, dz), strict=True):
      self.assertLess(error(one, expected), 0.02)

  @pytest.mark.slow
  def test_groups_that_would_be_cut_are_gathered_and_said(self):
    """With 24 tokens on 4 devices each has 6, a group and a half."""
    dz, x, on = normal(0, 24, D), jnp.asarray(np.eye(24, dtype=BF16)), mesh()
    f = jax.jit(lambda dz, x: linear_layer.kernel_weight_grad(dz, KEY, Rounded(None, x), backend='dense')[1])
    _dispatch.log_once.cache_clear()
    with self.assertLogs('pallas_kernels', logging.INFO) as logs:
      found = f(put(dz, on, 'd'), put(x, on, 'd'))
    self.assertRegex(logs.output[0], r"kernel_weight_grad: axes \['d'\] .* 'k', which is gathered: its 6 units")
    np.testing.assert_array_equal(np.asarray(found), np.asarray(f(dz, x)))

  @parameterized.parameters(AxisType.Explicit, AxisType.Auto)
  def test_groups_that_types_cut_are_gathered_and_said(self, other):
    """The same without a kernel, on a mesh whose axes are explicit, or one of them."""
    dz, x = normal(0, 24, D), jnp.asarray(np.eye(24, dtype=BF16))
    on = jax.make_mesh((4, 2), ('d', 't'), axis_types=(AxisType.Explicit, other))
    policy, w = s24.DotPolicy(weight_grad='mvue'), jnp.asarray(np.zeros((24, D), BF16))
    f = jit(lambda w, x, dz: jax.vjp(lambda w: s24.dot(x, w, policy=policy, key=KEY), w)[1](dz)[0])
    expected = f(w, x, dz)
    s24.verify24(expected)
    _dispatch.log_once.cache_clear()
    with self.assertLogs('pallas_kernels', logging.INFO) as logs:
      found = f(put(w, on), put(x, on, 'd'), put(dz, on, 'd'))
    self.assertRegex(logs.output[0], r'shape \(24, 64\) is divided .*parts of groups of 4: axis 0 is gathered')
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


class EntriesTest(parameterized.TestCase):

  @parameterized.parameters(2, 3, 6, 8)
  def test_a_state_may_move_to_another_mesh(self, parts):
    """What tells weights of one step from those of another are the same entries, however a mesh divides a weight."""
    w = normal(0, 192, 96)
    on = mesh('Explicit', (parts, 1))
    found = jax.jit(functools.partial(sample, stacked=()))(put(w, on, 'd'))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(sample(w, ())))


def step(policy, gated, x, weights, states, dy):
  def block(x, weights):
    return s24.ffn(
      x, weights['up'], weights['down'], states, policy=policy, activation='silu' if gated else 'gelu',
      w_gate=weights.get('gate'), b_down=jnp.ones(D, BF16), key=KEY,
    )  # fmt: skip

  y, vjp = jax.vjp(block, x, weights)
  return y, vjp(dy)


class BlockTest(parameterized.TestCase):

  @parameterized.parameters(
    (FST, False, 'Auto'), (FST, True, 'Explicit'), (FP8, False, 'Auto'), (FST_FP8, True, 'Auto')
  )
  @pytest.mark.few
  def test_data_parallel(self, policy, gated, kind):
    weights = {'up': normal(1, D, HIDDEN), 'down': normal(2, HIDDEN, D)}
    if gated:
      weights['gate'] = normal(3, D, HIDDEN)
    states = states_of(policy, weights)
    x, dy, on = normal(4, 8, TOKENS // 8, D), normal(5, 8, TOKENS // 8, D), mesh(kind, (8, 1))
    f = jit(functools.partial(step, policy, gated))
    y, (dx, dw) = f(x, weights, states, dy)
    args = put(x, on, 'd'), put(weights, on), put(states, on), put(dy, on, 'd')
    compiled = f.lower(*args).compile()
    found_y, (found_dx, found_dw) = compiled(*args)
    # Where a device sums in another order the last bit of bfloat16 differs, and FP8 rounds that to two bits.
    for found, expected in ((found_y, y), (found_dx, dx)):
      self.assertLess(error(found, expected), 0.05 if policy.precision == 'fp8' else 1e-4)
      self.assertEqual(found.sharding.shard_shape(found.shape), (1, *found.shape[1:]))
    for role in weights:  # eight summands in bfloat16
      self.assertLess(error(found_dw[role], dw[role]), 0.05 if policy.precision == 'fp8' else 5e-3, role)
    moved = exchanged(compiled.as_text())
    self.assertEqual(set(moved), {'all-reduce'})
    hidden = [(D, HIDDEN)] * (2 if gated else 1)
    self.assertCountEqual([s for s in moved['all-reduce'] if len(s) == 2], [*hidden, (HIDDEN, D)])
    # Each device multiplies its own tokens: nothing has the rows of all.
    self.assertEmpty(re.findall(rf'\[{TOKENS},\d+\]', compiled.as_text() or ''))

  @parameterized.parameters(
    # Along the axis of tokens packed weights are gathered; along another each device has its columns of gate and up.
    (FST, 'Explicit', 'd', (2, 2)), (FST, 'Auto', 't', (2, 2)), (FP8, 'Auto', 'd', (2, 1)),
    (FP8, 'Explicit', 't', (2, 2)), (FST_FP8, 'Auto', 'd', (2, 2)), (FST_FP8, 'Explicit', 't', (2, 2)),
  )
  @pytest.mark.slow
  def test_a_gate_of_divided_weights(self, policy, kind, axis, shape):
    weights = {'up': normal(1, D, HIDDEN), 'gate': normal(3, D, HIDDEN), 'down': normal(2, HIDDEN, D)}
    weights['gate'] = weights['gate'] * 5  # in FP8 of another scale
    states, on = states_of(policy, weights), mesh(kind, shape)
    x, dy = normal(4, TOKENS, D), normal(5, TOKENS, D)
    f = jit(functools.partial(step, policy, True))
    y, (dx, dw) = f(x, weights, states, dy)
    specs = {'up': (None, axis), 'gate': (None, axis), 'down': (axis, None)}
    weights = {role: put(weights[role], on, *specs[role]) for role in specs}
    states = {role: put(states[role], on, *(specs[role] if states[role].ndim else ())) for role in specs}
    divided = weights, states
    args = put(x, on, 'd', None), *divided, put(dy, on, 'd', None)
    compiled = f.lower(*args).compile()
    found_y, (found_dx, found_dw) = compiled(*args)
    for found, wanted in ((found_y, y), (found_dx, dx), *((found_dw[role], dw[role]) for role in specs)):
      self.assertLess(error(found, wanted), 0.05 if policy.precision == 'fp8' else 5e-3)
    moved = exchanged(compiled.as_text())
    automatic = kind == 'Auto' and axis == 't'  # where types say so, gradients of weights are gathered
    self.assertEqual(set(moved), {'all-reduce'} if automatic else {'all-gather', 'all-reduce'})
    activations = TOKENS, TOKENS // shape[0]
    self.assertEmpty([found for found in moved.get('all-gather', ()) if found and found[0] in activations])

  @parameterized.parameters((FST, False), (FP8, True))
  @pytest.mark.slow
  def test_a_bias_that_is_whole_beside_weights_that_are_not(self, policy, gated):
    weights = {'up': normal(1, D, HIDDEN), 'down': normal(2, HIDDEN, D)}
    weights |= {'gate': normal(3, D, HIDDEN)} if gated else {}
    states, on, bias = states_of(policy, weights), mesh('Explicit', (4, 2)), normal(6, HIDDEN)

    def gradient(bias, x, weights, states):
      y = s24.ffn(
        x, weights['up'], weights['down'], states, policy=policy, activation='silu', w_gate=weights.get('gate'),
        b_up=bias, key=KEY,
      )  # fmt: skip
      return y.astype(jnp.float32).sum()

    f, x = jit(jax.grad(gradient)), normal(4, TOKENS, D)
    expected = f(bias, x, weights, states)
    specs = {role: ('t', None) if role == 'down' else (None, 't') for role in weights}
    parts = {role: put(w, on, *specs[role]) for role, w in weights.items()}
    states = {role: put(s, on, *(specs[role] if s.ndim else ())) for role, s in states.items()}
    found = f(put(bias, on), put(x, on, 'd', None), parts, states)
    self.assertLess(error(found, expected), 0.05)

  def test_packed_gate_and_up_stay_divided(self):
    """The hidden units of the block are divided: the forward exchanges nothing, the input gradient a sum."""
    rng, on, d, hidden = np.random.default_rng(0), mesh('Auto', (1, 2)), 64, 128
    weights, dense = [], []
    for _ in range(2):
      w, mask = rng.integers(-2, 3, (d, hidden)), oracles.random_transposable_mask(rng, (d, hidden))
      weights.append(_packed(w.astype(BF16), mask))
      dense.append(w * mask)
    x, dz = (rng.integers(-1, 2, shape).astype(BF16) for shape in ((8, d), (8, 2, hidden)))

    @jit
    def matmuls(forward, input_grad, x, dz):
      options = dict(backend='dense', dtype=BF16, precision=NATIVE)
      gate, up = (PackedWeight(None, *each) for each in zip(forward, input_grad, strict=True))
      return (
        linear_layer.multiply_pair('forward', gate, up, Rounded(x, x), **options),
        linear_layer.multiply_pair('input_grad', gate, up, Rounded(dz, None), **options),
      )

    given = put([w.forward for w in weights], on, 't'), put([w.input_grad for w in weights], on, None, 't')
    args = *given, put(x, on), put(dz, on, None, None, 't')
    compiled = matmuls.lower(*args).compile()
    z, dx = compiled(*args)
    np.testing.assert_array_equal(z, np.stack([x.astype(float) @ w for w in dense], 1))
    np.testing.assert_array_equal(dx, sum(dz[:, i].astype(float) @ w.T for i, w in enumerate(dense)))
    self.assertEqual(z.sharding.shard_shape(z.shape), (8, 2, hidden // 2))
    self.assertEqual(exchanged(compiled.as_text()), {'all-reduce': [(8, d)]})

  @parameterized.product(gated=(False, True), divided=('tokens', 'columns'))
  @pytest.mark.slow
  def test_a_hidden_layer_with_a_constraint_moves_no_more_than_as_two_ops(self, gated, divided):
    on = mesh()
    hidden = {'tokens': PartitionSpec(('d', 't')), 'columns': PartitionSpec('d', None, 't')}[divided]
    rows = PartitionSpec(('d', 't')) if divided == 'tokens' else PartitionSpec('d')
    specs = {'up': (('d', 't'),), 'gate': (('d', 't'),), 'down': (None, ('d', 't'))}
    if divided == 'columns':
      specs = {'up': ('d', 't'), 'gate': ('d', 't'), 'down': ('t', 'd')}

    def f(p, x):
      h = jax.nn.silu(x @ p['gate']) * (x @ p['up']) if gated else jax.nn.gelu(x @ p['up'])
      return jax.lax.with_sharding_constraint(h, NamedSharding(on, hidden)) @ p['down']

    names = ('gate', 'up', 'down') if gated else ('up', 'down')
    shapes = {'up': (64, 512), 'gate': (64, 512), 'down': (512, 64)}
    params = {
      name: jax.ShapeDtypeStruct(shapes[name], BF16, sharding=NamedSharding(on, PartitionSpec(*specs[name])))
      for name in names
    }
    x = jax.ShapeDtypeStruct((16, 32, 64), BF16, sharding=NamedSharding(on, rows))
    bound = s24.bind(s24.Recipe('fst', (s24.Rule('.*', FST),)), f, params, x)
    self.assertCountEqual([use.role for weight in bound.weights for use in weight.uses], names)
    states = {
      name: jax.ShapeDtypeStruct(w.shape, jnp.bool_, sharding=w.sharding) for name, w in params.items()
    }

    placed = jax.tree.map(lambda a: a.sharding, (params, x))

    def step(p, states, x):
      y, vjp = jax.vjp(lambda p, x: s24.sparsify(f, bound)(p, states, KEY, x), p, x)
      return jax.lax.with_sharding_constraint(vjp(y), placed)

    def entries():
      moved = exchanged(jax.jit(step).lower(params, states, x).compile().as_text())
      return {kind: sorted(int(np.prod(shape)) for shape in each if shape) for kind, each in moved.items()}

    fused = entries()
    with mock.patch.object(transform, 'why_apart', lambda *_: 'a test'):
      apart = entries()
    self.assertEqual(fused.keys(), apart.keys())
    for kind, sizes in fused.items():
      self.assertLessEqual(sum(sizes), sum(apart[kind]), kind)
    if not gated:  # as two ops gate and up have a gradient of x each to be summed
      self.assertEqual(fused, apart)

  @pytest.mark.slow
  def test_layers_in_a_scan_recomputed_over_micro_batches(self):
    weights = {'up': normal(1, 2, D, HIDDEN), 'down': normal(2, 2, HIDDEN, D)}
    states, on = states_of(FST, weights), mesh()

    def gradient(weights, states, batches):
      def layer(x, given):
        weights, states, key = given
        return x + s24.ffn(x, weights['up'], weights['down'], states, policy=FST, key=key), None

      def micro(total, given):
        x, key = given

        def loss(weights):
          keys = jax.random.split(key, 2)
          y = jax.lax.scan(jax.checkpoint(layer), x, (weights, states, keys))[0]
          return jnp.sum(jnp.square(y.astype(jnp.float32)))

        return jax.tree.map(jnp.add, total, jax.grad(loss)(weights)), None

      return jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, weights), (batches, jax.random.split(KEY, 2)))[0]

    batches = normal(4, 2, TOKENS, D) / 8
    expected = jit(gradient)(weights, states, batches)
    args = put(weights, on), put(states, on), put(batches, on, None, ('d', 't'))
    compiled = jit(gradient).lower(*args).compile()
    for role, found in compiled(*args).items():
      self.assertLess(error(found, expected[role]), 2e-2, role)
    self.assertEqual(set(exchanged(compiled.as_text())), {'all-reduce'})


class TypesTest(parameterized.TestCase):
  """What JAX says of programs from their types alone."""

  @parameterized.product(policy=('FST', 'FP8'), shape=((2, 2), (4, 1)), layer=('dot', 'ffn'))
  @pytest.mark.few(2)
  def test_the_gradient_of_divided_features_is_divided_as_they_are(self, policy, shape, layer):
    policy, on = globals()[policy], mesh('Explicit', shape)
    weights = {'up': normal(1, D, HIDDEN), 'down': normal(2, HIDDEN, D)}
    states = states_of(policy, weights)

    def loss(x):
      if layer == 'dot':
        y = s24.dot(x, weights['up'], states['up'], policy=policy, key=KEY)
      else:
        y = s24.ffn(x, weights['up'], weights['down'], states, policy=policy, key=KEY)
      return jnp.sum(y.astype(jnp.float32))

    x = put(normal(0, TOKENS, D), on, 'd', 't')
    self.assertEqual(jax.eval_shape(jax.grad(loss), x).sharding, jax.typeof(x).sharding)

  @parameterized.parameters('dot', 'ffn')
  @pytest.mark.slow
  def test_axes_that_are_automatic_in_a_part_of_a_program(self, layer):
    """A remat throws residuals away: JAX then traces the op once more, where the axes are explicit again."""
    weights, x = {'up': normal(1, D, HIDDEN)}, normal(0, TOKENS, D)
    if layer == 'ffn':
      weights['down'] = normal(2, HIDDEN, D)
    states = states_of(FST, weights)

    def run(x, weights, states):
      if layer == 'dot':
        return s24.dot(x, weights['up'], states['up'], policy=FST, key=KEY)
      return s24.ffn(x, weights['up'], weights['down'], states, policy=FST, key=KEY)

    def grad(run):
      run = jax.checkpoint(run)
      return jit(jax.grad(lambda weights, x, states: jnp.sum(jnp.sin(run(x, weights, states).astype(jnp.float32)))))

    on = mesh('Explicit', (4, 1))
    with jax.set_mesh(on):
      automatic = jax.sharding.auto_axes(run, out_sharding=PartitionSpec('d'))
      found = grad(automatic)(put(weights, on), put(x, on, 'd'), put(states, on))
    for role, expected in grad(run)(weights, x, states).items():
      self.assertLess(error(found[role], expected), 5e-3, role)

  @parameterized.parameters((('Explicit', 'Auto'),), (('Auto', 'Explicit'),))
  def test_meshes_with_axes_of_both_kinds_take_plain_matmuls(self, kinds):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    on = Mesh(devices, ('d', 't'), axis_types=tuple(getattr(AxisType, kind) for kind in kinds))
    x, w = put(normal(0, 8, 8), on, 'd'), put(normal(1, 8, 8), on, None, 't')

    def grad(policy):
      def loss(w):
        return jnp.sum(s24.dot(x, w, states_of(policy, w), policy=policy, key=KEY).astype(jnp.float32))

      return jax.eval_shape(jax.grad(loss), w)

    plain = s24.DotPolicy(s24.magnitude(), weight_grad='mvue')
    self.assertEqual(grad(plain).shape, w.shape)  # JAX finds no matmul of which it is open how it is divided
    with self.assertRaisesRegex(ValueError, 'all automatic or all explicit, this one has both'):
      grad(dataclasses.replace(plain, implementation='dense'))


if __name__ == '__main__':
  absltest.main()
