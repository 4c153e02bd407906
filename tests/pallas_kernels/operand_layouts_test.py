"""Transposed and strided arrays reach a kernel as what it reads, row-major: the call says so, and XLA copies."""

import functools
import re
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import pytest

pytest.importorskip('triton')

from pallas_kernels import _device, operand
from pallas_kernels.ffi import cusparselt as library
from pallas_kernels.pack import triton as pack
from pallas_kernels.sparse_matmul import cusparselt, mosaic_gpu, mosaic_gpu_sm80
from pallas_kernels.sparse_matmul.call import Call, Vectors
from pallas_kernels.vnm import mosaic_gpu as vnm_mosaic_gpu
from pallas_kernels.vnm.format import VNMOperand
from tests import targets

_BF16 = jnp.dtype('bfloat16')
_CALL = re.compile(r'custom_call @(mosaic_gpu_v2|triton_kernel_call|sparse24_\w+)\(.*operand_layouts = \[(.*?)\],')
_PLAIN = Call(_BF16, 'nk', 'nm')


def _sparse_matmul(values, metadata, b, *, f, **kwargs):
  return f(operand.SparseOperand(values.T, metadata), b[::2].T, Vectors(), _PLAIN, **kwargs)


def _vnm_matmul(values, metadata, b):
  rows = jnp.zeros((2, 128), jnp.int32)
  a = VNMOperand(operand.SparseOperand(values.T, metadata), rows, 8, False)
  return vnm_mosaic_gpu.vnm_matmul(a, b.T[:, ::2], out_dtype=_BF16, out_layout='mn')


def _pack(values, metadata, b):
  del metadata, values
  return pack.soft_threshold_pack(b.T[::2], jnp.float32(1.0), axis=-1, dtype=_BF16).operand


class LayoutsTest(parameterized.TestCase):

  @parameterized.parameters(
    functools.partial(_sparse_matmul, f=mosaic_gpu.sparse_matmul),
    functools.partial(_sparse_matmul, f=mosaic_gpu_sm80.sparse_matmul),
    functools.partial(_sparse_matmul, f=cusparselt.sparse_matmul, config=cusparselt.Config()),
    _vnm_matmul,
    _pack,
  )
  def test_every_operand_is_row_major(self, f):
    structs = (
      targets.struct((64, 128), _BF16), targets.struct(operand.metadata_shape(128, 128), jnp.uint32),
      targets.struct((256, 256), _BF16),
    )
    with (
      mock.patch.object(_device, 'current', lambda: targets.target_device('sm_90a')),
      mock.patch.object(library, 'register', lambda: None), targets.lowering_for(90),
    ):
      text = jax.jit(f).trace(*structs).lower(lowering_platforms=('cuda',)).as_text()
    calls = _CALL.findall(text)
    self.assertNotEmpty(calls)
    for _, layouts in calls:
      orders = re.findall(r'dense<(?:\[(.*?)\]|(\d))?> : tensor<(\d+)xindex>', layouts)
      self.assertNotEmpty(orders)
      for many, one, rank in orders:
        order = [int(i) for i in (many or one).split(',') if i]
        self.assertEqual(order, list(reversed(range(int(rank)))))


if __name__ == '__main__':
  absltest.main()
