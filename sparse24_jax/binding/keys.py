"""Random keys for the matmuls of a function."""

import dataclasses
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

# A `fold_in` of its own is 130 instructions for XLA and, as its number is written into it, a kernel unlike all others
# to compile. So many are made by one kernel, and each is looked up by whatever reads it.
_AT_ONCE = 64


@dataclasses.dataclass
class Keys:
  """One random key a matmul: the same one each time that the same function is traced."""

  key: Array | None
  count: int = 0
  # Those of many matmuls, by the number of the first.
  made: dict[int, Array] = dataclasses.field(default_factory=dict)

  def next(self) -> Array | None:
    place = self.count % _AT_ONCE
    first = self.count - place + 1
    self.count += 1
    if not _is_traced_threefry(self.key):
      return None if self.key is None else jax.random.fold_in(self.key, self.count)
    if first not in self.made:
      # Without barriers XLA fuses all that makes the keys with what reads one, and makes each word of theirs by itself.
      key = jax.lax.optimization_barrier(self.key)
      made = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(first, first + _AT_ONCE))
      self.made[first] = jax.lax.optimization_barrier(made)
    # Nor is the place known to XLA, for which readers of other places would be other kernels.
    hidden = jax.lax.optimization_barrier(jnp.uint32(place))
    return jax.lax.dynamic_index_in_dim(self.made[first], hidden, keepdims=False)

  def inside(self, key: Array | None) -> 'Keys':
    """The keys for a part of the function that is given `key` as an argument."""
    return Keys(key, self.count)


def require_key(key: Any) -> None:
  """ValueError unless it is None or one random key: a typed one, or its words as `jax.random.PRNGKey` gives them."""
  if key is None:
    return
  dtype, shape = getattr(key, 'dtype', None), getattr(key, 'shape', None)
  if dtype is None or shape is None:
    found = f'a {type(key).__name__}'
  elif jnp.issubdtype(dtype, jax.dtypes.prng_key):
    if shape == ():
      return
    found = f'keys of shape {shape}, not one'
  elif dtype == jnp.uint32 and shape in ((2,), (4,)):  # threefry and rbg
    return
  else:
    found = f'{dtype} of shape {shape}'
  raise ValueError(
    f'the third argument must be a PRNG key or None: f(params, variables, key, ...); found {found}. Give'
    ' jax.random.key(seed) there, or None where nothing is sampled, and the arguments of the function behind it'
  )


def _is_traced_threefry(key: Array | None) -> bool:
  """Whether keys are made at once: outside a program each is an operation, others give other numbers under `vmap`."""
  return isinstance(key, jax.core.Tracer) and str(jax.random.key_impl(key)) == 'threefry2x32'
