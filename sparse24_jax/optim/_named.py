"""What the program of a step says of `sparse_training`: which weights an update is given, and which gradients."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from sparse24_jax.optim._weights import Absent, is_leaf

WEIGHTS, GRADIENTS = 'sparse24 weights', 'sparse24 gradients'


def named(projections: Any, tree: Any, name: str) -> Any:
  """The tree, whose entries at sparse weights have a name in a traced program, by which `check_step` finds them.

  A compiled program knows nothing of it.
  """

  def one(p: Any, x: Any) -> Any:
    return checkpoint_name(x, name) if isinstance(x, jax.core.Tracer) and not isinstance(p, Absent) else x

  return jax.tree.map(one, projections, tree, is_leaf=is_leaf)
