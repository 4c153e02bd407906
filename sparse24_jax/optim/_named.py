"""What the program of a step says of `sparse_training`: what an update is given of each weight, and what it makes."""

from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from sparse24_jax.optim._weights import Absent, is_leaf
from sparse24_jax.rules import map_by_path

Kind = Literal['weights', 'gradients', 'updates', 'states']

# Of its counter: the update is of a dense phase, in which no weight has a name, as nothing of a gradient is checked.
DENSE_UPDATE = 'sparse24 dense update'


def name_of(kind: Kind, path: str) -> str:
  """The name, in a traced program, of what an update is given for a sparse weight or makes of it."""
  return f'sparse24 {kind} {path}'


def named(kind: Kind, projections: Any, tree: Any) -> Any:
  """The tree, whose entries at sparse weights have names in a traced program, by which `check_step` finds them.

  A compiled program knows nothing of it.
  """

  def one(path: str, p: Any, x: Any) -> Any:
    sparse = not isinstance(p, Absent) and isinstance(x, jax.core.Tracer)
    return checkpoint_name(x, name_of(kind, path)) if sparse else x

  return map_by_path(one, projections, tree, is_leaf=is_leaf)
