"""The Triton packers without a GPU: numerics in the interpreter, machine code for three architectures."""

import unittest
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import pytest

from tests.pallas_kernels import compiling, triton_interpreter

BF16, U16, U32, I32, F32 = jnp.bfloat16, jnp.uint16, jnp.uint32, jnp.int32, jnp.float32
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
PAIR = [BF16, U32, BF16, U32]
# (a kernel, dtypes of its arrays, its constants, warps).
KERNELS = (
  ('transposable_kernel', [BF16, *PAIR, U16, I32], dict(AHEAD=512), 2),
  ('repair_kernel', [BF16, I32, *PAIR, U16, *PAIR, U16], dict(TILES=4096), 4),
  ('masked_kernel', [BF16, U16, *PAIR], {}, 4),
  ('soft_threshold_kernel', [BF16, F32, BF16, U32], dict(GROUPS_DOWN=True, dense=None), 2),
  ('mvue_kernel', [BF16, U32, BF16, U32], {}, 2),
)
# For compute capability 9.0: the sparse float8 matmul is Hopper's.
FLOAT8_KERNELS = (
  ('soft_threshold_kernel', [BF16, F32, E4M3, U32, E4M3], dict(GROUPS_DOWN=True), 2),
  ('masked_scaled_kernel', [BF16, U16, F32, E4M3, U32, E4M3, U32], {}, 2),
  ('masked_scaled_kernel', [F32, U16, F32, E4M3, U32, E4M3, U32], {}, 2),
  ('mvue_scaled_kernel', [BF16, U32, F32, E5M2, U32, E5M2], {}, 2),
)


@unittest.skipUnless(triton_interpreter.HAS_TRITON, 'triton is not installed')
class TritonTest(parameterized.TestCase):

  @parameterized.parameters(
    *((*kernel, capability) for capability in (90, 80, 86) for kernel in KERNELS),
    *((*kernel, 90) for kernel in FLOAT8_KERNELS),
  )
  @pytest.mark.few(5)
  def test_compiles_without_spills(self, kernel, arrays, constants, warps, capability):
    from pallas_kernels.pack import triton as pack

    constants = constants | dict(ROWS=4096, COLUMNS=4096, TILE_ROWS=16, TILE_COLUMNS=16)
    made = compiling.compile_for(
      getattr(pack, kernel), arrays, constants, compute_capability=capability, num_warps=warps
    )
    self.assertEqual(made.stack_bytes, 0)
    self.assertGreater(made.count('LDG.E.128') + made.count('LDG.E.64'), 0)
    self.assertEqual(made.count('CCTL.E.PF2') > 0, 'AHEAD' in constants)

  def test_searches_of_16_bits_alone_fetch_ahead(self):
    from pallas_kernels.pack import triton as pack

    def call(kernel, *args, out_shape, **constants):
      asked.append(constants.get('AHEAD'))
      return [jnp.zeros(out.shape, out.dtype) for out in out_shape]

    asked = []
    with mock.patch.object(pack._triton, 'call', call):
      for dtype in (BF16, jnp.float16, F32):
        jax.eval_shape(lambda w: pack.transposable_pack(w, dtype=BF16), jax.ShapeDtypeStruct((64, 64), dtype))
    self.assertEqual(asked, [512, None, 512, None, 0, None])

  def test_matrices_beyond_the_offsets_are_refused(self):
    from pallas_kernels.pack import triton as pack

    w, scale = jax.ShapeDtypeStruct((2**16, 2**16), BF16), jax.ShapeDtypeStruct((), F32)
    for f in (
      lambda w, _: pack.transposable_pack(w, dtype=jnp.dtype(BF16)),
      lambda w, scale: pack.soft_threshold_pack(w, scale, axis=-1, dtype=jnp.dtype(BF16)),
      lambda w, scale: pack.soft_threshold_pack(w, scale, axis=-1, dtype=jnp.dtype(E4M3)),
    ):
      with self.assertRaisesRegex(NotImplementedError, r'less than 2\^32 entries, found \(65536, 65536\)'):
        jax.eval_shape(f, w, scale)


if __name__ == '__main__':
  absltest.main()
