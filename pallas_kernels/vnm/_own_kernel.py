"""This package's V:N:M kernel on a GPU, as it is tuned and benchmarked."""

import dataclasses
import importlib
import pathlib
from typing import Any

from jax import Array

from pallas_kernels import _device, _dispatch, _records
from pallas_kernels.vnm import api
from pallas_kernels.vnm.format import VNMOperand


@dataclasses.dataclass(frozen=True)
class OwnKernel:
  """A back end of `vnm_matmul`.

  Attributes:
    name: in `api.MATMULS`.
    module: with `vnm_matmul`, `Config`, `default_config(v)` and `settings(v)`, those that are worth timing.
  """

  name: str
  module: Any

  def known(self, a: VNMOperand, n: int, device: _device.Device, folder: pathlib.Path = _records.TUNED) -> Any:
    """The setting that records have for A times [K, n] to 'mn', else the default."""
    key = api.key(a, n, a.dtype, 'mn')
    choice = _records.lookup(device.slug, api.OP, key, implementation=self.name, folder=folder)
    return self.module.Config(**choice.config) if choice and choice.config else self.module.default_config(a.v)

  def multiply(self, a: VNMOperand, b: Array, config: Any) -> Array:
    """A . B in the dtype of both."""
    return self.module.vnm_matmul(a, b, out_dtype=a.dtype, out_layout='mn', config=config)


def here() -> OwnKernel:
  """The kernel of the GPU at hand; ValueError where there is none."""
  name = _dispatch.backend_of(api.OP, 'sparse', api.MATMULS)
  assert name is not None
  return OwnKernel(name, importlib.import_module(api.MATMULS[name].partition(':')[0]))
