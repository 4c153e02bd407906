"""MST, mixed sparsity training: dense to sparse, ultra-sparse, and back, with a topology that changes throughout."""

import re
from typing import Literal

from sparse24_jax.attention import Attention
from sparse24_jax.density import check_ramp, CosineDecay, DensitySchedule, Stage
from sparse24_jax.policy import DotPolicy
from sparse24_jax.projections import dynamic_sparse
from sparse24_jax.recipe import Phase, PhaseName, Recipe, Rule
from sparse24_jax.recipes._registry import register
from sparse24_jax.topology import Distribution, Structure


@register(
  dict(total_steps=300_000),
  mixed_sparsity_24=dict(structure='2:4'),
  mixed_sparsity_transposable=dict(structure='transposable'),
)
def mixed_sparsity(
  path: str,
  *,
  total_steps: int,
  density: float = 0.09,
  warm_up: float = 0.1,
  restoration: float = 0.05,
  warm_up_ramp: Literal['once', 'linear', 'cubic'] = 'cubic',
  restoration_ramp: Literal['once', 'linear', 'cubic'] = 'once',
  drop_fraction: float = 0.3,
  random_share: float = 0.25,
  distribution: Distribution = 'erdos_renyi',
  structure: Structure | None = None,
  mvue_path: str | None = None,
  attention: Attention = None,
  refresh_every: int = 100,
  reset_moments: bool = True,
  seed: int = 0,
) -> Recipe:
  """Three stages over one run: warm-up (dense to sparse), ultra-sparsification, restoration (back to dense).

  Every `refresh_every` steps links are dropped by magnitude and grown by mixed growing, three by gradient for one at
  random. The share of links that move falls from `drop_fraction` to zero as half a cosine over the run. Grown links
  start at zero with zero moments; an update of the topology is an optimizer step like any other (the released code
  skips that step, and keeps moments).

  A clip belongs inside, `sparse_training(optax.chain(clip, optimizer), recipe)`: in front gradients are dense.

  Each stage is a phase, and all are called `'sparse'`: their density follows a traced schedule, so that one compiled
  step serves all, or two if the ultra-sparse stage has an `attention` of its own. With a `structure` warm-up and
  restoration are dense phases, as masks of four out of four are not 2:4; in between the 2:4 matmul runs every step: the
  forward with `'2:4'`, the input gradient, too, with `'transposable'`. It takes as long at any density: `density=0.5`
  costs no more time than less. These variants are ours.

  Args:
    path: regular expression of the weights to make sparse; the paper takes every linear layer.
    total_steps: optimizer steps of the run; fractions and schedules refer to it, and `phase_at` refuses another.
    density: kept share in the ultra-sparse stage, over all the weights together. With a `structure` no layer keeps more
      than half, and what the distribution cuts from one is not given to others: at 0.5 a model keeps less than half.
    warm_up: share of the steps in which the density falls from 1.
    restoration: share of the steps, at the end, in which it rises to 1; 0 ends the run sparse.
    warm_up_ramp: how it falls, see `Stage`; without effect with a `structure`.
    restoration_ramp: how it rises; likewise.
    drop_fraction: at the start.
    random_share: of the grown links, the share that is drawn uniformly.
    distribution: of the density over weights, see `layer_densities`.
    structure: `'2:4'` for masks that are 2:4 at any density, `'transposable'` for masks that are so both ways.
    mvue_path: regular expression of those of the weights whose weight gradient is taken of an MVUE sample, 2:4 along
      tokens; for all of them the same text as `path`. In feed-forward layers it is what the fused block takes; their
      links grow by the estimate then, see `dynamic_sparse`. None leaves all weight gradients exact.
    attention: of the ultra-sparse stage, for models that can (hybrid sparse attention): a pattern for all heads and
      layers, or others for each, see `Phase`; None is full.
    refresh_every: optimizer steps between changes of topology.
    reset_moments: see `dynamic_sparse`.
    seed: for random choices.

  Raises:
    ValueError: fractions that leave nothing for the ultra-sparse stage, an unknown ramp, a 2:4 density above 0.5, a
      stage of fewer steps than `refresh_every`, or paths that are no regular expressions.

  Source: Liu et al., arXiv 2408.11746. Period 100, drop fraction 0.3, mixed growing 3:1 and Erdos-Renyi densities are
    the released code's. No public source tells the fractions of the stages, the densities and the ramps of the paper:
    `density`, `warm_up`, `restoration` and the two ramps are ours, chosen so that GPT-2 124M takes a quarter of the
    dense FLOPs, and not varied beyond that.

  >>> import sparse24_jax as s24
  >>> recipe = s24.recipes.mixed_sparsity('.*/(attn|mlp)/.*', total_steps=10_000, density=0.1)
  >>> density = recipe.rules[0].policy.projection.update.density
  >>> [round(float(density(step)), 2) for step in (0, 500, 1000, 9499, 9500)]
  [1.0, 0.21, 0.1, 0.1, 1.0]
  """
  ultra = _ultra_sparse_share(warm_up, restoration, total_steps, refresh_every)
  check_ramp('warm_up_ramp', warm_up_ramp)
  check_ramp('restoration_ramp', restoration_ramp)
  if structure is not None and density > 0.5:
    raise ValueError(f'density={density} is above the 0.5 that structure={structure!r} can keep')
  free = structure is None
  around: PhaseName = 'sparse' if free else 'dense'
  phases = [Phase(around, warm_up), Phase('sparse', ultra, attention)]
  stages = [Stage(warm_up, density, warm_up_ramp) if free else Stage(warm_up, 0.5), Stage(ultra, density)]
  if restoration:
    phases.append(Phase(around, restoration))
    stages.append(Stage(restoration, 1.0, restoration_ramp) if free else Stage(restoration, 0.5))
  projection = dynamic_sparse(
    DensitySchedule(tuple(stages), total_steps),
    drop_fraction=CosineDecay(drop_fraction, total_steps),
    random_share=random_share,
    distribution=distribution,
    start='magnitude',
    structure=structure,
    reset_moments=reset_moments,
    seed=seed,
  )
  input_grad = 'sparse' if projection.transposable else 'dense'
  rules = [Rule(path, DotPolicy(projection, input_grad=input_grad))]
  if mvue_path is not None:
    both = path if mvue_path == path else _both(path, mvue_path)
    sampled = Rule(both, DotPolicy(projection, input_grad=input_grad, weight_grad='mvue'))
    rules = [sampled] if mvue_path == path else [sampled, *rules]
  name = {None: 'mixed_sparsity', '2:4': 'mixed_sparsity_24', 'transposable': 'mixed_sparsity_transposable'}[structure]
  return Recipe(name, tuple(rules), refresh_every=refresh_every, phases=tuple(phases), total_steps=total_steps)


def _ultra_sparse_share(warm_up: float, restoration: float, total_steps: int, refresh_every: int) -> float:
  """What the other stages leave; ValueError if that is nothing, or one of them ends before its first refresh."""
  ultra = 1 - warm_up - restoration
  if not (0 < warm_up < 1 and 0 <= restoration < 1 and ultra > 1e-9):
    raise ValueError(
      f'warm_up={warm_up} must be in (0, 1), restoration={restoration} in [0, 1), and their sum below 1'
    )
  shortest = min(warm_up, restoration or 1, ultra)
  if (steps := round(shortest * total_steps)) < refresh_every:
    raise ValueError(
      f'a stage of {total_steps} steps x {shortest:g} is shorter than refresh_every={refresh_every}: its change of'
      f' density would come late or never: give {f"refresh_every={steps} or less, or " if steps else ""}more steps'
    )
  return ultra


def _both(path: str, mvue_path: str) -> str:
  """An expression that matches what both match."""
  for name, each in (('path', path), ('mvue_path', mvue_path)):
    try:
      re.compile(f'(?:{each})')
    except re.error as error:
      raise ValueError(
        f'{name}={each!r} does not go into a larger regular expression, which path and mvue_path make: {error}; write'
        ' flags as (?i:...)'
      ) from error
  return rf'(?=(?:{path})\Z)(?:{mvue_path})'
