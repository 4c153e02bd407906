"""What differs between JAX releases, in one place."""

from typing import Any

import jax
from jax import Array


def varying_axes(x: Any) -> frozenset:
  """The mesh axes over which `x` differs inside `jax.shard_map`; none outside."""
  kind = jax.typeof(x)
  manual = getattr(kind, 'manual_axis_type', None)
  return manual.varying if manual is not None else getattr(kind, 'vma', frozenset())


def vary_over(x: Array, axes: frozenset) -> Array:
  """`x` as a value that may differ over `axes`; its cotangent is summed over those that are new."""
  new = axes - varying_axes(x)
  return jax.lax.pcast(x, tuple(sorted(new)), to='varying') if new else x
