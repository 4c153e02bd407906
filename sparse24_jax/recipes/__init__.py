"""Ready-made recipes, one file a paper."""

import difflib
from typing import Any

from sparse24_jax.recipes._arguments import named
from sparse24_jax.recipes.dense import dense
from sparse24_jax.recipes.dynamic_sparse_training import rigl, set_, static
from sparse24_jax.recipes.mixed_sparsity import mixed_sparsity
from sparse24_jax.recipes.neuron_level import neuron_level
from sparse24_jax.recipes.s_ste import s_ste
from sparse24_jax.recipes.sr_ste import sr_ste
from sparse24_jax.recipes.ste import ste
from sparse24_jax.recipes.step import step
from sparse24_jax.recipes.transposable_srste import transposable_srste

# What papers call a recipe.
_PAPERS = {'fst': 'transposable_srste', 'mst': 'mixed_sparsity', 'sste': 's_ste', 'srste': 'sr_ste', 'set': 'set_'}

dense = named(dense)
rigl = named(rigl)
set_ = named(set_)
static = named(static)
mixed_sparsity = named(mixed_sparsity)
neuron_level = named(neuron_level)
s_ste = named(s_ste)
sr_ste = named(sr_ste)
ste = named(ste)
step = named(step)
transposable_srste = named(transposable_srste)

__all__ = [
  'dense',
  'mixed_sparsity',
  'neuron_level',
  'rigl',
  's_ste',
  'set_',
  'sr_ste',
  'static',
  'ste',
  'step',
  'transposable_srste',
]


def __getattr__(name: str) -> Any:
  if name.startswith('_'):
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  meant = _PAPERS.get(name.lower().replace('-', '_')) or next(iter(difflib.get_close_matches(name, __all__, 1)), None)
  raise AttributeError(
    f'no recipe {name!r}{f": did you mean {meant!r}?" if meant else "."} There are {", ".join(__all__)}'
  )
