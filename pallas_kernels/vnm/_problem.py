"""Problems and settings of the V:N:M matmul for Hopper: what can be built, and what is good unmeasured."""

import dataclasses
from typing import Any, Literal

from jax import lax
import jax.numpy as jnp

from pallas_kernels.mosaic.sizes import ceil, CONSUMERS, SHARED_MEMORY

BK = 64  # compact columns of a stage
# Even and odd steps keep their metadata, and the producer its indices, in different registers.
UNROLL = 2
LEADERS = 8  # CTAs of every launch on an H100 whose SMs come before its GPCs, as launches showed


@dataclasses.dataclass(frozen=True)
class Config:
  """Settings of the kernel; all give the same result up to the order of float32 additions.

  Attributes:
    rows: rows of a consumer, 64 or 128.
    bn: columns of a consumer, a multiple of 64 up to 256, or 384 with A from registers; `rows / 64 * bn / 2`
      accumulators a thread must leave room.
    a_from: where the instructions read A's values, in shared memory or in registers, from which one read serves 384
      columns; with 'registers' 64 rows and no delay.
    across: what the two consumers share out, the tile's columns 'n' or its rows 'm'.
    stages: in the ring.
    delay: K steps whose wgmmas stay in flight, 0 or 1.
    band: tiles of M walked before N advances.
    ctas: CTAs launched, if the GPU has so many SMs; None is one an SM.
    places: which tiles a CTA takes, by its index in the launch or by that and where the launch began, see `place_of`.
    epilogue_n: columns stored at a time, 8 to 64.
    slots: buffers of 64 x `epilogue_n` of a consumer that wait for TMA to store them.
    producer_registers: of a thread that copies; the consumers share the rest.
  """

  rows: int = 128
  bn: int = 192
  a_from: Literal['memory', 'registers'] = 'memory'
  across: Literal['n', 'm'] = 'n'
  stages: int = 3
  delay: int = 0
  band: int = 32
  ctas: int | None = 128
  places: Literal['launch', 'gpc'] = 'launch'
  epilogue_n: int = 64
  slots: int = 1
  producer_registers: int = 56

  @property
  def tile_m(self) -> int:
    return self.rows * (CONSUMERS if self.across == 'm' else 1)

  @property
  def tile_n(self) -> int:
    return self.bn * self.parts

  @property
  def parts(self) -> int:
    """Tiles of B in a stage, one a consumer or one for both."""
    return CONSUMERS if self.across == 'n' else 1

  @property
  def consumer_registers(self) -> int:
    """Registers of a multiplying thread: its share of the launch's 168 per thread. For more it would wait forever."""
    return min(240, (168 * (CONSUMERS + 1) - self.producer_registers) // CONSUMERS // 8 * 8)

  @property
  def shared_memory_bytes(self) -> int:
    stage = self.tile_m * BK + self.tile_n * BK * 2 + self.tile_m * BK // 8
    # 1024: the barriers at which copies of B arrive, and where the launch began; arrays start at multiples of it.
    small = 1024 * (2 if self.places == 'gpc' else 1)
    return self.stages * (stage + 16) + CONSUMERS * self.slots * 64 * self.epilogue_n * 2 + small


@dataclasses.dataclass(frozen=True)
class Problem:
  """What is multiplied: A [m, k] compact, in blocks of v rows, by gathered rows of B [depth, n]."""

  m: int
  n: int
  k: int
  v: int
  depth: int
  dtype: jnp.dtype
  out_dtype: jnp.dtype
  out_layout: str


def default_config(v: int) -> Config:
  """A good setting where nothing was measured."""
  if v % 256 == 0:
    return Config(across='m', stages=4, delay=1)
  if v % 128 == 0:
    # 40 registers for who copies: the accumulators and A need the rest.
    return Config(rows=64, bn=384, across='m', a_from='registers', places='gpc', band=64, producer_registers=40)
  return Config(rows=64, bn=256, delay=1, places='gpc')


def check_config(p: Problem, c: Config) -> None:
  """ValueError if `c` cannot be built for `p`."""
  rules = [
    (c.rows in (64, 128), f'rows={c.rows} must be 64 or 128'),
    (c.across in ('n', 'm'), f"across={c.across!r} must be 'n' or 'm'"),
    (p.v % c.tile_m == 0, f'a tile of {c.tile_m} rows must divide the {p.v} rows of a block'),
    (c.a_from in ('memory', 'registers'), f"a_from={c.a_from!r} must be 'memory' or 'registers'"),
    (c.a_from == 'memory' or (c.rows, c.delay) == (64, 0),
     f"a_from='registers' takes rows=64 and delay=0, not {c.rows} and {c.delay}"),
    ((c.bn % 64 == 0 and 64 <= c.bn <= 256) or (c.a_from, c.bn) == ('registers', 384),
     f"bn={c.bn} must be a multiple of 64 up to 256, or 384 with a_from='registers'"),
    (c.rows // 64 * c.bn <= 384,
     f'rows={c.rows} and bn={c.bn} need {c.rows * c.bn // 128} accumulators a thread, 192 fit'),
    (c.places in ('launch', 'gpc'), f"places={c.places!r} must be 'launch' or 'gpc'"),
    (c.epilogue_n in (8, 16, 32, 64), f'epilogue_n={c.epilogue_n} must be 8, 16, 32 or 64'),
    (c.slots >= 1, f'slots={c.slots} must be 1 or more'),
    (c.stages > c.delay, f'stages={c.stages} must exceed delay={c.delay}'),
    (c.shared_memory_bytes <= SHARED_MEMORY,
     f'{c.stages} stages need {c.shared_memory_bytes} bytes of shared memory of {SHARED_MEMORY}'),
  ]
  for ok, message in rules:
    if not ok:
      raise ValueError(f'vnm_matmul config: {message}')


def steps_of(k: int) -> int:
  """Steps that cover `k` compact columns."""
  return ceil(k, BK * UNROLL) * UNROLL


def place_of(cta: Any, first: Any, ctas: int) -> Any:
  """Place of a CTA among those of a launch as if each launch began with the GPC of SM 0.

  A launch fills one GPC after the other, always in the same order, but begins with another one each time. Neighbouring
  places read the same columns of B, which L2 serves best to SMs of one GPC. By place, columns end where GPCs do in
  every launch of an H100; by index they do in few. On a GPU with other GPCs this costs time, no more.

  Args:
    cta: its index in the launch.
    first: that of the CTA on SM 0, or anything below `LEADERS` if it is not known: the place is the index then.
    ctas: of the launch.
  """
  around = max(ctas - LEADERS, 1)
  begin = jnp.maximum(first, LEADERS)
  return jnp.where(cta < LEADERS, cta, LEADERS + lax.rem(cta - begin + around, jnp.int32(around)))
