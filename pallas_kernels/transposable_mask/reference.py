"""Transposable 2:4 masks: in every 4x4 block two entries of each row and two of each column are kept."""

import itertools

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from pallas_kernels._program import one_program
from pallas_kernels.formats import check_floating, check_groups, PAIRS
from pallas_kernels.prune.reference import magnitudes

# A row keeps one of six pairs, so half a block (two rows) has 36 choices; what the other half must add is given by how
# often each column is used so far. The 36 choices fall into 19 classes of such column counts, hence 90 patterns.
_ROW = np.array([[i in pair for i in range(4)] for pair in PAIRS])
_HALVES: dict[tuple[int, ...], list[tuple[int, int]]] = {}
for _first, _second in itertools.product(range(6), repeat=2):
  _HALVES.setdefault(tuple((_ROW[_first].astype(int) + _ROW[_second]).tolist()), []).append((_first, _second))


def _complement(counts: tuple[int, ...]) -> tuple[int, ...]:
  return tuple(2 - c for c in counts)


# The 90 patterns, bool [90, 4, 4], in the order that decides ties: by column counts of the upper half, then by the
# pairs of the four rows.
PATTERNS = np.array(
  [
    [_ROW[pair] for pair in (*upper, *lower)]
    for counts, uppers in _HALVES.items()
    for upper in uppers
    for lower in _HALVES[_complement(counts)]
  ]
)


# What a NaN counts, negative, and the most that anything else does: sums of eight are finite, and no seven
# entries outweigh a NaN.
NAN = float(jnp.finfo(jnp.float32).max) / 16
LIMIT = NAN / 16


def bounded_magnitudes(w: Array) -> Array:
  """float32 magnitudes, infinities and the largest tied at `LIMIT`; a NaN is minus `NAN`."""
  a = magnitudes(w.astype(jnp.float32))
  return jnp.where(a < 0, -NAN, jnp.minimum(a, LIMIT))


def block_planes(x: Array) -> Array:
  """[..., 4, 4, rows / 4, columns / 4]: plane (i, j) holds entry (i, j) of every 4x4 block.

  Axes are split one at a time, which keeps the sharding of an array whose shards hold whole blocks. The barrier makes
  XLA write the planes out: arithmetic on contiguous planes is vectorised, on entries four apart it is not (15 times
  slower on a CPU).
  """
  rows = x.reshape(*x.shape[:-2], x.shape[-2] // 4, 4, x.shape[-1])
  blocks = rows.reshape(*rows.shape[:-1], x.shape[-1] // 4, 4)
  return jax.lax.optimization_barrier(jnp.moveaxis(blocks, (-3, -1), (-4, -3)))


def join_planes(planes: Array) -> Array:
  """Inverse of `block_planes`."""
  blocks = jnp.moveaxis(planes, (-4, -3), (-3, -1))
  rows = blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * 4)
  return rows.reshape(*rows.shape[:-3], rows.shape[-3] * 4, rows.shape[-1])


def _check(w: Array) -> None:
  if w.ndim < 2:
    raise ValueError(f'w of shape {w.shape} is not a matrix [..., rows, columns]')
  check_groups(w, -2)
  check_groups(w, -1)
  check_floating(w, 'w')


@one_program()
def transposable_mask(w: Array) -> Array:
  """The best of the 90 patterns in each 4x4 block; see `sparse24_jax.transposable_mask`.

  Meets in the middle: the best choice of each half is found for each of the 19 classes, and the two halves are joined
  class by class. About 170 additions and maxima a block, all elementwise, instead of 16 x 90 multiply-adds.
  """
  _check(w)
  planes = block_planes(bounded_magnitudes(w))
  code = _best_codes([[planes[..., i, j, :, :] for j in range(4)] for i in range(4)])
  # No pattern may keep a NaN: its plane is negative, so its bit is cleared.
  for i, j in itertools.product(range(4), repeat=2):
    code = jnp.where(planes[..., i, j, :, :] < 0, code & jnp.uint16(0xFFFF ^ 1 << (4 * i + j)), code)
  code = jnp.expand_dims(jax.lax.optimization_barrier(code), (-4, -3))
  bit = jnp.arange(16, dtype=jnp.uint16).reshape((1,) * (code.ndim - 4) + (4, 4, 1, 1))
  return join_planes((code >> bit) & 1 == 1)


def _best_codes(a: list[list[Array]]) -> Array:
  """uint16 a block: bit 4 i + j says that entry (i, j) is kept."""
  pair_sums = [[row[i] + row[j] for i, j in PAIRS] for row in a]
  upper = {counts: _best_half(pair_sums[:2], 0, choices) for counts, choices in _HALVES.items()}
  lower = {counts: _best_half(pair_sums[2:], 8, choices) for counts, choices in _HALVES.items()}
  candidates = []
  for counts, (upper_score, upper_code) in upper.items():
    lower_score, lower_code = lower[_complement(counts)]
    candidates.append((upper_score + lower_score, upper_code | lower_code))
  return _first_best(candidates)[1]


def _best_half(pair_sums: list[list[Array]], shift: int, choices: list[tuple[int, int]]) -> tuple[Array, Array]:
  """Score and code of the best of `choices` for two rows whose bits start at `shift`."""
  return _first_best(
    [
      (pair_sums[0][p] + pair_sums[1][q], jnp.uint16(_bits(p) << shift | _bits(q) << (shift + 4)))
      for p, q in choices
    ]
  )


def _bits(pair: int) -> int:
  return sum(1 << i for i in PAIRS[pair])


def _first_best(candidates: list[tuple[Array, Array]]) -> tuple[Array, Array]:
  """The candidate of the highest score, the first of equals."""
  best, code = candidates[0]
  for score, other in candidates[1:]:
    better = score > best
    best, code = jnp.maximum(best, score), jnp.where(better, other, code)
  return best, code | jnp.zeros_like(best, jnp.uint16)  # not broadcast_to, which would drop an explicit sharding


@one_program()
def two_approximation_mask(w: Array) -> Array:
  """Greedy: entries by falling magnitude, kept while row and column have room; see `sparse24_jax.transposable_mask`."""
  _check(w)
  planes = jnp.moveaxis(block_planes(bounded_magnitudes(w)), (-4, -3), (-2, -1))
  flat = planes.reshape(*planes.shape[:-2], 16)
  order = jnp.argsort(-flat, axis=-1, stable=True)
  place = jnp.arange(16).reshape((1,) * (flat.ndim - 1) + (16,))

  def keep_next(step: Array, kept: Array) -> Array:
    here = jax.lax.dynamic_index_in_dim(order, step, axis=-1)
    row_full = jnp.sum(kept & (place // 4 == here // 4), axis=-1, keepdims=True) >= 2
    column_full = jnp.sum(kept & (place % 4 == here % 4), axis=-1, keepdims=True) >= 2
    return kept | ((place == here) & jnp.logical_not(row_full | column_full))

  kept = jax.lax.fori_loop(0, 16, keep_next, jnp.zeros(flat.shape, jnp.bool_))
  kept = jnp.moveaxis(kept.reshape(planes.shape), (-2, -1), (-4, -3))
  return join_planes(kept & (jnp.moveaxis(planes, (-2, -1), (-4, -3)) >= 0))
