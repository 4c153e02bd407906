"""A generation is one value: which kernels it has, and what 'sparse' means there. Orders of positions do not mix."""

import contextlib
import dataclasses
import io
import pathlib
import sys
import tempfile
import types
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from pallas_kernels import _checks, _device, _dispatch, _records, _tuning, arch, operand
from pallas_kernels.pack.api import soft_threshold_pack
from pallas_kernels.sparse_matmul import _settings, api, check, mosaic_gpu, mosaic_gpu_sm80, reference
from pallas_kernels.sparse_matmul.call import Call, Vectors
from pallas_kernels.vnm import api as vnm_api
from pallas_kernels.vnm import arg_specs, tune
from pallas_kernels.vnm import mosaic_gpu as vnm_mosaic_gpu
from pallas_kernels.vnm import reference as vnm_reference
from pallas_kernels.vnm.format import compress, to_vnm_operand
from pallas_kernels.vnm.reference import vnm_mask
import sparse24_jax as s24
from sparse24_jax import plan
from sparse24_jax.availability import Target
from tests import targets
from tests.pallas_kernels import triton_interpreter
from tests.sparse24_jax.gpus import gpu

_BF16 = jnp.dtype('bfloat16')


class ArchTest(parameterized.TestCase):
  @parameterized.parameters(
    ((8, 0), 'mosaic_gpu_sm80', None, False), ((8, 6), 'mosaic_gpu_sm80', None, False),
    ((8, 7), 'mosaic_gpu_sm80', None, False), ((8, 9), 'mosaic_gpu_sm80', None, True),
    ((9, 0), 'mosaic_gpu', 'mosaic_gpu', True), ((10, 0), None, None, True), ((12, 0), None, None, True),
    ((7, 5), None, None, False), ((0, 0), None, None, False),
  )  # fmt: skip
  def test_kernels(self, capability, of_weights, of_blocks, float8):
    found = arch.of_capability(capability)
    self.assertEqual(found.capability, capability)
    names = [kernel and kernel.backend for kernel in map(found.kernel, ('sparse_matmul', 'vnm_matmul'))]
    self.assertEqual(names, [of_weights, of_blocks])
    self.assertEqual(1 in found.itemsizes, float8)
    narrow = found.kernel('sparse_matmul', 1)
    self.assertEqual(narrow and narrow.backend, 'mosaic_gpu' if capability == (9, 0) else None)

  @parameterized.parameters(*arch.ARCHS)
  def test_every_kernel_is_a_back_end(self, generation):
    backends = {'sparse_matmul': api.BACKENDS, 'vnm_matmul': vnm_api.MATMULS}
    for kernel in generation.kernels:
      self.assertIn(kernel.backend, backends[kernel.op])

  @parameterized.parameters(('sm_80', 'mosaic_gpu_sm80'), ('sm_89', 'mosaic_gpu_sm80'), ('sm_90a', 'mosaic_gpu'))
  def test_sparse_is_the_kernel_of_the_gpu(self, target, kernel):
    with mock.patch.object(_device, 'current', lambda: targets.target_device(target)):
      self.assertEqual(_dispatch.backend_of('sparse_matmul', 'sparse', api.BACKENDS), kernel)
      self.assertEqual(_dispatch.backend_of('transpose_pack', 'sparse', vnm_api.TRANSPOSERS), 'triton')

  def test_where_there_is_none_it_says_what_there_is(self):
    a = _operand()
    with self.assertRaisesRegex(ValueError, r"'sparse' has no 16-bit kernel for cpu; accepted there are \['cusp"):
      api.sparse_matmul(a, jnp.ones((8, 64), _BF16), implementation='sparse')
    with self.assertRaisesRegex(ValueError, r"'sparse' has no 16-bit kernel for cpu; accepted there are \['dense'"):
      vnm_api.vnm_matmul(_blocks(), jnp.ones((64, 8), _BF16), implementation='sparse')


def _operand():
  return soft_threshold_pack(jnp.ones((64, 64), _BF16), jnp.float32(1), axis=-1).operand


def _blocks():
  x = jnp.arange(128.0 * 64).reshape(128, 64).astype(_BF16)
  return to_vnm_operand(compress(x, vnm_mask(x, v=64, m=8), v=64, m=8))


class LayoutTest(parameterized.TestCase):
  """An operand that another generation's kernel packed: an error in every reader, where there were wrong numbers."""

  def setUp(self):
    super().setUp()
    self.a = dataclasses.replace(_operand(), layout='tcgen05')
    self.blocks = dataclasses.replace(_blocks(), compact=dataclasses.replace(_blocks().compact, layout='tcgen05'))

  def refused(self, f, *args, **kwargs):
    with self.assertRaisesRegex(ValueError, "packed in the order 'tcgen05', and 'sparse wgmma' is read here"):
      f(*args, **kwargs)

  def test_of_two_of_four(self):
    b = jnp.ones((8, 64), _BF16)
    call = Call(_BF16, 'nk', 'nm')
    for implementation in (None, 'dense', 'reference'):
      self.refused(api.sparse_matmul, self.a, b, implementation=implementation)
    for kernel in (mosaic_gpu, mosaic_gpu_sm80):
      self.refused(kernel.sparse_matmul, self.a, b, Vectors(), call, device=targets.target_device('sm_90a'))
    self.refused(operand.from_operand, self.a)
    self.refused(vnm_api.expand, self.a)
    with self.assertRaisesRegex(ValueError, "second is packed in the order 'tcgen05'"):
      operand.concatenate(_operand(), self.a, axis=-2)

  def test_of_blocks(self):
    b = jnp.ones((64, 8), _BF16)
    for implementation in (None, 'dense', 'reference'):
      self.refused(vnm_api.vnm_matmul, self.blocks, b, implementation=implementation)
    gpu = targets.target_device('sm_90a')
    self.refused(vnm_mosaic_gpu.vnm_matmul, self.blocks, b, out_dtype=_BF16, out_layout='mn', device=gpu)
    x, columns = jnp.ones((128, 64), _BF16), jnp.zeros(3, jnp.int32)
    for implementation in ('reference', 'triton') if triton_interpreter.HAS_TRITON else ('reference',):
      named = dict(implementation=implementation)
      for f in (vnm_api.transpose_pack, vnm_api.transpose_pack_24, vnm_api.expand):
        self.refused(f, self.blocks, **named)
      self.refused(vnm_api.take_columns, self.blocks, columns, **named)
      self.refused(
        vnm_api.vnm_pack, self.blocks.compact.values, v=64, m=8, gradient=x, pattern=self.blocks, **named
      )


B200 = _device.Device('NVIDIA B200', 'gpu', (10, 0), 148)


def _only_here(f):
  """A stand-in of a kernel that runs on the next generation alone, and the settings with which it was called."""
  called = []

  def kernel(*args, config=None, device=None, **kwargs):
    if (device or _device.current()).arch.name != 'sm_100a':
      raise NotImplementedError('needs tcgen05')
    called.append(config)
    return f(*args, **kwargs)

  return kernel, called


class NextGenerationTest(parameterized.TestCase):
  """What `README.md` lists is enough: an `Arch`, a module with the op and its settings, and its line in `BACKENDS`."""

  def setUp(self):
    super().setUp()
    kernels = arch.Kernel(api.OP, 'tcgen05', by_default=True), arch.Kernel(vnm_api.OP, 'tcgen05')
    generation = arch.Arch('sm_100a', (10, 0), kernels)
    self.enter_context(mock.patch.object(arch, 'ARCHS', (*arch.ARCHS, generation)))

  def _add(self, package, backends, **names):
    module = types.ModuleType(f'pallas_kernels.{package}.tcgen05')
    module.Config = dataclasses.make_dataclass('Config', [('stages', int, 2)], frozen=True)
    vars(module).update(names)
    self.enter_context(mock.patch.dict(sys.modules, {module.__name__: module}))
    self.enter_context(mock.patch.dict(backends, tcgen05=f'{module.__name__}:{next(iter(names))}'))
    return module

  def test_its_kernel_is_reached(self):
    kernel, called = _only_here(reference.sparse_matmul)
    module = self._add('sparse_matmul', api.BACKENDS, sparse_matmul=kernel)
    a, b = _operand(), jnp.ones((8, 64), _BF16)
    with self.assertRaisesRegex(ValueError, 'tcgen05: needs tcgen05'):
      api.sparse_matmul(a, b, implementation='tcgen05')
    with mock.patch.object(_device, 'current', lambda: B200):
      self.assertEqual(api.sparse_matmul(a, b, implementation='sparse').shape, (64, 8))
      for other in ('mosaic_gpu', 'mosaic_gpu_sm80'):
        with self.assertRaisesRegex(ValueError, r'NVIDIA B200 has \(10, 0\)'):
          api.sparse_matmul(a, b, implementation=other)
      self.assertEqual(plan.backend_of('sparse'), 'tcgen05')  # of layers
    self.assertEqual({*called}, {None})
    p = mosaic_gpu.Problem(64, 8, 64, _BF16, _BF16, _BF16, 'nk', 'mn')
    own = _settings.own_kernel(p, B200)
    self.assertEqual(own.name, 'tcgen05')
    ((config, _),) = _settings.compiled(p, own, _settings.to_time(p, own, _records.TUNED, True))  # by `tune`
    self.assertEqual(config, module.Config())
    self.assertEqual(called[-1], config)

  def test_the_check_at_first_use_asks_for_what_it_takes(self):
    kernel, _ = _only_here(reference.sparse_matmul)
    self._add('sparse_matmul', api.BACKENDS, sparse_matmul=kernel)
    key = dict(m=2**10, n=2**10, k=2**10, dtype='bfloat16', out_dtype='bfloat16', b_layout='nk', out_layout='nm')
    with mock.patch.object(_checks, 'outcome', return_value={}) as checked:
      self.assertEqual(check.outcome(B200, key), {})
      self.assertIsNone(check.outcome(B200, key | dict(dtype='float8_e4m3fn')))
    self.assertEqual(checked.call_args.args[:4], (B200, api.OP, key, []))

  @parameterized.product(itemsizes=((2,), (1, 2)), here=(True, False))
  def test_fp8_takes_a_kernel_of_8_bits_or_none(self, itemsizes, here):
    kernel = arch.Kernel(api.OP, 'tcgen05', itemsizes, by_default=True)
    self.enter_context(mock.patch.object(arch, 'ARCHS', (*arch.ARCHS[:-1], arch.Arch('sm_100a', (10, 0), (kernel,)))))
    policy = s24.DotPolicy(s24.soft_threshold_projection(), weight_grad='mvue', precision='fp8')
    with gpu(B200):
      found = plan.plan_layer(policy, 4096, 1024, 4096, _BF16, on=Target(B200, here))
      wide = dataclasses.replace(policy, precision='default')
      in_16_bits = plan.plan_layer(wide, 4096, 1024, 4096, _BF16, on=Target(B200, here))
    self.assertEqual(in_16_bits.backends.weight_grad, 'tcgen05')
    expected = 'tcgen05' if 1 in itemsizes else None
    self.assertEqual((found.backends.forward, found.backends.weight_grad), (expected, expected))
    self.assertEqual(found.precision.simulates, expected is None)

  def test_its_settings_of_blocks_are_tuned(self):
    kernel, called = _only_here(vnm_reference.vnm_matmul)
    module = self._add('vnm', vnm_api.MATMULS, vnm_matmul=kernel, default_config=lambda v: module.Config(v // 64))
    module.settings = lambda v: [module.Config(1), module.Config(2)]
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

    def times(f, args, iterations):
      jax.block_until_ready(f(*args))
      return [1.0 if isinstance(args[0], jax.Array) else 0.5] * iterations

    def dense(wide):  # a CPU multiplies bfloat16 in few layouts
      return {'plain': lambda a, b: jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32)).astype(a.dtype)}

    with (
      mock.patch.object(_device, 'current', lambda: B200), mock.patch.object(_device, 'environment', dict),
      mock.patch.object(_tuning, 'times_ms', times), mock.patch.object(_tuning.time, 'sleep', lambda s: None),
      mock.patch.object(tune, 'dense_ways', dense), contextlib.redirect_stdout(io.StringIO()),
    ):
      self.assertEqual(tune.tune(arg_specs.Spec(64, 8, (128, 256, 128)), folder), 0)
    (entry,) = _records.entries_of(folder / B200.slug / f'{vnm_api.OP}.json')
    self.assertEqual(entry['choice']['implementation'], 'tcgen05')
    self.assertCountEqual(called, [module.Config(1), module.Config(2)])


if __name__ == '__main__':
  absltest.main()
