"""The transposable mask on a GPU, where the packer finds it: `pytest -m gpu`."""

from absl.testing import absltest, parameterized
import jax
import numpy as np

from pallas_kernels.pack import api
from pallas_kernels.two_of_four import transposable
from tests.pallas_kernels.on_a_gpu import draw, LARGE, marks, RAGGED, REPEATS

pytestmark = marks(8, 0)


class TransposableMaskTest(parameterized.TestCase):

  @parameterized.product(case=((RAGGED, 'bfloat16'), (RAGGED, 'float32'), (LARGE, 'float32')), special=(0.0, 0.003))
  def test_bit_for_bit(self, case, special):
    w = draw(*case, special=special)
    f = jax.jit(api.transposable_mask).lower(w).compile()
    self.assertIn('custom_call_target="triton_kernel_call"', f.as_text() or '')
    found = f(w)
    np.testing.assert_array_equal(found, jax.jit(transposable.transposable_mask)(w))
    for _ in range(REPEATS if case[0] == LARGE else 0):
      np.testing.assert_array_equal(f(w), found)

  def test_two_of_four_both_ways(self):
    mask = np.asarray(jax.jit(api.transposable_mask)(draw(LARGE, special=0.0)))
    for blocks in (mask.reshape(-1, 4), mask.T.reshape(-1, 4)):
      np.testing.assert_array_equal(blocks.sum(axis=-1), 2)


if __name__ == '__main__':
  absltest.main()
