"""A generation is one value: which kernels it has, what 'sparse' means there, and in which order positions are read."""

import dataclasses
import sys
import types
from unittest import mock

from absl.testing import absltest, parameterized
import jax.numpy as jnp

from pallas_kernels import _device, _dispatch, _records, arch, vnm
from pallas_kernels.pack.api import soft_threshold_pack
from pallas_kernels.sparse_matmul import _own_kernel, api, mosaic_gpu, mosaic_gpu_sm80, operand, reference
from pallas_kernels.vnm import api as vnm_api
from pallas_kernels.vnm import mosaic_gpu as vnm_mosaic_gpu
from pallas_kernels.vnm.format import to_vnm_operand
from sparse24_jax import plan
from tests import targets
from tests.pallas_kernels import triton_interpreter

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
    self.assertEqual((found.kernel('sparse_matmul'), found.kernel('vnm_matmul')), (of_weights, of_blocks))
    self.assertEqual(found.float8, float8)
    self.assertEqual(found.layout is None, of_weights is None)
    self.assertEqual(found.sparse_instruction is None, of_weights is None)

  @parameterized.parameters(*arch.ARCHS)
  def test_every_kernel_is_a_back_end(self, generation):
    for op, backends in (('sparse_matmul', api.BACKENDS), ('vnm_matmul', vnm_api.MATMULS)):
      self.assertIn(generation.kernel(op), {*backends, None})

  @parameterized.parameters(('sm_80', 'mosaic_gpu_sm80'), ('sm_89', 'mosaic_gpu_sm80'), ('sm_90a', 'mosaic_gpu'))
  def test_sparse_is_the_kernel_of_the_gpu(self, target, kernel):
    with mock.patch.object(_device, 'current', lambda: targets.target_device(target)):
      self.assertEqual(_dispatch.backend_of('sparse_matmul', 'sparse', api.BACKENDS), kernel)
      self.assertEqual(_dispatch.backend_of('transpose_pack', 'sparse', vnm_api.TRANSPOSERS), 'triton')

  def test_where_there_is_none_it_says_what_there_is(self):
    a = _operand()
    with self.assertRaisesRegex(ValueError, r"'sparse' has no kernel for cpu; accepted there are \['cusparselt', 'd"):
      api.sparse_matmul(a, jnp.ones((8, 64), _BF16), implementation='sparse')
    with self.assertRaisesRegex(ValueError, r"'sparse' has no kernel for cpu; accepted there are \['dense', 'ref"):
      vnm_api.vnm_matmul(_blocks(), jnp.ones((64, 8), _BF16), implementation='sparse')


def _operand():
  return soft_threshold_pack(jnp.ones((64, 64), _BF16), jnp.float32(1), axis=-1).operand


def _blocks():
  x = jnp.arange(128.0 * 64).reshape(128, 64).astype(_BF16)
  return to_vnm_operand(vnm.compress(x, vnm.vnm_mask(x, v=64, m=8), v=64, m=8))


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
    options = dict(activation=None, out_dtype=_BF16, b_layout='nk', out_layout='nm')
    for implementation in (None, 'dense', 'reference'):
      self.refused(api.sparse_matmul, self.a, b, implementation=implementation)
    for kernel in (mosaic_gpu, mosaic_gpu_sm80):
      self.refused(kernel.sparse_matmul, self.a, b, device=targets.target_device('sm_90a'), **options)
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


class NextGenerationTest(absltest.TestCase):
  """What `README.md` lists is enough: an `Arch`, a module with `Config` and the op, and its line in `BACKENDS`."""

  def test_its_kernel_is_reached(self):
    b200 = _device.Device('NVIDIA B200', 'gpu', (10, 0), 148)
    generation = arch.Arch(
      'sm_100a', (10, 0), sparse_instruction='tcgen05', layout=arch.REGISTER_ORDER, kernels={api.OP: 'tcgen05'},
      float8=True,
    )  # fmt: skip
    module = types.ModuleType('pallas_kernels.sparse_matmul.tcgen05')
    module.Config = dataclasses.make_dataclass('Config', [], frozen=True)
    called = []

    def by_reference(*args, config=None, device=None, **kwargs):
      if (device or _device.current()).arch.sparse_instruction != 'tcgen05':
        raise NotImplementedError('needs tcgen05')
      called.append(config)
      return reference.sparse_matmul(*args, **kwargs)

    module.sparse_matmul = by_reference
    a, b = _operand(), jnp.ones((8, 64), _BF16)
    with (
      mock.patch.object(arch, 'ARCHS', (*arch.ARCHS, generation)),
      mock.patch.dict(sys.modules, {module.__name__: module}),
      mock.patch.dict(api.BACKENDS, tcgen05=f'{module.__name__}:sparse_matmul'),
    ):
      with self.assertRaisesRegex(ValueError, 'tcgen05: needs tcgen05'):
        api.sparse_matmul(a, b, implementation='tcgen05')
      with mock.patch.object(_device, 'current', lambda: b200):
        self.assertEqual(api.sparse_matmul(a, b, implementation='sparse').shape, (64, 8))
        for other in ('mosaic_gpu', 'mosaic_gpu_sm80'):
          with self.assertRaisesRegex(ValueError, r'NVIDIA B200 has \(10, 0\)'):
            api.sparse_matmul(a, b, implementation=other)
        self.assertEqual(plan.backend_of('sparse'), 'tcgen05')  # of layers
        self.assertEqual(_own_kernel.name(b200), 'tcgen05')
        p = mosaic_gpu.Problem(64, 8, 64, _BF16, _BF16, _BF16, 'nk', 'mn')
        ((config, _),) = _own_kernel.compiled(p, b200, _own_kernel.settings(p, b200, _records.TUNED, True))  # by `tune`
        self.assertEqual(config, module.Config())
    self.assertTrue(called)


if __name__ == '__main__':
  absltest.main()
