"""Looking into the checkpoint of a run: what each sparse weight is like, and the loss it gives."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from experiments.runs import build, programs, records, restored
from experiments.runs.checkpoint import Checkpoints, Restored
from experiments.runs.checkpoint_errors import RemovedError
from experiments.runs.experiment import Config
import sparse24_jax as s24

# To read the newest checkpoint while its run replaces it.
_ATTEMPTS = 5


class Loaded(NamedTuple):
  """A run's checkpoint, ready to use.

  Attributes:
    parts: the parts of the run.
    state: parameters and optimizer state.
    phase: phase of the step that made the checkpoint.
  """

  parts: build.Parts
  state: programs.TrainState
  phase: str


class WeightRow(NamedTuple):
  """One sparse weight: path, shape, kept share, flip rate, and whether the weight the forward sees is 2:4."""

  path: str
  shape: tuple[int, ...]
  density: float
  flip_rate: float
  is_24: bool


def load(folder: str | Path, *, step: int | None = None, data: Any = None) -> Loaded:
  """Loads a checkpoint of a run folder.

  Args:
    folder: the run's folder.
    step: which checkpoint; None is the newest.
    data: batches in place of the configured corpus.

  Raises:
    CheckpointError: no checkpoint there, or one that cannot be read.
    ValueError: not a run folder.
  """
  config: Config = ConfigDict(records.read_config(folder))
  config.mesh = ConfigDict({'data': 1, 'fsdp': 1, 'model': 1})
  config.accumulate = 1
  if config.model.get('attention') == 'cudnn' and jax.default_backend() != 'gpu':
    config.model.attention = 'xla'
  parts = build.make_parts(config, data=data)
  target = jax.eval_shape(lambda: programs.init_state(parts))
  found = _restore(Path(folder) / 'checkpoints', target, step)
  restored.require_ours(Path(folder) / 'checkpoints', found, parts.recipe)
  state = programs.TrainState(jnp.int32(found.meta['step']), found.params, found.opt_state)
  return Loaded(parts, state, found.meta['phase'])


def _restore(directory: Path, target: programs.TrainState, step: int | None) -> Restored:
  """Reads a checkpoint of a run that may be training, and so may remove what is being read."""
  for attempt in range(_ATTEMPTS):
    with Checkpoints(directory, read_only=True) as checkpoints:
      try:
        meta = checkpoints.read_meta(step)
        return checkpoints.restore(target.params, target.opt_state, identity=meta['identity'], step=meta['step'])
      except RemovedError:
        if step is not None or attempt == _ATTEMPTS - 1:
          raise
  raise AssertionError('the last attempt returns or raises')


def evaluate(loaded: Loaded, *, num_batches: int | None = None) -> dict[str, float]:
  """Validation loss and what the task measures, in the phase of the checkpoint; for language perplexity and bits."""
  count = loaded.parts.config.eval_batches if num_batches is None else num_batches
  if count < 1:
    raise ValueError(f'validation takes 1 batch or more, found {count}')
  _, attention = build.phase_of(loaded.parts, int(loaded.state.step) - 1)
  parts, state = loaded.parts, loaded.state
  found = programs.make_eval(parts, loaded.phase, attention, num_batches=count)(state)
  values = {name: float(value) for name, value in found.items()}
  if 'vocab_size' in parts.task.sizes(parts.data) and 'classes' not in parts.task.sizes(parts.data):
    values |= {'perplexity': float(np.exp(values['loss'])), 'bits_per_token': float(values['loss'] / np.log(2))}
  if parts.task.score is not None:
    values |= parts.task.score(programs.make_predict(parts, loaded.phase, attention, state), parts.data, count)
  return values


def weight_table(loaded: Loaded) -> list[WeightRow]:
  """One row a sparse weight, of the values that the forward of the checkpoint's phase reads."""
  _, params, opt_state = loaded.state
  recipe = build.bound_recipe(loaded.parts, params)
  weights = _by_path(s24.project(params, opt_state, recipe, phase=loaded.phase))
  rows = []
  for path, rate in s24.get_flip_rate(opt_state).per_weight.items():
    w = weights[path]
    try:
      s24.verify24(w)
    except ValueError:
      is_24 = False
    else:
      is_24 = True
    rows.append(WeightRow(path, w.shape, float(jnp.mean(w != 0)), float(jnp.mean(rate)), is_24))
  return rows


def _by_path(tree: Any) -> Mapping[str, jax.Array]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}
