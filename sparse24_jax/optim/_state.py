"""Finding one of our states in an optimizer state."""

from typing import Any

import jax


def states_of[T](opt_state: Any, kind: type[T]) -> list[T]:
  """The states of type `kind` in `opt_state`, however deep it is wrapped."""
  nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
  return [node for node in nodes if isinstance(node, kind)]


def find_state[T](opt_state: Any, kind: type[T], maker: str) -> T:
  """The one of `states_of`; ValueError if there is not one."""
  found = states_of(opt_state, kind)
  if len(found) != 1:
    why = (
      f'{maker} goes around optax.multi_transform, partition or masked, not inside' if found
      else f'make it by tx.init(params), where tx holds {maker}; a saved one is restored into the tree that this makes'
    )  # fmt: skip
    raise ValueError(f'the optimizer state holds {len(found)} states of {maker}, expected one: {why}')
  return found[0]
