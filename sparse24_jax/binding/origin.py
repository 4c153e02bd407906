"""Of which weights states were made: fingerprints beside them, by which a forward with others is not taken for right.

A packed weight is one of the step in which it was packed, and a mask that of the weights that a step left. A forward in
the trace that made the states is given the very arrays that the fingerprints are of: it computes nothing of this.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any
import weakref

import jax
from jax import Array
import jax.numpy as jnp

from sparse24_jax.fingerprint import fingerprint, first_of_all_kinds, was_changed

# Beside the states of a function's or a linen model's weights. No module and no parameter has this name.
MADE_OF = 'made of'
NNX_MADE_OF = 'sparse24/made_of/'
# Ours: how many weights are looked at. Others than those of the step are so in all of its weights.
_WEIGHTS = 4
_Stacked = tuple[tuple[str, tuple[int, ...]], ...]
# By the identity of a fingerprint, that one and the weight that it is of, as long as they are there.
_WEIGHT_OF: dict[int, tuple[Callable[[], Any], Callable[[], Any]]] = {}


@functools.partial(jax.tree_util.register_dataclass, data_fields=['fingerprints'], meta_fields=['shapes'])
@dataclasses.dataclass(frozen=True)
class MadeOf:
  """The weights that states are of.

  Attributes:
    fingerprints: of a few, float32 `[2]`, by path.
    shapes: (path, shape, dtype) of these.
  """

  fingerprints: dict[str, Array]
  shapes: tuple[tuple[str, tuple[int, ...], Any], ...]


def of_weights(weights: Mapping[str, tuple[Array, tuple[int, ...]]]) -> MadeOf:
  """Of weights and their stacked axes, by path."""
  paths = first_of_all_kinds(weights, _WEIGHTS)
  arrays = {path: weights[path][0] for path in paths}
  shapes = tuple((path, tuple(w.shape), jnp.result_type(w)) for path, w in arrays.items())
  return MadeOf(fingerprints(arrays, tuple((path, weights[path][1]) for path in paths)), shapes)


def others(states: Mapping[str, Any], weights: Mapping[str, tuple[Array, tuple[int, ...]]]) -> dict[str, Array]:
  """Of weights and their stacked axes, by path, which are others than those that states were made of.

  Args:
    states: by path, as `sparse_variables` gives them.
    weights: that a forward is given; those that nothing is known of, or of which it is a shard, are left out.
  """
  beside = states.get(MADE_OF)
  if isinstance(beside, MadeOf):
    # A cast to bfloat16 is seen through, one to float16 is not.
    fit = {path for path, *shape in beside.shapes if path in weights and shape[0] == tuple(weights[path][0].shape)
           and (shape[1] == weights[path][0].dtype or weights[path][0].dtype != jnp.float16)}  # fmt: skip
    known = {path: of for path, of in beside.fingerprints.items() if path in fit}
  else:
    of_nnx = {path.removeprefix(NNX_MADE_OF): of for path, of in states.items() if path.startswith(NNX_MADE_OF)}
    known = {path: of_nnx[path] for path in first_of_all_kinds(of_nnx, _WEIGHTS) if path in weights}
  mine = [path for path, of in known.items() if not is_of(of, weights[path][0])]
  if not mine:
    return {}
  given = {path: jax.lax.stop_gradient(weights[path][0]) for path in mine}
  return changed(given, {path: known[path] for path in mine}, tuple((path, weights[path][1]) for path in mine))


def fingerprints(weights: dict[str, Array], stacked: _Stacked) -> dict[str, Array]:
  """Of weights, by path, each known to be of this very array."""
  made = _made(weights, stacked)
  for path, of in made.items():
    key = id(of)
    _WEIGHT_OF[key] = weakref.ref(of, lambda _, key=key: _WEIGHT_OF.pop(key, None)), weakref.ref(_origin(weights[path]))
  return made


def is_of(fingerprint: Any, w: Any) -> bool:
  """Whether it is known to be of this very array; False where only a comparison tells."""
  found, of = _WEIGHT_OF.get(id(fingerprint), (lambda: None,) * 2)
  return found() is fingerprint and of() is _origin(w)


def _origin(w: Any) -> Any:
  """The array that a transform for derivatives wraps."""
  return _origin(w.primal) if hasattr(w, 'primal') else w


def spoiled(out: Any, fine: Array) -> Any:
  """A result that nobody takes for one, unless it is fine; booleans stay, and so do random keys.

  Its floating-point numbers are NaN, and their gradients. Integers, tokens say, are the least of their dtype, or where
  that is 0 the largest.
  """
  factor = jnp.where(fine, 1.0, jnp.nan)

  def one(y: Any) -> Any:
    dtype = jnp.result_type(y)
    if jnp.issubdtype(dtype, jnp.integer):
      return jnp.where(fine, y, jnp.asarray(jnp.iinfo(dtype).min or jnp.iinfo(dtype).max, dtype))
    return y * factor.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else y

  return jax.tree.map(one, out)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _made(weights: dict[str, Array], stacked: tuple[tuple[str, tuple[int, ...]], ...]) -> dict[str, Array]:
  return {path: fingerprint(weights[path], axes) for path, axes in stacked}


@functools.partial(jax.jit, static_argnums=2, inline=True)
def changed(
  weights: dict[str, Array], known: dict[str, Array], stacked: tuple[tuple[str, tuple[int, ...]], ...]
) -> dict[str, Array]:
  return {path: was_changed(weights[path], axes, known[path]) for path, axes in stacked}
