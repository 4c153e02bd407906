"""What can be said of Triton kernels before Triton is asked, and while it compiles."""

import functools
import unittest

from absl.testing import absltest, parameterized
import jax.numpy as jnp

from pallas_kernels import _triton
from tests.pallas_kernels import compiling, triton_interpreter


class CallTest(parameterized.TestCase):
  @parameterized.parameters(((1, 65536),), ((1, 1, 65536),), ((1 << 20, 70000),))
  def test_a_grid_that_cuda_does_not_take(self, grid):
    def pack_rows() -> None:
      """Stands in for a kernel, which is not reached."""

    with self.assertRaisesRegex(NotImplementedError, r'pack_rows on a grid of .*65,535'):
      _triton.call(pack_rows, out_shape=[], grid=grid, num_warps=1)


@unittest.skipUnless(triton_interpreter.HAS_TRITON, 'triton is not installed')
class PtxTest(parameterized.TestCase):
  def test_a_dtype_that_nothing_is_rounded_to_is_an_error(self):
    import triton
    import triton.language as tl

    from pallas_kernels.triton_blocks import ptx

    @triton.jit
    def pair(source, out, DTYPE: tl.constexpr):
      x = tl.load(source)
      tl.store(out, ptx.round_pair(x, x, DTYPE))

    @triton.jit
    def quad(source, out, DTYPE: tl.constexpr):
      x = tl.load(source)
      tl.store(out, ptx.round_quad(x, x, x, x, DTYPE))

    for kernel, taken, others in (
      (pair, tl.float8e5, (tl.float32, tl.float8e4b15)),
      (quad, tl.float8e5, (tl.float32, tl.bfloat16)),
    ):
      compile_for = functools.partial(
        compiling.compile_for, kernel, (jnp.float32, jnp.uint32), compute_capability=90, num_warps=1
      )
      self.assertIn('cvt.rn.satfinite.e5m2x2', compile_for(dict(DTYPE=taken)).ptx)
      for dtype in others:
        with self.assertRaises(triton.CompilationError) as error:
          compile_for(dict(DTYPE=dtype))
        self.assertIn('no rounding to this dtype', str(error.exception.__cause__))


if __name__ == '__main__':
  absltest.main()
