"""The Triton V:N:M packer without a GPU: interpreted, and compiled for three cards."""

from absl.testing import absltest, parameterized

from pallas_kernels import _triton
from tests.pallas_kernels import triton_interpreter


@absltest.skipUnless(triton_interpreter.HAS_TRITON, 'needs triton')
class InterpretedTest(absltest.TestCase):

  def test_bit_for_bit(self):
    self.assertIn('OK', triton_interpreter.run_interpreted('tests.pallas_kernels.vnm.interpreted'))


@absltest.skipUnless(triton_interpreter.HAS_TRITON, 'needs triton')
class CompileTest(parameterized.TestCase):

  @parameterized.product(case=(((128, 8), 80), ((128, 16), 90)), kind=('forward', 'tokens', 'gradient'))
  def test_compiles(self, case, kind):
    shape, capability = case
    from pallas_kernels.vnm import triton as packers
    from pallas_kernels.vnm._kernels import pack_kernel

    constants = packers.constants(
      4096, 4096, *shape, transposed=kind == 'tokens', spread=kind == 'tokens',
      activation=None if kind == 'tokens' else 'squared_relu', gradient=kind == 'gradient',
      masked=kind == 'gradient',
    )
    arrays = ['bfloat16', 'bfloat16', 'bfloat16', 'uint32', 'int32', 'bfloat16']
    made = _triton.compile_for(
      pack_kernel, arrays, constants, compute_capability=capability, num_warps=packers.warps(shape[1])
    )
    # What ptxas cannot keep in registers: one 64-bit value on sm_80, and more in the widest case, which has two inputs
    # and two outputs where 16 warps leave 128 registers.
    spilled = {('forward', 80): 8, ('gradient', 90): 48}
    self.assertLessEqual(made.stack_bytes, spilled.get((kind, capability), 0))
    self.assertGreater(made.count('LDG.E.128') + made.count('LDG.E.64'), 0)


if __name__ == '__main__':
  absltest.main()
