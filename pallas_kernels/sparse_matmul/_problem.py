"""What the Hopper kernel computes and how it is set: `Problem`, `Config`, and what fits the hardware."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.mosaic.sizes import ceil, CONSUMERS, SHARED_MEMORY
from pallas_kernels.sparse_matmul import _schedule
from pallas_kernels.sparse_matmul.call import Call


@dataclasses.dataclass(frozen=True)
class Config:
  """Settings of the kernel; all give the same result up to the order of float32 additions.

  Attributes:
    rows: rows of A of a consumer, 64 or 128; a CTA's tile has twice as many.
    bn: columns of a tile, a multiple of 8 up to 256; `rows / 64 * bn / 2` accumulators a thread must leave room.
    bk: logical K of a stage: 64 for 16-bit values, 128 for 8-bit ones.
    stages: stages in the ring.
    cluster: CTAs that share an operand.
    along: where the CTAs of a cluster lie: 'm' below each other, which share B, or 'n' side by side, which share A.
    delay: K steps whose wgmmas stay in flight, 0 or 1.
    band: tiles of N walked before M advances, for hits in L2.
    ctas: CTAs launched; None is one an SM. Fewer can make whole waves.
    split: at most so many pieces of a tile in the last wave; 1 leaves tiles whole.
    epilogue_n: columns stored at a time, a multiple of 8 dividing `bn`; where they lie side by side in D ('mn', and
      every float32) 32, 64 or a multiple of 128 bytes, as TMA swizzles them.
    slots: buffers of 64 x `epilogue_n` of a consumer that wait for TMA to store them.
    halves: what the two consumers of a CTA share out: 'm', the rows of its tile, or 'k', the K steps. By steps a tile
      has half the rows, so that twice as many CTAs read a small A; the two sums are added in shared memory.
  """

  rows: int = 128
  bn: int = 192
  bk: int = 64
  stages: int = 4
  cluster: int = 2
  delay: int = 1
  band: int = 8
  ctas: int | None = None
  split: int = 1
  epilogue_n: int = 64
  slots: int = 1
  along: str = 'm'
  halves: str = 'm'

  @property
  def tile_m(self) -> int:
    return self.rows if self.halves == 'k' else CONSUMERS * self.rows

  @property
  def cluster_tile(self) -> tuple[int, int]:
    """Rows and columns of D that a cluster makes at a time."""
    return (self.tile_m * self.cluster, self.bn) if self.along == 'm' else (self.tile_m, self.bn * self.cluster)

  @property
  def unroll(self) -> int:
    """Two if a step is in flight: even and odd steps then keep their metadata in different registers."""
    return 2 if self.delay else 1


@dataclasses.dataclass(frozen=True)
class Problem:
  """What is multiplied; see `reference.sparse_matmul`.

  Attributes:
    m: rows of A.
    n: columns of D.
    k: logical columns of A.
    a_dtype: dtype of A.
    b_dtype: dtype of B.
    out_dtype: dtype of D.
    b_layout: 'nk' or 'kn'.
    out_layout: 'mn' or 'nm'.
    activation: a key of `ACTIVATIONS`, or None.
    bias: whether there is one.
    scalars: how many scales the accumulator has as a whole, up to two.
    row_scale: whether each of its rows has one of its own.
    column_scale: whether each of its columns has.
    keep_preactivation: whether D is stored before the activation too.
    alpha: what the accumulator is multiplied with.
    amax: whether the largest magnitude of D is noted.
  """

  m: int
  n: int
  k: int
  a_dtype: jnp.dtype
  b_dtype: jnp.dtype
  out_dtype: jnp.dtype
  b_layout: str = 'nk'
  out_layout: str = 'mn'
  activation: str | None = None
  bias: bool = False
  scalars: int = 0
  row_scale: bool = False
  column_scale: bool = False
  keep_preactivation: bool = False
  alpha: float = 1.0
  amax: bool = False

  @property
  def call(self) -> Call:
    """What a back end is asked for."""
    return Call(
      self.out_dtype, self.b_layout, self.out_layout, self.activation, self.keep_preactivation, self.alpha, self.amax
    )

  @property
  def key(self) -> dict[str, Any]:
    """What tuned records are looked up by."""
    return dict(m=self.m, n=self.n, k=self.k, dtype=self.a_dtype.name, out_dtype=self.out_dtype.name,
                b_layout=self.b_layout, out_layout=self.out_layout)


def shared_memory_bytes(p: Problem, c: Config) -> int:
  """Shared memory of a CTA, without alignment."""
  stage = c.tile_m * c.bk // 2 * p.a_dtype.itemsize + c.bn * c.bk * p.b_dtype.itemsize + c.tile_m * c.bk // 8
  sums = 4 * c.rows * c.bn if c.halves == 'k' else 0
  return c.stages * (stage + 16) + sums + CONSUMERS * c.slots * 64 * c.epilogue_n * p.out_dtype.itemsize


def check_config(p: Problem, c: Config) -> None:
  """ValueError if `c` cannot be built for `p`."""
  stored = c.epilogue_n * p.out_dtype.itemsize
  rules = [
    (c.rows in (64, 128), f'rows={c.rows} must be 64 or 128'),
    (c.bn % 8 == 0 and 8 <= c.bn <= 256, f'bn={c.bn} must be a multiple of 8 up to 256'),
    (c.rows // 64 * c.bn <= 384,
     f'rows={c.rows} and bn={c.bn} need {c.rows * c.bn // 128} accumulators a thread, 192 fit'),
    (c.bn % c.epilogue_n == 0, f'bn={c.bn} must be a multiple of epilogue_n={c.epilogue_n}'),
    (c.epilogue_n % 8 == 0, f'epilogue_n={c.epilogue_n} must be a multiple of 8'),
    # float32 is transposed after the kernel.
    ((p.out_layout == 'nm' and p.out_dtype.itemsize < 4) or stored in (32, 64) or stored % 128 == 0,
     f'epilogue_n={c.epilogue_n} columns of {p.out_dtype} are {stored} bytes; 32, 64 or a multiple of 128 are stored'),
    # The cycle of buffers must close with the tile, or a buffer is refilled while TMA still reads it.
    (c.rows // 64 * c.bn // c.epilogue_n % c.slots == 0,
     f'slots={c.slots} must divide the {c.rows // 64 * c.bn // c.epilogue_n} pieces that a consumer stores'),
    (c.bk in (64, 128), f'bk={c.bk} must be 64 or 128'),
    (c.along in ('m', 'n'), f"along={c.along!r} must be 'm' or 'n'"),
    (c.halves in ('m', 'k'), f"halves={c.halves!r} must be 'm' or 'k'"),
    (c.halves == 'm' or (c.stages % 2 == 0 and ceil(p.k, c.bk) % 2 == 0 and c.split == c.cluster == 1),
     f"halves='k' takes an even number of stages and of K steps, found {c.stages} and {ceil(p.k, c.bk)}, split=1 and"
     ' cluster=1'),
    (p.b_layout == 'nk' or c.bn % 32 == 0, f'bn={c.bn} must be a multiple of 32 when B is [K, N]'),
    (p.b_layout == 'kn' or c.along == 'n' or c.bn // 8 % c.cluster == 0 or c.cluster % (c.bn // 8) == 0,
     f'bn={c.bn} must be a multiple or a divisor of {8 * c.cluster}: each of cluster={c.cluster} CTAs copies whole'
     ' pieces of 8 columns of the B that they share'),
    # By steps each consumer has half of the stages.
    (c.stages > c.delay * (CONSUMERS if c.halves == 'k' else 1),
     f'stages={c.stages} must exceed delay={c.delay}' + (', a consumer' if c.halves == 'k' else '')),
    (shared_memory_bytes(p, c) <= SHARED_MEMORY,
     f'{c.stages} stages need {shared_memory_bytes(p, c)} bytes of shared memory of {SHARED_MEMORY}'),
  ]
  for ok, message in rules:
    if not ok:
      raise ValueError(f'sparse_matmul config: {message}')


def for_outputs(p: Problem, c: Config) -> Config:
  """`c`, which was measured with one output, for the outputs of `p`.

  Z and D go through the buffers in turns; with two of them, neither waits until TMA has read the other.
  """
  two = dataclasses.replace(c, slots=2)
  return two if p.keep_preactivation and c.slots == 1 and fits(p, two) else c


def fits(p: Problem, c: Config) -> bool:
  """Whether `c` can be built for `p`."""
  try:
    check_config(p, c)
  except ValueError:
    return False
  return True


def ends_half_way(p: Problem) -> bool:
  """Whether the last step along K of 8-bit operands, of two or more, is half a one: narrower boxes read all of it.

  Padded to whole steps each operand would be copied by a pass of its own.
  """
  return p.a_dtype.itemsize == 1 and p.k % 128 == 64 and p.k > 64


def box_bytes(step: int, row: int) -> int:
  """Bytes of a row that TMA copies and swizzles together: those of a step, as far as whole boxes make a row."""
  for size in (128, 64, 32):
    if size <= step and row % size == 0:
      return size
  raise ValueError(f'sparse_matmul: rows of {row} bytes must be a multiple of 32')


def copies_a(p: Problem, c: Config) -> bool:
  """Whether A is padded along K, so copied in every call, where shorter steps would leave it alone."""
  return p.a_dtype.itemsize == 2 and p.k % c.bk == 64


def schedule(p: Problem, c: Config, num_sms: int) -> _schedule.Schedule:
  """Which cluster works on what."""
  k_steps = ceil(p.k, c.bk)
  if c.split > 1:
    k_steps = ceil(k_steps, c.unroll) * c.unroll
  rows, columns = c.cluster_tile
  tiles = ceil(p.m, rows) * ceil(p.n, columns)
  clusters = max(1, min(c.ctas or num_sms, num_sms) // c.cluster)
  if c.split == 1:
    clusters = min(clusters, tiles)
  return _schedule.Schedule(tiles, k_steps, clusters, c.unroll, c.split)
