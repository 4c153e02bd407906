"""Ready-made recipes, one file a paper."""

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
from sparse24_jax.suggestions import meant

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
  close = meant(name, __all__)
  raise AttributeError(
    f'no recipe {name!r}{f": did you mean {close!r}?" if close else "."} There are {", ".join(__all__)}'
  )
