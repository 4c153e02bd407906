"""Meshes of the benchmarks: how they hold weights, moments and masks, and what their devices exchange."""

from collections.abc import Callable
import functools
import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from experiments.runs import meshes

TOKENS, WHOLE = PartitionSpec('data'), PartitionSpec()
SHARDINGS = ('whole', 'fsdp')
_TILE = 64  # a shard of a sparse weight is packed where it lies if it holds whole tiles of positions


def make_mesh(devices: int) -> Mesh:
  """A mesh of the first devices, all along 'data', whose axis XLA divides by itself."""
  return Mesh(np.array(jax.devices()[:devices]), ('data',))


def place(mesh: Mesh, tree: Any, spec: PartitionSpec) -> Any:
  """The arrays of a tree on the mesh."""
  return jax.device_put(tree, NamedSharding(mesh, spec))


def state_shardings(mesh: Mesh, sharding: str, tree: Any) -> Any:
  """How a mesh holds the arrays of a training state, or their shapes.

  Args:
    mesh: of one axis, 'data'.
    sharding: 'whole' is everything on every device. 'fsdp' divides matrices, and what has an entry for each of theirs,
      along one of the last two axes: the larger of those that give every device whole tiles, else of those that divide
      at all.
    tree: the state, in which arrays are found by the names of parameters.
  """

  def one(path: Any, a: Any) -> NamedSharding:
    matrix = a.ndim >= 2 and getattr(path[-1], 'key', None) in ('kernel', 'embedding')
    fit = [axis for axis in (-2, -1) if matrix and a.shape[axis] % mesh.size == 0]
    if sharding == 'whole' or not fit:
      return NamedSharding(mesh, WHOLE)
    axis = max(fit, key=lambda axis: (a.shape[axis] % (_TILE * mesh.size) == 0, a.shape[axis])) + a.ndim
    return NamedSharding(mesh, PartitionSpec(*(None,) * axis, 'data'))

  return jax.tree_util.tree_map_with_path(one, tree)


def keep_tokens_divided(mesh: Mesh, f: Callable[..., Any]) -> Callable[..., Any]:
  """`f` of models that keep `[B, T, ...]` divided along B, see `meshes.rows_stay_split`."""

  @functools.wraps(f)
  def kept(*args: Any) -> Any:
    with meshes.rows_stay_split(mesh, TOKENS):
      return f(*args)

  return kept


def communication(text: str) -> dict[str, int]:
  """How often a compiled program lets devices exchange arrays, by the kind of exchange; in a loop's body once.

  >>> communication('%a = f32[2] all-reduce(%b)\\n%c = (f32[2], f32[4]) all-gather-start(%d)')
  {'all-reduce': 1, 'all-gather': 1}
  """
  kinds = re.findall(r' = .*? (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(', text)
  return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
