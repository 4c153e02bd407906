"""The mma.sp kernel, compiled for GPUs that are not there; its numbers are checked on a GPU by `gpu_test`."""

import json
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import pytest

from pallas_kernels import _device, operand
from pallas_kernels.sparse_matmul import mosaic_gpu_sm80
from pallas_kernels.sparse_matmul.call import Call, Vectors
from tests import targets
from tests.pallas_kernels import compiling

_BF16 = jnp.dtype('bfloat16')


def _report(target, dtype):
  m, n, k = 500, 300, 260
  s, dtype = targets.struct, jnp.dtype(dtype)

  def f(values, metadata, b):
    return mosaic_gpu_sm80.sparse_matmul(
      operand.SparseOperand(values, metadata), b, Vectors(), Call(dtype, 'kn', 'nm', 'gelu'),
      device=targets.target_device(target),
    )

  args = s((m, k // 2), dtype), s(operand.metadata_shape(m, k), jnp.uint32), s((k, n), dtype)
  return compiling.compile_report(f, *args, target=target)


@absltest.skipUnless(compiling.can_compile_for_gpu(), 'needs the CUDA plugin wheels')
class CompileTest(parameterized.TestCase):

  # The oldest, the newest, and a consumer GPU, which has less shared memory.
  @parameterized.parameters(
    ('sm_80', 'bfloat16'), ('sm_90a', 'bfloat16', 'float16'), ('sm_86', 'bfloat16', 'float16')
  )
  @pytest.mark.few
  def test_compiles_without_spills(self, target, *dtypes):
    # A process a target: Mosaic keeps the settings of the first.
    root = pathlib.Path(_device.__file__).parents[1]
    done = subprocess.run(
      [sys.executable, __file__, target, *dtypes], cwd=root,
      env=os.environ | {'PYTHONPATH': str(root), 'JAX_PLATFORMS': 'cpu'},
      capture_output=True, text=True, check=False, timeout=240,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    for spill_bytes, architecture, instructions in json.loads(done.stdout.splitlines()[-1]):
      self.assertEqual(spill_bytes, 0)
      self.assertEqual(architecture, target)
      # 2 x 8 tiles of 64 x 8 (four warps' m16n8 each), two instructions a K step of 64, in a loop that LLVM may unroll.
      self.assertGreater(instructions, 0)
      self.assertEqual(instructions % 32, 0)


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
    ('bfloat16', _device.Device('NVIDIA V100', 'gpu', (7, 0), 80), 'compute capability 8.0 to 9.0'),
    ('float8_e4m3fn', targets.target_device('sm_80'), 'pairs of bfloat16 or float16'),
  )
  def test_not_mine(self, dtype, device, message):
    a = operand.SparseOperand(jnp.zeros((64, 32), dtype), jnp.zeros((1, 1, 128), jnp.uint32))
    with self.assertRaisesRegex(NotImplementedError, message):
      mosaic_gpu_sm80.sparse_matmul(
        a, jnp.zeros((8, 64), dtype), Vectors(), Call(_BF16, 'nk', 'mn'), device=device
      )


if __name__ == '__main__':
  if len(sys.argv) > 2 and sys.argv[1] in targets.TARGETS:
    found = [_report(sys.argv[1], dtype) for dtype in sys.argv[2:]]
    print(json.dumps([(r.spill_bytes, r.architecture, r.count('mma.sp::ordered_metadata')) for r in found]))
  else:
    absltest.main()
