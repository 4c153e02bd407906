"""Which phase a step belongs to, and whether it chooses masks."""

from jax.core import Tracer

from sparse24_jax.attention import Attention
from sparse24_jax.recipe import Phase, PhaseName, Recipe, require_recipe


def phase_at(recipe: Recipe, step: int, total_steps: int) -> PhaseName:
  """The phase of an optimizer step.

  A Python value, so that each phase is its own compiled step. A phase begins at the rounded share of the steps before
  it: the last sixth of 300,000 steps begins at step 250,000.

  Args:
    recipe: its phases are looked at.
    step: counted from zero.
    total_steps: of the run.

  Raises:
    ValueError: `recipe` is not a Recipe, or is made for runs of another length; `step` is not in `[0, total_steps)`, or
      is traced.

  Source: Hu et al., arXiv 2404.01847, section 4.4 (dense fine-tuning).

  >>> import sparse24_jax as s24
  >>> recipe = s24.recipes.transposable_srste('.*/mlp/.*', masked_decay=6e-5)
  >>> [s24.phase_at(recipe, step, 300_000) for step in (0, 249_999, 250_000)]
  ['sparse', 'sparse', 'dense']
  """
  require_recipe(recipe, 'phase_at(recipe, step, total_steps)')
  return _phase(recipe, step, total_steps).name


def refresh_at(recipe: Recipe, step: int) -> bool:
  """Whether an optimizer step chooses masks anew, so that others may be told `refresh=False`.

  Args:
    recipe: every how many steps it does.
    step: counted from zero.

  Raises:
    ValueError: `step` is traced.

  >>> import sparse24_jax as s24
  >>> recipe = s24.recipes.transposable_srste('.*/mlp/.*', masked_decay=6e-5)
  >>> [step for step in range(100) if s24.refresh_at(recipe, step)]
  [39, 79]
  """
  require_recipe(recipe, 'refresh_at(recipe, step)')
  _require_python_value(step)
  return (step + 1) % recipe.refresh_every == 0


def attention_at(recipe: Recipe, step: int, total_steps: int) -> Attention:
  """The attention of an optimizer step: that of its phase, see `Phase`; None is what the model does by itself.

  Args:
    recipe: its phases are looked at.
    step: counted from zero.
    total_steps: of the run.

  Raises:
    ValueError: `recipe` is not a Recipe, or is made for runs of another length; `step` is not in `[0, total_steps)`, or
      is traced.

  >>> import sparse24_jax as s24
  >>> local = s24.AttentionPattern('local', 128)
  >>> recipe = s24.Recipe('two', phases=(s24.Phase('sparse', 0.9, local), s24.Phase('sparse', 0.1)))
  >>> s24.attention_at(recipe, 10, 100), s24.attention_at(recipe, 95, 100)
  (AttentionPattern(kind='local', window=128), None)
  """
  require_recipe(recipe, 'attention_at(recipe, step, total_steps)')
  return _phase(recipe, step, total_steps).attention


def _require_python_value(step: int) -> None:
  if isinstance(step, Tracer):
    raise ValueError('step is traced: give a Python number, outside of jit, and compile a step for each phase')


def _phase(recipe: Recipe, step: int, total_steps: int) -> Phase:
  _require_python_value(step)
  if recipe.total_steps not in (None, total_steps):
    raise ValueError(
      f'total_steps={total_steps}, but the schedules of recipe {recipe.name!r} are made for'
      f' total_steps={recipe.total_steps}: give both the steps of the run; for a run that goes on longer, or stops'
      ' earlier, make the recipe of the new total, whose schedules hold from this step on'
    )
  if not 0 <= step < total_steps:
    raise ValueError(f'step {step} is not in [0, {total_steps})')
  done = 0.0
  for phase in recipe.phases[:-1]:
    done += phase.fraction
    if step < round(done * total_steps):
      return phase
  return recipe.phases[-1]
