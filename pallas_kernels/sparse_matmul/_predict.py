"""How long the Hopper kernel should take with a setting, and which settings are worth timing.

Waves of tiles times the steps of a tile. The constants are a fit to an H100's first record; `pallas_kernels/README.md`
says how well it predicts. A tuner needs no more than the order of the settings, and an untuned problem a setting that
does not waste a wave.
"""

import dataclasses

from pallas_kernels.costs import sparse_entry
from pallas_kernels.mosaic.sizes import ceil
from pallas_kernels.sparse_matmul._problem import Config, copies_a, fits, Problem, schedule
from pallas_kernels.sparse_matmul._schedule import Schedule

H100_SMS = 132
# Nanoseconds of a K step of 64 16-bit or 128 8-bit entries by (rows, columns) of a consumer, on a full GPU. Ours.
_STEP_NS = {(128, 192): 630.0, (64, 256): 442.0, (64, 192): 345.0, (64, 128): 262.0}
# Widths between, by what passes the port of shared memory: B and, of A's kept values, as much as 32 of its columns.
# With 64 rows an H200 takes an eighth longer than that.
_ROWS_NS = {128: 630.0 / (192 + 32), 64: 1.125 * 345.0 / (192 + 32)}
# What sharing A, the smaller operand, or nothing adds: every step then brings more bytes from L2.
_SHARING_A = {128: 1.01, 64: 1.06}
_SHARING_NOTHING = {192: 1.3, 256: 1.3, 128: 1.0}
_EPILOGUE_NS = 3e-2  # an entry of a CTA's tile
_LAUNCH_US = 4.0
# An almost empty GPU clocks higher.
_IDLE_GAIN = 0.15
# Splitting sends partial sums through memory, and fills SMs whose rest would have raised the clock. Its pieces are at
# different parts of K, so that some of what their tiles share comes from memory: an eighth of it at 2.8 TB/s. Ours.
_SPLIT_US, _SPLIT_FACTOR, _SPLIT_BYTES_US = 15.0, 1.03, 22.5e6
# Up to so many columns reading A takes the time, and partial sums are small. Bytes a microsecond that one CTA reads,
# and that all do; what a split of the sum adds. Ours, by the sizes alone.
FEW_COLUMNS, _MUCH_TO_READ = 64, 2**20
_CTA_BYTES_US, _ALL_BYTES_US, _SUM_US = 60e3, 3e6, 1.5


def reads_only(p: Problem) -> bool:
  """Whether a problem has so few columns, and so large an A, that its time is that of reading A: as in generation."""
  return p.n <= FEW_COLUMNS and p.m * p.k >= _MUCH_TO_READ


def predicted_us(p: Problem, c: Config, num_sms: int = H100_SMS) -> float:
  """Time of a matmul in microseconds, as an H100 would take it.

  >>> import jax.numpy as jnp
  >>> bf16 = jnp.dtype('bfloat16')
  >>> round(predicted_us(Problem(8192, 8192, 8192, bf16, bf16, bf16), Config()))  # measured: 893
  900
  """
  work = schedule(p, c, num_sms)
  if reads_only(p):
    return _reading_us(p, c, work)
  most = max(1, num_sms // c.cluster)
  if work.remainder:
    waves, fill = work.tiles / work.clusters, 1.0
  else:
    waves = ceil(work.tiles, work.clusters)
    fill = work.tiles / (waves * most)
  other = _ROWS_NS[c.rows] * (c.bn + 32) if c.bn >= 128 else 0.8 * c.rows / 64 * (64 + c.bn)
  step = _STEP_NS.get((c.rows, c.bn), other) * (1 - _IDLE_GAIN * (1 - fill))
  if c.along == 'n' and c.cluster > 1:
    step *= _SHARING_A[c.rows]
  if c.cluster == 1:
    step *= _SHARING_NOTHING.get(c.bn, 1.15)
  us = waves * (work.k_steps * step + _EPILOGUE_NS * c.tile_m * c.bn) / 1e3 + _LAUNCH_US
  return us * _SPLIT_FACTOR + _SPLIT_US + _split_bytes(p, c, work.remainder) / _SPLIT_BYTES_US if work.remainder else us


def _reading_us(p: Problem, c: Config, work: Schedule) -> float:
  """Time of a matmul that waits for A: the busiest CTA's share of it, or all of it."""
  rows, _ = c.cluster_tile
  step = rows * c.bk * sparse_entry(p.a_dtype.itemsize) + c.bn * c.bk * p.b_dtype.itemsize
  if work.remainder:
    busy = work.pieces(work.remainder) if work.remainder == work.tiles else work.clusters
    steps, added = work.tiles * work.k_steps / busy, _SUM_US
  else:
    busy, steps, added = min(work.tiles, work.clusters), ceil(work.tiles, work.clusters) * work.k_steps, 0.0
  return _LAUNCH_US + added + steps * step / min(_CTA_BYTES_US, _ALL_BYTES_US / busy)


def _split_bytes(p: Problem, c: Config, tiles: int) -> float:
  """What so many tiles of a cluster read if they share nothing: kept values, positions and B."""
  rows, columns = c.cluster_tile
  return tiles * p.k * (rows * sparse_entry(p.a_dtype.itemsize) + columns * p.b_dtype.itemsize)


def shapes(p: Problem) -> list[Config]:
  """Tiles and clusters of every kind that fits a problem."""
  if reads_only(p):
    return [c for c in _few_columns(p) if fits(p, c) and not copies_a(p, c)]
  eight_bit = p.a_dtype.itemsize == 1
  wide = Config(bk=128) if eight_bit else Config()
  narrow = dataclasses.replace(wide, rows=64, bn=256, stages=4 if eight_bit else 5)
  middle, small = (dataclasses.replace(narrow, bn=bn, stages=6) for bn in (192, 128))
  found = [wide, narrow, middle, small]
  found += [_stored(p, dataclasses.replace(wide, bn=128))]
  if p.out_layout == 'nm' and p.out_dtype.itemsize == 2:
    # Widths between, which may divide N, or fill the last wave, where these do not. Not timed where columns lie side by
    # side in D: TMA stores few of them at a time there.
    found += [_stored(p, dataclasses.replace(wide, bn=bn)) for bn in range(144, 192, 16)]
    found += [
      _deepest(p, _stored(p, dataclasses.replace(narrow, bn=bn, stages=4)), 1, 6)
      for bn in range(144, 256, 16) if bn != 192
    ]  # fmt: skip
  found += [dataclasses.replace(c, along='n') for c in found if c.bn > 128 and c not in (middle, small)]
  found += [dataclasses.replace(small, cluster=1)]
  return [c for c in found if fits(p, c)]


def _stored(p: Problem, c: Config) -> Config:
  """`c` storing as many columns at a time as its tile and TMA allow, up to 112."""
  sizes = [n for n in range(112, 0, -8) if c.bn % n == 0]
  return next((d for n in sizes if fits(p, d := dataclasses.replace(c, epilogue_n=n))), c)


def _few_columns(p: Problem) -> list[Config]:
  """Small tiles in a ring as deep as shared memory allows, which keeps as many bytes of A on their way as it may.

  A tile of 16 columns is timed where 8 would do: on an H200 4,096 x 4,096 takes 7.5 us with 16 tokens by the one, and
  7.9 with one token by the other.
  """
  bk = 64 if p.a_dtype.itemsize > 1 and p.k % 128 else 128
  narrowest = next(bn for bn in (8, 16, 32, 64) if p.n <= bn)
  found = []
  for bn in sorted({narrowest, max(16, narrowest)}):
    c = Config(rows=64, bn=bn, bk=bk, stages=2, cluster=1, epilogue_n=bn)
    if (p.out_layout == 'mn' or p.b_layout == 'kn') and not fits(p, c):  # TMA copies no narrower piece along rows
      c = dataclasses.replace(c, bn=64, epilogue_n=64)
    for deep in (_deepest(p, c, 1), _deepest(p, dataclasses.replace(c, stages=4, halves='k'), 2)):
      found += [deep, dataclasses.replace(deep, delay=0)]
  return list(dict.fromkeys(found))


def _deepest(p: Problem, c: Config, by: int, most: int = 64) -> Config:
  while c.stages + by <= most and fits(p, deeper := dataclasses.replace(c, stages=c.stages + by)):
    c = deeper
  return c


def default_config(p: Problem, num_sms: int = H100_SMS) -> Config:
  """The setting that should be fastest where nothing was measured."""
  return min(_ways(p, num_sms), key=lambda c: predicted_us(p, c, num_sms))


def _ways(p: Problem, num_sms: int) -> list[Config]:
  """Every shape with its last wave whole or split."""
  found = shapes(p)

  def pieces(c: Config) -> list[int]:
    if not reads_only(p):
      return [4]
    # Every SM is to read: equal pieces for nearly all, and unequal ones for all.
    equal = num_sms // schedule(p, c, num_sms).tiles
    return sorted({max(2, equal), max(2, equal + 1)})

  split = (dataclasses.replace(c, split=n) for c in found for n in pieces(c))
  # A sum that is not split is no shorter for having been allowed to.
  return found + [c for c in split if fits(p, c) and schedule(p, c, num_sms).remainder]


def candidates(p: Problem, num_sms: int, count: int = 10) -> list[Config]:
  """The settings that are worth timing, likely ones first.

  Half of them differ in tiles, clusters and the last wave; the others vary the two best of these in what no prediction
  covers: CTAs that have nothing to do, output buffers, a deeper ring, the order of tiles.

  Args:
    p: the problem.
    num_sms: of the GPU.
    count: at most so many.
  """
  ranked = sorted(_ways(p, num_sms), key=lambda c: predicted_us(p, c, num_sms))
  if reads_only(p):
    # A shallower ring starts sooner.
    pairs = {'m': 1, 'k': 2}  # of stages
    shallow = [dataclasses.replace(c, stages=c.stages // 2 // pairs[c.halves] * pairs[c.halves]) for c in ranked[:2]]
    return [*ranked[: count - 2], *(c for c in shallow if fits(p, c))]
  found = ranked[: count // 2]
  change = dataclasses.replace
  for c in ranked[:2]:
    found += [change(c, slots=2), change(c, slots=2, band=16)]
    if c.split == 1 and (fewer := balanced(p, c, num_sms)) < num_sms // c.cluster * c.cluster:
      found += [change(c, ctas=max(fewer, min(128, num_sms)))]
    found += [_deepest(p, c, 1, c.stages + 1), change(c, slots=2, band=4)]
  # A long matmul may prefer what its last wave does not let expect.
  found += ranked[count // 2 :]
  return [c for c in dict.fromkeys(found) if fits(p, c)][:count]


def balanced(p: Problem, c: Config, num_sms: int) -> int:
  """The fewest CTAs that need no more waves than all of them: an idle SM saves power, which sets the clock."""
  clusters = num_sms // c.cluster
  tiles = schedule(p, c, num_sms).tiles
  waves = ceil(tiles, clusters)
  return ceil(tiles, waves) * c.cluster


def of_neighbour(p: Problem, measured: Config, num_sms: int = H100_SMS) -> Config:
  """`measured`, the best setting of a problem of about this size, unless its tiles waste a wave of this one.

  Predictions err by a few percent, so the neighbour's setting is given up only for a gain of more than 3%.
  """
  default = default_config(p, num_sms)
  if not fits(p, measured) or copies_a(p, measured):
    return default
  gain = predicted_us(p, measured, num_sms) / predicted_us(p, default, num_sms)
  return default if gain > 1.03 else measured
