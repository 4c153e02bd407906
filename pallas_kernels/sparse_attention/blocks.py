"""Sparse attention that skips what its pattern leaves out, from plain XLA operations: runs, and saves, on any device.

Positions are laid out as a grid [u, r], i = u c + r. Then each pattern is one or two dense matmuls:

    own      queries [u, r] and keys [u, s]        the block that a query is in
    near     queries [u, r] and keys [u-1 | u, s]  that block and the one before, which hold the last c positions
    column   queries [u, r] and keys [w, r]        every c-th position
    last     queries [u, r] and keys [w, c-1]      the last position of every block

`local` is near, `strided` is column, `combined` is near and the rest of column, `fixed` is own and last. Where there
are two, their scores are joined before the softmax, so the result is that of the mask, to rounding. A length that is no
multiple of c is padded at the end, which causality hides.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from pallas_kernels import _partitioning
from pallas_kernels.sparse_attention.patterns import Pattern


class _Part(NamedTuple):
  """One dense matmul of a pattern; its scores are [B, G, M, u, r, keys].

  Attributes:
    keys: picks keys or values from [B, u, r, G, K].
    scores: einsum of queries [B, u, r, G, M, K] and picked keys.
    values: einsum of weights and picked values.
    mask: (blocks, c) -> bool [u, r, keys], True = attended.
  """

  keys: Callable[[Array], Array]
  scores: str
  values: str
  mask: Callable[[int, int], np.ndarray]


def _grid(blocks: int, c: int, keys: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  u, r, key = np.ogrid[:blocks, :c, :keys]
  return u, r, key


def _own_mask(blocks: int, c: int) -> np.ndarray:
  _, r, s = _grid(blocks, c, c)
  return np.broadcast_to(s <= r, (blocks, c, c))


def _near_mask(blocks: int, c: int) -> np.ndarray:
  u, r, key = _grid(blocks, c, 2 * c)
  distance = r + c - key
  return (distance >= 0) & (distance < c) & ((u > 0) | (key >= c))


def _column_mask(blocks: int, c: int) -> np.ndarray:
  u, _, w = _grid(blocks, c, blocks)
  return np.broadcast_to(w <= u, (blocks, c, blocks))


def _earlier_mask(blocks: int, c: int) -> np.ndarray:
  u, _, w = _grid(blocks, c, blocks)
  return np.broadcast_to(w < u, (blocks, c, blocks))


def _with_block_before(x: Array) -> Array:
  before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))
  return jnp.concatenate([before, x], axis=2)


_BLOCK = ('burgmk,busgk->bgmurs', 'bgmurs,busgk->burgmk')
_OWN = _Part(lambda x: x, *_BLOCK, _own_mask)
_NEAR = _Part(_with_block_before, *_BLOCK, _near_mask)
_COLUMN = _Part(lambda x: x, 'burgmk,bwrgk->bgmurw', 'bgmurw,bwrgk->burgmk', _column_mask)
# What is nearer than c is in the other part.
_FAR_COLUMN = _COLUMN._replace(mask=_earlier_mask)
_LAST = _Part(lambda x: x[:, :, -1], 'burgmk,bwgk->bgmurw', 'bgmurw,bwgk->burgmk', _earlier_mask)

PARTS = {'local': (_NEAR,), 'strided': (_COLUMN,), 'combined': (_NEAR, _FAR_COLUMN), 'fixed': (_OWN, _LAST)}


def sparse_attention(q: Array, k: Array, v: Array, *, patterns: tuple[Pattern, ...], scale: float) -> Array:
  """The back end: `reference.sparse_attention` by blocks, heads of one pattern together."""
  return by_pattern(q, k, v, patterns, lambda pattern, q, k, v: _one_pattern(q, k, v, pattern, scale))


def by_pattern(
  q: Array, k: Array, v: Array, patterns: tuple[Pattern, ...], attend: Callable[[Pattern, Array, Array, Array], Array]
) -> Array:
  """Calls `attend` once a pattern with that pattern's heads, and puts the heads back in order.

  With several patterns, every device computes all heads where types say that a mesh divides them.
  """
  kinds = list(dict.fromkeys(patterns))
  if len(kinds) == 1:
    return attend(kinds[0], q, k, v)
  shared = q.shape[2] // k.shape[2]
  heads = [[h for h, pattern in enumerate(patterns) if pattern == kind] for kind in kinds]
  out = []
  for kind, chosen in zip(kinds, heads, strict=True):
    # Whole groups keep sharing their keys and values; heads of a group that is split get copies.
    groups = list(dict.fromkeys(h // shared for h in chosen))
    whole = len(groups) * shared == len(chosen)
    kv = np.array(groups if whole else [h // shared for h in chosen])
    out.append(attend(kind, _heads(q, np.array(chosen)), _heads(k, kv), _heads(v, kv)))
  order = np.argsort([h for chosen in heads for h in chosen])
  return _partitioning.like(_heads(jnp.concatenate(out, axis=2), order), q)


def _heads(x: Array, which: np.ndarray) -> Array:
  """Heads of `x`, all on every device that has the sequence where types say how a mesh divides."""
  sharding = _partitioning.division(x).sharding
  if sharding is None:
    return x[:, :, which]
  # The gather and its transpose by XLA: types refuse both along a divided axis, the latter beside one too.
  spec = PartitionSpec(*sharding.spec[:2], None, *sharding.spec[3:])
  take: Any = jax.sharding.auto_axes(lambda x: x[:, :, which], out_sharding=sharding.update(spec=spec))
  return take(x)


def _one_pattern(q: Array, k: Array, v: Array, pattern: Pattern, scale: float) -> Array:
  batch, length, heads, size = q.shape
  groups = k.shape[2]
  if pattern.kind == 'full':
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True, implementation='xla')
  c = min(pattern.window, length)
  blocks = -(-length // c)
  pad = ((0, 0), (0, blocks * c - length), (0, 0), (0, 0))
  # An axis at a time, on the way back too: no other reshape keeps the division of an explicit mesh.
  q = jnp.pad(q, pad).reshape(batch, blocks, c, heads, size).reshape(batch, blocks, c, groups, heads // groups, size)
  k, v = (jnp.pad(x, pad).reshape(batch, blocks, c, groups, size) for x in (k, v))
  parts = PARTS[pattern.kind]
  scores = []
  for part in parts:
    s = jnp.einsum(part.scores, q, part.keys(k), preferred_element_type=jnp.float32) * jnp.float32(scale)
    scores.append(jnp.where(jnp.asarray(part.mask(blocks, c)), s, -jnp.inf))
  weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1) if len(parts) > 1 else scores[0], axis=-1).astype(q.dtype)
  ends = np.cumsum([s.shape[-1] for s in scores])[:-1]
  y = sum(
    jnp.einsum(part.values, w, part.keys(v), preferred_element_type=jnp.float32)
    for part, w in zip(parts, jnp.split(weights, ends, axis=-1), strict=True)
  )
  y = y.astype(v.dtype).reshape(batch, blocks, c, heads, size)
  return y.reshape(batch, blocks * c, heads, size)[:, :length]
