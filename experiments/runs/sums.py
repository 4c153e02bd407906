"""Checksums of arrays on any mesh, and whether their numbers are finite: one pass over the memory where they lie.

An array's checksum depends on its values and their places and not on how it is split, so that what eight processes
saved can be checked by one. It is a sum of hashed words, modulo 2^32: each hash is one to one, so one changed word is
always seen, and more are missed once in 2^32.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


class Seen(NamedTuple):
  """What was found in the arrays of a tree.

  Attributes:
    sums: checksum of every array, by path.
    not_finite: paths of those that hold a NaN or an infinity, in the order of the tree.
  """

  sums: Mapping[str, int]
  not_finite: tuple[str, ...]


def look(tree: Any) -> Seen:
  """Looks at every array of a tree once, on its own devices; all processes that hold a part must call it.

  >>> look({'w': jnp.array([1.0, jnp.inf])}).not_finite
  ('w',)
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  paths = [jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in leaves]
  found = jax.device_get([_look(leaf) for _, leaf in leaves])
  sums = {path: int(value) for path, (value, _) in zip(paths, found, strict=True)}
  return Seen(sums, tuple(path for path, (_, finite) in zip(paths, found, strict=True) if not finite))


@jax.jit
def all_finite(tree: Any) -> jax.Array:
  """Whether no float of a tree is NaN or infinite; a bool scalar."""
  floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
  return jnp.stack([jnp.isfinite(leaf).all() for leaf in floats]).all() if floats else jnp.array(True)


@jax.jit
def _look(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  if x.dtype.itemsize not in _WORDS or jnp.issubdtype(x.dtype, jnp.complexfloating):
    raise ValueError(f'arrays of {x.dtype} have no checksum; accepted are real numbers of 1, 2, 4 or 8 bytes')
  words = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize])
  place = jnp.zeros(words.shape, jnp.uint32)
  for axis, stride in enumerate(np.cumprod((1, *words.shape[:0:-1]), dtype=np.uint64)[::-1] if words.ndim else ()):
    # In an array of more than 2^32 words, places repeat.
    place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(int(stride) % 2**32)
  mixed = _mix(words.astype(jnp.uint32) + _mix(place + np.uint32(0x9E3779B9)))
  return mixed.sum(dtype=jnp.uint32), all_finite(x)


def _mix(x: jax.Array) -> jax.Array:
  """The finalizer of MurmurHash3, which maps words to words one to one."""
  x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
  return x ^ (x >> np.uint32(16))
