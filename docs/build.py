"""Writes the reference pages: `python docs/build.py [folder]`, by default `site/`.

Pages come from the docstrings. What they show and how is in `templates/`, which extends that of pdoc.
"""

from pathlib import Path
import sys

import pdoc
import pdoc.render

ROOT = Path(__file__).resolve().parent.parent
# In pdoc's own terms: `!` takes away what matches. Some functions are named like the files that hold them.
PAGES = (
  'sparse24_jax', r'!sparse24_jax\.', 'sparse24_jax.linen', 'sparse24_jax.nnx',
  'sparse24_jax.recipes', r'!sparse24_jax\.recipes\.',
  *(f'pallas_kernels.{op}.api' for op in (
    'sparse_matmul', 'pack', 'vnm', 'gated_activation', 'transposable_mask', 'quantize', 'sparse_attention',
  )),
  'pallas_kernels.formats', 'pallas_kernels.sparse_matmul.operand', 'pallas_kernels.vnm.format',
)  # fmt: skip


def build(folder: Path) -> None:
  """Writes one page a module, an index, and what the search needs."""
  pdoc.render.configure(docformat='google', template_directory=ROOT / 'docs' / 'templates')
  pdoc.pdoc(*PAGES, output_directory=folder)


if __name__ == '__main__':
  folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / 'site'
  build(folder)
  print(f'open {folder / "index.html"}')
