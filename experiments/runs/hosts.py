"""Several processes of one run: how they meet, who speaks, and what they must agree on. With one all of this is idle.

The processes are those of `jax.distributed`. Each holds its own devices of one mesh and feeds its own rows of every
batch; the first one writes the files of the run. If one is lost the others cannot go on: all end, and the same command
resumes from the newest checkpoint.
"""

from collections.abc import Callable
import os
from pathlib import Path
import re
import time
from typing import Any, cast
import zlib

import jax
from jax.experimental import multihost_utils
import numpy as np
import orbax.checkpoint as ocp

from experiments.runs import durable

# What a process ends with when another one is lost (EX_PROTOCOL), see docs/hosts.md.
LOST = 76
# What the others then see: collectives that fail, by Gloo on CPUs and NCCL on GPUs, and calls of JAX's coordination
# service, which every one of its messages names. A status such as UNAVAILABLE alone says nothing: a remote file system
# has it too.
_LOST = re.compile(
  r'Gloo [\w -]+ failed|remote process exited|ncclRemoteError|'
  r'(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|INTERNAL|FAILED_PRECONDITION)\b[\s\S]*'
  r'(CoordinationService|coordination_service)'
)
# Bytes of an error that the other processes are told.
_TOLD = 500
# How long a process that ends with an error waits for the others to end as well.
_END_SECONDS = 20


class OtherProcessError(RuntimeError):
  """Another process of the run could not do its part; the message says which, what and why."""


def join(coordinator: str | None, processes: int | None, process: int | None, heartbeat: int) -> None:
  """Meets the other processes; before anything else is done with JAX.

  Args:
    coordinator: 'host:port' of the first process; None is found out, as are the next two, from Slurm, Open MPI or
      Kubernetes.
    processes: how many there are.
    process: which one this is.
    heartbeat: seconds without a sign of life after which a process is taken for lost.

  Raises:
    ValueError: the processes cannot be found out, or do not meet.
  """
  given = [value is not None for value in (coordinator, processes, process)]
  try:
    jax.distributed.initialize(
      coordinator,
      processes,
      process,
      cluster_detection_method='deactivate' if all(given) else None,
      heartbeat_timeout_seconds=heartbeat,
    )
  except (ValueError, RuntimeError) as error:
    raise ValueError(
      f'the processes did not meet: {str(error).splitlines()[0]} Start them by srun, mpirun or as an indexed job of '
      'Kubernetes, or give --coordinator HOST:PORT, --processes and --process to each; see docs/hosts.md'
    ) from error


def several() -> bool:
  """Whether the run has more than one process."""
  return jax.process_count() > 1


def first() -> bool:
  """Whether this process is the one that writes the files of a run and speaks for it."""
  return jax.process_index() == 0


def all_of(here: bool) -> bool:
  """Whether `here` is true in every process."""
  return bool(multihost_utils.process_allgather(np.array(here)).all()) if several() else here


def together[T](what: str, action: Callable[[], T]) -> T:
  """Does something in every process; if it fails in one, all raise, so that none waits for that one in vain.

  Args:
    what: the action as a verb, 'write config.json' say.
    action: takes part in no collective, in which others would wait for a process that failed before it.

  Returns:
    What the action returned in this process.

  Raises:
    OtherProcessError: it failed in another process.
    Exception: it failed in this one; the very error.
  """
  if not several():
    return action()
  told, found = b'', None
  try:
    found = action()
  except Exception as caught:
    found, told = caught, f'{type(caught).__name__}: {caught}'.encode()[:_TOLD]
  heard = multihost_utils.process_allgather(np.frombuffer(told.ljust(_TOLD, b'\0'), np.uint8))
  if told:
    assert isinstance(found, Exception)
    raise found
  for index, line in enumerate(heard):
    if text := line.tobytes().rstrip(b'\0').decode(errors='replace'):
      raise OtherProcessError(f'process {index} of {len(heard)} could not {what}: {text}')
  return cast(T, found)


def by_first(what: str, action: Callable[[], Any]) -> None:
  """Does something in the first process alone; see `together`."""
  together(what, lambda: action() if first() else None)


def require_same(what: str, text: str) -> None:
  """Raises ValueError in every process unless all have the same text; names those that differ from the first."""
  if not several():
    return
  found = np.ravel(multihost_utils.process_allgather(np.array(zlib.crc32(text.encode()), np.uint32)))
  if (others := np.flatnonzero(found != found[0])).size:
    raise ValueError(
      f'{what} of processes {others.tolist()} differ from those of process 0; start all with the same command, the '
      'same code and the same data'
    )


def require_shared(folder: Path) -> None:
  """Raises ValueError in every process unless all see the same folder, as checkpoints and resuming need."""
  if not several():
    return
  # Only the first knows its process id.
  number = int(multihost_utils.broadcast_one_to_all(np.array(os.getpid(), np.int32)))
  token = folder / f'.seen-by-all-{number}'

  def make() -> None:
    folder.mkdir(parents=True, exist_ok=True)
    durable.open_own(token, 'w').close()

  by_first(f'write to {folder}', make)
  everywhere = all_of(token.exists())
  by_first(f'remove {token}', token.unlink)
  if not everywhere:
    raise ValueError(f'{folder} is not the same folder for all processes; name one on a file system that they share')


def end_together() -> None:
  """Waits until all processes are about to end, for some seconds, or not at all if they never met.

  The first process holds what keeps them together. If it were gone before another one had told its error, JAX would end
  that one with a status of its own, and a scheduler would start again what can only fail again.
  """
  if jax.distributed.is_initialized() and several():
    try:
      ocp.multihost.get_barrier_sync_fn()(key='sparse24_jax.end', timeout_ms=_END_SECONDS * 1000)
    except jax.errors.JaxRuntimeError:
      return  # The others are not ending: they are in a step, which this one leaves.
    if first():
      time.sleep(1)  # They are told by this process that all are there.


def lost_another(error: BaseException | None) -> bool:
  """Whether an error is what a process sees when another one of its run is gone."""
  while several() and error is not None:
    # JAX raises some of these as ValueError, where a result is read.
    if isinstance(error, jax.errors.JaxRuntimeError | ValueError) and _LOST.search(str(error)):
      return True
    error = error.__cause__ or error.__context__
  return False


def tell_lost(error: BaseException) -> str:
  """What to say of such an error."""
  why = (str(error).strip().splitlines() or [''])[0][:200]
  return (
    f'process {jax.process_index()} of {jax.process_count()} cannot reach the others any more ({why}); one of them is '
    'lost, and this one ends. Start all again with the same command: they resume from the newest checkpoint.'
  )
