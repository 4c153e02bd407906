"""What `compile_seconds` counts in a program."""

from absl.testing import absltest

from tests import compile_seconds

PROGRAM = """HloModule m

%fused_add (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0), metadata={op_name="h_0"}
  ROOT %add = f32[4]{0} add(%a, %a)
}

%fused_add.1 (b: f32[4]) -> f32[4] {
  %b = f32[4]{0} parameter(0)
  ROOT %add.1 = f32[4]{0} add(%b, %b), metadata={op_name="h_1"}
}

%fused_mul (c: f32[4]) -> f32[4] {
  %c = f32[4]{0} parameter(0)
  ROOT %mul = f32[4]{0} multiply(%c, %c)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %one = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused_add
  %two = f32[4]{0} fusion(%one), kind=kLoop, calls=%fused_add.1
  %call = f32[4]{0} custom-call(%two), custom_call_target="mosaic_gpu_v2"
  ROOT %three = f32[4]{0} fusion(%call), kind=kLoop, calls=%fused_mul
}
"""


class PartsTest(absltest.TestCase):

  def test_fusions_that_differ_in_names_alone_are_one_kernel(self):
    self.assertEqual(
      compile_seconds.parts(PROGRAM), dict(instructions=11, fusions=3, distinct_fusions=2, custom_calls=1)
    )


if __name__ == '__main__':
  absltest.main()
