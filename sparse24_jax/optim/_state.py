"""Optimizers and states, told apart; one of our states in that of an optimizer."""

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
      f'{maker} stands in the chain more than once, or inside of optax.multi_transform, partition or masked, which go'
      ' inside of it; of several optimizers give the state of one' if found
      else f'make it by tx.init(params), where tx holds {maker}; a saved one is restored into the tree that this makes'
    )  # fmt: skip
    raise ValueError(f'the optimizer state holds {len(found)} states of {maker}, expected one: {why}')
  return found[0]


def require_optimizer(name: str, found: Any, example: str) -> None:
  """ValueError unless the argument of this name is a gradient transformation; the state of one is often meant."""
  if not all(callable(getattr(found, method, None)) for method in ('init', 'update')):
    raise ValueError(
      f'{name} must be an optimizer such as {example}, not its state and not a function that makes one; found'
      f' {type(found).__name__}{", which holds one: give its tx" if hasattr(found, "tx") else ""}'
    )
