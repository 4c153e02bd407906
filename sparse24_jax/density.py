"""Functions of the step count: how dense a run is and how much of its topology it changes, as data."""

from collections.abc import Callable
import dataclasses
import math
import numbers
from typing import Any, Literal

from jax import Array
import jax.numpy as jnp

from pallas_kernels._choices import check_whole

_POWERS = {'once': 0, 'linear': 1, 'cubic': 3}


def check_share(name: str, value: Any, *, schedule: bool = True) -> None:
  """ValueError unless `value` is a number from 0 to 1, or, where allowed, a function of the step count."""
  if callable(value):
    if schedule:
      return
  elif isinstance(value, numbers.Real) and 0 <= value <= 1:
    return
  raise ValueError(f'{name}={value!r} must be from 0 to 1' + (', or a schedule' if schedule else ''))


def check_ramp(name: str, value: Any) -> None:
  """ValueError unless `value` is one of the ramps of `Stage`."""
  if value not in _POWERS:
    raise ValueError(f'{name}={value!r}: known are {list(_POWERS)}')


def schedule_name(schedule: Callable[[Any], Any]) -> str:
  """Tells schedules apart in logs and checkpoints: frozen data by its fields, any other function by its values."""
  if dataclasses.is_dataclass(schedule):
    return repr(schedule)
  return str([float(schedule(10**k)) for k in range(7)])


@dataclasses.dataclass(frozen=True)
class Stage:
  """A stretch of a density schedule.

  Attributes:
    fraction: share of the optimizer steps, in (0, 1].
    density: kept share of the weights at its end, in (0, 1].
    ramp: how the density gets there: `'once'`, with the stage's first topology update; `'linear'`; or `'cubic'`, fast
      at first: d1 + (d0 - d1) (1 - t)^3 with t from 0 to 1 over the stage.

  >>> import sparse24_jax as s24
  >>> fall, rest = s24.Stage(0.1, 0.09, 'cubic'), s24.Stage(0.9, 0.09)
  >>> float(s24.DensitySchedule((fall, rest), total_steps=1000)(50)) < 0.5 * (1 + 0.09)
  True
  """

  fraction: float
  density: float
  ramp: Literal['once', 'linear', 'cubic'] = 'once'

  def __post_init__(self):
    for name in ('fraction', 'density'):
      check_share(name, getattr(self, name), schedule=False)
      if not getattr(self, name):
        raise ValueError(f'{name}=0 of a stage must be above 0')
    check_ramp('ramp', self.ramp)


@dataclasses.dataclass(frozen=True)
class DensitySchedule:
  """Density as a function of the optimizer step: sparsity variation, as data.

  A stage begins at the rounded share of the steps before it, as a phase does. Calling it works on traced steps, so a
  run compiles once however the density moves.

  Attributes:
    stages: in order; the fractions add up to one.
    total_steps: of the run.
    start: density before the first stage.

  Source: Liu et al., arXiv 2408.11746 (sparsity variation); Zhu and Gupta, arXiv 1710.01878, equation 1 (cubic).

  >>> import sparse24_jax as s24
  >>> schedule = s24.DensitySchedule((s24.Stage(0.5, 0.2, 'linear'), s24.Stage(0.5, 1.0)), total_steps=100)
  >>> [round(float(schedule(step)), 2) for step in (0, 25, 49, 50, 99)]
  [1.0, 0.6, 0.22, 1.0, 1.0]
  """

  stages: tuple[Stage, ...]
  total_steps: int
  start: float = 1.0

  def __post_init__(self):
    if not isinstance(self.stages, tuple) or not all(isinstance(stage, Stage) for stage in self.stages):
      raise ValueError(f'stages must be a tuple of Stage, found {self.stages!r}')
    if not math.isclose(total := sum(stage.fraction for stage in self.stages), 1.0, abs_tol=1e-6):
      raise ValueError(f'the fractions of the stages add up to {total}, not 1: {self.stages}')
    check_whole('total_steps', self.total_steps, 1)
    check_share('start', self.start, schedule=False)

  @property
  def corners(self) -> tuple[float, ...]:
    """The density at the start, unless the first stage leaves it at once, and at the end of each stage."""
    starts = () if self.stages[0].ramp == 'once' else (self.start,)
    return *starts, *(stage.density for stage in self.stages)

  def __call__(self, step: Any) -> Array:
    """float32, shape of `step`: the density after `step` optimizer steps."""
    step = jnp.asarray(step, jnp.float32)
    density, before, done = jnp.full(step.shape, self.start, jnp.float32), self.start, 0.0
    for stage in self.stages:
      begin, done = round(done * self.total_steps), done + stage.fraction
      length = max(1, round(done * self.total_steps) - begin)
      left = jnp.clip(1 - (step - begin) / length, 0.0, 1.0) ** _POWERS[stage.ramp]
      reached = stage.density + (before - stage.density) * left if stage.ramp != 'once' else stage.density
      density, before = jnp.where(step >= begin, reached, density), stage.density
    return density


@dataclasses.dataclass(frozen=True)
class CosineDecay:
  """Half a cosine from `initial` at step 0 to zero at `steps`, and zero after: the share of links that an update drops.

  Source: Evci et al., arXiv 1911.11134, section 3 (f_decay).

  >>> import sparse24_jax as s24
  >>> [round(float(s24.CosineDecay(0.3, 100)(step)), 3) for step in (0, 50, 100, 200)]
  [0.3, 0.15, 0.0, 0.0]
  """

  initial: float
  steps: int

  def __post_init__(self):
    check_share('initial', self.initial, schedule=False)
    check_whole('steps', self.steps, 1)

  def __call__(self, step: Any) -> Array:
    """float32, shape of `step`."""
    done = jnp.clip(jnp.asarray(step, jnp.float32) / self.steps, 0.0, 1.0)
    return self.initial / 2 * (1 + jnp.cos(jnp.pi * done))
