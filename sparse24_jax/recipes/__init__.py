"""Ready-made recipes, one file a paper."""

from sparse24_jax.recipes.dense import dense
from sparse24_jax.recipes.s_ste import s_ste
from sparse24_jax.recipes.sr_ste import sr_ste
from sparse24_jax.recipes.ste import ste
from sparse24_jax.recipes.step import step
from sparse24_jax.recipes.transposable_srste import transposable_srste

__all__ = ['dense', 's_ste', 'sr_ste', 'ste', 'step', 'transposable_srste']
