"""Parameters of a finished run for a new one: fine-tuning."""

from collections.abc import Mapping
import dataclasses
from pathlib import Path
import re
from typing import Any

import jax
import numpy as np

from experiments.runs import build, inspection
import sparse24_jax as s24
from sparse24_jax.rules import leaves_by_path

# What decides a model's arithmetic, and no shape of it shows.
_ARITHMETIC = ('num_heads', 'num_kv_heads', 'mlp', 'positions', 'rope_theta', 'scale_embeddings')
_BLOCK = re.compile(r'(.*/)?h(_\d+)?/')


@dataclasses.dataclass(frozen=True)
class Source:
  """What a new run starts from.

  Attributes:
    params: by path.
    step: after which they were saved.
    settings: of the run that they are of, see `settings_of`.
    spare_rows: at most how many rows of its embedding stand for no token of its text: a mask's, and those that fill up.
  """

  params: Mapping[str, np.ndarray]
  step: int
  settings: Mapping[str, Any]
  spare_rows: int = 1


def settings_of(parts: build.Parts) -> dict[str, Any]:
  """What two runs have to agree in for the parameters of one to mean the same in the other, as far as they have it."""
  data, model = parts.config.data, parts.model.config
  # A trained tokenizer is that of its corpus.
  tokenizer = f'{data.tokenizer} of {data.corpus}' if data.tokenizer.startswith('bpe') else data.tokenizer
  found = {f'model.{name}': getattr(model, name) for name in _ARITHMETIC if hasattr(model, name)}
  return {'data.tokenizer': tokenizer, **found}


def read(folder: str | Path, *, into_phase: str) -> Source:
  """The parameters of a run's newest checkpoint.

  Where the checkpoint is of a sparse phase and the new run begins dense, they are the projected weights: the ones that
  the model computed with.

  Raises:
    CheckpointError: no checkpoint there, or one that cannot be read.
    ValueError: not a run folder.
  """
  loaded = inspection.load(folder)
  params = loaded.state.params
  if (loaded.phase, into_phase) == ('sparse', 'dense'):
    recipe = build.bound_recipe(loaded.parts, params)
    params = s24.project(params, loaded.state.opt_state, recipe, phase='sparse')
  by_path = {path: np.asarray(leaf) for path, leaf in leaves_by_path(params)}
  # A vocabulary with a mask token, filled up to a multiple, has at most so many rows beyond the vocabulary.
  spare = max(1, loaded.parts.config.vocab_multiple)
  return Source(by_path, int(loaded.state.step), settings_of(loaded.parts), spare)


def merge(params: Any, source: Source, settings: Mapping[str, Any]) -> tuple[Any, list[str], list[str]]:
  """A tree with what was found in place of its leaves, the paths of those that stay as they are, and what is left out.

  An embedding with more rows than there are here gives its first: a mask's token, or positions, that are not needed.

  >>> import numpy as np
  >>> source = Source({'h/kernel': np.ones((2, 2)), 'head/kernel': np.ones((2, 9))}, 10, {'model.num_heads': 2})
  >>> params = {'h': {'kernel': np.zeros((2, 2))}, 'classifier': {'kernel': np.zeros((2, 3))}}
  >>> params, new, left_out = merge(params, source, {'model.num_heads': 2})
  >>> params['h']['kernel'].sum(), new, left_out
  (np.float64(4.0), ['classifier/kernel'], ['head/kernel'])

  Args:
    params: of the new run.
    source: of the other one.
    settings: of the new run.

  Raises:
    ValueError: nothing is found, an array of another shape, another vocabulary, a block of which a part is not here,
      or settings with which the parameters mean something else.
  """
  new: list[str] = []
  for name in source.settings.keys() & settings.keys():
    if source.settings[name] != settings[name]:
      raise ValueError(
        f'{name} is {source.settings[name]!r} in the run of init_from, and {settings[name]!r} here, where its'
        f' parameters would mean something else: --set {name}=... as there'
      )

  def take(path: Any, leaf: Any) -> Any:
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if name not in source.params:
      new.append(name)
      return leaf
    array = source.params[name]
    if name.endswith('embedding') and array.shape[1:] == leaf.shape[1:] and len(array) > len(leaf):
      if not _of_positions(name) and len(array) - len(leaf) > source.spare_rows:
        raise ValueError(
          f'{name} has {len(array)} rows in the run of init_from, and {len(leaf)} in this model: more than the'
          f' {source.spare_rows} that may stand for no token, so that it is of another vocabulary'
        )
      array = array[: len(leaf)]
    if array.shape != leaf.shape:
      raise ValueError(f'{name} has shape {array.shape} in the run of init_from, and {leaf.shape} in this model')
    # Where and as what the leaf is.
    return jax.device_put(array.astype(leaf.dtype), leaf.sharding) if isinstance(leaf, jax.Array) else array

  merged = jax.tree_util.tree_map_with_path(take, params)
  if len(new) == len(jax.tree.leaves(params)):
    first = list(source.params)[:3]
    raise ValueError(f'no parameter of this model is in the run of init_from, whose first are {first}')
  here = dict(leaves_by_path(params))
  left_out = [name for name in source.params if name not in here]
  if blocks := [name for name in left_out if _BLOCK.match(name)]:
    raise ValueError(
      f'{blocks[0]} is in the run of init_from, and not in this model, with {len(blocks) - 1} more of its blocks: give'
      ' this model the layers of that one, model.num_layers, model.bias, model.qk_norm and model.scan_layers say'
    )
  return merged, new, left_out


def _of_positions(path: str) -> bool:
  return path.split('/')[-2].startswith('wpe')
