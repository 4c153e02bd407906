"""Ready-made recipes, one file a paper."""

from typing import Any

from sparse24_jax.recipes._registry import KNOWN as KNOWN
from sparse24_jax.recipes.dense import dense as dense
from sparse24_jax.recipes.dynamic_sparse_training import rigl as rigl
from sparse24_jax.recipes.dynamic_sparse_training import set_ as set_
from sparse24_jax.recipes.dynamic_sparse_training import static as static
from sparse24_jax.recipes.mixed_sparsity import mixed_sparsity as mixed_sparsity
from sparse24_jax.recipes.neuron_level import neuron_level as neuron_level
from sparse24_jax.recipes.s_ste import s_ste as s_ste
from sparse24_jax.recipes.sr_ste import sr_ste as sr_ste
from sparse24_jax.recipes.ste import ste as ste
from sparse24_jax.recipes.step import step as step
from sparse24_jax.recipes.transposable_srste import transposable_srste as transposable_srste
from sparse24_jax.suggestions import meant

__all__ = [
  'dense', 'mixed_sparsity', 'neuron_level', 'rigl', 's_ste', 'set_', 'sr_ste', 'static', 'ste', 'step',
  'transposable_srste',
]  # fmt: skip


def __getattr__(name: str) -> Any:
  if name.startswith('_'):
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  close = meant(name, __all__)
  raise AttributeError(
    f'no recipe {name!r}{f": did you mean {close!r}?" if close else "."} There are {", ".join(__all__)}'
  )
