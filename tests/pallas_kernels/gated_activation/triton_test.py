"""The Triton activation kernels without a GPU: numerics in the interpreter, machine code for three architectures."""

import unittest

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import pytest

from tests.pallas_kernels import compiling, triton_interpreter

BF16, U32, E5M2 = jnp.bfloat16, jnp.uint32, jnp.float8_e5m2
BACKWARD = [BF16, BF16, U32, BF16, BF16, U32]


@unittest.skipUnless(triton_interpreter.HAS_TRITON, 'triton is not installed')
@pytest.mark.few
class TritonTest(parameterized.TestCase):

  @parameterized.product(kind=(('silu', True), ('gelu', False)), capability=(80, 86, 90))
  @pytest.mark.slow
  def test_backward_compiles_without_spills(self, kind, capability):
    from pallas_kernels.gated_activation import triton as gated

    activation, gate = kind
    constants = dict(ACTIVATION=activation, GATED=gate)
    made = compiling.compile_for(
      gated.backward_kernel, BACKWARD, constants | dict(ROWS=4096, COLUMNS=4096, TILE_ROWS=16, TILE_COLUMNS=16),
      compute_capability=capability, num_warps=4,
    )  # fmt: skip
    self.assertEqual(made.stack_bytes, 0)

  @parameterized.parameters(('silu', True, 16, 4), ('gelu', False, 32, 8))
  @pytest.mark.slow
  def test_float8_backward_compiles_without_spills(self, activation, gate, tile_columns, warps):
    from pallas_kernels.gated_activation import triton as gated

    made = compiling.compile_for(
      gated.backward_scaled_kernel, [BF16, BF16, U32, jnp.float32, E5M2, E5M2, U32],
      dict(ACTIVATION=activation, GATED=gate, ROWS=4096, COLUMNS=4096, TILE_ROWS=16, TILE_COLUMNS=tile_columns),
      compute_capability=90, num_warps=warps,
    )  # fmt: skip
    self.assertEqual(made.stack_bytes, 0)

  @parameterized.parameters((576, 16, 8), (640, 32, 16))
  def test_tiles_end_with_the_half_of_the_gate(self, features, tile_columns, warps):
    from pallas_kernels.gated_activation import triton as gated
    from pallas_kernels.triton_blocks.launch import Config

    found = gated._within_a_half(Config(tile_columns=32, num_warps=16), features)
    self.assertEqual((found.tile_columns, found.num_warps), (tile_columns, warps))
    self.assertEqual(features % (4 * found.tile_columns), 0)


if __name__ == '__main__':
  absltest.main()
