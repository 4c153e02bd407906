"""This package's kernel of an op on a GPU, as it is checked, tuned and benchmarked."""

from collections.abc import Mapping
import dataclasses
import importlib
import pathlib
from typing import Any

from pallas_kernels import _device, _records


@dataclasses.dataclass(frozen=True)
class OwnKernel:
  """A back end of an op on a GPU.

  Attributes:
    op: name of the op.
    name: of the back end.
    module: with the function of the op and `Config`, whose defaults run; where there is a choice also with `settings`,
      those that are worth timing of a problem.
    device: the GPU.
  """

  op: str
  name: str
  module: Any
  device: _device.Device

  def known(self, key: Mapping[str, Any], folder: pathlib.Path = _records.TUNED, reach: float = 1.0) -> Any:
    """The best setting that records have near a problem, or None; see `_records.lookup`."""
    choice = _records.lookup(self.device.slug, self.op, key, implementation=self.name, reach=reach, folder=folder)
    return self.module.Config(**choice.config) if choice and choice.config else None


def of(op: str, backends: Mapping[str, str], device: _device.Device, itemsize: int = 2) -> OwnKernel | None:
  """The kernel that a GPU has for entries of so many bytes, or None.

  Args:
    op: name of the op.
    backends: name -> `'module:function'`.
    device: the GPU.
    itemsize: bytes of an entry.
  """
  kernel = device.arch.kernel(op, itemsize)
  if kernel is None:
    return None
  return OwnKernel(op, kernel.backend, importlib.import_module(backends[kernel.backend].partition(':')[0]), device)


def here(op: str, backends: Mapping[str, str]) -> OwnKernel:
  """The kernel of the GPU at hand; ValueError where there is none."""
  device = _device.current()
  own = of(op, backends, device)
  if own is None:
    raise ValueError(f'{op} has no kernel for {device.name}')
  return own
