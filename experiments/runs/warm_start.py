"""Parameters of a finished run for a new one: fine-tuning."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.runs import inspection
import sparse24_jax as s24
from sparse24_jax.rules import leaves_by_path


def read(folder: str | Path, *, into_phase: str) -> tuple[dict[str, np.ndarray], int]:
  """The parameters of a run's newest checkpoint by path, and its step.

  Where the checkpoint is of a sparse phase and the new run begins dense, they are the projected weights: the ones that
  the model computed with.

  Raises:
    CheckpointError: no checkpoint there, or one that cannot be read.
    ValueError: not a run folder.
  """
  loaded = inspection.load(folder)
  params = loaded.state.params
  if (loaded.phase, into_phase) == ('sparse', 'dense'):
    params = s24.project(params, loaded.state.opt_state, loaded.parts.recipe, phase='sparse')
  return {path: np.asarray(leaf) for path, leaf in leaves_by_path(params)}, int(loaded.state.step)


def merge(params: Any, found: Mapping[str, np.ndarray]) -> tuple[Any, list[str]]:
  """A tree with what was found in place of its leaves, and the paths of those that stay as they are.

  An embedding with more rows than there are here gives its first: a mask's token, or positions, that are not needed.

  >>> import numpy as np
  >>> found = {'h/kernel': np.ones((2, 2)), 'head/kernel': np.ones((2, 9))}
  >>> params, new = merge({'h': {'kernel': np.zeros((2, 2))}, 'classifier': {'kernel': np.zeros((2, 3))}}, found)
  >>> params['h']['kernel'].sum(), new
  (np.float64(4.0), ['classifier/kernel'])

  Raises:
    ValueError: nothing is found, or an array of another shape.
  """
  new: list[str] = []

  def take(path: Any, leaf: Any) -> Any:
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if name not in found:
      new.append(name)
      return leaf
    array = found[name]
    if name.endswith('embedding') and array.shape[0] > leaf.shape[0]:
      array = array[: leaf.shape[0]]
    if array.shape != leaf.shape:
      raise ValueError(f'{name} has shape {array.shape} in the run of init_from, and {leaf.shape} in this model')
    # Where and as what the leaf is.
    return jax.device_put(array.astype(leaf.dtype), leaf.sharding) if isinstance(leaf, jax.Array) else array

  merged = jax.tree_util.tree_map_with_path(take, params)
  if len(new) == len(jax.tree.leaves(params)):
    raise ValueError(f'no parameter of this model is in the run of init_from, whose first are {list(found)[:3]}')
  return merged, new
