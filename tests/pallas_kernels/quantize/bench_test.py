"""What the bench of the float8 kernels keeps, with a clock and results of our own."""

import contextlib
import io
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from pallas_kernels import _device
from pallas_kernels.pack import bench as pack_bench
from tests.pallas_kernels import triton_interpreter

_RECORD = dict(
  bench='memory_bound', op='quantize_both', implementation='triton', bytes=1 << 30, median_ms=0.5, device='card',
  driver='1', versions={}, when='today',
)  # fmt: skip


@absltest.skipUnless(triton_interpreter.HAS_TRITON, 'needs triton')
class MainTest(parameterized.TestCase):

  @parameterized.parameters(
    ([0, 0], 'check,passes', True), ([0, 3], 'check,passes', False), (None, 'check,passes', False),
    ([3], 'passes', True),
  )
  def test_costs_are_kept_unless_a_check_failed(self, differing, parts, kept):
    """`differing` entries of a comparison; None for a check that breaks off."""
    from pallas_kernels.quantize import bench

    check = mock.Mock(side_effect=RuntimeError) if differing is None else lambda: [dict(differing=differing)]
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    for module, name, value in (
      (pack_bench, 'bandwidths', lambda: dict(copy_tb_s=3.0, pass_tb_s=2.5)),
      (pack_bench, 'common_fields', lambda *_: _RECORD),
      (bench, 'check', check), (bench, 'reductions', list),
      (pack_bench, 'measure', lambda case, *_, **__: dict(op=case.op)),
      (_device, 'current', lambda: _device.target_device('sm_90a')),
    ):
      self.enter_context(mock.patch.object(module, name, value))
    arguments = ['bench', '--out', str(folder / 'out'), '--parts', parts, '--tuned', str(folder)]
    with mock.patch('sys.argv', arguments), contextlib.redirect_stdout(io.StringIO()):
      found = bench.main()
    self.assertEqual(found, int(not kept))  # also where a part broke off
    self.assertEqual(bool(list(folder.glob('*/memory_bound_fp8.json'))), kept)


if __name__ == '__main__':
  absltest.main()
