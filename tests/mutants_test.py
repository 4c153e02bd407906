"""The list of mutants does not rot: each line is there, each change is a program, each test is there and fast."""

import ast
from pathlib import Path

from absl.testing import absltest, parameterized

from tests import mutants

ROOT = Path(__file__).parents[1]


class MutantsTest(parameterized.TestCase):
  def test_there_are_enough_and_each_promise_is_named_once(self):
    self.assertGreaterEqual(len(mutants.MUTANTS), 30)
    promises = [mutant.promise for mutant in mutants.MUTANTS]
    self.assertCountEqual(promises, set(promises))

  @parameterized.parameters(*((mutant,) for mutant in mutants.MUTANTS))
  def test_the_line_is_there_once_and_the_tests_are_fast(self, mutant):
    text = (ROOT / mutant.file).read_text()
    if text.count(mutant.old) != 1:
      elsewhere = [str(path.relative_to(ROOT)) for path in (ROOT / mutant.file.split('/')[0]).rglob('*.py')
                   if mutant.old in path.read_text()]  # fmt: skip
      self.fail(f'{mutant.old!r} is not once in {mutant.file}; it is in {elsewhere}: change tests/mutants.py')
    self.assertNotEqual(mutant.old, mutant.new)
    ast.parse(text.replace(mutant.old, mutant.new))
    tests = ast.parse((ROOT / mutant.tests).read_text())
    fast = [
      f'{node.name} {test.name}'
      for node in tests.body if isinstance(node, ast.ClassDef) and not _slow(node)
      for test in node.body if isinstance(test, ast.FunctionDef) and test.name.startswith('test') and not _slow(test)
    ]  # fmt: skip
    self.assertTrue(any(mutant.only in name for name in fast), f'no fast test with {mutant.only!r} in {mutant.tests}')


def _slow(node: ast.ClassDef | ast.FunctionDef) -> bool:
  return any(ast.unparse(decorator) == 'pytest.mark.slow' for decorator in node.decorator_list)


if __name__ == '__main__':
  absltest.main()
