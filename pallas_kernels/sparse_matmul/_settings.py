"""With which settings this package's kernel is checked, tuned and benchmarked; a kernel without any has one."""

from collections.abc import Sequence
import pathlib
from typing import Any

from pallas_kernels import _device, _own_kernel, _records
from pallas_kernels._own_kernel import OwnKernel
from pallas_kernels.sparse_matmul import _prepared, mosaic_gpu
from pallas_kernels.sparse_matmul.api import BACKENDS, OP


def own_kernel(p: mosaic_gpu.Problem, device: _device.Device) -> OwnKernel | None:
  """The kernel of a GPU for the entries of a problem, or None."""
  return _own_kernel.of(OP, BACKENDS, device, p.a_dtype.itemsize)


def to_time(p: mosaic_gpu.Problem, own: OwnKernel | None, folder: pathlib.Path, search: bool) -> list[Any]:
  """What a tuner times, where there are settings: the best known one, and with `search` all that look promising."""
  if own is None or not hasattr(own.module, 'settings'):
    return []
  promising = own.module.settings(p, own.device.num_sms) if search else ()
  return list(dict.fromkeys([*_known(p, own, folder), *promising]))


def of_library(p: mosaic_gpu.Problem, own: OwnKernel | None, folder: pathlib.Path = _records.TUNED) -> list[Any]:
  """The setting that the library runs, or what another `folder` than its own has for this very problem."""
  if own is None or not hasattr(own.module, 'settings'):
    return []
  known = [] if folder == _records.TUNED else _known(p, own, folder)
  return known or [own.module.chosen_config(p, own.device)]


def _known(p: mosaic_gpu.Problem, own: OwnKernel, folder: pathlib.Path) -> list[Any]:
  """The best setting in the records of this very problem, if there is one."""
  known = own.known(p.key, folder, reach=0.0)
  return [] if known is None else [known]


def compiled(p: mosaic_gpu.Problem, own: OwnKernel | None, choices: Sequence[Any]) -> _prepared.Compiled:
  """The kernel, as far as it takes the problem and compiles, by `choices` where it has any."""
  if own is None:
    return []
  return _prepared.compile_sparse(p, choices or [own.module.Config()], own.module.sparse_matmul, own.device)
