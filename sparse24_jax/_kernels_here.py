"""Whether products run on kernels where a policy names none: by the card, its records, the mesh, what is installed."""

import functools

import jax.numpy as jnp

from pallas_kernels import _device, _dispatch, _partitioning, _records, _triton
from pallas_kernels.ffi import cusparselt
from pallas_kernels.sparse_matmul import api

log_once = functools.partial(_dispatch.log_once, logger='sparse24_jax')


def kernels_are_here(precision: str) -> bool:
  """Whether a policy of this precision may take some kernel on this card and mesh."""
  device = _device.current()
  if not device.has_sparse_wgmma and (precision == 'fp8' or not _sparse_wins(device)):
    return False
  if not _partitioning.serves():
    log_once('no kernels inside a jax.shard_map over some axes of the mesh only; they run outside and over all axes')
    return False
  reason = _triton.why_absent()
  if reason is not None:
    log_once(f'the kernels need jax-triton, from the extra sparse24-jax[cuda]: {reason}')
  return reason is None


def _sparse_wins(device: _device.Device) -> bool:
  """Whether some product of 16 bits measured faster sparse than dense on a card."""
  if device.platform != 'gpu':
    return False
  entries = _records.entries_of(_records.path_of(_records.TUNED, device.slug, api.OP))
  if any(e['choice']['implementation'] != 'dense' and jnp.dtype(e['key']['dtype']).itemsize == 2 for e in entries):
    return True
  if entries:
    reason = 'no sparse product of 16 bits measured faster than the dense one'
  else:
    reason = 'nothing was measured there, `python -m pallas_kernels tune` does it'
  log_once(f'no kernels on {device.name}: {reason}; a policy can name an implementation')
  return False


def has_hopper_kernel(device: str) -> bool:
  """Whether the card of this name runs `mosaic_gpu`; of one that is not here its records tell, without them it does."""
  here = _device.current()
  if here.platform == 'gpu' and here.slug == device:
    return here.has_sparse_wgmma
  entries = _records.entries_of(_records.path_of(_records.TUNED, device, api.OP))
  return not entries or any(r['implementation'] == 'mosaic_gpu' for e in entries for r in e['candidates'])


def is_installed(backend: str) -> bool:
  """Whether a back end that a record chose can be used: cuSPARSELt is a library of its own."""
  if backend == 'cusparselt':
    try:
      cusparselt.register()
    except NotImplementedError as e:
      log_once(f'passing over cusparselt: {e}')
      return False
  return True
