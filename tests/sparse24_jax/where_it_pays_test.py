"""The advice on layers, against what `implementation=None` does on that GPU and against sums by hand."""

import contextlib
import dataclasses
import re
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from pallas_kernels import _records, costs
from pallas_kernels.ffi import cusparselt
from pallas_kernels.sparse_matmul import api
import sparse24_jax as s24
from sparse24_jax.layer_plan import Backends
from sparse24_jax.plan import plan_layer
from sparse24_jax.precision import NATIVE
from sparse24_jax.where_it_pays import RoleGain, table
from tests.sparse24_jax.gpus import gpu, H100
from tests.standard import standard

RECIPES = {
  'fst': s24.recipes.transposable_srste('.*', masked_decay=0.0),
  's_ste': s24.recipes.s_ste('.*'),
  's_ste_fp8': s24.recipes.s_ste('.*', fp8=True),
  'sr_ste': s24.recipes.sr_ste('.*', masked_decay=0.0),
  'dense_weight_grad': s24.Recipe(
    'r', (s24.Rule('.*', s24.DotPolicy(s24.transposable(), input_grad='sparse')),)
  ),
  'not_packed': s24.Recipe('r', (s24.Rule('.*', s24.DotPolicy(s24.magnitude(m=8), weight_grad='mvue')),)),
}  # fmt: skip
FP8_POLICY = RECIPES['s_ste_fp8'].rules[0].policy
SHAPES = ((768, 3072), (3072, 768), (1600, 6400), (4096, 16384), (3072, 8192), (96, 512))
ROLES = ('forward', 'input_grad', 'weight_grad')


def struct(*shape: int, dtype='float32'):
  return {'mlp': {'up': {'kernel': jax.ShapeDtypeStruct(shape, dtype)}}}


@contextlib.contextmanager
def records(*, packing=lambda op, size: 0.0, **times):
  """Times of each matmul, by role, and of packing passes."""

  def matmul(device, op, key):
    assert (device, op) == ('gpu', 'sparse_matmul')
    (role,) = (r for r in ROLES if key == expected_key(r))
    return dict(times.get(role, {}))

  def candidates_for(device, **key):
    times_of = matmul(device.slug, 'sparse_matmul', key)
    fastest = min(times_of, key=times_of.__getitem__, default='dense')
    return ('dense',) if fastest == 'dense' else (fastest, 'dense')

  with (
    mock.patch.object(_records, 'expected_ms', matmul),
    mock.patch.object(api, 'candidates_for', candidates_for),
    mock.patch.object(costs, 'expected_ms', lambda device, op, size: packing(op, size)),
  ):
    yield


def expected_key(role: str):
  """The key of x [32, 64] W [64, 128] in bfloat16."""
  m, n, k, b_layout = {
    'forward': (128, 32, 64, 'nk'), 'input_grad': (64, 32, 128, 'nk'), 'weight_grad': (128, 64, 32, 'kn'),
  }[role]  # fmt: skip
  return dict(m=m, n=n, k=k, dtype='bfloat16', out_dtype='bfloat16', b_layout=b_layout, out_layout='nm')


def gain_of(recipe, *, lead=(), dtype='float32'):
  params = struct(*lead, 64, 128, dtype=dtype)
  (layer,) = s24.where_it_pays(params, standard(recipe, params), tokens=32, device='gpu')
  return layer


def of_implementation(recipe, implementation):
  (rule,) = recipe.rules
  policy = dataclasses.replace(rule.policy, implementation=implementation)
  return dataclasses.replace(recipe, rules=(dataclasses.replace(rule, policy=policy),))


SPARSE_WINS = dict(
  forward=dict(dense=4.0, mosaic_gpu=3.0, cusparselt=2.5),
  input_grad=dict(dense=5.0, mosaic_gpu=3.5),
  weight_grad=dict(dense=6.0, mosaic_gpu=4.5),
)


class ChoiceTest(parameterized.TestCase):

  def test_sizes_are_along_the_axes_that_a_model_reads(self):
    params, x = {'w': jax.ShapeDtypeStruct((4, 3072, 768), 'bfloat16')}, jax.ShapeDtypeStruct((64, 768), 'bfloat16')
    recipe = s24.recipes.transposable_srste('w', masked_decay=0.0)
    bound = s24.bind(recipe, lambda p, x: jnp.einsum('td,efd->tef', x, p['w']), params, x)
    (layer,) = s24.where_it_pays(params, bound, tokens=4096, device=H100.slug)
    self.assertEqual((layer.shape, layer.layers), ((768, 4 * 3072), 1))
    params = struct(768, 4 * 3072, dtype='bfloat16')
    (by_itself,) = s24.where_it_pays(params, RECIPES['fst'], tokens=4096, device=H100.slug)
    self.assertEqual(layer.roles, by_itself.roles)

  @parameterized.parameters('kernel', 'up/weight', 'up/bias')
  def test_axes_that_nothing_tells_are_refused_by_name(self, name):
    """Stacked, of another library, and with a bias as long as the first axis; they were taken for [..., in, out]."""
    w = jax.ShapeDtypeStruct((2, 8, 4) if name == 'kernel' else (8, 4), 'float32')
    params = {'up/kernel': w, name: jax.ShapeDtypeStruct((8,), 'float32')} if 'bias' in name else {name: w}
    (path,) = (path for path, leaf in params.items() if leaf is w)
    for price in (s24.where_it_pays, s24.only_where_it_pays):
      with self.assertRaisesRegex(ValueError, rf'^{path} \(.*\): where_it_pays does not see along which .*\.bind'):
        price(params, RECIPES['fst'], tokens=32, device='gpu')

  # Each pair of recipe and number of tokens, and of recipe and dtype.
  @parameterized.parameters(*(
    (recipe, tokens, ('bfloat16', 'float16', 'float32')[(i + j) % 3])
    for i, recipe in enumerate(RECIPES) for j, tokens in enumerate((512, 2048, 16384))
  ))
  def test_is_that_of_the_plan(self, recipe, tokens, dtype):
    recipe = RECIPES[recipe]
    policy = recipe.rules[0].policy
    for shape in SHAPES:
      with gpu():
        plan = plan_layer(policy, tokens, *shape, jnp.dtype(dtype))
        (layer,) = s24.where_it_pays(struct(*shape), recipe, tokens=tokens, dtype=dtype)
      for role in layer.roles:
        dense = 'dense' if policy.precision == 'default' else 'dense_fp8' if plan.packs else 'simulated'
        self.assertEqual(role.chosen, getattr(plan.backends, role.role) or dense, f'{shape} {role}')

  def test_a_named_implementation_is_priced_as_it_runs(self):
    """Masks by magnitude are packed by no kernel, so that by itself the forward stays with XLA."""
    expected = {
      None: (['dense'] * 3, "no kernel packs these masks; recipes with kernels are transposable_srste and s_ste"),
      'sparse': (['mosaic_gpu', 'dense', 'dense'], None), 'reference': (['dense'] * 3, "implementation='reference'"),
    }  # fmt: skip
    with records(**SPARSE_WINS):
      for implementation, (chosen, plain) in expected.items():
        layer = gain_of(of_implementation(RECIPES['sr_ste'], implementation))
        self.assertEqual(([role.chosen for role in layer.roles], layer.plain), (chosen, plain))
      exact = gain_of(of_implementation(RECIPES['dense_weight_grad'], 'reference'))
      sampled = gain_of(of_implementation(RECIPES['fst'], 'reference'))
    self.assertEqual((exact.gain, sampled.gain), (1.0, None))  # what XLA takes for a sample was not measured

  @parameterized.parameters(
    ('dense', 'bfloat16', "implementation='dense' decompresses what it packed"),
    ('sparse', 'float32', "implementation='sparse' cannot serve this layer: activations are float32"),
  )
  def test_a_named_implementation_that_has_no_price_is_refused_by_path(self, implementation, dtype, message):
    recipe = of_implementation(RECIPES['fst'], implementation)
    with self.assertRaisesRegex(ValueError, f'^mlp/up/kernel: {message}'):
      s24.where_it_pays(struct(64, 128), recipe, tokens=32, dtype=dtype, device=H100.slug)

  @parameterized.parameters(
    (None, None, 'cusparselt', None), (NotImplementedError('absent'), None, 'mosaic_gpu', None),
    (None, 'absent', 'dense', f'{H100.slug} has no kernels that can run here'),
  )
  def test_on_this_gpu_it_is_what_is_installed(self, library, triton, chosen, plain):
    wins = mock.patch.object(api, 'candidates_for', lambda **_: ('cusparselt', 'dense'))
    with gpu(triton=triton), wins, mock.patch.object(cusparselt, 'register', side_effect=library):
      (layer,) = s24.where_it_pays(struct(4096, 16384), RECIPES['fst'], tokens=16384)
      block = s24.block_gain(4096, 16384, RECIPES['fst'], tokens=16384)
      plan = plan_layer(RECIPES['fst'].rules[0].policy, 16384, 4096, 16384, jnp.bfloat16)
      (named,) = s24.where_it_pays(struct(4096, 16384), RECIPES['fst'], tokens=16384, device=H100.slug)
    self.assertEqual((layer.roles[2].chosen, layer.plain), (chosen, plain))
    self.assertEqual(plan.backends.weight_grad or 'dense', chosen)
    by = {part.name: part.by for part in block.chosen}
    self.assertIn(chosen, (by.get('dW of up'), by.get('weight_grad of up')))
    self.assertEqual(named.roles[2].chosen, 'cusparselt')  # of a GPU that is named all is there

  def test_tokens_are_those_of_one_device_of_the_mesh(self):
    """Which of both sizes a device gets is not known where it runs: the record of either may choose a kernel."""
    asked = []
    choose = lambda n, k, **_: asked.append((n, k)) or ('dense',)  # noqa: E731
    with gpu(whole=False), mock.patch.object(api, 'candidates_for', lambda *, m, n, k, **_: choose(n, k)):
      s24.where_it_pays(struct(64, 128), RECIPES['dense_weight_grad'], tokens=32)
      priced = list(asked)
      asked.clear()
      plan_layer(RECIPES['dense_weight_grad'].rules[0].policy, 32 * 8, 64, 128, jnp.bfloat16)
    self.assertEqual(priced, [(32, 64), (256, 64), (32, 128), (256, 128)])
    self.assertEqual(asked, priced)

  def test_sides_that_do_not_pack_are_dense(self):
    with gpu():
      (layer,) = s24.where_it_pays(struct(8, 6), RECIPES['s_ste'], tokens=32)
    self.assertEqual([role.chosen for role in layer.roles], ['dense'] * 3)

  @parameterized.parameters(
    (dict(dense=1.0, mosaic_gpu=2.0, cusparselt=1.5), 'mosaic_gpu', 2.0),  # drawn sparse though dense is faster
    (dict(dense=3.0, mosaic_gpu=2.0, cusparselt=1.5), 'cusparselt', 1.5),
    (dict(dense=3.0), 'mosaic_gpu', None), ({}, 'mosaic_gpu', None),
  )
  def test_of_a_sampled_gradient(self, times, chosen, ms):
    """A record that prefers the dense matmul leaves it to the kernel that takes every operand."""
    with records(weight_grad=times):
      role = gain_of(RECIPES['s_ste']).roles[2]
    self.assertEqual((role.chosen, role.sparse_ms, role.dense_ms), (chosen, ms, times.get('dense')))
    order = ('dense',) if min(times, key=times.get, default='dense') == 'dense' else ('cusparselt', 'dense')
    records_say = mock.patch.object(api, 'candidates_for', lambda *a, **k: order)
    with gpu(), records_say, mock.patch.object(cusparselt, 'register'):
      found = plan_layer(RECIPES['s_ste'].rules[0].policy, 32, 64, 128, jnp.bfloat16)
      self.assertEqual(found.backends.weight_grad, chosen)

  def test_fp8_with_exact_weight_gradients(self):
    exact = s24.Recipe('r', (s24.Rule('.*', dataclasses.replace(FP8_POLICY, weight_grad='dense')),))
    sampled = s24.Recipe('r', (s24.Rule('.*', FP8_POLICY),))
    (layer,), (other,) = (
      s24.where_it_pays(struct(4096, 16384), r, tokens=16384, dtype='bfloat16', device=H100.slug)
      for r in (exact, sampled)
    )
    self.assertEqual([role.chosen for role in layer.roles], ['mosaic_gpu', 'dense_fp8', 'dense_fp8'])
    self.assertEqual(layer.roles[:2], other.roles[:2])
    self.assertIsNotNone(layer.expected_ms)
    self.assertGreater(layer.expected_ms, other.expected_ms)

  @parameterized.parameters(
    (4096, 16386, 'bfloat16', FP8_POLICY, 'packing takes multiples of four, found a weight 4096 x 16386'),
    (4096, 16384, 'float32', FP8_POLICY, 'activations are float32, the kernels take bfloat16 and float16'),
    (4096, 16384, 'bfloat16', s24.DotPolicy(s24.transposable(), weight_grad='mvue', precision='fp8'),
     "under transposable masks FP8 has no dense weight to read: input_grad must be 'sparse', found 'dense'"),
  )  # fmt: skip
  def test_fp8_that_no_kernel_serves_is_no_dense_layer(self, d_in, d_out, dtype, policy, reason):
    recipe = s24.Recipe('r', (s24.Rule('.*', policy),))
    (layer,) = s24.where_it_pays(struct(d_in, d_out), recipe, tokens=16384, dtype=dtype, device=H100.slug)
    with gpu():
      self.assertEqual(plan_layer(policy, 16384, d_in, d_out, jnp.dtype(dtype)).backends, Backends())
    self.assertEqual([role.chosen for role in layer.roles], ['simulated'] * 3)
    self.assertEqual((layer.expected_ms, layer.gain, layer.simulated), (None, None, reason))
    self.assertEqual(layer.dense_ms is None, dtype == 'float32')
    *_, advice = lines = table([layer]).split('\n')
    self.assertRegex(lines[2], r'^  forward +simulated +- ')
    self.assertEqual(advice, f'mlp/up/kernel: FP8 would be simulated: {reason}')

  def test_tokens_must_be_positive(self):
    with self.assertRaisesRegex(ValueError, 'tokens=0 must be positive'):
      s24.where_it_pays(struct(64, 128), RECIPES['fst'], tokens=0, device='gpu')
    with self.assertRaisesRegex(ValueError, 'decides for no weight'):
      s24.where_it_pays(struct(64, 128), s24.recipes.ste('other'), tokens=4, device='gpu')


class Float16Test(absltest.TestCase):

  def test_what_bfloat16_gains(self):
    gains = [
      s24.where_it_pays(struct(4096, 16384), RECIPES['fst'], tokens=16384, dtype=dtype, device=H100.slug)[0].gain
      for dtype in ('bfloat16', 'float16')
    ]
    self.assertGreater(gains[0], 1.3)
    self.assertEqual(*gains)


class SumTest(parameterized.TestCase):

  def test_times_of_a_layer(self):
    operand = 64 * 128 * 9 // 8  # half of the values in two bytes, two bits for each
    sample = 32 * 128 * 2 + 32 * 128 * 9 // 8
    codes = 64 * 128 + 2 * 2 * (16 * 32)  # a mask read; two bytes a block of 4x4 written and read
    passes = {('masked_pack', 64 * 128 * 4 + codes + 2 * operand): 0.25, ('mvue_pack_axis-2', sample): 0.125}
    with records(packing=lambda op, size: passes[op, size], **SPARSE_WINS):
      layer = gain_of(RECIPES['fst'])
    self.assertEqual(layer.roles, (
      RoleGain('forward', 4.0, 2.5, 0.0, 'cusparselt'),
      RoleGain('input_grad', 5.0, 3.5, 0.0, 'mosaic_gpu'),
      RoleGain('weight_grad', 6.0, 4.5, 0.125, 'mosaic_gpu'),
    ))  # fmt: skip
    self.assertEqual((layer.dense_ms, layer.packing_ms), (15.0, 0.25))
    self.assertEqual(layer.expected_ms, 2.5 + 3.5 + 4.5 + 0.125 + 0.25)
    self.assertEqual(layer.gain, 15.0 / layer.expected_ms)
    self.assertEqual((layer.path, layer.shape, layer.layers), ('mlp/up/kernel', (64, 128), 1))

  def test_a_matmul_that_loses_costs_its_dense_time_and_no_packing(self):
    slow = {role: dict(dense=1.0, mosaic_gpu=2.0) for role in ROLES}
    with records(packing=lambda op, size: 1000.0, **slow):
      layer = gain_of(RECIPES['dense_weight_grad'])
    self.assertEqual([role.expected_ms for role in layer.roles], [1.0, 1.0, 1.0])
    self.assertEqual((layer.gain, layer.packing_ms, layer.packed_bytes), (1.0, 0.0, 0))

  @parameterized.parameters(*ROLES)
  def test_what_was_not_measured_leaves_no_sum(self, missing):
    with records(**{role: times for role, times in SPARSE_WINS.items() if role != missing}):
      layer = gain_of(RECIPES['fst'])
    self.assertIsNone(layer.gain)
    self.assertIsNone(layer.dense_ms)
    self.assertIsNone(layer.expected_ms)
    self.assertEqual([role.dense_ms is None for role in layer.roles], [role == missing for role in ROLES])

  @parameterized.parameters(
    ('fst', 'masked_pack'), ('fst', 'mvue_pack_axis-2'), ('s_ste', 'soft_threshold_pack_axis-2'),
  )  # fmt: skip
  def test_a_pass_that_was_not_measured_leaves_no_gain(self, recipe, missing):
    with records(packing=lambda op, size: None if op == missing else 0.25, **SPARSE_WINS):
      layer = gain_of(RECIPES[recipe])
    self.assertEqual((layer.dense_ms, layer.expected_ms, layer.gain), (15.0, None, None))
    self.assertRegex(table([layer]), r'all of it +- +15\.000 +-$')

  def test_a_gpu_without_records(self):
    layer, = s24.where_it_pays(struct(64, 128), RECIPES['fst'], tokens=32, device='no_such_gpu')
    self.assertEqual([role.chosen for role in layer.roles], ['dense', 'dense', 'mosaic_gpu'])
    self.assertIsNone(layer.gain)

  @parameterized.parameters(('fst', ()), ('s_ste', (12,)), ('s_ste', (2, 3)), ('fst', (4,)))
  def test_bytes_are_those_of_what_is_packed_and_kept(self, recipe, lead):
    """Scanned layers count all their bytes; times are those of one."""
    projection = RECIPES[recipe].rules[0].policy.projection
    assert projection is not None
    with records(**SPARSE_WINS):
      layer, one = (gain_of(RECIPES[recipe], lead=lead) for lead in (lead, ()))
    w = jax.ShapeDtypeStruct((*lead, 64, 128), jnp.float32)
    state = jax.eval_shape(projection.init, w)
    packed = jax.eval_shape(lambda w, s: NATIVE.pack(projection.form, w, s, jnp.bfloat16), w, state)
    sizes = [sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(t)) for t in ((packed.forward, packed.input_grad),
                                                                                   state)]  # fmt: skip
    self.assertEqual([layer.packed_bytes, layer.state_bytes], sizes)
    self.assertEqual((layer.expected_ms, layer.roles), (one.expected_ms, one.roles))
    self.assertEqual(layer.layers * one.packed_bytes, layer.packed_bytes)


class TableTest(absltest.TestCase):

  def test_names_what_is_known(self):
    with records(**SPARSE_WINS):
      head, title, *lines = table([gain_of(RECIPES['fst'], lead=(12,))]).split('\n')
    self.assertEqual(re.split(' {2,}', head.strip()), ['runs on', 'sparse ms', 'dense ms', 'times faster'])
    self.assertEqual(title, 'mlp/up/kernel, 64 x 128, 12 of them, each')
    forward, _, weight_grad, _, everything = (re.split(' {2,}', line.strip()) for line in lines)
    self.assertEqual(forward, ['forward', 'cusparselt', '2.500', '4.000', '1.60'])
    self.assertEqual(weight_grad, ['weight gradient', 'mosaic_gpu', '4.500', '6.000', '1.33'])
    self.assertEqual(everything, ['all of it', '10.500', '15.000', '1.43'])

  def test_says_dashes_where_nothing_is(self):
    with records():
      *lines, why = table([gain_of(RECIPES['fst'])]).split('\n')
    self.assertRegex(lines[4], r'^  weight gradient  mosaic_gpu +- +- +-$')
    self.assertRegex(why, '^mlp/up/kernel: nothing .* was measured, so chosen blindly: forward dense, .* mosaic_gpu$')

  def test_gives_no_advice_on_a_layer_that_loses_by_itself(self):
    """In a fused block it may gain all the same."""
    with records(packing=lambda op, size: 100.0, **SPARSE_WINS):
      self.assertLen(table([gain_of(RECIPES['fst'])]).split('\n'), 7)


if __name__ == '__main__':
  absltest.main()
