"""What is read from NVIDIA's profiler, from an `ncu` of our own making."""

import contextlib
import io
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from pallas_kernels.sparse_matmul import bounds

_LISTED = """Device NVIDIA GH100 (GH100)
------------------------------------------ ----------- --------------- ---------------------
Metric Name                                Metric Type Metric Unit     Metric Description
------------------------------------------ ----------- --------------- ---------------------
gpu__time_duration                         Counter     nsecond         duration, not sm__cycles_active
l1tex__data_pipe_lsu_wavefronts            Counter                     # of local/global/shared wavefronts
l1tex__data_pipe_lsu_wavefronts_mem_shared Counter                     # of shared memory wavefronts
sm__cycles_elapsed                         Counter     cycle           # of cycles elapsed on SM
sm__pipe_tensor_cycles_active              Counter     cycle           # of cycles where tensor pipe was active
"""
_NAMES = ('gpu__time_duration.sum', 'sm__cycles_elapsed.max', 'l1tex__data_pipe_lsu_wavefronts.avg',
          'l1tex__data_pipe_lsu_wavefronts_mem_shared.avg', 'dram__throughput.avg.pct_of_peak_sustained_elapsed')
_FIRST = ('ID', 'Process ID', 'Process Name', 'Host Name', 'Kernel Name', 'Context', 'Stream', 'Block Size',
          'Grid Size', 'Device', 'CC')


def _line(*fields):
  return ','.join(f'"{field}"' for field in fields)


def _launch(i, kernel, *values):
  return _line(i, 2583, 'python3.12', '127.0.0.1', kernel, 1, 14, '(384, 1, 1)', '(132, 1, 1)', 0, '9.0', *values)


_CSV = '\n'.join((
  '==PROF== Connected to process 2583 (/usr/bin/python3.12)',
  '==PROF== Profiling "nvjet_sm90_tst" - 0: 0%....50%....100% - 3 passes',
  _line(*_FIRST, *_NAMES),
  _line(*[''] * len(_FIRST), 'ns', 'cycle', '', '', '%'),
  _launch(0, 'nvjet_sm90_tst', '1,304,900', '2,098,600', '1,417,000.5', '1,200,000', '36.70'),
  _launch(1, 'loop_convert_fusion', '90,000', '150,000', '1,000', '0', '80.1'),
  _launch(2, 'void f(int, float)', '857600', '1389700', '1232500', 'n/a', '29.93'),
  '==PROF== Disconnected from process 2583',
))


class BoundsTest(parameterized.TestCase):

  def test_metrics_are_those_that_there_are(self):
    with contextlib.redirect_stdout(io.StringIO()) as out:
      found = bounds.metrics_of(_LISTED)
    self.assertEqual(found, [
      'gpu__time_duration.sum', 'sm__cycles_elapsed.max', 'sm__pipe_tensor_cycles_active.avg',
      'l1tex__data_pipe_lsu_wavefronts_mem_shared.avg', 'l1tex__data_pipe_lsu_wavefronts.avg',
    ])
    self.assertIn('no metric for mcycles_active, l2_gigabytes, l2_percent, dram_percent', out.getvalue())

  def test_launches_in_base_units(self):
    dense, convert, sparse = bounds.launches_of(_CSV)
    self.assertEqual([row['kernel'] for row in (dense, convert, sparse)],
                     ['nvjet_sm90_tst', 'loop_convert_fusion', 'void f(int, float)'])
    self.assertEqual(dense['profiled'], dict(
      ms=1.3049, mcycles_elapsed=2.0986, mcycles_active=None, mcycles_tensor=None, port_mwavefronts=1.417,
      l2_gigabytes=None, l2_percent=None, dram_percent=36.7,
    ))
    self.assertNotIn('l1tex__data_pipe_lsu_wavefronts_mem_shared.avg', sparse['counters'])
    self.assertEqual(sparse['profiled']['port_mwavefronts'], 1.2325)

  def test_the_longest_launches_are_the_matmuls(self):
    found = bounds.matmuls_of(bounds.launches_of(_CSV), ('dense', 'mosaic_gpu'))
    self.assertEqual({name: row['kernel'] for name, row in found.items()},
                     dict(dense='nvjet_sm90_tst', mosaic_gpu='void f(int, float)'))
    with self.assertRaisesRegex(ValueError, "ncu saw .*'loop_convert_fusion'.* of "):
      bounds.matmuls_of(bounds.launches_of(_CSV), 'abcd')

  @parameterized.parameters(
    ('echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"; exit 1', 'may not read counters'),
    ('echo "==ERROR== Target died" >&2; exit 9', 'ncu ended with 9: .*Target died'),
  )
  def test_says_why_there_are_no_counters(self, script, message):
    with tempfile.TemporaryDirectory() as folder, self.assertRaisesRegex(ValueError, message):
      ncu = pathlib.Path(folder, 'ncu')
      ncu.write_text(f'#!/bin/sh\nif [ $1 = --query-metrics ]; then\ncat <<END\n{_LISTED}END\nelse {script}\nfi\n')
      ncu.chmod(0o755)
      with contextlib.redirect_stdout(io.StringIO()):
        bounds._profiled(bounds.CASES['forward'][1], {'dense': {'way': 'plain'}}, str(ncu), {})

  def test_the_matmuls_that_the_readme_speaks_of(self):
    found = [(*s.mnk, s.dtype.name) for specs in bounds.CASES.values() for s in specs]
    sizes = (8192, 8192, 8192), (16384, 16384, 4096)
    self.assertEqual(found, [(*mnk, name) for mnk in sizes for name in ('bfloat16', 'float8_e4m3fn')])


if __name__ == '__main__':
  absltest.main()
