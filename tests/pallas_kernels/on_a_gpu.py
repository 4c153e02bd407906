"""What tests of memory-bound kernels on a GPU share (`pytest -m gpu`): inputs with everything in them, equal bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _device
from pallas_kernels._passes import differing

# Batched, and tiles that are not full; and many whole tiles.
RAGGED, LARGE = (2, 1028, 260), (4096, 4096)
REPEATS = 20


def marks(*capability):
  """What a file of such tests gives to pytest."""
  reason = f'needs compute capability {".".join(map(str, capability))}'
  return [pytest.mark.gpu, pytest.mark.skipif(_device.current().capability < capability, reason=reason)]


def draw(shape, dtype=jnp.bfloat16, seed=0, special=0.003):
  """Normal values with ties and zeros of both signs, and infinities and NaN in the share `special`."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape, np.float32)
  x = np.where(rng.random(shape, np.float32) < 0.2, np.round(2 * x), x)
  for value in (-0.0, np.inf, -np.inf, np.nan):
    x = np.where(rng.random(shape, np.float32) < (special if value else 0.003), np.float32(value), x)
  return jnp.asarray(x).astype(dtype)


def compiled(op, implementation, **options):
  return jax.jit(functools.partial(op, implementation=implementation, **options))


def assert_same_bits(found, expected):
  """Two trees of arrays; one NaN is as good as another."""
  assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected), (found, expected)
  counts = differing(found, expected)
  assert not any(counts), f'entries that differ, by array: {counts}'


def check(op, *args, repeats=0, **options):
  """The Triton back end of `op` against its reference, and against itself."""
  f = compiled(op, 'triton', **options)
  found = f(*args)
  assert_same_bits(found, compiled(op, 'reference', **options)(*args))
  for _ in range(repeats):
    assert_same_bits(f(*args), found)


def check_default(op, *args, **options):
  """`implementation=None` takes the Triton back end."""
  text = compiled(op, None, **options).lower(*args).compile().as_text() or ''
  assert 'custom_call_target="triton_kernel_call"' in text, text
