"""Transposable 2:4 masks: in every 4x4 block two entries of each row and two of each column are kept."""

import itertools

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from pallas_kernels._program import traced_once
from pallas_kernels.formats import check_floating, check_groups
from pallas_kernels.two_of_four.prune import magnitudes

# The columns in two pairs, in three ways. A half of a block, two rows, keeps both entries of a column, or one, or none,
# and the other half what is missing of two. So in a pattern the halves share no column; or they share the two of one
# pair, one entry of each in each row, and of the other pair each half takes a column whole; or they share all.
_SPLITS = (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2)))
_WHOLE, _TOP, _BOTTOM = ((0, 1), (2, 3)), ((0,), (1,)), ((2,), (3,))


def _crossings(pair: tuple[int, int], rows: tuple[tuple[int, ...], tuple[int, ...]]) -> list[int]:
  """Codes of a pair of columns, the first in the first rows and the second in the others, or the other way."""
  return [sum(1 << (4 * r + c) for c, group in zip(cs, rows, strict=True) for r in group) for cs in (pair, pair[::-1])]


def _codes() -> list[int]:
  """Codes of all patterns, in the order in which `_best_codes` comes to them."""
  found, tops, bottoms = [], [], []

  def joined(*choices: list[int]) -> list[int]:
    return [sum(codes) for codes in itertools.product(*choices)]

  for split in _SPLITS:
    whole, top, bottom = ([_crossings(pair, rows) for pair in split] for rows in (_WHOLE, _TOP, _BOTTOM))
    found += joined(*whole) + joined(whole[1], top[0], bottom[0]) + joined(whole[0], top[1], bottom[1])
    tops, bottoms = tops + joined(*top), bottoms + joined(*bottom)
    if split == _SPLITS[1]:  # the third way gives nothing new to those without a shared column, and with four
      found += joined(tops, bottoms)
  return list(dict.fromkeys(found))


# The 90 patterns, bool [90, 4, 4], in the order that decides ties.
PATTERNS = np.array([[[code >> (4 * i + j) & 1 for j in range(4)] for i in range(4)] for code in _codes()], bool)


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


@traced_once()
def transposable_mask(w: Array) -> Array:
  """The best of the 90 patterns in each 4x4 block; see `sparse24_jax.transposable_mask`.

  What two columns contribute where they cross is chosen once, and stands in many patterns: 28 comparisons and 63
  additions a block, all elementwise, instead of 16 x 90 multiply-adds.
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
  halves = [[x + y for x, y in zip(*rows, strict=True)] for rows in (a[:2], a[2:])]
  tops, bottoms = [], []
  candidates = []
  for split in _SPLITS:
    whole, top, bottom = (
      [_crossed(rows, pair, _crossings(pair, names)) for pair in split]
      for rows, names in ((halves, _WHOLE), (a[:2], _TOP), (a[2:], _BOTTOM))
    )
    one_shared = _first_best(_both(whole[1], _both(top[0], bottom[0])), _both(whole[0], _both(top[1], bottom[1])))
    if split == _SPLITS[2]:
      candidates += [one_shared]
    else:
      candidates += [_both(*whole), one_shared]
      tops, bottoms = [*tops, _both(*top)], [*bottoms, _both(*bottom)]
    if split == _SPLITS[1]:
      candidates += [_both(_first_best(*tops), _first_best(*bottoms))]
  return _first_best(*candidates)[1]


_Choice = tuple[Array, Array]  # score and code


def _crossed(rows: list[list[Array]], pair: tuple[int, int], codes: list[int]) -> _Choice:
  """One column of a pair from the first of two rows and the other from the second, the better way."""
  (i, j), (first, second) = pair, rows
  straight, crossed = first[i] + second[j], first[j] + second[i]
  code = jnp.where(crossed > straight, jnp.uint16(codes[1]), jnp.uint16(codes[0]))
  return jnp.maximum(straight, crossed), code


def _both(x: _Choice, y: _Choice) -> _Choice:
  """Two choices that have no entry in common."""
  return x[0] + y[0], x[1] | y[1]


def _first_best(*candidates: _Choice) -> _Choice:
  """The candidate of the highest score, the first of equals."""
  best, code = candidates[0]
  for score, other in candidates[1:]:
    code = jnp.where(score > best, other, code)
    best = jnp.maximum(best, score)
  return best, code


@traced_once()
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
