"""What git tracks are the project's own files."""

from pathlib import Path
import subprocess

from absl.testing import absltest

ROOT = Path(__file__).parents[1]


class TrackedFilesTest(absltest.TestCase):
  def test_no_link_is_tracked(self):
    """One to an environment leads nowhere in another checkout, and hides the folder that belongs there."""
    if not (ROOT / '.git').exists():
      self.skipTest('not a checkout')
    listed = subprocess.run(['git', 'ls-files', '-s'], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [line.partition('\t') for line in listed.splitlines()]
    self.assertNotEmpty(files)
    self.assertEqual([path for mode, _, path in files if mode.startswith('120000')], [])


if __name__ == '__main__':
  absltest.main()
