"""Counter-based uniforms: Philox4x32-10 over (key, coordinates of a group).

A group's uniform depends on the key and on where the group is, never on the tiling, the sharding, the padding or the
device, so every back end draws the same bits. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels.formats import join_groups

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_OTHERS = (0x3C6EF372, 0xA54FF53A)  # of the square roots of 5 and 7


def multiply_high(x: Array, constant: int) -> Array:
  """The high 32 bits of x * constant, by 16-bit halves (uint64 is not available without x64)."""
  low, high = constant & 0xFFFF, constant >> 16
  x_low, x_high = x & 0xFFFF, x >> 16
  # Each partial product fits 32 bits; the middle sum carries at most into bit 32 of the whole.
  middle = x_high * jnp.uint32(low) + ((x_low * jnp.uint32(low)) >> 16)
  carry = (x_low * jnp.uint32(high)) + (middle & 0xFFFF)
  return x_high * jnp.uint32(high) + (middle >> 16) + (carry >> 16)


def philox4x32(counter: tuple[Array, Array, Array, Array], key: tuple[Array, Array]) -> tuple[Array, ...]:
  """Four uint32 words for each counter; all arguments uint32, counters of one shape.

  >>> words = philox4x32((jnp.zeros((), jnp.uint32),) * 4, (jnp.zeros((), jnp.uint32),) * 2)
  >>> [hex(w) for w in words]
  ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
  """
  c0, c1, c2, c3 = counter
  k0, k1 = key
  for _ in range(ROUNDS):
    high0, low0 = multiply_high(c0, _MULTIPLIERS[0]), c0 * jnp.uint32(_MULTIPLIERS[0])
    high1, low1 = multiply_high(c2, _MULTIPLIERS[1]), c2 * jnp.uint32(_MULTIPLIERS[1])
    c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    k0, k1 = k0 + jnp.uint32(_WEYL[0]), k1 + jnp.uint32(_WEYL[1])
  return c0, c1, c2, c3


def _is_typed(key: Array) -> bool:
  return jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def seed_words(key: Array) -> tuple[Array, Array]:
  """Two uint32 words from any JAX key, typed or raw, of any implementation: its own, if it has two."""
  words = jax.random.key_data(key) if isinstance(key, jax.Array) and _is_typed(key) else key
  if getattr(words, 'shape', None) != (2,) or words.dtype != jnp.uint32:  # JAX refuses what is no key, or several
    words = jax.random.bits(key, (2,), jnp.uint32)
  return words[0], words[1]


def two_keys(key: Array) -> tuple[Array, Array]:
  """Two keys for samples that are drawn with one, of any kind: its words with other bits.

  Philox makes independent streams of any two keys. `jax.random.split` hashes them, by 150 instructions of XLA's.
  Never give it a key that it made: each half is its own inverse, so the first key comes back, and the halves commute.
  """
  # Hidden from XLA, for which the readers of the two would be two kernels.
  first, second = jax.lax.optimization_barrier(tuple(jnp.uint32(bits) for bits in _OTHERS))
  if not _is_typed(key):
    return key ^ first, key ^ second
  words, impl = jax.random.key_data(key), jax.random.key_impl(key)
  return jax.random.wrap_key_data(words ^ first, impl=impl), jax.random.wrap_key_data(words ^ second, impl=impl)


def check_origin(origin: tuple[Array | int, Array | int, Array | int]) -> None:
  """ValueError unless it is (batch, group, column), and the column, if it is known, a multiple of four."""
  if len(origin) != 3:
    raise ValueError(f'origin={origin} must be (batch, group, column)')
  if not isinstance(origin[2], jax.core.Tracer) and int(origin[2]) % 4:
    raise ValueError(f'origin column {origin[2]} is not a multiple of four')


def group_uniforms(
  seed: tuple[Array, Array],
  shape: tuple[int, int, int],
  *,
  stream: int = 0,
  origin: tuple[Array | int, Array | int, Array | int] = (0, 0, 0),
) -> Array:
  """float32 uniforms in [0, 1), multiples of 2^-24, one a group.

  The group in batch `b`, at position `g` of the grouped axis and in column `c` takes word `c % 4` of the counter
  `(c // 4, g, b, stream)`: one call of the generator serves four neighbouring columns.

  Args:
    seed: from `seed_words`.
    shape: (batches, groups, columns).
    stream: tells independent draws for one group apart.
    origin: (batch, group, column) of the first group, for a part of a larger array; the column a multiple of four.
  """
  batches, groups, columns = shape
  check_origin(origin)
  batch0, group0, column0 = origin
  quads = (batches, groups, -(-columns // 4))
  batch, group, quad = (
    jax.lax.broadcasted_iota(jnp.uint32, quads, d) + o
    for d, o in enumerate((jnp.uint32(batch0), jnp.uint32(group0), jnp.uint32(column0) >> 2))
  )
  words = philox4x32((quad, group, batch, jnp.full(quads, stream, jnp.uint32)), seed)
  uniforms = [(w >> 8).astype(jnp.float32) * jnp.float32(2**-24) for w in words]
  return jax.lax.slice_in_dim(join_groups(uniforms, -1), 0, columns, axis=2)
