"""Several processes of one run: who speaks, and agreement between them. With one process all of this does nothing."""

import jax
from jax.experimental import multihost_utils
import numpy as np


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
