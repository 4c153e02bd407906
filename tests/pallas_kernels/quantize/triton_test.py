"""The Triton quantiser without a GPU: numerics in the interpreter, machine code for Hopper."""

import unittest

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import pytest

from tests.pallas_kernels import compiling, triton_interpreter


@unittest.skipUnless(triton_interpreter.HAS_TRITON, 'triton is not installed')
@pytest.mark.few
class TritonTest(parameterized.TestCase):
  @parameterized.product(dtype=(jnp.float8_e4m3fn, jnp.float8_e5m2), plain=(True, False))
  def test_compiles_without_spills(self, dtype, plain):
    from pallas_kernels.quantize import triton

    config = triton.DEFAULT
    made = compiling.compile_for(
      triton.quantize_kernel, [jnp.bfloat16, jnp.float32, dtype, dtype],
      dict(PLAIN=plain, TRANSPOSED=True, **config.constants(4096, 4096)), compute_capability=90,
      num_warps=config.num_warps,
    )  # fmt: skip
    self.assertEqual(made.stack_bytes, 0)
    # Two entries a conversion.
    per_thread = 16 * config.tile_rows * config.tile_columns // (32 * config.num_warps)
    self.assertEqual(made.count('F2FP.SATFINITE') or made.count('F2FP'), per_thread // 2)


if __name__ == '__main__':
  absltest.main()
