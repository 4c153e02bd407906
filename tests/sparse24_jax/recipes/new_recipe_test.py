"""A new recipe is a file and a line: what takes a recipe by its name then takes it."""

import importlib
import inspect
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest

from pallas_kernels._dispatch import log_once
import sparse24_jax as s24
from sparse24_jax.recipes._registry import register

ROOT = Path(__file__).parents[3]
FILE = '''"""One of four."""
from sparse24_jax.policy import DotPolicy
from sparse24_jax.projections import magnitude
from sparse24_jax.recipe import Recipe, Rule
from sparse24_jax.recipes._registry import register


@register(dict(share=0.5), quarters_refreshed=dict(share=0.25))
def quarters(path: str, *, share: float, refresh_every: int = 1) -> Recipe:
  """Keeps one of four.

  Args:
    path: which weights.
    share: of nothing.
  """
  return Recipe('quarters', (Rule(path, DotPolicy(magnitude())),), refresh_every=refresh_every)
'''
LINE = 'from sparse24_jax.recipes.quarters import quarters as quarters\n'
PROGRAM = '''
import pickle
import jax
from experiments.runs import experiment, recipes
import sparse24_jax as s24
from sparse24_jax.__main__ import main
from tests import conformance

def example():
  return lambda p, x: x @ p['w'], *jax.eval_shape(lambda: ({'w': jax.numpy.ones((16, 8))}, jax.numpy.ones((4, 16))))

for name in ('quarters', 'quarters_refreshed'):
  assert main(['check', '__main__:example', '--recipe', name]) == 0
  assert main(['where-it-pays', '--tokens', '4096', '--d', '1024', '--hidden', '4096', '--device', 'h100',
               '--recipe', name]) == 0
config = experiment.load_config('nano', ['recipe.name=quarters', 'recipe.kwargs={"share": 0.5}'])
assert recipes.make_recipe(config).name == 'quarters'
assert 'quarters' in conformance.CASES
assert pickle.loads(pickle.dumps(s24.recipes.quarters)) is s24.recipes.quarters
for call, message in ((lambda: s24.recipes.quarters('w'), 'quarters() needs share: of nothing'),
                      (lambda: s24.recipes.quarter, "did you mean 'quarters'?")):
  try:
    call()
  except (AttributeError, TypeError) as error:
    assert message in str(error), error
  else:
    raise AssertionError(message)
print(s24.__file__)
'''


class NewRecipeTest(absltest.TestCase):

  def test_a_file_and_a_line(self):
    with tempfile.TemporaryDirectory() as folder:
      copy = Path(folder) / 'sparse24_jax'
      shutil.copytree(ROOT / 'sparse24_jax', copy)  # what is compiled to bytecode too
      (copy / 'recipes' / 'quarters.py').write_text(FILE)
      listed = copy / 'recipes' / '__init__.py'
      before, found, after = listed.read_text().partition('from sparse24_jax.recipes.s_ste import')
      listed.write_text((before + LINE + found + after).replace("'s_ste',", "'quarters', 's_ste',"))
      ran = subprocess.run(
        [sys.executable, '-c', PROGRAM], cwd=folder, capture_output=True, text=True, check=False,
        env=os.environ | {'PYTHONPATH': f'{folder}{os.pathsep}{ROOT}', 'JAX_PLATFORMS': 'cpu'},
      )  # fmt: skip
    self.assertEqual(ran.returncode, 0, ran.stderr)
    self.assertStartsWith(ran.stdout.splitlines()[-1], folder)

  def test_no_file_is_without_its_line(self):
    files = {path.stem for path in (ROOT / 'sparse24_jax' / 'recipes').glob('[a-z]*.py')}
    found = {Path(inspect.getfile(inspect.unwrap(known.make))).stem for known in s24.recipes.KNOWN.values()}
    self.assertEqual(found, files)

  def test_all_that_is_known_can_be_called(self):
    made = {known.make.__name__: known.make for known in s24.recipes.KNOWN.values()}
    self.assertEqual({name: getattr(s24.recipes, name) for name in s24.recipes.__all__}, made)

  def test_the_module_of_a_recipe_holds_what_the_package_does(self):
    module = importlib.import_module('sparse24_jax.recipes.sr_ste')
    self.assertIs(module.sr_ste, s24.recipes.sr_ste)
    with self.assertRaisesRegex(TypeError, r'sr_ste\(\) needs masked_decay: the factor lambda'):
      module.sr_ste('w')

  def test_what_is_never_sparse_says_so(self):
    found = {name for name, known in s24.recipes.KNOWN.items() if not known.is_sparse}
    self.assertEqual(found, {'dense'})

  @mock.patch.dict(s24.recipes.KNOWN)
  def test_what_cannot_be_known_is_refused(self):
    def new(path: str, *, share: float) -> s24.Recipe:
      del share
      return s24.recipes.ste(path)

    def of_a_share(path: str, share: float) -> s24.Recipe:
      return new(path, share=share)

    def ste(path: str) -> s24.Recipe:
      return s24.recipes.dense(path)

    before = dict(s24.recipes.KNOWN)
    for make, settings, message in (
      (ste, (None, {}), "recipe 'ste' is taken, by sparse24_jax.recipes.ste.ste"),
      (new, (None, {}), "recipe 'new': missing a required .*argument: 'share'"),
      (new, (dict(shear=1.0), {}), "recipe 'new': .*'share'"),
      (new, (dict(share=1.0), dict(wider=dict(shear=2.0))), "recipe 'wider': .*'shear'"),
      (new, (dict(share=1.0), dict(ste=dict(share=2.0))), "recipe 'ste' is taken"),
      (of_a_share, (None, {}), "recipe 'of_a_share': share stands by its place"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        register(settings[0], **settings[1])(make)
      self.assertEqual(s24.recipes.KNOWN, before)
    for _ in range(2):
      register(dict(share=1.0))(new)
    self.assertEqual(s24.recipes.KNOWN['new'].example('.*').name, 'ste')

  @mock.patch.dict(s24.recipes.KNOWN)
  def test_a_name_twice_in_a_module_is_refused_and_a_reload_is_not(self):
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, 'path', [folder, *sys.path]):
      file = Path(folder) / 'recipes_of_quarters.py'
      file.write_text(FILE)
      module = importlib.import_module(file.stem)
      self.addCleanup(sys.modules.pop, file.stem)
      file.write_text(f'# Changed, and a line further down.\n{FILE}')
      importlib.reload(module)
      file.write_text(FILE + FILE.partition('\n\n\n')[2])
      with self.assertRaisesRegex(ValueError, "'quarters' is taken, by recipes_of_quarters.quarters, line 8: give"):
        importlib.reload(module)

  @mock.patch.dict(s24.recipes.KNOWN)
  def test_a_cell_or_a_script_that_was_changed_runs_again_in_one_namespace(self):
    """As in a notebook, and by `%run -i`."""
    script = {'__name__': '__main__', '__spec__': None, '__file__': '/a/script.py'}
    changed = FILE.replace("Recipe('quarters'", "Recipe('changed'")
    for file in ('<cell>', '/a/script.py'):
      for text in (FILE, FILE, f'# A line further down.\n{changed}'):
        exec(compile(text, file, 'exec'), script)
        self.assertIs(s24.recipes.KNOWN['quarters'].make, script['quarters'])
      self.assertEqual(s24.recipes.KNOWN['quarters'].example('w').name, 'changed')
    exec(compile(changed.replace(', quarters_refreshed=dict(share=0.25)', ''), '<cell>', 'exec'), script)
    self.assertNotIn('quarters_refreshed', s24.recipes.KNOWN)
    with self.assertRaisesRegex(ValueError, "'quarters' is taken, by __main__.quarters, line 8: give this one another"):
      exec(compile(FILE, '/another.py', 'exec'), {'__name__': 'another', '__spec__': None})


  @mock.patch.dict(s24.recipes.KNOWN)
  def test_a_recipe_of_a_script_that_replaces_another_says_so(self):
    script = {'__name__': '__main__', '__spec__': None}
    log_once.cache_clear()
    with self.assertNoLogs('sparse24_jax', 'WARNING'):
      for _ in range(2):
        exec(compile(FILE, '<cell>', 'exec'), script)
    with self.assertLogs('sparse24_jax', 'WARNING') as logs:
      exec(compile(f'# Below.\n{FILE}', '<cell>', 'exec'), script)
    (said,) = logs.records
    self.assertRegex(said.getMessage(), "^recipe 'quarters' replaces __main__.quarters, line 8: give one another name")


if __name__ == '__main__':
  absltest.main()
