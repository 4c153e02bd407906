"""What is read from NVIDIA's profiler, from an `ncu` of our own making."""

import pathlib
import tempfile

from absl.testing import absltest, parameterized

from pallas_kernels.sparse_matmul import bounds

_NAMES = ('dram__throughput.avg.pct_of_peak_sustained_elapsed', 'dram__throughput.max.pct_of_peak_sustained_elapsed',
          'gpu__time_duration.sum', 'l1tex__data_pipe_lsu_wavefronts.avg', 'lts__t_bytes.sum',
          'lts__t_sectors.avg.pct_of_peak_sustained_elapsed', 'sm__cycles_active.avg', 'sm__cycles_elapsed.max',
          'sm__pipe_tensor_cycles_active.avg')
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
  _line(*[''] * len(_FIRST), '%', '%', 'ns', '', 'byte', '%', 'cycle', 'cycle', 'cycle'),
  _launch(0, 'nvjet_sm90_tst', '24.36', '24.38', '1,351,296', '1,416,806.49', '8745234368', '42.06', '2061567.39',
          '2,113,776', '8213845.33'),
  _launch(1, 'loop_convert_fusion', '80.1', '80.2', '90,000', '1,000', '134217728', '40.1', '120,000', '150,000', '0'),
  _launch(2, 'kernel_mosaic_gpu(int, float)', '19.62', '19.65', '890592', '1232518.45', '5933528992', '43.28',
          '1296515.88', '1400597', '4098978.91'),
  '==PROF== Disconnected from process 2583',
))


class BoundsTest(parameterized.TestCase):

  def test_launches_in_base_units(self):
    dense, convert, sparse = bounds.launches_of(_CSV)
    self.assertEqual([row['kernel'] for row in (dense, convert, sparse)],
                     ['nvjet_sm90_tst', 'loop_convert_fusion', 'kernel_mosaic_gpu(int, float)'])
    self.assertEqual(dense['profiled'], dict(
      ms=1.3513, mcycles_elapsed=2.1138, mcycles_active=2.0616, mcycles_tensor=2.0535, port_mwavefronts=1.4168,
      l2_gigabytes=8.7452, l2_percent=42.06, dram_percent=24.36,
    ))
    self.assertNotIn('dram__throughput.max.pct_of_peak_sustained_elapsed', sparse['counters'])
    self.assertEqual(sparse['counters']['sm__cycles_elapsed.max'], 1400597)

  def test_the_longest_launches_are_the_matmuls(self):
    found = bounds.matmuls_of(bounds.launches_of(_CSV), ('dense', 'mosaic_gpu'))
    self.assertEqual({name: row['kernel'] for name, row in found.items()},
                     dict(dense='nvjet_sm90_tst', mosaic_gpu='kernel_mosaic_gpu(int, float)'))
    with self.assertRaisesRegex(ValueError, "ncu saw .*'loop_convert_fusion'.* of "):
      bounds.matmuls_of(bounds.launches_of(_CSV), 'abcd')
    with self.assertRaisesRegex(ValueError, 'ncu saw'):
      bounds.matmuls_of(bounds.launches_of(_CSV), ('mosaic_gpu', 'dense'))

  @parameterized.parameters(
    ('echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"; exit 1', 'may not read counters'),
    ('echo "==ERROR== Target died" >&2; exit 9', 'ncu ended with 9: .*Target died'),
  )
  def test_says_why_there_are_no_counters(self, script, message):
    with tempfile.TemporaryDirectory() as folder, self.assertRaisesRegex(ValueError, message):
      ncu = pathlib.Path(folder, 'ncu')
      ncu.write_text(f'#!/bin/sh\n{script}\n')
      ncu.chmod(0o755)
      bounds._profiled(bounds.CASES['forward'][1], {'dense': {'way': 'plain'}}, str(ncu), {})

  def test_the_matmuls_that_the_readme_speaks_of(self):
    found = [(*s.mnk, s.dtype.name) for specs in bounds.CASES.values() for s in specs]
    sizes = (8192, 8192, 8192), (16384, 16384, 4096)
    self.assertEqual(found, [(*mnk, name) for mnk in sizes for name in ('bfloat16', 'float8_e4m3fn')])


if __name__ == '__main__':
  absltest.main()
