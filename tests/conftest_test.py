"""What `conftest.py` promises of a run of pytest, seen from outside."""

from pathlib import Path
import subprocess
import sys

from absl.testing import absltest
import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = '''
import sys
import pytest
assert pytest.main(['-q', '--collect-only', 'sparse24_jax/plan.py']) == 0
dot = sys.modules['sparse24_jax.dot']
sys.exit(vars(sys.modules['sparse24_jax.plan']) is not dot.plan_layer.__globals__)
'''


class ConftestTest(absltest.TestCase):

  @pytest.mark.slow  # a second library
  def test_doctests_of_one_file_are_of_the_module_that_others_import(self):
    ran = subprocess.run([sys.executable, '-c', PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False)
    self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)


if __name__ == '__main__':
  absltest.main()
