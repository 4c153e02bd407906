"""Decides where kernels may run if a policy names none: by the GPU, its records, the mesh, and what is installed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _checks, _device, _dispatch, _partitioning, _passes_check, _records, _triton
from pallas_kernels.arch import of_measured
from pallas_kernels.ffi import cusparselt
from pallas_kernels.sparse_matmul import api
from sparse24_jax.precision import Precision

log_once = functools.partial(_dispatch.log_once, logger='sparse24_jax')


@dataclasses.dataclass(frozen=True)
class Target:
  """What a plan is made for.

  Attributes:
    device: the GPU.
    here: whether the plan will be run in this process, on its mesh and with what is installed. Otherwise all kernels of
      the GPU are there, cuSPARSELt included, and arrays are whole.
    priced: whether the plan is to be priced. Its tokens are then those of one device, and it holds what checks found.
  """

  device: _device.Device
  here: bool
  priced: bool = False

  def has_kernels(self, precision: Precision) -> bool:
    """Whether a policy of this precision may take some kernel."""
    if self.here:
      return kernels_are_here(precision)
    return not precision.scales or _taken(self.device, precision)

  def has(self, backend: str) -> bool:
    """Whether a back end that a record chose can be used: cuSPARSELt is a library of its own."""
    if self.here and backend == 'cusparselt':
      try:
        cusparselt.register()
      except NotImplementedError as e:
        log_once(f'passing over cusparselt: {e}')
        return False
    return True

  def shares(self, tokens: int) -> tuple[int, ...]:
    """How many tokens a device may get, where it is not known while tracing: an equal share, or all."""
    if not self.here or _device.arrays_are_whole():
      return (tokens,)
    devices = jax.sharding.get_abstract_mesh().size or jax.device_count()
    if self.priced:
      return tokens, tokens * devices
    return (tokens,) if tokens % devices else (tokens // devices, tokens)


def target(slug: str | None = None) -> Target:
  """The GPU with records of this name, or the one that is here, to run on it.

  The records tell the generation of a GPU that is not here.
  """
  here = _device.current()
  if slug is None:
    return Target(here, True)
  if here.platform == 'gpu' and here.slug == slug:
    return Target(here, False, priced=True)
  names = {row['implementation'] for entry in _entries(slug) for row in (*entry['candidates'], entry['choice'])}
  return Target(_device.Device(slug, 'gpu', of_measured(api.OP, names).capability), False, priced=True)


def priced_on(slug: str | None) -> Target:
  """What a plan to be priced is made for: the GPU with records of this name, or the one that is here, as it runs."""
  return target(slug) if slug is not None else dataclasses.replace(target(), priced=True)


def kernels_are_here(precision: Precision) -> bool:
  """Whether a policy of this precision may take some kernel on this GPU and mesh."""
  device = _device.current()
  own = device.arch.kernel(api.OP, precision.width(2))
  # Passes that scale are not checked.
  checked = not (precision.scales or (own and own.by_default)) and _checks.possible(device, api.OP)
  if not checked and not _taken(device, precision):
    return False
  if not _partitioning.serves():
    log_once('no kernels inside a jax.shard_map over some axes of the mesh only; they run outside and over all axes')
    return False
  reason = _triton.why_absent()
  if reason is not None:
    log_once(f'the kernels need jax-triton, from the extra sparse24-jax[cuda]: {reason}')
  return reason is None and (not checked or _passes_check.right(device))


def _entries(slug: str) -> tuple:
  return tuple(e for path in _records.paths_of(_records.TUNED, slug, api.OP) for e in _records.entries_of(path))


def _taken(device: _device.Device, precision: Precision) -> bool:
  """Whether a precision takes kernels on a GPU unchecked: this package's by default, or since its records say so.

  A precision with scales needs this package's: not all of its matmuls go by records.
  """
  itemsize = precision.width(2)
  own = device.arch.kernel(api.OP, itemsize)
  if own is None and precision.scales:
    return False
  return (own is not None and own.by_default) or _sparse_wins(device, itemsize)


def _sparse_wins(device: _device.Device, itemsize: int) -> bool:
  """Whether some matmul of entries of so many bytes measured faster sparse than dense on a GPU."""
  if device.platform != 'gpu':
    return False
  entries = _entries(device.slug)
  of_width = (e for e in entries if jnp.dtype(e['key']['dtype']).itemsize == itemsize)
  if any(e['choice']['implementation'] != 'dense' for e in of_width):
    return True
  if entries:
    reason = f'no sparse matmul of {8 * itemsize} bits measured faster than the dense one'
  else:
    reason = 'nothing was measured there, `python -m pallas_kernels tune sparse_matmul` does it'
  log_once(f'no kernels on {device.name}: {reason}; a policy can name an implementation')
  return False
