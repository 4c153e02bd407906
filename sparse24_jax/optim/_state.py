"""Finding one of our states in an optimizer state."""

from typing import Any

import jax


def find_state[T](opt_state: Any, kind: type[T], maker: str) -> T:
  """The one state of type `kind` in `opt_state`, however deep it is wrapped; ValueError if there is not one."""
  nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
  found = [node for node in nodes if isinstance(node, kind)]
  if len(found) != 1:
    raise ValueError(f'the optimizer state holds {len(found)} states of {maker}, expected one')
  return found[0]
