"""Checkpoints of everything a run needs to go on bit for bit, and refusals of those that would not.

One checkpoint is one folder ``<directory>/<step>`` with three Orbax items: ``params`` (the dense parameters under their
own names, so that the plain model loads them), ``opt_state`` (with masks, scales and counters) and ``meta`` (JSON:
step, data position, the run's identity with the seed of its keys, checksums of all of it). Orbax writes to a temporary
folder and renames it, and removes an old checkpoint only after the new one is complete, so a failed save leaves the
last good one as it was. A checkpoint of any mesh is read onto any other.
"""

from collections.abc import Callable, Collection, Mapping
import json
from pathlib import Path
import shutil
import sys
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from experiments.runs import hosts, sums
from experiments.runs.checkpoint_errors import (
  CheckpointError,
  differences,
  DifferentRunError,
  differing,
  first_line,
  is_damage,
  NotFiniteError,
  RemovedError,
  UnreadableError,
)
from experiments.runs.checkpoint_items import abstract, checksum, decode, encode

# Raised with every change of what a state holds: an older checkpoint is refused, never taken for damage.
FORMAT = 4
_ITEMS = ('params', 'opt_state', 'meta')


class Restored(NamedTuple):
  """A checkpoint that was read.

  Attributes:
    params: parameter tree.
    opt_state: optimizer state, with the structure of the abstract tree given.
    meta: what `Checkpoints.save` was given as `meta`, with 'step' added.
    changed: fields of the identity that differ and were allowed to: (in the checkpoint, in this run).
  """

  params: Any
  opt_state: Any
  meta: dict[str, Any]
  changed: Mapping[str, tuple[Any, Any]]


def _reader_of_one(directory: Path) -> ocp.CheckpointManager:
  """A manager that reads in this process alone.

  A manager of all processes ends a read at a barrier: if one process could not read, the others would wait for it.
  """
  me = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(
    primary_host=me, active_processes={me}, barrier_sync_key_prefix=f'reader_{me}'
  )
  options = ocp.CheckpointManagerOptions(
    create=False, read_only=True, enable_async_checkpointing=False, multiprocessing_options=alone
  )
  return ocp.CheckpointManager(directory, options=options, item_names=_ITEMS)


class Checkpoints:
  """The checkpoints of one run.

  Args:
    directory: folder that holds one sub-folder a checkpoint; made when missing.
    keep: how many of the newest to keep.
    read_only: never create, delete or write anything.
    asynchronous: `save` returns when the arrays are copied and writes while the run goes on; a failed write is an
      error of the next call.
  """

  def __init__(self, directory: str | Path, *, keep: int = 2, read_only: bool = False, asynchronous: bool = False):
    self.directory = Path(directory).resolve()
    if read_only and not self.directory.is_dir():
      raise CheckpointError(f'{self.directory} does not exist; give the folder of a run that has saved a checkpoint')
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      create=not read_only,
      read_only=read_only,
      cleanup_tmp_directories=not read_only,
      enable_async_checkpointing=asynchronous,
    )
    self._manager = ocp.CheckpointManager(self.directory, options=options, item_names=_ITEMS)
    self._reader = _reader_of_one(self.directory) if hosts.several() else self._manager
    self._read_only, self._asynchronous = read_only, asynchronous
    self._writing: int | None = None

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
    try:
      if kind is None or not hosts.several():  # Or it would wait for a process that is lost.
        self.wait()
    except CheckpointError:
      if kind is None:  # Otherwise what ended the run is told, and this is what the next start finds.
        raise
    finally:
      if kind is None or not hosts.several():
        self._manager.close()

  def latest(self) -> int | None:
    """Step of the newest complete checkpoint, or None."""
    return self._manager.latest_step()

  def steps(self) -> list[int]:
    """Steps of all checkpoints, in order."""
    return sorted(self._manager.all_steps())

  def save(self, step: int, params: Any, opt_state: Any, meta: Mapping[str, Any]) -> None:
    """Writes a checkpoint, unless its numbers are bad.

    Args:
      step: optimizer steps done.
      params: parameter tree.
      opt_state: optimizer state.
      meta: JSON-able; must hold 'identity', which `restore` compares.

    Raises:
      NotFiniteError: a parameter or a part of the optimizer state is not finite; names them, writes nothing.
      CheckpointError: the write failed (a full disk, a missing permission), or that of the save before; earlier
        checkpoints are untouched.
    """
    self.wait()
    items = {'params': encode(params), 'opt_state': encode(opt_state)}
    seen = sums.look(items)
    if bad := seen.not_finite:
      some = f'{", ".join(bad[:3])} ({len(bad)} of {len(seen.sums)} arrays)'
      raise NotFiniteError(f'{some} are not finite at step {step}')
    meta = json.loads(json.dumps({**meta, 'format': FORMAT, 'step': step, 'checksums': seen.sums}))
    args = ocp.args.Composite(
      **{name: ocp.args.StandardSave(item) for name, item in items.items()},
      meta=ocp.args.JsonSave({**meta, 'checksum': checksum(meta)}),
    )
    self._writing = step
    try:
      self._manager.save(step, args=args, force=True)
    except Exception as error:  # Orbax raises whatever the file system or TensorStore did.
      raise self._not_saved(error) from error
    if not self._asynchronous:
      self.wait()

  def wait(self) -> None:
    """Waits until what `save` began is on the disk.

    Raises:
      CheckpointError: it could not be written.
    """
    if self._writing is None:
      return
    try:
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
    except Exception as error:
      raise self._not_saved(error) from error
    self._writing = None

  def _not_saved(self, error: Exception) -> CheckpointError:
    step, self._writing = self._writing, None
    if hosts.first():
      for folder in self.directory.glob('*.orbax-checkpoint-tmp*'):
        shutil.rmtree(folder, ignore_errors=True)
    self._manager.reload()  # The manager took the step for saved.
    good = self.steps()
    kept = f'the checkpoint of step {max(good)} is intact' if good else 'there is no earlier checkpoint'
    free = shutil.disk_usage(self.directory).free / 2**20
    return CheckpointError(
      f'could not save step {step} to {self.directory} ({free:.0f} MiB free there): {first_line(error)}; {kept}. '
      'Free some space or fix the folder and start the same command again to resume.'
    )

  def set_aside(self, steps: Collection[int]) -> Path:
    """Moves checkpoints out of the way, to a folder beside this one, where nothing reads or removes them."""
    aside = self.directory.with_name(f'{self.directory.name}-set-aside')

    def move() -> None:
      aside.mkdir(exist_ok=True)
      for step in steps:
        taken = len(list(aside.glob(f'{step}*')))
        (self.directory / str(step)).rename(aside / (f'{step}-{taken}' if taken else str(step)))

    hosts.by_first(f'move checkpoints to {aside}', move)
    self._manager.reload()
    return aside

  def read_meta(self, step: int | None = None) -> dict[str, Any]:
    """Reads the JSON part of a checkpoint, by default the newest.

    Raises:
      UnreadableError: it is corrupted or not one of ours.
      CheckpointError: there is none, or it has another format.
    """
    step = self._step(step)
    meta = self._read(step, ocp.args.Composite(meta=ocp.args.JsonRestore()))['meta']
    wanted = {'identity', 'checksums', 'step', 'format'}
    if not (isinstance(meta, dict) and wanted <= set(meta) and isinstance(meta['checksums'], dict)):
      raise self._unreadable(step, 'its meta item was not written by this program')
    if meta.get('checksum') != checksum(meta) or meta['step'] != step:
      raise self._unreadable(step, 'the checksum of its meta item differs')
    if meta['format'] != FORMAT:
      raise CheckpointError(
        f'checkpoint {self.directory / str(step)} has format {meta["format"]!r}, this program reads {FORMAT}. It is '
        'not damaged, and nothing was changed; go on with the version that wrote it, or train in another folder.'
      )
    return meta

  def restore(
    self,
    params: Any,
    opt_state: Any,
    *,
    identity: Mapping[str, Any],
    step: int | None = None,
    may_differ: Callable[[str], bool] = lambda _: False,
  ) -> Restored:
    """Reads a checkpoint into the shapes, dtypes and shardings of the given (abstract or real) trees.

    Args:
      params: parameter tree to fill; leaves without a sharding go to the first device of this process.
      opt_state: optimizer state to fill.
      identity: JSON-able description of this run; must equal the one saved.
      step: which checkpoint; None is the newest.
      may_differ: whether a field of the identity, 'optimizer.peak_lr' say, may be another.

    Raises:
      UnreadableError: corrupted or foreign.
      OSError, MemoryError, JaxRuntimeError: it may be good, but could not be read; so it is with a CheckpointError.
      DifferentRunError: of a run whose identity differs; names the fields.
      CheckpointError: none there.
    """
    step = self._step(step)
    meta = self._in_all(step, lambda: self.read_meta(step))
    changed = differing(meta['identity'], identity)
    if refused := [field for field in changed if not may_differ(field)]:
      raise DifferentRunError(
        f'{self.directory / str(step)} belongs to a different run:\n  '
        + '\n  '.join(differences(meta['identity'], identity))
        + '\nChange these settings back, or train in another folder.',
        refused,
      )
    wanted = jax.tree.map(abstract, {'params': params, 'opt_state': opt_state})
    args = ocp.args.Composite(**{name: ocp.args.StandardRestore(item) for name, item in wanted.items()})
    items = self._in_all(step, lambda: self._read(step, args))
    seen = sums.look({'params': items['params'], 'opt_state': items['opt_state']})
    if other := sorted(seen.sums.keys() ^ meta['checksums'].keys()):
      raise self._unreadable(step, f'arrays and checksums are not of the same names: {", ".join(other[:3])}')
    if wrong := [path for path, value in seen.sums.items() if meta['checksums'][path] != value]:
      why = f'checksums differ at {", ".join(wrong[:3])} ({len(wrong)} of {len(seen.sums)} arrays)'
      raise self._unreadable(step, why)
    return Restored(decode(items['params'], params), decode(items['opt_state'], opt_state), meta, changed)

  def restore_newest(
    self, params: Any, opt_state: Any, *, tell: Callable[[str], None], **options: Any
  ) -> Restored:
    """Like `restore`, of the newest checkpoint that can be read; newer ones, which are damaged, are set aside.

    Args:
      params: parameter tree to fill.
      opt_state: optimizer state to fill.
      tell: gets a line about every checkpoint that cannot be read.
      **options: of `restore`.

    Raises:
      UnreadableError: none can be read; nothing was moved.
      CheckpointError: see `restore`.
    """
    bad: dict[int, UnreadableError] = {}
    for step in reversed(self.steps()):
      try:
        found = self.restore(params, opt_state, step=step, **options)
        break
      except UnreadableError as error:
        bad[step] = error
    else:
      raise next(iter(bad.values()), UnreadableError(f'{self.directory} has no checkpoint'))
    if bad:
      aside = self.set_aside(bad)
      for error in bad.values():
        tell(f'{error} It was moved to {aside}.')
      tell(f'going on from the checkpoint of step {step}, the newest that can be read')
    return found

  def _step(self, step: int | None) -> int:
    steps = self.steps()
    if step is None and steps:
      return steps[-1]
    if step is None or step not in steps:
      what = 'no checkpoint' if step is None else f'no checkpoint of step {step} (there are: {steps})'
      raise CheckpointError(f'{self.directory} has {what}')
    return step

  def _read(self, step: int, args: ocp.args.Composite) -> Any:
    try:
      return self._reader.restore(step, args=args)
    except Exception as error:
      if hosts.several():  # Before any other process is met: should that fail, the cause is known.
        where = f'process {jax.process_index()} of {jax.process_count()}'
        print(f'{where} could not read {self.directory / str(step)}: {first_line(error)}', file=sys.stderr, flush=True)
      judged = self._judged(step, error)
      if judged is error:  # An error that is its own cause would send who follows the causes round for ever.
        raise
      raise judged from error

  def _in_all[T](self, step: int, read: Callable[[], T]) -> T:
    """What is read; if one process cannot read it, an error in all."""

    def attempt() -> T | UnreadableError:
      try:
        return read()
      except UnreadableError as error:
        return error

    found = hosts.together(f'read the checkpoint of step {step}', attempt)
    everywhere = hosts.all_of(not isinstance(found, UnreadableError))
    if isinstance(found, UnreadableError):
      raise found
    if not everywhere:
      raise UnreadableError(f'checkpoint {self.directory / str(step)} cannot be read by another process.')
    return found

  def _judged(self, step: int, error: Exception) -> Exception:
    """What to raise for an error of reading: that it is damaged only where the error proves it."""
    if is_damage(error) or self._was_removed(step):
      return self._unreadable(step, first_line(error))
    if isinstance(error, OSError | MemoryError | jax.errors.JaxRuntimeError):
      return error
    return CheckpointError(
      f'checkpoint {self.directory / str(step)} could not be read, which need not be its fault: {first_line(error)}. '
      'Nothing was changed; look after disk, memory and permissions, and start the same command again.'
    )

  def _was_removed(self, step: int) -> bool:
    folder = self.directory / str(step)
    return self._read_only and not (folder / 'meta').exists() and not folder.exists()

  def _unreadable(self, step: int, why: str) -> CheckpointError:
    folder = self.directory / str(step)
    if self._was_removed(step):
      return RemovedError(f'checkpoint {folder} was removed while it was read: its run goes on and keeps newer ones')
    others = [other for other in self.steps() if other != step]
    hint = f'there are also those of steps {others}: eval and inspect take --step' if others else 'there is no other'
    return UnreadableError(
      f'checkpoint {folder} cannot be read (corrupted, or not of this program): {why}. Nothing was changed; {hint}.'
    )
