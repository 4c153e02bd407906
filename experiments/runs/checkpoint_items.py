"""What a checkpoint holds: arrays as Orbax writes them, and the checksum of the rest."""

from collections.abc import Mapping
import json
from typing import Any
import zlib

import jax
import jax.numpy as jnp


def _is_key(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def encode(tree: Any) -> Any:
  """Typed keys as their data, which is what goes to disk."""
  return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, tree)


def decode(tree: Any, like: Any) -> Any:
  """Typed keys again, where `like` has them."""
  return jax.tree.map(lambda leaf, wanted: jax.random.wrap_key_data(leaf) if _is_key(wanted) else leaf, tree, like)


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
  """What Orbax reads in the place of a leaf: of a key its data."""
  # Without one Orbax would ask for the very devices that wrote the checkpoint. That of a key serves its data too.
  sharding = getattr(leaf, 'sharding', None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  if _is_key(leaf):
    leaf = jax.eval_shape(jax.random.key_data, leaf)
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def checksum(meta: Mapping[str, Any]) -> int:
  """CRC-32 of JSON-able data, whatever the order of its keys."""
  rest = {key: value for key, value in meta.items() if key != 'checksum'}
  return zlib.crc32(json.dumps(rest, sort_keys=True).encode())
