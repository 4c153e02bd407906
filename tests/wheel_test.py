"""What is installed is enough: the wheel has the data that the library reads at run time, and no other package."""

import json
from pathlib import Path
import subprocess
import sys
import tempfile
import zipfile

from absl.testing import absltest

ROOT = Path(__file__).parents[1]
DEVICE = 'nvidia_h100_80gb_hbm3'


class WheelTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    temporary = tempfile.TemporaryDirectory()
    cls.addClassCleanup(temporary.cleanup)
    cls.folder = Path(temporary.name)
    subprocess.run(
      [sys.executable, '-m', 'hatchling', 'build', '-t', 'wheel', '-d', cls.folder / 'dist'],
      cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = (cls.folder / 'dist').iterdir()
    with zipfile.ZipFile(wheel) as archive:
      cls.files = set(archive.namelist())
      archive.extractall(cls.folder / 'site')

  def test_it_holds_what_is_read_at_run_time(self):
    data = {
      path.relative_to(ROOT).as_posix()
      for pattern in ('ffi/*.cc', 'tuned/*/*.json')
      for path in (ROOT / 'pallas_kernels').glob(pattern)
    }
    known = {'pallas_kernels/ffi/cusparselt.cc', f'pallas_kernels/tuned/{DEVICE}/sparse_matmul.json'}
    self.assertContainsSubset(known, data)
    self.assertContainsSubset(data, self.files)

  def test_it_holds_the_two_packages_alone(self):
    tops = {name.split('/')[0] for name in self.files}
    self.assertEqual({top for top in tops if not top.endswith('.dist-info')}, {'pallas_kernels', 'sparse24_jax'})

  def test_it_runs_without_the_checkout(self):
    program = f"""
import json, pallas_kernels, sparse24_jax as s24
block = s24.block_gain(4096, 16384, s24.recipes.s_ste('.*'), tokens=16384, device='{DEVICE}')
print(json.dumps([pallas_kernels.__file__, s24.__file__, block.gain]))
"""
    site = self.folder / 'site'
    done = subprocess.run(
      [sys.executable, '-c', program], cwd=self.folder, env={'PYTHONPATH': str(site), 'JAX_PLATFORMS': 'cpu'},
      check=True, capture_output=True, text=True,
    )  # fmt: skip
    *files, gain = json.loads(done.stdout)
    self.assertTrue(all(Path(file).is_relative_to(site) for file in files), files)
    self.assertGreater(gain, 1.0)


if __name__ == '__main__':
  absltest.main()
