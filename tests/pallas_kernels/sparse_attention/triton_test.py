"""The Triton attention kernels without a GPU: numerics in the interpreter, machine code for three architectures."""

import functools
import unittest
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest

from pallas_kernels import _device
from pallas_kernels.sparse_attention.api import sparse_attention
from pallas_kernels.sparse_attention.patterns import Pattern
from tests import targets
from tests.pallas_kernels import compiling, triton_interpreter

BF16, F32 = jnp.bfloat16, jnp.float32
ARRAYS = {
  'forward': [BF16] * 4 + [F32, BF16, F32], 'queries': [BF16] * 4 + [F32] * 2 + [BF16] * 2,
  'keys': [BF16] * 4 + [F32] * 2 + [BF16] * 5, 'last_keys': [BF16] * 4 + [F32] * 4,
}  # fmt: skip
ALONE, FAR, WITH_LAST = dict(JOINED=False, LAST=False), dict(JOINED='', WITH_DQ=True), dict(JOINED=False, LAST=True)
KERNELS = (
  ('forward', 'combined', 'near', dict(JOINED=True, LAST=False)), ('keys', 'combined', 'far', FAR),
  ('forward', 'fixed', 'own', WITH_LAST), ('queries', 'fixed', 'own', WITH_LAST),
  ('keys', 'local', 'near', dict(JOINED='all', WITH_DQ=False)),
  ('keys', 'fixed', 'own', dict(JOINED='last', WITH_DQ=False)),
  ('forward', 'strided', 'column', ALONE), ('keys', 'strided', 'column', FAR),
  ('queries', 'combined', 'near', dict(JOINED=True, LAST=False)), ('last_keys', 'fixed', 'last', {}),
)  # fmt: skip
GPU = mock.patch.object(_device, 'current', lambda: _device.Device('gpu', 'gpu', (9, 0), 132))


def step(**options):
  def f(q, k, v, dy):
    y, vjp = jax.vjp(lambda *x: sparse_attention(*x, **options), q, k, v)
    return y, vjp(dy)

  return f


@unittest.skipUnless(triton_interpreter.HAS_TRITON, 'triton is not installed')
@pytest.mark.few
class TritonTest(parameterized.TestCase):
  # Each kernel at the size of most registers, with the least and the most shared memory; the first two everywhere.
  @parameterized.parameters(
    *((kernel, gpu) for kernel in KERNELS for gpu in ((128, 86), (128, 90))),
    *((kernel, gpu) for kernel in KERNELS[:2] for gpu in ((64, 80), (64, 90), (128, 80))),
  )
  def test_compiles_without_spills(self, kernel, gpu):
    from pallas_kernels.sparse_attention import _gradients, _kernels, triton

    (name, kind, part, constants), (size, capability) = kernel, gpu
    pattern, shape = Pattern(kind, 128), (4, 4096, 12, size)
    launch = triton.last_keys_launch(pattern, 0.125, shape, 12) if name == 'last_keys' else (
      triton.Part(part, pattern, 0.125, shape, 12).launch(name, **constants)
    )
    del launch['grid']
    made = compiling.compile_for(
      getattr(_kernels if name == 'forward' else _gradients, f'{name}_kernel'), ARRAYS[name], launch,
      compute_capability=capability, num_warps=launch.pop('num_warps'),
    )  # fmt: skip
    # On 8.6 the forward over two parts keeps 8 bytes on the stack.
    self.assertLessEqual(made.stack_bytes, 8 if (capability, name, part) == (86, 'forward', 'near') else 0)
    self.assertLessEqual(made.shared_bytes, (227 if capability == 90 else 99) * 1024)  # 8.6 and 8.9 have no more
    tensor_cores = made.count('HMMA') + made.count('HGMMA')
    self.assertGreater(tensor_cores, 0)

  @parameterized.parameters(
    ('local', 32, 3), ('strided', 32, 2), ('strided', 4, 3), ('combined', 32, 5), ('combined', 4, 6), ('fixed', 32, 4)
  )
  @pytest.mark.slow
  def test_programs_have_few_launches_and_no_copies(self, kind, window, launches):
    q, kv = (jax.ShapeDtypeStruct((2, 512, heads, 64), BF16) for heads in (4, 2))
    f = jax.jit(step(patterns=Pattern(kind, window), implementation='triton'))
    with GPU, targets.lowering_for(90):
      text = f.trace(q, kv, kv, q).lower(lowering_platforms=('cuda',)).as_text()
    self.assertEqual(text.count('@triton_kernel_call'), launches)
    self.assertEqual(text.count('stablehlo.transpose'), 1)  # of delta, a number a query
    self.assertNotIn('stablehlo.gather', text)
    self.assertNotIn('stablehlo.pad', text)

  @parameterized.parameters(
    (dict(dtype=F32), 'bfloat16 and float16, found float32'), (dict(size=80), r'size \[16, 32, 64, 128\], found 80'),
    (dict(batch=0), 'take 1 to 65535 sequences'),
  )
  def test_refusals(self, changes, message):
    x = jnp.ones((changes.get('batch', 1), 32, 2, changes.get('size', 64)), changes.get('dtype', BF16))
    with GPU, self.assertRaisesRegex(ValueError, message):
      sparse_attention(x, x, x, patterns=Pattern('fixed', 8), implementation='triton')
    with GPU:  # another serves
      served = jax.eval_shape(functools.partial(sparse_attention, patterns=Pattern('fixed', 8)), x, x, x)
      self.assertEqual(served.shape, x.shape)

  @pytest.mark.slow
  def test_each_pattern_is_dispatched_by_itself(self):
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), BF16)
    # The second and the fourth mean the same at this length.
    patterns = (Pattern('combined', 32), Pattern('full'), Pattern('combined', 32), Pattern('fixed', 256))
    with GPU, targets.lowering_for(90), mock.patch('pallas_kernels.sparse_attention.cudnn._refusal', lambda *_: 'no'):
      lowered = jax.jit(step(patterns=patterns)).trace(x, x, x, x).lower(lowering_platforms=('cuda',))
    self.assertEqual(lowered.as_text().count('@triton_kernel_call'), 5 + 3)


@unittest.skipUnless(triton_interpreter.HAS_TRITON, 'triton is not installed')
@pytest.mark.few
class MeshTest(parameterized.TestCase):
  """With dense attention in place of the kernels: what each device gets, and that nothing is exchanged."""

  def setUp(self):
    super().setUp()
    from pallas_kernels.sparse_attention import triton

    def y_of(q, k, v):
      k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
      weights = jax.nn.softmax(jnp.einsum('bqhd,bkhd->bhqk', q, k), axis=-1)
      return jnp.einsum('bhqk,bkhd->bqhd', weights, v)

    def forward(_, q, k, v, **__):
      return y_of(q, k, v), jnp.zeros((q.shape[0], q.shape[2], q.shape[1]))

    def backward(_, q, k, v, y, log, dy, **__):
      del y, log
      return jax.vjp(y_of, q, k, v)[1](dy)

    for name, f in (('_forward', forward), ('_backward', backward)):
      patch = mock.patch.object(triton, name, f)
      patch.start()
      self.addCleanup(patch.stop)
    self.attend = functools.partial(triton.attend, Pattern('fixed', 4), scale=0.3)
    q, kv = (2, 12, 4, 16), (2, 12, 2, 16)
    keys = jax.random.split(jax.random.key(0), 4)
    self.args = [jax.random.normal(key, s) for key, s in zip(keys, (q, kv, kv, q), strict=True)]
    self.expected = self.step(*self.args)

  def step(self, q, k, v, dy):
    y, vjp = jax.vjp(self.attend, q, k, v)
    return y, *vjp(dy)

  def check_equal(self, found):
    for a, b in zip(found, self.expected, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5)

  @parameterized.parameters('Auto', 'Explicit')
  def test_batch_and_heads_are_divided(self, kind):
    mesh = jax.make_mesh((2, 2), ('d', 't'), axis_types=(getattr(AxisType, kind),) * 2)
    sharding = NamedSharding(mesh, PartitionSpec('d', None, 't', None))
    args = [jax.device_put(x, sharding) for x in self.args]
    compiled = jax.jit(self.step).lower(*args).compile()
    self.assertNotRegex(compiled.as_text(), 'all-gather|all-reduce|all-to-all|collective-permute')
    found = compiled(*args)
    self.check_equal(found)
    for x in found:
      self.assertTrue(x.sharding.is_equivalent_to(sharding, 4))

  @pytest.mark.slow
  def test_inside_shard_map_with_undivided_keys(self):
    """Heads over the mesh that share their keys and values, whose gradients are sums over devices."""
    mesh = jax.make_mesh((2,), ('t',), axis_types=(AxisType.Auto,))
    by_head, whole = PartitionSpec(None, None, 't', None), PartitionSpec()
    one = [x[:, :, : 2 if x.shape[2] == 4 else 1] for x in self.args]
    expected = self.step(*one)
    specs = dict(in_specs=(by_head, whole, whole, by_head), out_specs=(by_head, whole, whole, whole))

    def step(q, k, v, dy):
      y, dq, dk, dv = self.step(q, k, v, dy)
      return y, dk, dv, jax.lax.psum(jnp.sum(dq), 't')

    found = jax.jit(jax.shard_map(step, mesh=mesh, **specs))(*one)
    for a, b in zip(found[:3], (expected[0], *expected[2:]), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5)


class NoGpuTest(absltest.TestCase):
  def test_refusal_names_the_gpu(self):
    x = jnp.ones((1, 32, 2, 64), BF16)
    with self.assertRaisesRegex(ValueError, 'compute capability 8.0|cannot be imported'):
      sparse_attention(x, x, x, patterns=Pattern('local', 8), implementation='triton')


if __name__ == '__main__':
  absltest.main()
