"""The projections of the library: by magnitude, transposable, by soft threshold, and masks that move."""

from collections.abc import Callable
import functools
from typing import Literal

from jax import Array
import jax.numpy as jnp

from pallas_kernels._choices import check_whole
from pallas_kernels._partitioning import like
from pallas_kernels._program import one_program
from pallas_kernels.formats import join_groups, split_groups
from pallas_kernels.pack.api import transposable_mask
from pallas_kernels.two_of_four.prune import magnitude_mask, soft_threshold, soft_threshold_scale
from pallas_kernels.two_of_four.transposable import two_approximation_mask
from sparse24_jax.policy import ActivationPolicy
from sparse24_jax.projection import Form, Masked, Projection, remembered, SoftThreshold, TransposableMasked
from sparse24_jax.topology import Distribution, Schedule, Start, Structure, Topology


@remembered
def magnitude(*, n: int = 2, m: int = 4) -> Projection:
  """Keeps the `n` largest magnitudes in each group of `m` along the input axis.

  Args:
    n: kept, from 1 to `m`. The 2:4 matmul takes 2 of 4 and 1 of 4.
    m: entries of a group.

  Raises:
    ValueError: `n` is not a whole number in that range, or `m` is not a whole number.

  >>> import jax.numpy as jnp, sparse24_jax as s24
  >>> projection = s24.magnitude()
  >>> w = jnp.array([[1.0], [-3.0], [2.0], [0.5]])
  >>> projection.apply(w, projection.init(w))[:, 0].tolist()
  [0.0, -3.0, 2.0, 0.0]
  """
  check_whole('n', n, 1)
  check_whole('m', m, 1)
  if n > m:
    raise ValueError(f'n={n} of m={m}: n must be from 1 to m')
  form = Masked(n) if (n, m) in ((2, 4), (1, 4)) else None
  return _masked(f'magnitude {n}:{m}', lambda w: magnitude_mask(w, n=n, m=m), divisor=(m, 1), form=form)


@remembered
def transposable(*, method: Literal['exact', 'two_approx'] = 'exact') -> Projection:
  """Keeps two of four along rows and columns of each 4x4 block: one mask for the forward and the input gradient.

  Args:
    method: `'exact'` keeps the largest sum of magnitudes that any such pattern can; `'two_approx'` picks greedily, and
      keeps at least half of that sum.

  Raises:
    ValueError: another method.

  Source: Hu et al., arXiv 2404.01847, section 5.1; Hubara et al., arXiv 2102.08124 (two-approximation).

  >>> import jax, sparse24_jax as s24
  >>> w = jax.random.normal(jax.random.key(0), (8, 8))
  >>> projection = s24.transposable()
  >>> int((projection.apply(w, projection.init(w)) != 0).sum())
  32
  """
  searches = {'exact': transposable_mask, 'two_approx': two_approximation_mask}
  if method not in searches:
    raise ValueError(f'method={method!r}: known are {sorted(searches)}')
  return _masked(f'transposable {method}', searches[method], divisor=(4, 4), form=TransposableMasked())


def _masked(
  name: str, search: Callable[[Array], Array], *, divisor: tuple[int, int], form: Form | None
) -> Projection:
  return Projection(
    name=name,
    init=one_program()(search),
    # A NaN is pruned from every mask, and would be hidden as a zero: it passes.
    apply=one_program()(_apply_mask),
    # Nor may a new mask hide it: where a NaN is, the old one stays, in which it is kept if it ever reached the forward.
    refresh=one_program()(lambda w, mask: jnp.where(_holds_nan(w, divisor), mask, search(w))),
    mask=lambda w, mask: mask,
    transposable=divisor == (4, 4),
    divisor=divisor,
    form=form,
  )


def _apply_mask(w: Array, mask: Array) -> Array:
  # A model may divide a weight in another way than it is stored, and its mask with it.
  return jnp.where(like(mask, w) | jnp.isnan(w), w, jnp.zeros((), w.dtype))


def _holds_nan(w: Array, divisor: tuple[int, int]) -> Array:
  """True throughout the groups in which `w` holds a NaN."""
  held = jnp.isnan(w)
  for axis, size in zip((-2, -1), divisor, strict=True):
    some = functools.reduce(jnp.logical_or, split_groups(held, axis, size))
    held = join_groups([some] * size, axis)
  return held


@remembered
def soft_threshold_projection(*, axis: Literal[-2, -1] = -2) -> Projection:
  """beta S(w): the soft threshold of the weight as it is now, times the scale frozen at initialisation, its state.

  Its mask is where S(w) is not zero: at most, and almost always, two of four.

  Args:
    axis: -2 makes it 2:4 along the input, for the forward; -1 along the output, for the input gradient.

  Raises:
    ValueError: another axis.

  >>> import jax, sparse24_jax as s24
  >>> w = jax.random.normal(jax.random.key(0), (64, 64))
  >>> projection = s24.soft_threshold_projection()
  >>> scale = projection.init(w)
  >>> scale.shape, int((projection.apply(w, scale) != 0).sum())
  ((), 2048)
  """
  if axis not in (-2, -1):
    raise ValueError(f'axis={axis}: a weight [in, out] is 2:4 along -2 or -1')

  @one_program()
  def apply(w: Array, scale: Array) -> Array:
    soft = soft_threshold(w, axis=axis).astype(jnp.float32)
    return (soft * jnp.expand_dims(scale, (-2, -1))).astype(w.dtype)

  return Projection(
    name='soft_threshold' if axis == -2 else 'soft_threshold along out',
    init=lambda w: soft_threshold_scale(w, axis=axis),
    apply=apply,
    refresh=lambda w, scale: scale,
    mask=one_program()(lambda w, scale: soft_threshold(w, axis=axis) != 0),
    divisor=(4, 1) if axis == -2 else (1, 4),
    form=SoftThreshold(axis),
  )


@remembered
def dynamic_sparse(
  density: float | Schedule,
  *,
  drop_fraction: float | Schedule = 0.0,
  random_share: float = 0.0,
  distribution: Distribution = 'uniform',
  start: Start = 'random',
  structure: Structure | None = None,
  reset_moments: bool = True,
  seed: int = 0,
) -> Projection:
  """A mask of a given density that drops its smallest weights and grows others, every `refresh_every` steps.

  Pruned weights are zero and not trained. RigL is `random_share` 0, SET is 1, mixed growing 0.25, and a static mask is
  `drop_fraction` 0. The forward and both gradients run as dense matmuls, with zeros, unless `structure` is given.

  A clip in front of `sparse_training` sees the dense gradients, whose norm is larger than that of the links: put it
  inside, `sparse_training(optax.chain(clip, adamw), recipe)`.

  In a dense phase every link is there: the state is all True (with a structure, the best mask of that by magnitude).

  Under `DotPolicy(weight_grad='mvue')` links grow by an unbiased estimate of the dense gradient. Its noise is that of
  one sample: a link whose gradient is small is at times grown for it, in place of one whose gradient is larger.

  Args:
    density: kept share of all weights under this projection together, a number or a function of the step count such as
      `DensitySchedule`. With a `structure` a layer that the distribution gives more than half keeps half, and the rest
      is not given to others, so that all together may keep less.
    drop_fraction: share of a weight's links that one update drops and replaces; a number or a function of the step
      count such as `CosineDecay`.
    random_share: share of the grown links that is drawn uniformly; the rest have the largest gradients.
    distribution: of the density over weights, see `layer_densities`.
    start: how the first mask is chosen.
    structure: `'2:4'` keeps at most two of four along axis -2 at any density up to 0.5, so that the 2:4 matmul can run
      the forward. `'transposable'` does so along both axes, by masks that are parts of transposable ones, and so for
      the input gradient, too. The kernel multiplies the further zeros of a lower density. A schedule above
      0.5 is cut to it. At 0.5 a link that alone is dropped from its 4x4 block is the only one that fits there, and
      comes back: links move where two or more of a block are dropped.
    reset_moments: start the moments of a link at zero when it comes or goes. Off, a link that returns has the second
      moment of its last life, as in the released code of mixed sparsity training. Under Adam a first step from zero
      moments is (1 - b1) / sqrt(1 - b2) of the learning rate once bias correction has faded: 0.45 for b1 0.9 and b2
      0.95, but 3.2 for b2 0.999.
    seed: for random choices; step and path of the weight are folded in.

  Returns:
    A projection whose `update` is a `Topology`, and so shows these settings.

  Raises:
    ValueError: a share that is not in [0, 1], an unknown choice, or a 2:4 density above 0.5.

  Source: Liu et al., arXiv 2408.11746; Evci et al., arXiv 1911.11134 (RigL); Mocanu et al., arXiv 1707.04780 (SET).
    The structures, and that they are kept at lower densities, are ours.

  >>> import jax, optax, sparse24_jax as s24
  >>> params = {'mlp': {'kernel': jax.random.normal(jax.random.key(0), (16, 16))}}
  >>> rule = s24.Rule('mlp/.*', s24.DotPolicy(s24.dynamic_sparse(0.25, drop_fraction=0.3)))
  >>> tx = s24.sparse_training(optax.adam(1e-2), s24.Recipe('rigl', (rule,), refresh_every=2))
  >>> state, grads = tx.init(params), {'mlp': {'kernel': jax.random.normal(jax.random.key(1), (16, 16))}}
  >>> for _ in range(2):
  ...   updates, state = tx.update(grads, state, params)
  ...   params = optax.apply_updates(params, updates)
  >>> int((params['mlp']['kernel'] != 0).sum()), int(state.projections['mlp']['kernel'].sum())
  (45, 64)
  """
  topology = Topology(density, drop_fraction, random_share, distribution, start, structure, reset_moments, seed)
  # Computed from the weight, so that it is sharded like it; a constant would not be.
  search, divisor, form = {
    None: (lambda w: jnp.logical_not(jnp.isnan(w)), (1, 1), None),
    '2:4': (magnitude_mask, (4, 1), Masked()),
    'transposable': (transposable_mask, (4, 4), TransposableMasked()),
  }[structure]
  masked = _masked(f'dynamic_sparse {topology.name}', search, divisor=divisor, form=form)
  return masked._replace(update=topology)


def projections_of(policy: ActivationPolicy) -> dict[str, Projection | None]:
  """The projections of the two weights of a squared-ReLU block, by role: 'up' and 'down'."""
  if not policy.sparse_weights:
    return {'up': None, 'down': None}
  return {'up': soft_threshold_projection(), 'down': soft_threshold_projection(axis=-1)}
