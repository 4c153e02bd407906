"""The mesh axes over which a value differs inside `jax.shard_map`, and what differs there between JAX releases."""

from typing import Any

import jax

Array = jax.Array


def varying_axes(x: Any) -> frozenset:
  """The mesh axes over which `x` differs inside `jax.shard_map`; none outside."""
  return varying_of(jax.typeof(x))


def varying_of(kind: Any) -> frozenset:
  """The mesh axes over which a value of this type differs."""
  manual = getattr(kind, 'manual_axis_type', None)
  return manual.varying if manual is not None else getattr(kind, 'vma', frozenset())


def vary_over(x: Array, axes: frozenset) -> Array:
  """`x` as a value that may differ over `axes`; its cotangent is summed over those that are new."""
  new = axes - varying_axes(x)
  return jax.lax.pcast(x, tuple(sorted(new)), to='varying') if new else x


def vary_like(result: Any, arguments: Any) -> Any:
  """`result` as a tree of arrays that may differ wherever one of the `arguments` does: custom calls do not say so."""
  axes = frozenset().union(*(varying_axes(a) for a in jax.tree.leaves(arguments) if isinstance(a, jax.Array)))
  return jax.tree.map(lambda a: vary_over(a, axes), result) if axes else result
