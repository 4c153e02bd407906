"""Holds the Hopper kernel, interpreted with race detection, to the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _tuning
from pallas_kernels.sparse_matmul import mosaic_gpu, reference


def check(test, args, call, config):
  f = jax.jit(functools.partial(mosaic_gpu.sparse_matmul, call=call, config=config, interpret=True))
  found = jax.block_until_ready(f(*args))
  test.assertFalse(_compat.races_found())
  exact = dataclasses.replace(call, out_dtype=jnp.dtype('float32'))
  expected = jax.jit(functools.partial(reference.sparse_matmul, call=exact))(*args)
  test.assertEqual(jax.tree.structure(found), jax.tree.structure(expected))
  for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    # A scalar is the largest magnitude. It comes from one output, whose rounding to bfloat16 alone may cost 3.9e-3.
    test.assertEqual(f.dtype, call.out_dtype if f.ndim else jnp.float32)
    test.assertEqual(f.shape, e.shape)
    test.assertLessEqual(_tuning.relative_error(f, e), _tuning.TOLERANCE if f.ndim else 2 * _tuning.TOLERANCE)
