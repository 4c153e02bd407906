"""Which device holds what: the mesh of a run, the rows of a process, and how parameters and optimizer state are split.

Axes: batches are split over 'data' and 'fsdp', each parameter over 'fsdp', and over 'model' the neurons of feed-forward
layers, so that a device computes with its own neurons and the sums of their outputs are added up. An axis is split only
into whole groups of four, which keeps the search for masks free of communication.
"""

from collections.abc import Sequence
import contextlib
import math
import re
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
from rich.console import Console

from experiments.runs import hosts, terminal
from experiments.runs.experiment import Config
from experiments.runs.models import layers
import sparse24_jax as s24
from sparse24_jax.rules import rule_for

# What a batch is split over.
BATCH = ('data', 'fsdp')
_ROWS = PartitionSpec(BATCH)
# Where a feed-forward matrix has its neurons: the axis that 'model' splits.
_NEURONS = ((re.compile(r'(^|/)mlp/(c_fc|c_gate)/kernel$'), -1), (re.compile(r'(^|/)mlp/c_proj/kernel$'), -2))


class WeightRow(NamedTuple):
  """How one weight is split: path, shape, spec, what a shard holds, and whether its groups stay whole."""

  path: str
  shape: tuple[int, ...]
  spec: str
  shard: tuple[int, ...]
  verdict: str


def sizes(config: Config) -> dict[str, int]:
  """Devices on each axis."""
  return {'data': config.mesh.data, 'fsdp': config.mesh.fsdp, 'model': config.mesh.model}


def make_mesh(config: Config) -> Mesh | None:
  """A mesh of the axes ('data', 'fsdp') over the first devices, with 'model' if that has several; None for one device.

  Raises:
    ValueError: more devices asked for than there are, or fewer than several processes have.
  """
  axes = sizes(config)
  if axes['model'] == 1:
    axes.pop('model')
  wanted, devices, text = math.prod(axes.values()), jax.devices(), ' x '.join(map(str, axes.values()))
  if hosts.several() and wanted != len(devices):
    raise ValueError(
      f'mesh {text} takes {wanted} devices, but {jax.process_count()} processes have {len(devices)} together and all '
      'must be used; set mesh.data, mesh.fsdp and mesh.model'
    )
  if wanted > len(devices):
    raise ValueError(f'mesh {text} needs {wanted} devices, there are {len(devices)}; set mesh.data')
  return None if wanted == 1 else Mesh(np.array(devices[:wanted]).reshape(tuple(axes.values())), tuple(axes))


def rows_of_this_process(mesh: Mesh | None) -> tuple[int, int]:
  """Which share of each batch the devices of this process need, and how many shares there are.

  Raises:
    ValueError: they need rows that do not lie side by side, which a mesh in the order of `jax.devices()` never asks.
  """
  if mesh is None:
    return 0, 1
  shards = math.prod(mesh.shape[axis] for axis in BATCH)
  places = NamedSharding(mesh, PartitionSpec(BATCH)).addressable_devices_indices_map((shards,))
  mine = sorted({place[0].indices(shards)[0] for place in places.values() if place is not None})
  if mine != list(range(mine[0], mine[0] + len(mine))) or mine[0] % len(mine):
    raise ValueError(f'the devices of process {jax.process_index()} need the parts {mine} of a batch in {shards}')
  return mine[0] // len(mine), shards // len(mine)


def state_sharding(mesh: Mesh, tree: Any) -> Any:
  """Shardings for parameters and optimizer state: neurons over 'model', the longest other axis that can be over 'fsdp'.

  The rule sees the end of a path and shapes only, so that a parameter, its moments and its mask are split alike.

  Raises:
    ValueError: neurons that 'model' does not split into whole groups of four; names weight and sizes.
  """
  model, fsdp = mesh.shape.get('model', 1), mesh.shape['fsdp']

  def spec(path: Any, leaf: Any) -> NamedSharding:
    if len(leaf.shape) < 2:
      return NamedSharding(mesh, PartitionSpec())
    name, split = jax.tree_util.keystr(path, simple=True, separator='/'), {}
    for pattern, axis in _NEURONS if model > 1 else ():
      if pattern.search(name):
        if leaf.shape[axis] % (4 * model):
          raise ValueError(
            f'{name} has {leaf.shape[axis]} neurons, which mesh.model {model} does not split into whole groups of '
            f'four; accepted are multiples of {4 * model}'
          )
        split[axis % len(leaf.shape)] = 'model'
    free = [axis for axis, length in enumerate(leaf.shape) if length % (4 * fsdp) == 0 and axis not in split]
    if fsdp > 1 and free:
      split[max(free, key=lambda axis: leaf.shape[axis])] = 'fsdp'
    return NamedSharding(mesh, PartitionSpec(*(split.get(axis) for axis in range(len(leaf.shape))) if split else ()))

  return jax.tree_util.tree_map_with_path(spec, tree)


def rows_stay_split(mesh: Mesh | None, spec: PartitionSpec = _ROWS) -> contextlib.AbstractContextManager[None]:
  """Models that are traced here keep `[B, ...]` split as batches are, by `spec`; see `layers.rows_split`."""
  return layers.rows_split(None if mesh is None else NamedSharding(mesh, spec))


def weight_rows(params: Any, recipe: s24.Recipe) -> list[WeightRow]:
  """How the weights that a recipe makes sparse are split, a row each, of parameters in their shards."""
  rows = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if leaf.ndim < 2 or rule_for(name, recipe) is None:
      continue
    shard = leaf.sharding.shard_shape(leaf.shape)
    verdict = 'split' if any(length % 4 for length in shard[-2:]) else 'whole'
    rows.append(WeightRow(name, leaf.shape, _text(leaf.sharding.spec), shard, verdict))
  return rows


def _text(spec: Sequence[Any]) -> str:
  return ', '.join('-' if axis is None else str(axis) for axis in spec) or 'copied to all'


def show(rows: Sequence[WeightRow]) -> None:
  """Prints how the sparse weights are split over the mesh."""
  if not hosts.first() or not rows:
    return
  shown = []
  for row in rows:
    shape, shard = (' x '.join(map(str, sizes)) for sizes in (row.shape, row.shard))
    shown.append((row.path, shape, row.spec, shard, row.verdict))
  head = ('weight', 'shape', 'split', 'a shard', 'groups of four')
  Console(highlight=False).print(terminal.table(head, shown))
