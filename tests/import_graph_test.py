"""Which package may import what, read from the sources: pallas_kernels <- sparse24_jax <- experiments."""

import ast
import functools
import graphlib
import pathlib
import sys

from absl.testing import absltest, parameterized

ROOT = pathlib.Path(__file__).parent.parent
OURS = ('pallas_kernels', 'sparse24_jax', 'experiments')
JAX = {'jax', 'jaxlib', 'numpy'}
TRITON = {'triton', 'jax_triton'}


def imports(source: str, package: str) -> list[tuple[str, bool]]:
  """(full dotted name, whether it is imported with the module rather than inside a function) of every import."""
  found = []

  def visit(node: ast.AST, at_import: bool) -> None:
    for child in ast.iter_child_nodes(node):
      if isinstance(child, ast.Import):
        found.extend((alias.name, at_import) for alias in child.names)
      elif isinstance(child, ast.ImportFrom):
        base = package.split('.')[: len(package.split('.')) + 1 - child.level] if child.level else []
        stem = '.'.join([*base, child.module] if child.module else base)
        found.extend((f'{stem}.{alias.name}', at_import) for alias in child.names)
      visit(child, at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

  visit(ast.parse(source), True)
  return found


@functools.cache
def graph(top: str) -> list[tuple[str, str, bool]]:
  """(file, imported name, at import time) over all files of a package."""
  files = sorted((ROOT / top).rglob('*.py'))
  assert files, top
  return [
    (file.relative_to(ROOT).as_posix(), name, at_import)
    for file in files
    for name, at_import in imports(file.read_text(), '.'.join(file.relative_to(ROOT).parent.parts))
  ]


def room_of(path: str) -> str:
  """The folder of `experiments` that a path from the root lies in, or is: 'runs', 'runs/data'."""
  found = ROOT / path
  while not found.is_dir():
    found = found.parent
  return found.relative_to(ROOT / 'experiments').as_posix()


def third_party(name: str) -> str | None:
  top = name.partition('.')[0]
  return None if top in sys.stdlib_module_names or top in OURS else top


class ImportGraphTest(parameterized.TestCase):
  def test_kernels_import_jax_and_numpy_and_where_asked_triton(self):
    for file, name, at_import in graph('pallas_kernels'):
      if file.endswith('/bench.py') and not at_import:
        continue  # a program; what it compares with is loaded when it runs
      self.assertIn(third_party(name), {None, *JAX, *TRITON}, f'{file} imports {name}')

  def test_nothing_loads_triton_without_being_asked_to(self):
    """Triton kernels need the language when they are defined: in files of their own, which others import late."""
    edges = graph('pallas_kernels') + graph('sparse24_jax')
    loads = {file for file, name, at_import in edges if at_import and third_party(name) in TRITON}
    for file in loads:
      self.assertRegex(file, r'^pallas_kernels/(triton_blocks/\w+|(\w+/)*(triton|_\w+))\.py$', f'{file} imports triton')
    loads |= {file for file, _, _ in edges if file.endswith('/triton.py')}
    modules = {file.removesuffix('.py').replace('/', '.') for file in loads}
    for file, name, at_import in edges:
      if at_import and any(name == module or name.startswith(f'{module}.') for module in modules):
        self.assertIn(file, loads, f'{file} imports {name}, which imports triton')

  def test_kernels_know_nothing_of_the_library(self):
    for file, name, _ in graph('pallas_kernels'):
      self.assertNotIn(name.split('.')[0], ('sparse24_jax', 'experiments', 'tests'), f'{file} imports {name}')

  def test_the_library_knows_nothing_of_the_experiments(self):
    for file, name, _ in graph('sparse24_jax'):
      self.assertNotIn(name.split('.')[0], ('experiments', 'tests'), f'{file} imports {name}')

  def test_flax_and_optax_have_their_rooms(self):
    rooms = {'flax': 'sparse24_jax/integration/', 'optax': 'sparse24_jax/optim/'}
    seen = set()
    for file, name, _ in graph('sparse24_jax'):
      top = third_party(name)
      if top in rooms:
        self.assertStartsWith(file, rooms[top], f'{file} imports {name}')
        seen.add(top)
      else:
        self.assertIn(top, {None, *JAX}, f'{file} imports {name}')
    self.assertEqual(seen, set(rooms))

  def test_the_core_of_the_library_does_not_reach_into_its_doors(self):
    """Three files only re-export what users import: the package itself, `sparse24_jax.linen` and `sparse24_jax.nnx`."""
    facades = {f'sparse24_jax/{name}.py': f'sparse24_jax.integration.{name}_mlp.' for name in ('linen', 'nnx')}
    for file, name, _ in graph('sparse24_jax'):
      if file == 'sparse24_jax/__init__.py' or file.startswith('sparse24_jax/integration/'):
        continue
      if file in facades:
        self.assertStartsWith(name, facades[file], f'{file} imports {name}')
        continue
      self.assertFalse(name.startswith('sparse24_jax.integration'), f'{file} imports {name}')
      for facade in ('sparse24_jax.linen', 'sparse24_jax.nnx'):
        self.assertFalse(name == facade or name.startswith(f'{facade}.'), f'{file} imports {name}')
      if not file.startswith('sparse24_jax/optim/'):
        self.assertFalse(name.startswith('sparse24_jax.optim'), f'{file} imports {name}')

  @parameterized.parameters(
    ('policy', {'layout', 'projection'}, {'_choices', '_program'}),
    (
      'recipe', {'asked', 'attention', 'layout', 'policy', 'projection'},
      {'_choices', '_program', 'sparse_attention.patterns'},
    ),
  )
  def test_policies_and_recipes_are_data(self, module, library, kernels):
    """All that they import, however far down: neither kernels nor ops."""
    edges = [
      (file.removesuffix('.py').replace('/', '.'), name, at_import)
      for top in ('sparse24_jax', 'pallas_kernels') for file, name, at_import in graph(top)
    ]  # fmt: skip
    files: dict[str, list[str]] = {file: [] for file, *_ in edges}
    for file, name, at_import in edges:
      known = next((n for n in (name, name.rpartition('.')[0]) if n in files), None)
      if at_import and known:
        files[file].append(known)
    found, left = set(), [f'sparse24_jax.{module}']
    while left:
      for name in files[left.pop()]:
        if name not in found:
          found.add(name)
          left.append(name)
    self.assertEqual(found, {f'sparse24_jax.{n}' for n in library} | {f'pallas_kernels.{n}' for n in kernels})

  @parameterized.parameters(
    ('runs/data', ()),
    ('runs/models', ()),
    ('runs/tasks', ('runs/data', 'runs/models')),
    ('runs', ('runs/data', 'runs/models', 'runs/configs', 'runs/tasks')),
    ('runs/race', ('runs/data', 'runs/models', 'runs')),
    # Times what races train; `keep` knows a record as pages do.
    ('bench', ('runs/models', 'runs/race', 'runs', 'reports')),
    ('bench/scale', ('bench', 'runs')),
    ('reports', ('runs/race', 'runs', 'bench/scale')),  # a page has what many GPUs cost on paper
  )
  def test_rooms_of_the_experiments(self, room, others):
    """What a room may know; a page is made of what runs leave behind, and nothing that trains knows a page."""
    for file, name, _ in graph('experiments'):
      if room_of(file) == room and name.startswith('experiments.'):
        self.assertIn(room_of(name.replace('.', '/')), (room, *others), f'{file} imports {name}')

  def test_no_circles(self):
    """Imports inside functions count, too."""
    files = {file for top in OURS for file, _, _ in graph(top)}
    modules = {file.removesuffix('.py').removesuffix('/__init__').replace('/', '.') for file in files}
    edges: dict[str, set[str]] = {}
    for file, name, _ in (edge for top in OURS for edge in graph(top)):
      module = file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')
      edges.setdefault(module, set()).add(name if name in modules else name.rpartition('.')[0])
    try:
      graphlib.TopologicalSorter({module: found - {module} for module, found in edges.items()}).prepare()
    except graphlib.CycleError as error:
      self.fail(f'imports in a circle: {error.args[1]}')

  def test_packages_of_kernels_import_nothing(self):
    """To import a module is to import its package, so what that imports would be another circle."""
    for file, name, _ in graph('pallas_kernels'):
      self.assertNotEndsWith(file, '/__init__.py', f'{file} imports {name}')

  def test_ops_import_nothing_private_of_each_other(self):
    """What several need is in `mosaic`, `triton_blocks` or `two_of_four`, or in the package itself."""
    for file, name, _ in graph('pallas_kernels'):
      _, *here = file.split('/')
      package, *there = name.split('.')
      if package == 'pallas_kernels' and len(here) > 1 and len(there) > 1 and there[0] != here[0]:
        self.assertFalse(any(part.startswith('_') for part in there[1:]), f'{file} imports {name}')

  def test_no_circles_of_ops(self):
    edges: dict[str, set[str]] = {}
    for file, name, _ in graph('pallas_kernels'):
      _, *here = file.split('/')
      package, _, there = name.partition('.')
      if len(here) > 1 and package == 'pallas_kernels' and (ROOT / package / (op := there.split('.')[0])).is_dir():
        edges.setdefault(here[0], set()).add(op)
    self.assertIn('mosaic', edges['sparse_matmul'])
    try:
      graphlib.TopologicalSorter({op: found - {op} for op, found in edges.items()}).prepare()
    except graphlib.CycleError as error:
      self.fail(f'ops import each other in a circle: {error.args[1]}')

  @parameterized.parameters(*OURS)
  def test_the_deprecated_triton_of_pallas_is_not_used(self, top):
    for file, name, _ in graph(top):
      self.assertNotRegex(name, r'pallas(\.ops\.gpu)?\.triton', f'{file} imports {name}')
      self.assertFalse(name.endswith('.*'), f'{file} imports {name}')

  @parameterized.parameters(
    ('import flax.linen as nn', [('flax.linen', True)]),
    ('def f():\n  from triton import language', [('triton.language', False)]),
    ('try:\n  import a, b\nexcept ImportError:\n  pass', [('a', True), ('b', True)]),
    ('class A:\n  import a', [('a', True)]),
    ('from . import c\nfrom ..d import e', [('p.q.c', True), ('p.d.e', True)]),
  )
  def test_reader(self, source, expected):
    self.assertEqual(imports(source, 'p.q'), expected)


if __name__ == '__main__':
  absltest.main()
