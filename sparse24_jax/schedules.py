"""Which phase a step belongs to."""

from sparse24_jax.recipe import PhaseName, Recipe


def phase_at(recipe: Recipe, step: int, total_steps: int) -> PhaseName:
  """The phase of optimizer step `step`, counted from zero, of a run of `total_steps`.

  A Python value, so that each phase is its own compiled step. A phase begins at the rounded share of the steps before
  it: the last sixth of 300,000 steps begins at step 250,000.

  Raises:
    ValueError: `step` is not in `[0, total_steps)`.

  Source: Hu et al., arXiv 2404.01847, section 4.4 (dense fine-tuning).

  >>> import sparse24_jax as s24
  >>> recipe = s24.recipes.transposable_srste('.*/mlp/.*', masked_decay=6e-5)
  >>> [s24.phase_at(recipe, step, 300_000) for step in (0, 249_999, 250_000)]
  ['sparse', 'sparse', 'dense']
  """
  if not 0 <= step < total_steps:
    raise ValueError(f'step {step} is not in [0, {total_steps})')
  done = 0.0
  for phase in recipe.phases[:-1]:
    done += phase.fraction
    if step < round(done * total_steps):
      return phase.name
  return recipe.phases[-1].name
