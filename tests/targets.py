"""GPUs that tests compile for on a machine without one."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax

from pallas_kernels import _triton
from pallas_kernels._device import Device
from pallas_kernels.arch import ARCHS

TARGETS = {each.name: each for each in ARCHS if each.example}


def target_device(target: str) -> Device:
  """A GPU of those that are compiled for where there is none."""
  generation = TARGETS[target]
  assert generation.example is not None
  return Device(generation.example.name, 'gpu', generation.capability, generation.example.sms)


def struct(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
  """Short for `jax.ShapeDtypeStruct`."""
  return jax.ShapeDtypeStruct(tuple(shape), dtype)


def lowering_for(compute_capability: int) -> Any:
  """Context in which Triton kernels are lowered for a compute capability, 90 say."""
  return mock.patch.object(_triton, '_lowering_for', compute_capability)
