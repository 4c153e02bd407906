"""Compiling for an H100 without one, as dispatch would choose kernels there; see `compiling.compile_report`."""

import contextlib
import functools
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _device
from pallas_kernels.sparse_matmul import api
import sparse24_jax as s24
from tests import targets
from tests.pallas_kernels import compiling, triton_interpreter

TARGET = 'sm_90a'
TOKENS, D, HIDDEN = 256, 128, 512
BF16 = jnp.bfloat16
POLICY = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue')


@contextlib.contextmanager
def hopper():
  """Dispatch as on an H100 whose records favour the kernels."""
  with (
    mock.patch.object(_device, 'current', lambda: targets.target_device(TARGET)),
    mock.patch.object(_device, 'arrays_are_whole', lambda: True),
    mock.patch.object(api, 'candidates_for', lambda *args, **kwargs: ('mosaic_gpu', 'dense')),
    targets.lowering_for(90),
    _compat.assumed_capability(9, 0),
  ):
    yield


@functools.cache
def sharding():
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(
    platform='cuda', target_config=compiling.description(TARGET), topology='1x1x1'
  )
  return jax.sharding.NamedSharding(topologies.make_mesh(topology, (1,), ('x',)), jax.sharding.PartitionSpec())


def compiled(f, *args) -> str:
  """Optimised HLO of `f` for the target, from trees of arrays or of shapes."""
  structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding()), args)
  with hopper():
    return jax.jit(f).lower(*structs).compile().as_text() or ''


def struct(*shape: int, dtype=BF16) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


needs_plugins = absltest.skipUnless(
  compiling.can_compile_for_gpu() and triton_interpreter.HAS_TRITON, 'needs the CUDA plugin wheels'
)
