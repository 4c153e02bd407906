"""This package's kernel on a GPU, as `check`, `tune`, `bench` and `verify` run it.

A back end in `SEARCHES` has settings to choose from; others run with the one that their `Config()` is.
"""

from collections.abc import Callable, Sequence
import importlib
import pathlib
from typing import Any

from pallas_kernels import _device, _records
from pallas_kernels.arch import MMA_SP
from pallas_kernels.sparse_matmul import _predict, _prepared, mosaic_gpu
from pallas_kernels.sparse_matmul.api import BACKENDS

OP = mosaic_gpu.OP
# What is worth timing of a problem on so many multiprocessors: settings of the back ends that have any. Their modules
# have `chosen_config` as well, which is what the library runs.
SEARCHES: dict[str, Callable[[mosaic_gpu.Problem, int], Sequence[Any]]] = {'mosaic_gpu': _predict.candidates}


def name(device: _device.Device, itemsize: int = 2) -> str:
  """The back end of a GPU for entries of so many bytes; where none runs, one that says why."""
  return (device.arch.kernel(OP, itemsize) or MMA_SP).backend


def _module(p: mosaic_gpu.Problem, device: _device.Device) -> Any:
  """The module of the back end, with `sparse_matmul` and `Config`."""
  return importlib.import_module(BACKENDS[name(device, p.a_dtype.itemsize)].partition(':')[0])


def settings(p: mosaic_gpu.Problem, device: _device.Device, folder: pathlib.Path, search: bool) -> list[Any]:
  """What a tuner times, where there are settings: the best known one, and with `search` all that look promising."""
  own = name(device, p.a_dtype.itemsize)
  if own not in SEARCHES:
    return []
  promising = SEARCHES[own](p, device.num_sms) if search else ()
  return list(dict.fromkeys([*_known(p, device, folder), *promising]))


def library_settings(
  p: mosaic_gpu.Problem, device: _device.Device, folder: pathlib.Path = _records.TUNED
) -> list[Any]:
  """The setting that the library runs, or what another `folder` than its own has for this very problem."""
  if name(device, p.a_dtype.itemsize) not in SEARCHES:
    return []
  known = [] if folder == _records.TUNED else _known(p, device, folder)
  return known or [_module(p, device).chosen_config(p, device)]


def _known(p: mosaic_gpu.Problem, device: _device.Device, folder: pathlib.Path) -> list[Any]:
  """The best setting in the records of this very problem, if there is one."""
  own = name(device, p.a_dtype.itemsize)
  known = _records.lookup(device.slug, OP, p.key, implementation=own, reach=0.0, folder=folder)
  return [_module(p, device).Config(**known.config)] if known and known.config else []


def compiled(p: mosaic_gpu.Problem, device: _device.Device, choices: Sequence[Any]) -> _prepared.Compiled:
  """The kernel of the GPU, as far as it takes the problem and compiles, by `choices` where it has any."""
  kernel = _module(p, device)
  return _prepared.compile_sparse(p, choices or [kernel.Config()], kernel.sparse_matmul, device)
