"""What `check` finds wrong with the chain of an optimizer."""

from collections.abc import Mapping

from sparse24_jax.binding.bound import BoundWeight
from sparse24_jax.optim import Tried
from sparse24_jax.recipe import Recipe
from sparse24_jax.rules import leaving_dense

GIVE_BOUND = 'Give sparse_training and all else what bind(recipe, f, params, ...) gives'


def problems_of(tried: Tried, weights: Mapping[str, BoundWeight]) -> dict[str, str]:
  """What a chain does wrong, by the path of a weight; of several things the one that explains the others.

  Args:
    tried: what became of its updates.
    weights: that are to be sparse, as the model reads them.
  """
  problems = {}
  for path, weight in weights.items():
    taken = tried.layouts.layout_of(path, len(weight.shape))
    if path not in tried.sparse:
      problems[path] = f'{path}: recipe makes it sparse, optimizer does not: give both the same recipe'
    elif taken != weight.layout:
      problems[path] = (
        f'{path} of shape {weight.shape}: the model reads it as {weight.layout.describe()}, and the optimizer takes it'
        f' for {taken.describe()}. {GIVE_BOUND}'
      )
  for path, step in tried.changed.items():
    problems.setdefault(
      path,
      f'{path}: the weights after step {step} differ from those the masks were chosen from: a transformation after'
      ' sparse_training changed the update, a learning rate or a clip say: put it inside,'
      ' sparse_training(chain(...), recipe)',
    )
  for path in tried.still:
    problems.setdefault(
      path,
      f'{path}: not trained by the optimizer, and pruned: leave it dense with {leaving_dense(path)}, in sparse_training'
      ' too',
    )
  return problems


def note_of_clip(tried: Tried) -> str | None:
  """What to say of a chain that seems to clip masked decay; no problem, as some optimizers do alike by design."""
  return tried.clipped and (
    f'{tried.clipped}: masked decay, which is added to its gradient, changes the updates of other weights. If a clip'
    ' is inside sparse_training, it clips gradient and decay together: put it outside,'
    ' optax.chain(clip, sparse_training(optimizer, recipe)). If the optimizer finds one factor for all updates, as DoG,'
    ' DoWG and mechanize do, all is well'
  )


def decays_gradients(recipe: Recipe) -> bool:
  """Whether a clip belongs outside: of links that come and go it belongs inside."""
  links_move = any(p is not None and p.update for p in (rule.policy.projection for rule in recipe.rules))
  return recipe.decay_on == 'gradients' and recipe.decays and not links_move
