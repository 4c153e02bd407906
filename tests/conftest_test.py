"""What `conftest.py` promises of a run of pytest, seen from outside."""

import itertools
import os
from pathlib import Path
import subprocess
import sys

from absl.testing import absltest
import pytest

ROOT = Path(__file__).parents[1]
# This may be one of a third of the tests, and what it runs is not.
ENV = {name: value for name, value in os.environ.items() if name != 'TESTS_THIRD'}
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
    command = [sys.executable, '-c', PROGRAM]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=ENV)
    self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)

  @pytest.mark.slow  # four processes
  def test_three_thirds_are_all(self):
    def collected(**env):
      command = [sys.executable, '-m', 'pytest', '-q', '--collect-only', 'tests/sparse24_jax/mvue_test.py']
      ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=ENV | env)
      return [line for line in ran.stdout.splitlines() if '::' in line]

    thirds = [collected(TESTS_THIRD=str(i)) for i in range(3)]
    self.assertTrue(all(thirds))
    self.assertCountEqual(itertools.chain(*thirds), collected())


if __name__ == '__main__':
  absltest.main()
