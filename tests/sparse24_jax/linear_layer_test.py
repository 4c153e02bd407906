"""Which matmul of a layer runs where, and what is packed for it."""

import contextlib
import dataclasses
import functools
import logging
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _device, _dispatch, _partitioning, _records, _triton
from pallas_kernels.ffi import cusparselt
from pallas_kernels.pack.api import Packed
from pallas_kernels.sparse_matmul import api
import sparse24_jax as s24
from sparse24_jax import fp8, linear_layer
from sparse24_jax.layer_plan import Backends, LayerPlan
from sparse24_jax.plan import may_pack, plan_layer
from sparse24_jax.precision import Precision
from tests import targets
from tests.sparse24_jax import layers_alike

H100, A100 = targets.target_device('sm_90a'), targets.target_device('sm_80')
BF16, FP16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
# Policy -> the roles that it makes sparse, of (forward, input gradient, weight gradient).
POLICIES = {
  'dense': (s24.DotPolicy(), (0, 0, 0)),
  'dense_mvue': (s24.DotPolicy(weight_grad='mvue'), (0, 0, 1)),
  'ste': (s24.DotPolicy(s24.magnitude()), (1, 0, 0)),
  'one_of_four': (s24.DotPolicy(s24.magnitude(n=1)), (1, 0, 0)),
  'two_of_eight': (s24.DotPolicy(s24.magnitude(m=8), weight_grad='mvue'), (0, 0, 1)),
  'dense_input_grad': (s24.DotPolicy(s24.transposable(), weight_grad='mvue'), (1, 0, 1)),
  'fst': (s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue'), (1, 1, 1)),
  'fst_without_mvue': (s24.DotPolicy(s24.transposable(), input_grad='sparse'), (1, 1, 0)),
  's_ste': (s24.DotPolicy(s24.soft_threshold_projection(), weight_grad='mvue'), (1, 0, 1)),
  's_ste_along_out': (s24.DotPolicy(s24.soft_threshold_projection(axis=-1)), (0, 0, 0)),
  'unstructured': (s24.DotPolicy(s24.dynamic_sparse(0.3)), (0, 0, 0)),
  'dynamic_2_4': (s24.DotPolicy(s24.dynamic_sparse(0.3, structure='2:4')), (1, 0, 0)),
}  # fmt: skip
FST = POLICIES['fst'][0]
# What policies name -> what runs on this machine, which is no GPU.
BACKENDS = {'sparse': 'mosaic_gpu', 'cusparselt': 'cusparselt', 'dense': 'dense'}
S_STE_FP8 = s24.DotPolicy(s24.soft_threshold_projection(), weight_grad='mvue', precision='fp8')
FP8_EXACT = s24.DotPolicy(s24.soft_threshold_projection(), precision='fp8')
FP8_MASKED = s24.DotPolicy(s24.magnitude(), weight_grad='mvue', precision='fp8')
KEY = jax.random.key(0)


def named(policy: s24.DotPolicy, implementation: str | None) -> s24.DotPolicy:
  return s24.DotPolicy(policy.projection, policy.input_grad, policy.weight_grad, policy.precision, implementation)


def backends(*args) -> Backends:
  return plan_layer(*args).backends


def packed_by_a_kernel(policy: s24.DotPolicy) -> bool:
  """Masks by magnitude are packed by XLA, a cost that no record has: their kernels are asked for by name."""
  return policy.projection is not None and policy.projection.name.startswith(('transposable', 'soft_threshold'))


@contextlib.contextmanager
def gpu(
  device=H100, *, served=True, whole=True, triton=None, records=lambda m, n, k, **_: ('mosaic_gpu', 'dense'),
  library=None,
):  # fmt: skip
  """A machine with this GPU, mesh, jax-triton, these records of measurements, and cuSPARSELt, or what it says."""
  with (
    mock.patch.object(cusparselt, 'register', side_effect=library),
    mock.patch.object(_device, 'current', lambda: device),
    mock.patch.object(_partitioning, 'serves', lambda *_: served),
    mock.patch.object(_device, 'arrays_are_whole', lambda: whole),
    mock.patch.object(_triton, 'why_absent', lambda: triton),
    mock.patch.object(api, 'candidates_for', records),
  ):
    yield


class PlanTest(parameterized.TestCase):

  # Each pair of policy and back end; both dtypes for each of these.
  @parameterized.parameters(*(
    (policy, implementation, (BF16, FP16)[(i + j) % 2])
    for i, policy in enumerate(POLICIES) for j, implementation in enumerate(BACKENDS)
  ))
  def test_a_named_back_end_serves_what_the_policy_makes_sparse(self, policy, implementation, dtype):
    (policy, sparse), backend = POLICIES[policy], BACKENDS[implementation]
    found = plan_layer(named(policy, implementation), 32, 64, 128, dtype)
    self.assertEqual(found.backends, Backends(*(backend if s else None for s in sparse)))
    self.assertEqual(found.packs, bool(sparse[0] or sparse[1]))
    expected = backend if all(sparse) else None  # the one back end of all three, or None
    self.assertEqual(found.backends.sole, expected)

  def test_sparse_is_the_kernel_of_the_gpu(self):
    for device, backend in ((H100, 'mosaic_gpu'), (A100, 'mosaic_gpu_sm80')):
      with gpu(device=device):
        self.assertEqual(backends(named(FST, 'sparse'), 32, 64, 128, BF16), Backends(*(backend,) * 3))

  @parameterized.product(policy=list(POLICIES), implementation=(None, 'reference'))
  def test_plain_on_this_machine(self, policy, implementation):
    for dtype in (F32, BF16, FP16):
      self.assertEqual(backends(named(POLICIES[policy][0], implementation), 32, 64, 128, dtype), Backends())

  @parameterized.parameters(*POLICIES)
  def test_an_h100_runs_what_the_policy_makes_sparse(self, policy):
    policy, sparse = POLICIES[policy]
    sparse = (sparse[0] and packed_by_a_kernel(policy), *sparse[1:])
    with gpu():
      self.assertEqual(backends(policy, 32, 64, 128, BF16), Backends(*('mosaic_gpu' if s else None for s in sparse)))
      self.assertEqual(backends(named(policy, 'reference'), 32, 64, 128, BF16), Backends())

  def test_the_records_decide_but_for_a_sampled_gradient(self):
    with gpu(records=lambda m, n, k, **_: ('dense',)):
      self.assertEqual(backends(FST, 32, 64, 128, BF16), Backends(None, None, 'mosaic_gpu'))
    # The input gradient alone, whose sparse operand has 64 rows.
    with gpu(records=lambda m, n, k, **_: ('cusparselt', 'dense') if m == 64 else ('dense',)):
      self.assertEqual(backends(FST, 32, 64, 128, BF16), Backends(None, 'cusparselt', 'mosaic_gpu'))

  def test_a_library_that_a_record_chose_may_be_missing(self):
    absent = NotImplementedError('cuSPARSELt was not found')
    with (
      gpu(records=lambda m, n, k, **_: ('cusparselt', 'dense'), library=absent),
      self.assertLogs('sparse24_jax', logging.INFO) as logs,
    ):
      self.assertEqual(backends(FST, 32, 64, 128, BF16), Backends(None, None, 'mosaic_gpu'))
    self.assertEqual(logs.output, ['INFO:sparse24_jax:passing over cusparselt: cuSPARSELt was not found'])

  def test_on_an_h100_float16_takes_the_kernels_of_bfloat16(self):
    with gpu(records=api.candidates_for):
      for dtype in (BF16, FP16):
        self.assertEqual(backends(FST, 16384, 4096, 16384, dtype), Backends(*('mosaic_gpu',) * 3))

  def test_records_are_asked_for_the_matmuls_that_run(self):
    """m, n, k and layouts of each question are those of a matmul in the step."""
    asked, ran = [], []

    def candidates_for(m, n, k, *, dtype, out_dtype, b_layout, out_layout, device):
      assert device == H100
      asked.append((m, n, k, jnp.dtype(dtype).name, jnp.dtype(out_dtype).name, b_layout, out_layout))
      return 'mosaic_gpu', 'dense'

    with gpu(records=candidates_for):
      backends(FST, 32, 64, 128, BF16)
    plain = api.sparse_matmul

    def sparse_matmul(a, b, *, b_layout, out_layout, **kwargs):
      out = plain(a, b, b_layout=b_layout, out_layout=out_layout, **kwargs)
      n = b.shape[0] if b_layout == 'nk' else b.shape[1]
      ran.append((a.shape[0], n, a.shape[1], b.dtype.name, out.dtype.name, b_layout, out_layout))
      return out

    x, w = jnp.ones((2, 16, 64), BF16), jnp.ones((64, 128), BF16)
    policy, state = named(FST, 'dense'), jnp.zeros((64, 128), bool)
    with (
      mock.patch.object(api, 'sparse_matmul', sparse_matmul),
      mock.patch.object(_device, 'arrays_are_whole', lambda: True),  # what a mesh may divide is traced more than once
      layers_alike.traced_one_by_one(),
    ):
      def loss(x, w):
        return s24.dot(x, w, state, policy=policy, key=KEY).astype(F32).sum()
      jax.eval_shape(jax.grad(loss, argnums=(0, 1)), x, w)
    self.assertLen(asked, 3)
    self.assertCountEqual(asked, ran)

  def test_records_are_asked_for_the_share_of_a_device(self):
    policy, tokens = POLICIES['fst_without_mvue'][0], []

    def records(m, n, k, **_):
      tokens.append(n)
      return ('dense',) if n == 256 else ('mosaic_gpu', 'dense')

    with gpu(whole=False, records=records):
      self.assertEqual(backends(policy, 64, 128, 512, BF16).forward, 'mosaic_gpu')
      self.assertEqual(backends(policy, 2048, 128, 512, BF16).forward, 'mosaic_gpu')
    # Of eight devices; where sparse loses on a share, or nothing like it was measured, all of them.
    self.assertEqual(tokens, [8, 8, 256, 2048, 256, 2048])

  def test_the_dtype_is_asked_for(self):
    dtypes = []
    with gpu(records=lambda m, n, k, *, dtype, **_: dtypes.append(jnp.dtype(dtype).name) or ('dense',)):
      for dtype in (BF16, FP16):
        backends(POLICIES['fst_without_mvue'][0], 32, 64, 128, dtype)
    self.assertEqual(dtypes, ['bfloat16'] * 2 + ['float16'] * 2)  # forward and input gradient

  @parameterized.named_parameters(
    ('another_gpu', dict(device=A100)),
    ('manual_over_some_axes', dict(served=False)),
    ('no_jax_triton', dict(triton='jax-triton cannot be used here')),
  )
  def test_plain_where_kernels_cannot_run(self, circumstance):
    with gpu(**circumstance):
      self.assertEqual(backends(FST, 32, 64, 128, BF16), Backends())

  @parameterized.named_parameters(
    ('float32', FST, 64, 128, F32, 'activations are float32, the kernels take bfloat16 and float16'),
    ('fp8_of_a_mask', FP8_MASKED, 64, 128, BF16, "FP8 packs by .* masks, found 'magnitude 2:4'"),
    ('fp8_float32', S_STE_FP8, 64, 128, F32, 'activations are float32'),
    ('fp8_narrow', S_STE_FP8, 64, 6, BF16, 'multiples of four, found a weight 64 x 6'),
    ('narrow', POLICIES['ste'][0], 64, 6, BF16, 'packing takes multiples of four, found a weight 64 x 6'),
    ('short', s24.DotPolicy(weight_grad='mvue'), 6, 64, BF16, 'multiples of four, found a weight 6 x 64'),
  )
  def test_what_kernels_do_not_serve(self, policy, d_in, d_out, dtype, reason):
    for backend in BACKENDS:
      with self.assertRaisesRegex(ValueError, f'implementation={backend!r} cannot serve this layer: .*{reason}'):
        backends(named(policy, backend), 32, d_in, d_out, dtype)
    self.assertEqual(backends(named(policy, 'reference'), 32, d_in, d_out, dtype), Backends())
    _dispatch.log_once.cache_clear()
    with gpu(), self.assertLogs('sparse24_jax', logging.INFO) as logs:
      for _ in range(3):
        self.assertEqual(backends(policy, 32, d_in, d_out, dtype), Backends())
    self.assertLen(logs.output, 1)
    self.assertRegex(logs.output[0], f'no kernels for a layer {d_in} x {d_out} on 32 tokens: .*{reason}')

  @parameterized.parameters(
    (FP8_EXACT, Backends('mosaic_gpu', None, None)), (s24.DotPolicy(precision='fp8'), Backends())
  )
  def test_fp8_without_samples_is_not_simulated(self, policy, expected):
    with gpu():
      found = plan_layer(policy, 32, 64, 128, BF16)
    self.assertEqual((found.backends, type(found.precision)), (expected, fp8.Fp8))
    self.assertEqual([step.name for step in found.prepared('weight_grad')], ['dz rounded'])

  def test_fp8_runs_on_kernels_or_is_simulated(self):
    for name, backend in BACKENDS.items():
      found = plan_layer(named(S_STE_FP8, name), 32, 64, 128, BF16)
      self.assertEqual((found.backends, type(found.precision)), (Backends(backend, None, backend), fp8.Fp8))
    with gpu(records=lambda m, n, k, **_: ('dense',)):  # of 16 bits; the matmuls in 8 bits were not measured
      found = plan_layer(S_STE_FP8, 32, 64, 128, BF16)
      self.assertEqual((found.backends, type(found.precision)), (Backends('mosaic_gpu', None, 'mosaic_gpu'), fp8.Fp8))
    _dispatch.log_once.cache_clear()
    with self.assertLogs('sparse24_jax', logging.INFO) as logs:
      for _ in range(3):
        found = plan_layer(S_STE_FP8, 32, 64, 128, BF16)
        self.assertEqual((found.backends, found.precision, found.packs), (Backends(), fp8.FP8.without_kernels, False))
    self.assertLen(logs.output, 1)
    self.assertIn("precision='fp8' is simulated", logs.output[0])

  @parameterized.parameters(('dense', None), ('mosaic_gpu', 'mosaic_gpu'), (None, 'mosaic_gpu'))
  def test_an_fp8_forward_is_dense_where_the_kernel_measured_slower(self, choice, forward):
    asked = []

    def lookup(device, op, key):
      asked.append((device, op, key))
      return choice and _records.Choice(choice, None, key, 0.0)

    with gpu(), mock.patch.object(_records, 'lookup', lookup):
      found = plan_layer(S_STE_FP8, 32, 64, 128, BF16)
      self.assertEqual(backends(named(S_STE_FP8, 'cusparselt'), 32, 64, 128, BF16).forward, 'cusparselt')
    self.assertEqual(found.backends, Backends(forward, None, 'mosaic_gpu'))
    self.assertTrue(found.packs)
    (device, op, key), *again = asked
    self.assertEqual(again, [asked[0]] * len(again))  # where a check may take the place of a record
    self.assertEqual((device, op), (targets.target_device('sm_90a').slug, 'sparse_matmul'))
    self.assertEqual(
      key, dict(m=128, n=32, k=64, dtype='float8_e4m3fn', out_dtype='bfloat16', b_layout='nk', out_layout='nm')
    )

  def test_absent_triton_is_said_once(self):
    with gpu(triton='no module'), self.assertLogs('sparse24_jax', logging.INFO) as logs:
      for _ in range(3):
        backends(FST, 32, 64, 128, BF16)
    self.assertLen(logs.output, 1)
    self.assertRegex(logs.output[0], r'sparse24-jax\[cuda\]: no module')

  def test_nothing_is_logged_off_the_gpu(self):
    with self.assertNoLogs('sparse24_jax', logging.INFO):
      backends(FST, 32, 64, 128, F32)

  def test_an_unknown_back_end_is_refused_by_the_policy(self):
    with self.assertRaisesRegex(ValueError, r"implementation='fast': known are \[None, 'sparse', 'cusparselt'"):
      named(FST, 'fast')


class MayPackTest(parameterized.TestCase):

  @parameterized.parameters(*POLICIES)
  def test_whether_some_plan_reads_the_weight_packed(self, policy):
    policy, sparse = POLICIES[policy]
    w, packs = jnp.zeros((64, 128)), bool(sparse[0] or sparse[1])
    self.assertFalse(may_pack(policy, w))  # no such GPU here
    self.assertFalse(may_pack(named(policy, 'reference'), w))
    self.assertEqual(may_pack(named(policy, 'dense'), w), packs)
    packs = packs and packed_by_a_kernel(policy)
    with gpu():
      self.assertEqual(may_pack(policy, w), packs)
      self.assertEqual(may_pack(policy, jnp.zeros((3, 64, 128))), packs)
      self.assertFalse(may_pack(named(policy, 'reference'), w))
      self.assertFalse(may_pack(policy, jnp.zeros((64, 6))))
      self.assertFalse(may_pack(policy, jnp.zeros((6, 64))))
      self.assertFalse(may_pack(FP8_MASKED, w))
      self.assertTrue(may_pack(S_STE_FP8, w))
    for elsewhere in (dict(device=A100), dict(served=False), dict(triton='absent')):
      with gpu(**elsewhere):
        self.assertFalse(may_pack(policy, w))


class PackedWeightTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.w = jax.random.normal(KEY, (64, 128))
    self.mask = jnp.asarray(np.tile(np.eye(4, dtype=bool) | np.eye(4, dtype=bool)[::-1], (16, 32)))
    self.policy = named(FST, 'dense')
    self.plan = LayerPlan(32, 64, 128, 'bfloat16', Backends('dense', 'dense', 'dense'))
    self.pack = jax.jit(functools.partial(linear_layer.pack_weight, self.policy), static_argnames='dtype')

  def test_what_was_handed_over_is_used(self):
    packed = self.pack(self.w, self.mask, dtype=BF16)
    self.assertIs(linear_layer.packed_weight(self.plan, self.policy, self.w, packed), packed)

  @parameterized.parameters('state', 'of_another_dtype')
  def test_packs_what_was_not(self, given):
    w = self.w.astype(FP16)
    state = self.mask if given == 'state' else self.pack(self.w, self.mask, dtype=BF16)
    plan = dataclasses.replace(self.plan, dtype='float16')
    found = jax.jit(lambda w, s: linear_layer.packed_weight(plan, self.policy, w, s))(w, state)
    self.assertEqual(found.dtype, FP16)
    jax.tree.map(np.testing.assert_array_equal, found, self.pack(w, self.mask, dtype=FP16))

  def test_nothing_where_the_plan_packs_nothing(self):
    packed = self.pack(self.w, self.mask, dtype=BF16)
    for served in (Backends(), Backends(weight_grad='dense')):
      for state in (self.mask, packed, None):
        plan = dataclasses.replace(self.plan, backends=served)
        self.assertIsNone(linear_layer.packed_weight(plan, self.policy, self.w, state))

  def test_state(self):
    packed = self.pack(self.w, self.mask, dtype=BF16)
    self.assertIs(linear_layer.projection_state(packed), packed.state)
    np.testing.assert_array_equal(packed.state, self.mask)
    self.assertIs(linear_layer.projection_state(self.mask), self.mask)
    self.assertIsNone(linear_layer.projection_state(None))

  def test_packing_has_no_cotangent(self):
    def total(w):
      return linear_layer.pack_weight(self.policy, w, self.mask, BF16).forward.values.astype(F32).sum()

    self.assertEqual(float(jnp.abs(jax.jit(jax.grad(total))(self.w)).max()), 0)

  def test_a_plain_matmul_takes_a_packed_weight_too(self):
    """A float32 layer on a GPU with kernels gets one, where `sparse_variables` packed for bfloat16."""
    x = jax.random.normal(KEY, (32, 64))
    packed = self.pack(self.w, self.mask, dtype=BF16)
    found, expected = (jax.jit(functools.partial(s24.dot, policy=FST))(x, self.w, s) for s in (packed, self.mask))
    np.testing.assert_array_equal(found, expected)


class Numbering(Precision):
  """Gives, for a sample, the gradient plus the number of each of its columns, times 100."""

  def sample(self, dz, key, scale, origin):
    return Packed(dz + 100 * (origin[2] + jnp.arange(dz.shape[1], dtype=dz.dtype)[None]))

  def weight_grad(self, sample, x, factors, *, backend, dtype):
    return x.T @ sample


class PartsTest(absltest.TestCase):
  """What each of two devices does with its columns of gate and of up, here with an axis of `vmap` for the devices."""

  SHARD = _partitioning.Shard(divided={'m': ('t',)}, units={'m': 2})

  def test_gate_and_up_are_sampled_as_the_columns_of_the_whole(self):
    rng = np.random.default_rng(0)
    dh, z, x = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((8, 16), (8, 2, 16), (8, 4)))
    dz = np.stack([dh * z[:, 1] * (z[:, 0] > 0), dh * np.maximum(z[:, 0], 0)], 1)
    dw = np.einsum('tk,tic->ikc', x, dz + 100 * np.arange(32).reshape(2, 16))

    def one(dh, z):
      scales = None, None
      options = dict(backend='dense', activation='relu', gated=True, precision=Numbering())
      return linear_layer._activation_and_weight_grad(self.SHARD, dh, z, KEY, x, *scales, **options)

    parts = jax.jit(jax.vmap(one, (1, 2), (2, 1, 1), axis_name='t'))(dh.reshape(8, 2, 8), z.reshape(8, 2, 2, 8))
    for expected, found in zip((dz, *dw), parts, strict=True):
      np.testing.assert_array_equal(found.reshape(expected.shape), expected)

  def test_the_scale_of_a_gradient_is_that_of_the_whole(self):
    dh, z = np.ones((4, 2, 8), np.float32), np.ones((4, 2, 2, 8), np.float32)
    z[1, 0, 1, 3] = 5  # up on the second device
    largest = functools.partial(fp8._largest, self.SHARD, activation='relu', gated=True)
    np.testing.assert_array_equal(jax.vmap(largest, (1, 2), axis_name='t')(dh, z), [5, 5])


if __name__ == '__main__':
  absltest.main()
