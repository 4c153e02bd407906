"""This package's kernel on a GPU, as `bench` times it.

`mosaic_gpu`, on Hopper, has settings to choose from; others run with the one that their `Config()` is.
"""

from collections.abc import Callable, Sequence
import functools
import importlib
import logging
import pathlib
from typing import Any

import jax

from pallas_kernels import _device, _records
from pallas_kernels.sparse_matmul import _predict, _prepared, mosaic_gpu
from pallas_kernels.sparse_matmul.api import BACKENDS

OP = mosaic_gpu.OP
Compiled = list[tuple[Any, Callable[..., jax.Array]]]


def name(device: _device.Device) -> str:
  return device.arch.kernel(OP) or 'mosaic_gpu_sm80'  # which says why it does not run


def settings(
  p: mosaic_gpu.Problem, device: _device.Device, folder: pathlib.Path, search: bool
) -> list[mosaic_gpu.Config]:
  """What a tuner times on Hopper: the best known setting, and with `search` all that look promising."""
  if name(device) != 'mosaic_gpu':
    return []
  known = _known(p, device, folder)
  return list(dict.fromkeys(known + (_predict.candidates(p, device.num_sms) if search else [])))


def library_settings(p: mosaic_gpu.Problem, device: _device.Device, folder: pathlib.Path) -> list[mosaic_gpu.Config]:
  """The setting that the library runs on Hopper, or what another `folder` than its own has for this very problem."""
  if name(device) != 'mosaic_gpu':
    return []
  known = [] if folder == _records.TUNED else _known(p, device, folder)
  return known or [mosaic_gpu._chosen_config(p, device)]


def _known(p: mosaic_gpu.Problem, device: _device.Device, folder: pathlib.Path) -> list[mosaic_gpu.Config]:
  """The best setting in the records of this very problem, if there is one."""
  known = _records.lookup(device.slug, OP, p.key, implementation='mosaic_gpu', reach=0.0, folder=folder)
  return [mosaic_gpu.Config(**known.config)] if known and known.config else []


def compiled(p: mosaic_gpu.Problem, device: _device.Device, choices: Sequence[mosaic_gpu.Config]) -> Compiled:
  """The kernel of the GPU, as far as it takes the problem and compiles: on Hopper, where it has any, by `choices`."""
  if name(device) == 'mosaic_gpu':
    return [*_prepared.compile_sparse(p, choices)]
  kernel = importlib.import_module(BACKENDS[name(device)].partition(':')[0])
  x = jax.eval_shape(functools.partial(_prepared.inputs, p), jax.random.key(0))
  f = functools.partial(
    kernel.sparse_matmul, activation=p.activation, out_dtype=p.out_dtype, b_layout=p.b_layout,
    out_layout=p.out_layout, device=device,
  )
  try:
    return [(kernel.Config(), jax.jit(_prepared.in_turn(p, f)).lower(_prepared.many(p, x.a), x.b).compile())]
  except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as e:
    logging.warning('%s: %s is left out: %s', p.key, name(device), e)
    return []
