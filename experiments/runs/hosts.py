"""Several processes of one run: how they meet, who speaks, and what they must agree on. With one all of this is idle.

The processes are those of `jax.distributed`. Each holds its own devices of one mesh and feeds its own rows of every
batch; the first one writes the files of the run. If one is lost the others cannot go on: all end, and the same command
resumes from the newest checkpoint.
"""

import os
from pathlib import Path
import zlib

import jax
from jax.experimental import multihost_utils
import numpy as np

# What a process ends with when another one is lost (EX_PROTOCOL), see docs/hosts.md.
LOST = 76


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


def wait_for_all(what: str) -> None:
  """Waits until every process is here."""
  if several():
    multihost_utils.sync_global_devices(what)


def all_of(here: bool) -> bool:
  """Whether `here` is true in every process."""
  return bool(multihost_utils.process_allgather(np.array(here)).all()) if several() else here


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
  token = folder / f'.seen-by-all-{os.getpid()}'
  # Only the first knows its process id.
  number = int(multihost_utils.broadcast_one_to_all(np.array(os.getpid(), np.int32)))
  if first():
    folder.mkdir(parents=True, exist_ok=True)
    token.write_text('')
  wait_for_all('folder made')
  seen = (folder / f'.seen-by-all-{number}').exists()
  everywhere = all_of(seen)
  if first():
    token.unlink()
  if not everywhere:
    raise ValueError(f'{folder} is not the same folder for all processes; name one on a file system that they share')


def lost_another(error: BaseException | None) -> bool:
  """Whether an error is what a process sees when another one of its run is gone."""
  while error is not None:
    if isinstance(error, jax.errors.JaxRuntimeError) and 'RESOURCE_EXHAUSTED' not in str(error):
      return several()
    error = error.__cause__ or error.__context__
  return False


def tell_lost(error: BaseException) -> str:
  """What to say of such an error."""
  why = (str(error).strip().splitlines() or [''])[0][:200]
  return (
    f'process {jax.process_index()} of {jax.process_count()} cannot reach the others any more ({why}); one of them is '
    'lost, and this one ends. Start all again with the same command: they resume from the newest checkpoint.'
  )
