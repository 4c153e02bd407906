"""The readers of HLO find what they are asked for, in a text by hand."""

from absl.testing import absltest

from tests.sparse24_jax.hlo import calls, computations, moves, reached
from tests.sparse24_jax.hlo_fingerprint import compared


class ReaderTest(absltest.TestCase):

  def test_a_comparison_names_cases_of_one_side(self):
    case = dict(calls=[], fusions=1, copies=0)
    lines = compared({'a': case, 'b': case, 'gone': case}, {'a': case, 'b': case | dict(copies=1), 'new': case})
    self.assertRegex('; '.join(lines), '^a: .* as before; b: .* before .*0}, now .*; new: .* before not there, now .*;'
                     ' gone: before alone$')  # fmt: skip

  def test_finds_calls_and_moves(self):
    hlo = '''
%fused (p: bf16[256,512]) -> bf16[512,256] {
  ROOT %transpose.1 = bf16[512,256]{1,0} transpose(%p), dimensions={1,0}
}

%body (t: f32[8]) -> f32[8] {
  ROOT %call.3 = bf16[8,8]{1,0} custom-call(%t), custom_call_target="inner"
}

ENTRY %main (x: bf16[256,512]) -> bf16[512,256] {
  %small = u32[2]{0} copy(%key)
  %loop = f32[8]{0} while(%z), condition=%cond, body=%body
  %copy.2 = bf16[256,512]{0,1} copy(%x)
  %wrapped_transpose_fusion = bf16[512,256]{1,0} fusion(%copy.2), kind=kInput, calls=%fused
  ROOT %call.4 = bf16[8,8]{1,0} custom-call(%loop), custom_call_target="outer"
}
'''
    entry = computations(hlo)['ENTRY']
    self.assertLen(entry, 5)
    self.assertLen(moves(entry), 2)
    self.assertLen(calls(entry, 'outer'), 1)
    self.assertEmpty(calls(entry, 'inner'))
    self.assertLen(calls(reached(hlo, 'ENTRY'), 'inner'), 1)


if __name__ == '__main__':
  absltest.main()
