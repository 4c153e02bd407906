"""Plain straight-through training with a magnitude mask."""

from sparse24_jax.policy import DotPolicy
from sparse24_jax.projections import magnitude
from sparse24_jax.recipe import Recipe, Rule
from sparse24_jax.recipes._registry import register


@register()
def ste(path: str) -> Recipe:
  """2:4 by magnitude along the input axis, chosen anew after every step; dense gradients passed straight through.

  Args:
    path: regular expression of the weights to make sparse.

  Raises:
    ValueError: `path` is no regular expression.

  Source: Bengio et al., arXiv 1308.3432 (the estimator); Zhou et al., arXiv 2102.04010, section 3.1 (for N:M).

  >>> import sparse24_jax as s24
  >>> s24.recipes.ste('.*/mlp/.*').refresh_every
  1
  """
  return Recipe('ste', (Rule(path, DotPolicy(magnitude())),))
