"""What the program of a step says of `sparse_training`: what an update is given of each weight, and what it makes."""

from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from sparse24_jax.optim._weights import Absent, is_leaf
from sparse24_jax.recipe import PhaseName
from sparse24_jax.rules import map_by_path

# Of weights, gradients and states that an update is given, other ones in a dense phase; of weights whose rule has this
# precision; of what an update makes; of masks that are chosen for a forward from the weights that it reads, and not by
# the optimizer.
Kind = Literal['weights', 'gradients', 'given states', 'fp8', 'updates', 'states', 'chosen']

# Of its counter: the update is of a dense phase, where no weight may have a mask.
DENSE_UPDATE = 'sparse24 dense update'


def name_of(kind: Kind, path: str, phase: PhaseName = 'sparse') -> str:
  """The name, in a traced program, of what an update is given for a sparse weight or makes of it."""
  return f'sparse24 {"dense " if phase == "dense" else ""}{kind} {path}'


def named(kind: Kind, projections: Any, tree: Any, params: Any, phase: PhaseName = 'sparse') -> Any:
  """The tree, whose entries at sparse weights have names in a traced program, by which `check_step` finds them.

  All of an update has them for a weight that is traced, or none. A compiled program knows nothing of it.
  """

  def one(path: str, p: Any, x: Any, w: Any) -> Any:
    traced = not isinstance(p, Absent) and isinstance(w, jax.core.Tracer)
    return checkpoint_name(x, name_of(kind, path, phase)) if traced else x

  return map_by_path(one, projections, tree, params, is_leaf=is_leaf)


def named_one(kind: Kind, path: str, x: Any) -> Any:
  """An array of one weight, with its name as above."""
  return checkpoint_name(x, name_of(kind, path)) if isinstance(x, jax.core.Tracer) else x
