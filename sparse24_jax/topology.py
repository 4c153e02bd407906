"""Dynamic sparse training: which links a weight drops, and which it grows, from magnitudes and dense gradients.

Everything here is a pure function of global arrays, a step and a path, so every replica and every sharding of the same
arrays gets the same mask.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import itertools
import math
from typing import get_args, Literal, NamedTuple

from jax import Array
import jax.numpy as jnp
import numpy as np

from pallas_kernels._choices import check_choices
from pallas_kernels._program import one_program
from pallas_kernels.formats import join_groups, split_groups
from pallas_kernels.pack.api import transposable_mask
from sparse24_jax.density import check_share, schedule_name
from sparse24_jax.selection import above_zero, count_kept, draw, keep_largest, word_of

type Schedule = Callable[[Array], Array]

Distribution = Literal['uniform', 'erdos_renyi']
Start = Literal['random', 'magnitude']
Structure = Literal['2:4', 'transposable']


class Context(NamedTuple):
  """What a change of topology may depend on besides the weight itself.

  Attributes:
    step: int32 scalar, optimizer steps done.
    path: of the weight; tells the random choices of two weights apart.
    shapes: shapes of all weights under the same projection, by path: layers share out one density.
    word: uint32 scalar that tells them apart, if one program changes weights of one shape in turn, of which `path` is
      the first; None: that of the path.
  """

  step: Array
  path: str
  shapes: Mapping[str, tuple[int, ...]]
  word: Array | None = None


class Evolved(NamedTuple):
  """A projection's new state, and where (bool, shape of the weight) the inner optimizer's moments start at zero."""

  state: Array
  reset: Array


def layer_densities(
  density: Array | float, shapes: Mapping[str, tuple[int, ...]], distribution: str
) -> dict[str, Array]:
  """Shares out one density over layers.

  `'uniform'` gives every layer the same. `'erdos_renyi'` gives a matrix `[in, out]` the density eps (in + out) / (in
  out), at most 1, with the eps at which all weights together have the one asked for: exactly, as both are piecewise
  linear in eps. The variant with kernel sizes is the same thing for weights `[..., in, out]`, whose leading axes stack
  layers or experts.

  Args:
    density: kept share of all weights together, in [0, 1]; may be traced.
    shapes: by path, `[..., in, out]`.
    distribution: one of `Distribution`.

  Returns:
    float32 scalars by path.

  Raises:
    ValueError: another `distribution`.

  Source: Mocanu et al., arXiv 1707.04780 (SET); Evci et al., arXiv 1911.11134, section 3 (RigL).

  >>> import sparse24_jax as s24
  >>> shapes = {'a': (64, 64), 'b': (64, 256)}
  >>> s24.layer_densities(0.25, shapes, 'uniform')['b'].item()
  0.25
  >>> {path: round(d.item(), 4) for path, d in s24.layer_densities(0.25, shapes, 'erdos_renyi').items()}
  {'a': 0.3571, 'b': 0.2232}
  """
  if distribution not in get_args(Distribution):
    raise ValueError(f'distribution={distribution!r}: known are {list(get_args(Distribution))}')
  density = jnp.asarray(density, jnp.float32)
  if distribution == 'uniform':
    return dict.fromkeys(shapes, density)
  ratios = np.array([(shape[-2] + shape[-1]) / (shape[-2] * shape[-1]) for shape in shapes.values()])
  sizes = np.array([float(np.prod(shape)) for shape in shapes.values()])
  corners = np.concatenate([[0.0], np.sort(1 / ratios)])  # of eps, where one more layer becomes dense
  layers = np.minimum(1.0, corners[:, None] * ratios)
  overall = jnp.asarray(layers @ sizes / sizes.sum(), jnp.float32)
  by_ratio = {ratio: jnp.asarray(layers[:, i], jnp.float32) for i, ratio in enumerate(ratios)}
  shared = {ratio: jnp.interp(density, overall, layer) for ratio, layer in by_ratio.items()}
  return {path: shared[ratio] for path, ratio in zip(shapes, ratios, strict=True)}


@dataclasses.dataclass(frozen=True)
class Topology:
  """Drops the smallest links of a weight and grows others, at each call; the settings of `dynamic_sparse`, as data.

  Attributes: as the arguments of `dynamic_sparse`.

  >>> import sparse24_jax as s24
  >>> topology = s24.dynamic_sparse(0.2, drop_fraction=0.3).update
  >>> topology.density, topology.structure, {k: float(d) for k, d in topology.densities(0, {'w': (8, 8)}).items()}
  (0.2, None, {'w': 0.20000000298023224})
  """

  density: float | Schedule
  drop_fraction: float | Schedule = 0.0
  random_share: float = 0.0
  distribution: Distribution = 'uniform'
  start: Start = 'random'
  structure: Structure | None = None
  reset_moments: bool = True
  seed: int = 0

  def __post_init__(self):
    check_share('density', self.density)
    check_share('drop_fraction', self.drop_fraction)
    check_share('random_share', self.random_share, schedule=False)
    check_choices(self)
    if self.structure and not callable(self.density) and self.density > 0.5:
      raise ValueError(f'density={self.density} is above the 0.5 that structure={self.structure!r} can keep')

  @property
  def name(self) -> str:
    """All settings in one line: equal for two topologies that train alike."""
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return ' '.join(f'{k}={schedule_name(v) if callable(v) else v}' for k, v in fields.items())

  @property
  def label(self) -> str:
    """What a table says of it: how dense its weights are, over the steps of a run.

    >>> import sparse24_jax as s24
    >>> s24.recipes.mixed_sparsity('.*', total_steps=4000, structure='2:4').rules[0].policy.projection.update.label
    '2:4 density 0.5 -> 0.09 -> 0.5'
    """
    most = 0.5 if self.structure else 1.0
    corners = getattr(self.density, 'corners', None) if callable(self.density) else (self.density,)
    reached = (f'{density:g}' for density, _ in itertools.groupby(min(corner, most) for corner in corners or ()))
    return ' '.join(filter(None, (self.structure, 'density', ' -> '.join(reached) or 'by a schedule')))

  def densities(self, step: Array, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Kept share of each weight by path, float32 scalars, as a topology update after `step` steps makes it."""
    density = self.density(step) if callable(self.density) else self.density
    densities = layer_densities(density, shapes, self.distribution)
    return {k: jnp.minimum(d, 0.5) for k, d in densities.items()} if self.structure else densities

  def links(self, context: Context, shape: tuple[int, ...]) -> Array:
    """Number of links of each matrix of a weight of this shape after a change, int32 scalar."""
    share = self.densities(context.step, context.shapes)[context.path]
    return _links_at(share, shape[-2] * shape[-1])

  def last_change(self, refresh_every: int, total_steps: int | None) -> int | None:
    """The step of the last change of density in a run; None where nothing tells how long the run is."""
    if not callable(self.density):
      return 0
    total_steps = total_steps or getattr(self.density, 'total_steps', None)
    return total_steps and total_steps // refresh_every * refresh_every

  def __call__(self, w: Array, grad: Array | None, mask: Array, context: Context) -> Evolved:
    """One change of topology.

    With S* the target density: max(zeta a, a - S* n) of the a links of n are dropped, smallest magnitudes first, and
    as many grown as the target lacks, so a new target is reached at once. The random share of these is drawn
    uniformly; the others have the largest gradients. A link that is dropped and grown again in one call stays as it is.

    Args:
      w: `[..., in, out]`, with zeros where no link is.
      grad: dense gradient, shape of `w`; None at the start of a run, where `mask` is replaced.
      mask: bool, the links, True = kept.
      context: step, path and shapes.

    Returns:
      The new mask, and where it changed (nowhere with `reset_moments` off).

    Source: Liu et al., arXiv 2408.11746 (mixed growing); Evci et al., arXiv 1911.11134, section 3.
    """
    if math.prod(w.shape[-2:]) >= 2**31:
      raise ValueError(
        f'{context.path} of shape {w.shape} has matrices of {math.prod(w.shape[-2:])} entries; dynamic_sparse counts up'
        ' to 2^31 - 1 links of one: divide the weight, with a leading axis for its parts'
      )
    target = self.links(context, w.shape)
    word = word_of(context.path) if context.word is None else context.word
    drawn = draw(self.seed, context.step, word, w.shape)
    if grad is None:
      score = drawn if self.start == 'random' else w
      none = jnp.zeros_like(mask)
      # Computed from the weight too, not from random numbers alone, so that it is sharded like it.
      new = keep_largest(score, target, self._room(none, score)) & ~jnp.isnan(w)
      return Evolved(new, none)
    zeta = self.drop_fraction(context.step) if callable(self.drop_fraction) else self.drop_fraction
    active = count_kept(mask)
    dropped = jnp.round(jnp.float32(zeta) * active.astype(jnp.float32)).astype(jnp.int32)
    new = keep_largest(w, jnp.minimum(active - dropped, target), mask)
    if self.random_share < 1:
      by_gradient = target - count_kept(new)
      by_gradient -= jnp.round(jnp.float32(self.random_share) * by_gradient.astype(jnp.float32)).astype(jnp.int32)
      new |= keep_largest(grad, by_gradient, self._room(new, grad))
    if self.random_share > 0:
      new |= keep_largest(drawn, target - count_kept(new), self._room(new, drawn))
    return Evolved(new, new != mask if self.reset_moments else jnp.zeros_like(mask))

  def _room(self, links: Array, score: Array) -> Array:
    """Marks where links may grow; with a structure, the best candidates of each group, as many as it can take."""
    free = ~links
    if self.structure is None:
      return free
    if self.structure == 'transposable':
      return free & _best_pattern(links, score)
    fours = (*links.shape[:-2], links.shape[-2] // 4, 4, links.shape[-1])
    free, taken = free.reshape(fours), jnp.sum(links.reshape(fours), axis=-2, keepdims=True, dtype=jnp.int32)
    best = above_zero(score.reshape(fours), free)
    ahead = []
    for i in range(4):
      mine = best[..., i : i + 1, :]
      before = jnp.sum(best[..., :i, :] >= mine, axis=-2, keepdims=True, dtype=jnp.int32)
      ahead.append(before + jnp.sum(best[..., i + 1 :, :] > mine, axis=-2, keepdims=True, dtype=jnp.int32))
    return (free & (taken + jnp.concatenate(ahead, axis=-2) < 2)).reshape(links.shape)


def _links_at(share: Array, size: int) -> Array:
  """A share of so many entries, int32; exactly none and exactly all at its ends."""
  # float32 does not hold every whole number above 2^24. A share below one, 1 - 2^-24 at most, never rounds beyond all.
  return jnp.where(share >= 1, size, jnp.round(share * size).astype(jnp.int32))


@one_program()
def _best_pattern(links: Array, score: Array) -> Array:
  """The transposable mask that holds the links, and beside them the largest sum of scores; bool, shape of `links`.

  Such a mask exists if the links of each block are part of one of the 90 patterns. They always are: dropping links
  leaves a part, and links grow only within a mask found here. A link weighs sixteen times the largest other entry of
  its block, so that no pattern without it, with at most eight entries, has a larger sum.
  """
  if score.dtype == jnp.uint32:
    value = (score >> jnp.uint32(8)).astype(jnp.float32)
  else:
    value = jnp.abs(score.astype(jnp.float32))
    value = jnp.where(jnp.isnan(value), 0.0, jnp.minimum(value, jnp.float32(2.0**100)))
  largest = value = jnp.where(links, 0.0, value)
  for axis in (-2, -1):
    largest = join_groups([functools.reduce(jnp.maximum, split_groups(largest, axis))] * 4, axis)
  return transposable_mask(jnp.where(links, 16 * jnp.maximum(largest, jnp.float32(2.0**-100)), value))
