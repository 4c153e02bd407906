"""Each op's Triton kernels in the interpreter: the first cases, all in one process, which imports for seconds."""

import unittest

from absl.testing import absltest

from tests.pallas_kernels import triton_interpreter

# Of each parameterized test the first case, and tests of one case.
WITH_FIRST_CASES = ('gated_activation', 'pack', 'sparse_attention')
CASES = (
  *(f'{op}.interpreted.*{ending}' for op in WITH_FIRST_CASES for ending in ('0', '[a-z]')),
  'quantize.interpreted.*', 'vnm.*test_rows0', 'vnm.*test_residuals0', 'vnm.*test_transpose_pack0',
)  # fmt: skip


@unittest.skipUnless(triton_interpreter.HAS_TRITON, 'triton is not installed')
class InterpretedTest(absltest.TestCase):

  def test_first_cases(self):
    found = triton_interpreter.run_interpreted(*WITH_FIRST_CASES, 'quantize', 'vnm', only=CASES)
    self.assertRegex(found, r'Ran 17 tests in [^\n]+\n\nOK')


if __name__ == '__main__':
  absltest.main()
