"""Which tile, and which part of K, a cluster works on: plain integer arithmetic, traced in the kernel, run in tests.

`tiles` tiles on `clusters` clusters make `tiles // clusters` full waves and a remainder. Left alone, the remainder
costs a whole wave in which most of the GPU idles: 688 tiles on 66 clusters take 11 waves for the work of 10.4. Split,
the remainder's K steps are laid end to end and cut into equal pieces, one a cluster (after stream-K, arXiv 2301.03598,
in its hybrid form: data-parallel full waves first).

A piece is no longer than a tile, so it touches at most two: the end of one and the start of the next. The owner of a
tile's end *finishes* it; the others *help*: they write their partial sums to memory and raise a flag. Each cluster
helps first and finishes second, so the partial sums a finisher needs were begun when it began, and it hardly waits. It
adds them in the order of the clusters, hence the same bits on every run. A helper never waits for anyone, so no order
of launch can deadlock.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

Int = Any  # int or int32 scalar


def _div(a: Int, b: int) -> Int:
  return lax.div(a, jnp.int32(b)) if isinstance(a, jax.Array) else a // b


def _select(condition: Any, a: Int, b: Int) -> Int:
  if isinstance(condition, jax.Array):
    return jnp.where(condition, jnp.int32(a), jnp.int32(b))
  return a if condition else b


@dataclasses.dataclass(frozen=True)
class Item:
  """One piece of work of a cluster.

  Attributes:
    tile: linear tile index.
    start: first K step.
    steps: number of K steps; 0 means nothing to do.
    helps: write partial sums instead of the result.
    first_helper: the partial sums of clusters first_helper .. this one (exclusive) are to be added.
  """

  tile: Int
  start: Int
  steps: Int
  helps: Any
  first_helper: Int


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Work of all clusters.

  Attributes:
    tiles: tiles of the result.
    k_steps: K steps of a tile, a multiple of `quantum` if tiles are split.
    clusters: clusters launched.
    quantum: a piece holds a multiple of so many K steps (the kernel's unrolling).
    split: at most so many pieces a tile in the last wave; 1 leaves tiles whole.
  """

  tiles: int
  k_steps: int
  clusters: int
  quantum: int = 2
  split: int = 1

  @property
  def remainder(self) -> int:
    """Tiles that are split."""
    left = self.tiles % self.clusters
    # With one cluster or none to spare a split tile would only travel through memory.
    return left if self.split > 1 and left and self.pieces(left) > left else 0

  def pieces(self, remainder: int) -> int:
    units = remainder * (self.k_steps // self.quantum)
    return min(self.clusters, self.split * remainder, units)

  @property
  def whole_waves(self) -> int:
    """Turns in which a cluster takes a whole tile (the last may be partial if nothing is split)."""
    return self.tiles // self.clusters if self.remainder else -(-self.tiles // self.clusters)

  @property
  def turns(self) -> int:
    """Items of a cluster."""
    return self.whole_waves + (2 if self.remainder else 0)

  def whole(self, cluster: Int, turn: Int) -> Item:
    """Item of a turn below `whole_waves`."""
    tile = cluster + turn * self.clusters
    return Item(tile, 0, _select(tile < self.tiles, self.k_steps, 0), False, cluster)

  def piece(self, cluster: Int, *, helps: bool) -> Item:
    """The helping or finishing part of a cluster's piece of the split tiles."""
    per_tile = self.k_steps // self.quantum
    units, pieces = self.remainder * per_tile, self.pieces(self.remainder)
    begin, end = _div(cluster * units, pieces), _div((cluster + 1) * units, pieces)
    tile = _div(begin, per_tile)
    boundary = (tile + 1) * per_tile
    base = self.whole_waves * self.clusters
    crosses = end > boundary
    if helps:
      start = _select(crosses, boundary, begin)
      length = _select(end == boundary, 0, end - start)
      tile = _select(crosses, tile + 1, tile)
      first_helper = cluster
    else:
      start = begin
      length = _select(end >= boundary, boundary - begin, 0)
      # The piece that holds the tile's first unit u is the largest p with p * units // pieces <= u.
      first_helper = _div((tile * per_tile + 1) * pieces - 1, units)
    length = _select(cluster < pieces, length, 0)
    return Item(base + tile, (start - tile * per_tile) * self.quantum, length * self.quantum, helps, first_helper)

  def item(self, cluster: Int, turn: Int) -> Item:
    """Item of any turn: whole tiles, then the helping part, then the finishing part."""
    whole = self.whole(cluster, turn)
    if not self.remainder:
      return whole
    parts = [self.piece(cluster, helps=True), self.piece(cluster, helps=False)]
    at = [turn == self.whole_waves, turn == self.whole_waves + 1]

    def pick(name: str) -> Int:
      otherwise = _select(at[1], getattr(parts[1], name), getattr(whole, name))
      return _select(at[0], getattr(parts[0], name), otherwise)

    return Item(pick('tile'), pick('start'), pick('steps'), at[0], pick('first_helper'))
