import contextlib
import json
import pathlib
import shutil
import subprocess
import tempfile
import types
from unittest import mock

from absl.testing import absltest, parameterized
import jax.numpy as jnp

from pallas_kernels import _device
from pallas_kernels.arch import WGMMA
from tests import targets
from tests.pallas_kernels import compiling


class DeviceTest(parameterized.TestCase):

  def test_describes_an_nvidia_gpu(self):
    gpu = types.SimpleNamespace(
      platform='gpu', device_kind='NVIDIA H100 80GB HBM3', compute_capability='9.0', core_count=132
    )
    found = _device.describe(gpu)
    self.assertEqual(found, targets.target_device('sm_90a'))
    self.assertEqual(found.slug, 'nvidia_h100_80gb_hbm3')
    self.assertEqual((found.arch.name, found.arch.kernel('sparse_matmul')), ('sm_90a', WGMMA))

  def test_cpu_and_blackwell_have_no_sparse_wgmma(self):
    self.assertEqual(_device.current().slug, 'cpu')
    self.assertEqual(_device.current().arch.kernels, ())
    self.assertEqual(_device.Device('NVIDIA B200', 'gpu', (10, 0), 148).arch.kernels, ())

  def test_reads_what_ptxas_says(self):
    report = compiling._read_report(
      "ptxas warning : (C7510) Potential Performance Loss\nptxas info : 8 bytes spill stores, 4 bytes spill loads\n"
      'ptxas info : Used 168 registers', 'wgmma.mma_async.sp.x a;\nwgmma.mma_async.sp.y b;\n wgmma.mma_async.z c;'
    )
    self.assertEqual((report.registers, report.spill_bytes), (168, 12))
    self.assertLen(report.warnings, 1)
    self.assertEqual(report.count('wgmma.mma_async.sp'), 2)

  def test_environment_is_json(self):
    self.assertContainsSubset(
      {'device', 'gpu', 'driver', 'versions', 'commit', 'command', 'when'}, _device.environment()
    )
    json.dumps(_device.environment())

  @parameterized.parameters(
    (('/a/pallas_kernels/__main__.py', 'verify', '--out', '/b/x.jsonl', '--count', '3'),
     'python -m pallas_kernels verify --out x.jsonl --count 3'),
    (('tune.py', 'out/x.jsonl'), 'python tune.py out/x.jsonl'), (('tune.py', '--out=/a/b/x'), 'python tune.py --out=x'),
  )
  def test_the_command_names_no_folder_of_the_machine(self, argv, command):
    self.assertEqual(_device._command(argv), command)

  def test_the_commit_is_that_of_the_source_wherever_the_process_runs(self):
    known, folder = _device.commit(), self.enter_context(tempfile.TemporaryDirectory())
    copied = pathlib.Path(folder, 'package', '_device.py')
    copied.parent.mkdir()
    shutil.copy(_device.__file__, copied)
    git = ['git', '-c', 'user.name=a', '-c', 'user.email=a@b', '-C', folder]
    for command in (['init', '-q'], ['commit', '-q', '--allow-empty', '-m', 'another']):
      subprocess.run([*git, *command], check=True)
    with contextlib.chdir(folder):
      self.assertEqual(_device.commit(), known)
    with mock.patch.object(_device, '__file__', str(copied)):
      self.assertIsNone(_device.commit())

  @absltest.skipUnless(compiling.can_compile_for_gpu(), 'needs the CUDA plugin wheels')
  def test_one_target_a_process(self):
    args = lambda x: x + 1, targets.struct((64,), jnp.float32)
    self.assertEqual(compiling.compile_report(*args, target='sm_90a').spill_bytes, 0)
    with self.assertRaisesRegex(ValueError, 'this process compiles for sm_90a'):
      compiling.compile_report(*args, target='sm_80')


if __name__ == '__main__':
  absltest.main()
