"""The list of mutants does not rot: each line is there, each change is a program, each test is there and fast."""

import ast
from pathlib import Path
import tempfile

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
    file, changed = mutants.mutated(mutant, ROOT)
    self.assertNotEqual(file.read_text(), changed)
    ast.parse(changed)
    tests = ast.parse((ROOT / mutant.tests).read_text())
    fast = [
      f'{node.name} {test.name}'
      for node in tests.body if isinstance(node, ast.ClassDef) and not _slow(node)
      for test in node.body if isinstance(test, ast.FunctionDef) and test.name.startswith('test') and not _slow(test)
    ]  # fmt: skip
    self.assertTrue(any(mutant.only in name for name in fast), f'no fast test with {mutant.only!r} in {mutant.tests}')

  def test_a_line_is_found_by_what_it_says(self):
    mutant = mutants.Mutant('sums', 'package/first.py', 'a + b, c', 'a - b, c', '', '')
    for name, text, changed in (
      ('first.py', 'x = f(a + b, c)', 'x = f(a - b, c)'),  # where it was
      ('first.py', 'x = f(\n  a +\n  b, c)', 'x = f(\n  a - b, c)'),  # wrapped
      ('second.py', 'x = f(a + b, c)', 'x = f(a - b, c)'),  # in another file
    ):
      with self.subTest(f'{name}: {text}'):
        root = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (root / 'package').mkdir()
        (root / 'package/first.py').write_text('')
        (root / 'package' / name).write_text(text)
        self.assertEqual(mutants.mutated(mutant, root), (root / 'package' / name, changed))
    (root / 'package/third.py').write_text('x = f(a + b, c)')
    with self.assertRaisesRegex(LookupError, r'second.py.*third.py.*change tests/mutants.py'):
      mutants.mutated(mutant, root)
    (root / 'package/second.py').write_text('x = f(b + a, c)')
    (root / 'package/third.py').unlink()
    with self.assertRaisesRegex(LookupError, r'it is in \[\]'):
      mutants.mutated(mutant, root)


def _slow(node: ast.ClassDef | ast.FunctionDef) -> bool:
  return any(ast.unparse(decorator) == 'pytest.mark.slow' for decorator in node.decorator_list)


if __name__ == '__main__':
  absltest.main()
