"""SR-STE: straight-through training with a decay on what is pruned."""

from collections.abc import Callable
from typing import Any, Literal

from sparse24_jax.policy import DotPolicy
from sparse24_jax.projections import magnitude
from sparse24_jax.recipe import Recipe, Rule
from sparse24_jax.recipes._registry import register


@register(dict(masked_decay=0.0))
def sr_ste(
  path: str, *, masked_decay: float | Callable[[Any], Any], decay_on: Literal['gradients', 'weights'] = 'weights'
) -> Recipe:
  """`ste` with lambda (1 - M) W pulling pruned weights to zero.

  Args:
    path: regular expression of the weights to make sparse.
    masked_decay: the factor lambda; the paper uses 2e-4, with SGD.
    decay_on: `'weights'`: W <- W - lr (step + lambda (1 - M) W), which `sparse_training` does given the learning
      rate. `'gradients'` lets the moments of Adam see it. The two are one under SGD, where the paper has it.

  Raises:
    ValueError: `path` is no regular expression, or `masked_decay` or `decay_on` is not as above.

  Source: Zhou et al., arXiv 2102.04010, equation 9.

  >>> import sparse24_jax as s24
  >>> s24.recipes.sr_ste('.*/mlp/.*', masked_decay=2e-4).decay_on
  'weights'
  """
  return Recipe('sr_ste', (Rule(path, DotPolicy(magnitude())),), masked_decay=masked_decay, decay_on=decay_on)
