"""Each op's Triton kernels in the interpreter: the first cases, or all, in one process, which imports for seconds."""

import unittest

from absl.testing import absltest
import pytest

from tests.pallas_kernels import triton_interpreter

# Of each parameterized test the first case; of attention in small tiles; packing V:N:M transposed, the smallest.
WITH_FIRST_CASES = ('gated_activation', 'pack')
CASES = (
  *(f'{op}.interpreted.*[!8]0' for op in WITH_FIRST_CASES),  # of those in float8 one
  'pack.interpreted.*mvue_in_float80', 'pack.interpreted.*fetches*', 'sparse_attention.interpreted.*gradients0',
  'quantize.interpreted.*', 'vnm.*test_rows0', 'vnm.*test_residuals0', 'vnm.*test_transpose_pack2',
)  # fmt: skip


@unittest.skipUnless(triton_interpreter.HAS_TRITON, 'triton is not installed')
class InterpretedTest(absltest.TestCase):

  def test_first_cases(self):
    found = triton_interpreter.run_interpreted(*WITH_FIRST_CASES, 'sparse_attention', 'quantize', 'vnm', only=CASES)
    self.assertRegex(found, r'Ran 14 tests in [^\n]+\n\nOK')

  @pytest.mark.slow
  def test_all_cases(self):
    found = triton_interpreter.run_interpreted(*WITH_FIRST_CASES, 'sparse_attention', 'vnm')
    self.assertIn('OK', found)


if __name__ == '__main__':
  absltest.main()
