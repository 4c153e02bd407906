"""The programs that measure Triton kernels, where they cannot run."""

import os
import pathlib
import subprocess
import sys

from absl.testing import absltest, parameterized
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
# As if Triton were not installed.
_RUN = """
import runpy, sys
for name in ('triton', 'jax_triton'):
  sys.modules[name] = None
sys.argv = [sys.argv[1], *sys.argv[2:]]
runpy.run_module(sys.argv[0], run_name='__main__')
"""


class WithoutTritonTest(parameterized.TestCase):

  def _run(self, *arguments):
    environment = os.environ | {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'}
    return subprocess.run(
      [sys.executable, '-c', _RUN, *arguments], env=environment, cwd=_ROOT, capture_output=True, text=True, check=False
    )

  @parameterized.parameters(('bench', 'pack'), ('tune', 'quantize'))
  @pytest.mark.slow
  def test_help_and_the_name_of_the_extra(self, *command):
    done = self._run('pallas_kernels', *command, '--help')
    self.assertEqual((done.returncode, done.stderr), (0, ''))
    self.assertIn(f'usage: python -m pallas_kernels {" ".join(command)}', done.stdout)
    done = self._run('pallas_kernels', *command)
    self.assertEqual(done.returncode, 2)
    self.assertIn('pip install "sparse24-jax[cuda]"', done.stderr)
    self.assertNotIn('Traceback', done.stderr)


if __name__ == '__main__':
  absltest.main()
