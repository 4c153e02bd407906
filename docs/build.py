"""Writes the site, documents and reference with one search: `python docs/build.py [folder]`, by default `site/`.

Reference pages come from the docstrings, the others from the Markdown files of the project. What they show and how is
in `templates/`, which extends that of pdoc.
"""

import importlib
from pathlib import Path
import re
import shutil
import sys
import types

import pdoc.doc
import pdoc.extract
import pdoc.render

ROOT = Path(__file__).resolve().parent.parent
# Page -> Markdown file.
DOCUMENTS = {
  'index': 'README.md', 'guide': 'docs/guide.md', 'kernels': 'pallas_kernels/README.md', 'speed': 'docs/speed.md',
  'quality': 'docs/quality.md', 'quality_runs': 'docs/quality_runs.md', 'hosts': 'docs/hosts.md',
  'faults': 'docs/faults.md', 'tasks': 'docs/tasks.md', 'scale': 'docs/scale.md',
  'contributing': 'CONTRIBUTING.md', 'changelog': 'CHANGELOG.md', 'log_pack': 'pallas_kernels/pack/LOG.md',
  'log_vnm': 'pallas_kernels/vnm/LOG.md',
}  # fmt: skip
# In pdoc's own terms: `!` takes away what matches. Some functions are named like the files that hold them.
REFERENCE = (
  'sparse24_jax', r'!sparse24_jax\.', 'sparse24_jax.linen', 'sparse24_jax.nnx',
  'sparse24_jax.recipes', r'!sparse24_jax\.recipes\.',
  *(f'pallas_kernels.{op}.api' for op in (
    'sparse_matmul', 'pack', 'vnm', 'gated_activation', 'quantize', 'sparse_attention',
  )),
  'pallas_kernels.activations', 'pallas_kernels.formats', 'pallas_kernels.operand', 'pallas_kernels.vnm.format',
)  # fmt: skip
# What the side of each page lists, above the reference.
SITE = {
  'index': 'Start', 'guide': 'Guide', 'sparse24_jax.recipes': 'Recipes', 'kernels': 'Kernels', 'speed': 'Speed',
  'quality': 'Quality', 'quality_runs': 'Quality: further runs', 'tasks': 'Tasks', 'hosts': 'Many hosts',
  'scale': 'Many GPUs, on paper', 'faults': 'Faults', 'contributing': 'Contributing', 'log_pack': 'Log of the packers',
  'log_vnm': 'Log of V:N:M', 'changelog': 'Changes',
}  # fmt: skip
_LINK = re.compile(r'(!?)\[([^\]]*)\]\(([^)\s]+)\)')


def page_of(document: str, folder: Path) -> types.ModuleType:
  """A document as a module whose docstring it is, which pdoc renders and indexes like others."""
  file = ROOT / DOCUMENTS[document]
  pages = {(ROOT / path).resolve(): name for name, path in DOCUMENTS.items()}

  def link(found: re.Match[str]) -> str:
    image, text, target = found.groups()
    name, _, anchor = target.partition('#')
    if name.startswith('https://') or not name:
      return found.group()
    path = (file.parent / name).resolve()
    if image:
      shutil.copy(path, folder / path.name)
      return f'![{text}]({path.name})'
    if path in pages:
      return f'[{text}]({pages[path]}.html{"#" + anchor if anchor else ""})'
    return text  # a file of the sources, which the site does not have

  module = types.ModuleType(document, _LINK.sub(link, file.read_text()))
  module.__docformat__ = 'markdown'
  return module


def build(folder: Path) -> None:
  """Writes one page a document and a module, and what the search needs."""
  folder.mkdir(parents=True, exist_ok=True)
  pdoc.render.configure(docformat='google', template_directory=ROOT / 'docs' / 'templates')
  modules = [page_of(name, folder) for name in DOCUMENTS]
  modules += [importlib.import_module(name) for name in pdoc.extract.walk_specs(REFERENCE)]
  pages = {module.__name__: pdoc.doc.Module(module) for module in modules}
  reference = {name: name for name in pages if name not in DOCUMENTS}
  pdoc.render.env.globals['site'] = {'Project': SITE, 'Reference': reference}
  for name, page in pages.items():
    file = folder / f'{name.replace(".", "/")}.html'
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(pdoc.render.html_module(page, pages))
  (folder / 'search.js').write_text(pdoc.render.search_index(pages))


if __name__ == '__main__':
  folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / 'site'
  build(folder)
  print(f'open {folder / "index.html"}')
