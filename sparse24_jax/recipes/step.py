"""STEP: dense until Adam's second moment settles, then sparse with that moment frozen."""

from sparse24_jax.policy import DotPolicy
from sparse24_jax.projections import magnitude
from sparse24_jax.recipe import Phase, Recipe, Rule
from sparse24_jax.recipes._registry import register


@register()
def step(path: str, *, dense_fraction: float = 0.25) -> Recipe:
  """A dense start, then `ste` preconditioned by the second moment that the dense part has learnt.

  Use it with `step_adam(..., phase=phase)` as the inner optimizer: in the sparse phase that one holds the second
  moment. `step_has_settled` tells from its state when the paper would switch.

  Args:
    path: regular expression of the weights to make sparse.
    dense_fraction: share of the steps, at the start, that run dense; the paper switches between 0.1 and 0.5.

  Raises:
    ValueError: `dense_fraction` is not in (0, 1).

  Source: Lu et al., arXiv 2302.01172, algorithm 1.

  >>> import sparse24_jax as s24
  >>> [phase.name for phase in s24.recipes.step('.*/mlp/.*').phases]
  ['dense', 'sparse']
  """
  if not 0 < dense_fraction < 1:
    raise ValueError(f'dense_fraction={dense_fraction} must be in (0, 1)')
  phases = (Phase('dense', dense_fraction), Phase('sparse', 1 - dense_fraction))
  return Recipe('step', (Rule(path, DotPolicy(magnitude())),), phases=phases, freezes_second_moment=True)
