"""Sparse from start to end at one density: RigL, SET, and a static mask, which are settings of one projection."""


from sparse24_jax.density import CosineDecay
from sparse24_jax.policy import DotPolicy
from sparse24_jax.projections import dynamic_sparse
from sparse24_jax.recipe import Recipe, Rule
from sparse24_jax.recipes._registry import register
from sparse24_jax.topology import Distribution


@register(dict(density=0.5, total_steps=300_000))
def rigl(
  path: str,
  *,
  density: float,
  total_steps: int,
  drop_fraction: float = 0.3,
  stop: float = 0.75,
  distribution: Distribution = 'erdos_renyi',
  refresh_every: int = 100,
  seed: int = 0,
) -> Recipe:
  """RigL: drops by magnitude, grows by the dense gradient. A clip belongs inside `sparse_training`, as for SET.

  Args:
    path: regular expression of the weights to make sparse.
    density: kept share of all the weights together.
    total_steps: optimizer steps of the run; `phase_at` refuses another.
    drop_fraction: share of a weight's links that an update replaces, at the start; falls as half a cosine.
    stop: share of the steps after which the topology rests.
    distribution: of the density over weights.
    refresh_every: optimizer steps between changes of topology.
    seed: for the first mask, which is random.

  Raises:
    ValueError: a share that is not in [0, 1], or a topology that rests before its first change.

  Source: Evci et al., arXiv 1911.11134, section 3; defaults as there. The paper puts an update of the topology in place
    of an optimizer step, here it follows one, and moments of changed links start at zero.

  >>> import sparse24_jax as s24
  >>> s24.recipes.rigl('.*/mlp/.*', density=0.2, total_steps=1000).refresh_every
  100
  """
  if not 0 < stop <= 1:
    raise ValueError(f'stop={stop} must be in (0, 1]')
  rests = round(stop * total_steps)
  if rests <= refresh_every:  # at that step itself the share that moves is zero
    raise ValueError(
      f'with total_steps={total_steps} and stop={stop} the topology rests from step {rests} on: with'
      f' refresh_every={refresh_every} it would never change'
    )
  drop = CosineDecay(drop_fraction, rests)
  projection = dynamic_sparse(density, drop_fraction=drop, distribution=distribution, seed=seed)
  rules = (Rule(path, DotPolicy(projection)),)
  return Recipe('rigl', rules, refresh_every=refresh_every, total_steps=total_steps)


@register(dict(density=0.5))
def set_(
  path: str,
  *,
  density: float,
  drop_fraction: float = 0.3,
  distribution: Distribution = 'erdos_renyi',
  refresh_every: int = 100,
  seed: int = 0,
) -> Recipe:
  """SET: drops by magnitude, grows at random.

  A clip belongs inside, `sparse_training(optax.chain(clip, optimizer), recipe)`: in front gradients are dense.

  Args:
    path: regular expression of the weights to make sparse.
    density: kept share of all the weights together.
    drop_fraction: share of a weight's links that an update replaces, all along.
    distribution: of the density over weights.
    refresh_every: optimizer steps between changes of topology; the paper does it once an epoch, 100 is RigL's.
    seed: for random choices.

  Raises:
    ValueError: a share is not in [0, 1], or `distribution` is unknown.

  Source: Mocanu et al., arXiv 1707.04780.

  >>> import sparse24_jax as s24
  >>> s24.recipes.set_('.*/mlp/.*', density=0.2).rules[0].policy.projection.update.random_share
  1.0
  """
  projection = dynamic_sparse(
    density, drop_fraction=drop_fraction, random_share=1.0, distribution=distribution, seed=seed
  )
  return Recipe('set_', (Rule(path, DotPolicy(projection)),), refresh_every=refresh_every)


@register(dict(density=0.5))
def static(
  path: str, *, density: float, distribution: Distribution = 'erdos_renyi', seed: int = 0
) -> Recipe:
  """One random mask, kept from start to end.

  Args:
    path: regular expression of the weights to make sparse.
    density: kept share of all the weights together.
    distribution: of the density over weights.
    seed: for the mask.

  Raises:
    ValueError: a share is not in [0, 1], or `distribution` is unknown.

  Source: the baseline of Evci et al., arXiv 1911.11134, and Liu et al., arXiv 2408.11746.

  >>> import sparse24_jax as s24
  >>> s24.recipes.static('.*/mlp/.*', density=0.2).rules[0].policy.projection.update.drop_fraction
  0.0
  """
  projection = dynamic_sparse(density, distribution=distribution, seed=seed)
  return Recipe('static', (Rule(path, DotPolicy(projection)),), refresh_every=100)
