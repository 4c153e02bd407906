"""`project` for tests whose weights are `[stacked..., in, out]` by what they say, without the trace of a model."""

from typing import Any

import sparse24_jax as s24
from sparse24_jax.binding.bound import Bound, BoundWeight, tracked
from sparse24_jax.layout import Layout
from sparse24_jax.rules import leaves_by_path


def standard(recipe: s24.Recipe, params: Any) -> s24.Recipe:
  """The recipe as `bind` returns it for a model that reads its weights so; one that is bound stays as it is."""
  if isinstance(recipe, Bound):
    return recipe
  weights = dict(leaves_by_path(params))
  found = [
    BoundWeight(path, tuple(w.shape), w.dtype, rule, Layout.standard(w.ndim), ())
    for path, rule in tracked(params, recipe).items() if (w := weights[path]).ndim > 1
  ]  # fmt: skip
  return Bound.of(recipe, found)


def project(params: Any, opt_state: Any, recipe: s24.Recipe, **kwargs: Any) -> Any:
  return s24.project(params, opt_state, standard(recipe, params), **kwargs)
