"""The reference pages: every public name is there, and has an example that a reader can paste."""

import ast
import builtins
import doctest
import importlib
import inspect
from pathlib import Path
import re
import subprocess
import sys
import tempfile
import types

from absl.testing import absltest, parameterized
import pytest

ROOT = Path(__file__).parents[1]
MODULES = ('sparse24_jax', 'sparse24_jax.linen', 'sparse24_jax.nnx', 'sparse24_jax.recipes')
APIS = tuple(f'pallas_kernels.{path.parent.name}.api' for path in sorted((ROOT / 'pallas_kernels').glob('*/api.py')))
APIS += ('pallas_kernels.formats',)
REFUSES_NOTHING = ('amax',)  # of quantize: any floats


def public_names() -> list[tuple[str, str]]:
  """(module, name) of what users call; modules have pages of their own."""
  modules = {name: importlib.import_module(name) for name in MODULES}
  return [
    (name, public)
    for name, module in modules.items()
    for public in module.__all__
    if not isinstance(getattr(module, public), types.ModuleType)
  ]


def kernel_functions() -> list[tuple[str, str]]:
  """(module, name) of the functions of kernels, those without an example too."""
  return [
    (name, function)
    for name in APIS
    for function, value in vars(importlib.import_module(name)).items()
    if inspect.isfunction(value) and value.__module__ == name and not function.startswith('_')
  ]


def undefined(example: str) -> set[str]:
  """Names that a doctest reads and neither makes nor imports."""
  tree = ast.parse('\n'.join(part.source for part in doctest.DocTestParser().get_examples(example)))
  made = {alias.asname or alias.name.split('.')[0] for node in ast.walk(tree)
          if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}  # fmt: skip
  names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
  made |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
  made |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
  made |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
  return {node.id for node in names} - made - set(dir(builtins))


def documents() -> list[Path]:
  return [ROOT / 'README.md', *(path for path in sorted(ROOT.glob('*/**/*.md')) if '.venv' not in str(path))]


def anchors(page: Path) -> set[str]:
  """The anchors of its headings, as GitHub makes them."""
  titles = re.findall(r'^#+ (.*)$', page.read_text(), re.MULTILINE)
  return {re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-') for title in titles}


class LinksTest(parameterized.TestCase):

  @parameterized.parameters(*documents())
  def test_links_inside_the_project_lead_somewhere(self, page):
    for target in re.findall(r'\]\(([^)\s]+)\)', page.read_text()):
      if not target.startswith('https://'):
        name, _, anchor = target.partition('#')
        found = page.parent / name if name else page
        self.assertTrue(found.exists(), target)
        if anchor:
          self.assertIn(anchor, anchors(found), target)

  def test_files_that_documents_name_are_there(self):
    for page in documents():
      for name in re.findall(r'experiments/results/\w+\.\w+', page.read_text()):
        self.assertTrue((ROOT / name).is_file(), f'{page.name}: {name}')


class DocstringsTest(parameterized.TestCase):

  @parameterized.parameters(*public_names(), *kernel_functions())
  def test_arguments_and_errors_are_told(self, module, name):
    """Holds for functions that users call. Those of dispatch have no example and are for the library."""
    public = inspect.unwrap(getattr(importlib.import_module(module), name))
    text = inspect.getdoc(public) or ''
    if not inspect.isfunction(public) or '>>>' not in text or name in REFUSES_NOTHING:
      return
    self.assertIn('Raises:', text)
    for argument in inspect.signature(public).parameters:
      self.assertRegex(text, rf'\n +\*{{0,2}}{argument}: |`{argument}`', f'{module}.{name}({argument})')


class ExamplesTest(parameterized.TestCase):

  @parameterized.parameters(*public_names(), *kernel_functions())
  def test_the_example_stands_by_itself(self, module, name):
    public = getattr(importlib.import_module(module), name)
    self.assertEmpty(undefined(inspect.getdoc(public) or ''), f'the example of {module}.{name} does not define these')

  def test_undefined(self):
    example = 'Text.\n\n>>> import a.b as c, d\n>>> for i in range(3):\n...   c(i, lambda j: d(j, e))\n>>> f = g\n'
    self.assertEqual(undefined(example), {'e', 'g'})


@pytest.mark.slow
class SiteTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    temporary = tempfile.TemporaryDirectory()
    cls.addClassCleanup(temporary.cleanup)
    cls.folder = Path(temporary.name)
    command = [sys.executable, '-W', 'error', ROOT / 'docs' / 'build.py', cls.folder]
    subprocess.run(command, check=True, cwd=ROOT, env={'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'})

  @parameterized.parameters(*public_names())
  def test_has_a_section_with_an_example(self, module, name):
    page = (self.folder / f'{module.replace(".", "/")}.html').read_text()
    section = re.search(rf'<section id="{name}">.*?</section>', page, re.DOTALL)
    self.assertIsNotNone(section, f'{module} has no section {name}')
    self.assertIn('<div class="docstring">', section.group())
    self.assertIn('&gt;&gt;&gt; ', section.group(), f'{module}.{name} has no example')

  def test_every_link_of_the_site_leads_somewhere(self):
    pages = {path: path.read_text() for path in self.folder.rglob('*.html')}
    for path, text in pages.items():
      for name, anchor in re.findall(r'<a[^>]* href="(?!https?://|\$)([^"#]*)#?([^"]*)"', text):
        target = (path.parent / name).resolve() if name else path
        self.assertIn(target, pages, f'{path.name} links to {name}')
        self.assertTrue(not anchor or f'id="{anchor}"' in pages[target], f'{path.name}: {name}#{anchor}')

  def test_each_page_lists_all_and_the_search_knows_them(self):
    search = (self.folder / 'search.js').read_text()
    for page in ('index.html', 'pallas_kernels/sparse_matmul/api.html'):
      links = re.findall(r'<li><a href="(?:\.\./)*([\w/]+)\.html"', (self.folder / page).read_text())
      self.assertContainsSubset([page.stem for page in self.folder.glob('*.html')], links)
      self.assertContainsSubset([module.replace('.', '/') for module in MODULES], links)
    for document in ('guide', 'kernels', 'speed', 'quality'):
      self.assertIn(f'"fullname": "{document}"', search)


if __name__ == '__main__':
  absltest.main()
