"""Checkpoints of everything a run needs to go on bit for bit, and refusals of those that would not.

One checkpoint is one folder ``<directory>/<step>`` with three Orbax items: ``params`` (the dense parameters under their
own names, so that the plain model loads them), ``opt_state`` (with masks, scales and counters) and ``meta`` (JSON:
step, data position, the run's identity with the seed of its keys, checksums). Orbax writes to a temporary folder and
renames it, and removes an old checkpoint only after the new one is complete, so a failed save leaves the last good one
as it was.
"""

from collections.abc import Mapping
from pathlib import Path
import shutil
from typing import Any, NamedTuple
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

FORMAT = 1
_ITEMS = ('params', 'opt_state', 'meta')


class CheckpointError(RuntimeError):
  """A checkpoint cannot be written, read, or used by this run; the message says what to do."""


class Restored(NamedTuple):
  """A checkpoint that was read.

  Attributes:
    params: parameter tree.
    opt_state: optimizer state, with the structure of the abstract tree given.
    meta: what `Checkpoints.save` was given as `meta`, with 'step' added.
  """

  params: Any
  opt_state: Any
  meta: dict[str, Any]


def _is_key(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _encode(tree: Any) -> Any:
  """Typed keys as their data, which is what goes to disk."""
  return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, tree)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
  if _is_key(leaf):
    return jax.eval_shape(jax.random.key_data, leaf)
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, 'sharding', None))


def _checksums(tree: Any) -> dict[str, int]:
  """CRC-32 of every array that this process holds whole, by path."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): zlib.crc32(np.ascontiguousarray(leaf))
    for path, leaf in leaves
    if leaf.is_fully_addressable
  }


def differences(found: Any, wanted: Any, prefix: str = '') -> list[str]:
  """Describes each field in which two JSON-like values differ, one line a field.

  >>> differences({'recipe': {'name': 'ste'}}, {'recipe': {'name': 'dense'}})
  ["recipe.name: 'ste' in the checkpoint, 'dense' in this run"]
  """
  lists = [v for v in (found, wanted) if isinstance(v, list) and all(isinstance(entry, Mapping) for entry in v)]
  if len(lists) == 2 and len(found) == len(wanted):  # such as rules
    found, wanted = (dict(enumerate(entries)) for entries in lists)
  if isinstance(found, Mapping) and isinstance(wanted, Mapping):
    lines = []
    for key in sorted({*found, *wanted}):
      lines += differences(found.get(key), wanted.get(key), f'{prefix}.{key}' if prefix else key)
    return lines
  return [] if found == wanted else [f'{prefix}: {found!r} in the checkpoint, {wanted!r} in this run']


class Checkpoints:
  """The checkpoints of one run.

  Args:
    directory: folder that holds one sub-folder a checkpoint; made when missing.
    keep: how many of the newest to keep.
    read_only: never create, delete or write anything.
  """

  def __init__(self, directory: str | Path, *, keep: int = 2, read_only: bool = False):
    self.directory = Path(directory).resolve()
    if read_only and not self.directory.is_dir():
      raise CheckpointError(f'{self.directory} does not exist; give the folder of a run that has saved a checkpoint')
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      create=not read_only,
      read_only=read_only,
      cleanup_tmp_directories=not read_only,
      # The step that follows donates these very buffers, and a failed save must stop the run that owns it.
      enable_async_checkpointing=False,
    )
    self._manager = ocp.CheckpointManager(self.directory, options=options, item_names=_ITEMS)

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, *_: Any) -> None:
    self._manager.close()

  def latest(self) -> int | None:
    """Step of the newest complete checkpoint, or None."""
    return self._manager.latest_step()

  def save(self, step: int, params: Any, opt_state: Any, meta: Mapping[str, Any]) -> None:
    """Writes a checkpoint.

    Args:
      step: optimizer steps done.
      params: parameter tree.
      opt_state: optimizer state.
      meta: JSON-able; must hold 'identity', which `restore` compares.

    Raises:
      CheckpointError: the write failed (a full disk, a missing permission); earlier checkpoints are untouched.
    """
    params, opt_state = _encode(params), _encode(opt_state)
    sums = _checksums({'params': params, 'opt_state': opt_state})
    args = ocp.args.Composite(
      params=ocp.args.StandardSave(params),
      opt_state=ocp.args.StandardSave(opt_state),
      meta=ocp.args.JsonSave({**meta, 'format': FORMAT, 'step': step, 'checksums': sums}),
    )
    good = self._manager.all_steps()
    try:
      self._manager.save(step, args=args, force=True)
    except Exception as error:  # Orbax raises whatever the file system or TensorStore did.
      self._remove_unfinished()
      kept = f'the checkpoint of step {max(good)} is intact' if good else 'there is no earlier checkpoint'
      free = shutil.disk_usage(self.directory).free / 2**20
      raise CheckpointError(
        f'could not save step {step} to {self.directory} ({free:.0f} MiB free there): {_first_line(error)}; {kept}. '
        'Free some space or fix the folder and start the same command again to resume.'
      ) from error

  def read_meta(self, step: int | None = None) -> dict[str, Any]:
    """Reads the JSON part of a checkpoint, by default the newest.

    Raises:
      CheckpointError: there is none, or it is corrupted or not one of ours.
    """
    step = self._step(step)
    try:
      meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))['meta']
    except Exception as error:
      raise self._unreadable(step, _first_line(error)) from error
    if not isinstance(meta, dict) or not {'identity', 'checksums', 'step'} <= set(meta):
      raise self._unreadable(step, 'its meta item was not written by this program')
    if meta.get('format') != FORMAT:
      raise self._unreadable(step, f'its format is {meta.get("format")!r}, this program reads {FORMAT}')
    return meta

  def restore(self, params: Any, opt_state: Any, *, identity: Mapping[str, Any], step: int | None = None) -> Restored:
    """Reads a checkpoint into the shapes, dtypes and shardings of the given (abstract or real) trees.

    Args:
      params: parameter tree to fill.
      opt_state: optimizer state to fill.
      identity: JSON-able description of this run; must equal the one saved.
      step: which checkpoint; None is the newest.

    Raises:
      CheckpointError: none there, corrupted, foreign, or of a run whose identity differs; names the fields.
    """
    step = self._step(step)
    meta = self.read_meta(step)
    if lines := differences(meta['identity'], identity):
      raise CheckpointError(
        f'{self.directory / str(step)} belongs to a different run:\n  ' + '\n  '.join(lines) + '\n'
        'Change these settings back, or train in another folder.'
      )
    abstract = jax.tree.map(_abstract, (params, opt_state))
    args = ocp.args.Composite(
      params=ocp.args.StandardRestore(abstract[0]), opt_state=ocp.args.StandardRestore(abstract[1])
    )
    try:
      items = self._manager.restore(step, args=args)
    except Exception as error:
      raise self._unreadable(step, _first_line(error)) from error
    sums = _checksums({'params': items['params'], 'opt_state': items['opt_state']})
    if wrong := [path for path, value in sums.items() if meta['checksums'].get(path) != value]:
      raise self._unreadable(step, f'checksums differ at {", ".join(wrong[:3])} ({len(wrong)} of {len(sums)} arrays)')
    decoded = jax.tree.map(
      lambda leaf, wanted: jax.random.wrap_key_data(leaf) if _is_key(wanted) else leaf,
      (items['params'], items['opt_state']),
      (params, opt_state),
    )
    return Restored(decoded[0], decoded[1], meta)

  def _step(self, step: int | None) -> int:
    steps = sorted(self._manager.all_steps())
    if step is None and steps:
      return steps[-1]
    if step is None or step not in steps:
      what = 'no checkpoint' if step is None else f'no checkpoint of step {step} (there are: {steps})'
      raise CheckpointError(f'{self.directory} has {what}')
    return step

  def _unreadable(self, step: int, why: str) -> CheckpointError:
    older = [s for s in self._manager.all_steps() if s < step]
    hint = f' to go on from step {max(older)}' if older else ' to start from the beginning'
    return CheckpointError(
      f'checkpoint {self.directory / str(step)} cannot be read (corrupted, or not of this program): {why}. '
      f'Nothing was changed; remove that folder{hint}.'
    )

  def _remove_unfinished(self) -> None:
    for folder in self.directory.glob('*.orbax-checkpoint-tmp*'):
      shutil.rmtree(folder, ignore_errors=True)


def _first_line(error: BaseException) -> str:
  text = str(error).strip().splitlines()
  return f'{type(error).__name__}: {text[0][:300] if text else ""}'
