"""Neuron-level activation sparsity: 2:4 weights and V:N:M activations, between a dense warm-up and a dense tail."""

from sparse24_jax.clusters import clustered
from sparse24_jax.policy import ActivationPolicy, DotPolicy
from sparse24_jax.projections import projections_of
from sparse24_jax.recipe import Phase, Recipe, Rule
from sparse24_jax.recipes._registry import register


@register()
def neuron_level(
  up: str,
  down: str,
  *,
  policy: ActivationPolicy | None = None,
  warmup_fraction: float = 0.1,
  dense_fraction: float = 0.2,
  refresh_every: int = 40,
) -> Recipe:
  """Squared-ReLU feed-forward blocks in which all six matmuls are sparse.

  `up` is 2:4 along its input and `down` along its output by the soft threshold of S-STE; activations are V:2:M, or 2:4
  with `policy=ActivationPolicy(TwoOfFour(), dense_features=0.05)`, the predecessor. Activations grow sparse during the
  warm-up; the dense tail repairs what the patterns lost. Only what runs the whole block, `neuron_level_ffn`, can follow
  this recipe.

  With `policy.clusters` the state of `up` says which cluster each neuron is in. Renew it once, where the warm-up ends:
  `opt_state = regroup_neurons(params, opt_state, recipe)`.

  Start the tail from the projected weights, `params = s24.project(params, opt_state, recipe, phase='sparse')`: nothing
  pulls the raw ones towards what the sparse phase trained. A block of V tokens sees all of them: in a causal model fill
  it with tokens of one position in different sequences, and evaluate without the pattern. Both are ours. Tokens are in
  the order of the array that the first matmul is given. `jax.vmap` over another axis than the first leaves that order
  as it is: in `[sequences, positions, d]` swap the axes, and do not map over the second.

  Args:
    up: regular expression of the up-projections, `[d, h]` or `[experts, d, h]`.
    down: regular expression of the down-projections.
    policy: of the block; None is `ActivationPolicy()`, whose weight gradients keep two of four tokens. That is ours;
      `docs/quality_runs.md` compares it with the published blocks of tokens.
    warmup_fraction: share of the steps, at the start, that run dense. arXiv 2503.16672 warms up for 1000 steps; that
      it is a share, and 0.1, are ours, and not varied.
    dense_fraction: share of the steps, at the end, that run dense; 0 keeps the run sparse. With both defaults the ratio
      of dense to sparse steps is 1:2.3, which is our choice; summaries of the paper name ratios from 1:1 to 1:3.5. With
      half of the steps sparse: `docs/quality_runs.md`.
    refresh_every: optimizer steps between measurements of the flip rate, as in `s_ste`; nothing else happens then.

  Raises:
    ValueError: a fraction is negative, or both leave no sparse steps; `policy` is of another type.

  Source: arXiv 2602.06183; arXiv 2503.16672.

  >>> import sparse24_jax as s24
  >>> from sparse24_jax.recipes.neuron_level import neuron_level
  >>> recipe = neuron_level('.*/c_fc/kernel', '.*/c_proj/kernel')
  >>> [(phase.name, phase.fraction) for phase in recipe.phases]
  [('dense', 0.1), ('sparse', 0.7), ('dense', 0.2)]
  """
  for name, fraction in (('warmup_fraction', warmup_fraction), ('dense_fraction', dense_fraction)):
    if not 0 <= fraction < 1:
      raise ValueError(f'{name}={fraction} must be in [0, 1)')
  sparse = round(1 - warmup_fraction - dense_fraction, 12)
  if sparse <= 0:
    raise ValueError(f'warmup_fraction={warmup_fraction} and dense_fraction={dense_fraction} leave no sparse steps')
  policy = ActivationPolicy() if policy is None else policy
  if not isinstance(policy, ActivationPolicy):
    raise ValueError(f'policy must be an ActivationPolicy, found {policy!r}')
  phases = [Phase('dense', warmup_fraction)] if warmup_fraction else []
  phases.append(Phase('sparse', sparse))
  phases += [Phase('dense', dense_fraction)] if dense_fraction else []
  projections = projections_of(policy)
  if policy.clusters:
    projections['up'] = clustered(projections['up'], policy.clusters.number)
  rules = tuple(Rule(path, DotPolicy(projections[role]), policy) for role, path in (('up', up), ('down', down)))
  return Recipe('neuron_level', rules, refresh_every=refresh_every, phases=tuple(phases))
