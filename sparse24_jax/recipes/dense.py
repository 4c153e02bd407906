"""No sparsity: the baseline."""

from sparse24_jax.policy import DotPolicy
from sparse24_jax.projection import Projection
from sparse24_jax.projections import magnitude
from sparse24_jax.recipe import Phase, Recipe, Rule
from sparse24_jax.recipes._registry import register


@register(dict(watch=magnitude()))
def dense(path: str | None = None, *, watch: Projection | None = None, refresh_every: int = 1) -> Recipe:
  """Plain training, from start to end.

  Args:
    path: weights whose would-be masks to follow, or None.
    watch: the projection whose mask is followed, in the optimizer state alone; needed with `path`. The flip rate of
      a dense run is the yardstick for that of a sparse one.
    refresh_every: optimizer steps between two of these masks.

  Raises:
    ValueError: one of `path` and `watch` without the other.

  >>> import sparse24_jax as s24
  >>> s24.recipes.dense().rules
  ()
  """
  if (path is None) != (watch is None):
    watched = watch.name if watch else None
    raise ValueError(f'path={path!r} and watch={watched!r}: give both or neither, as watch a projection: magnitude()')
  rules = () if path is None else (Rule(path, DotPolicy(watch)),)
  return Recipe('dense', rules, refresh_every=refresh_every, phases=(Phase('dense', 1.0),))
