"""What can be said of Triton kernels before Triton is asked."""

from absl.testing import absltest, parameterized

from pallas_kernels import _triton


class CallTest(parameterized.TestCase):
  @parameterized.parameters(((1, 65536),), ((1, 1, 65536),), ((1 << 20, 70000),))
  def test_a_grid_that_cuda_does_not_take(self, grid):
    def pack_rows() -> None:
      """Stands in for a kernel, which is not reached."""

    with self.assertRaisesRegex(NotImplementedError, r'pack_rows on a grid of .*65,535'):
      _triton.call(pack_rows, out_shape=[], grid=grid, num_warps=1)


if __name__ == '__main__':
  absltest.main()
