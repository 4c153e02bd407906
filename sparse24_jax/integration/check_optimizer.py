"""What `check` finds wrong with the chain of an optimizer."""

from collections.abc import Mapping
from typing import Any

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
      ' sparse_training(chain(...), recipe), and a clip in front where gradients have masked decay',
    )
  for path in tried.still:
    problems.setdefault(
      path,
      f'{path}: not trained by the optimizer, and pruned: leave it dense with {leaving_dense(path)}, in sparse_training'
      ' too',
    )
  return problems


def notes_of_clips(tried: Tried) -> list[str]:
  """What to say of a chain that seems to clip what it should not; no problem, as some optimizers do alike by design."""
  decay, links = tried.clipped, tried.in_front
  return list(filter(None, (
    decay and f'{decay}: masked decay, which is added to its gradient, changes the updates of other weights. If a clip'
    ' is inside sparse_training, it clips gradient and decay together: put it outside,'
    ' optax.chain(clip, sparse_training(optimizer, recipe)). If the optimizer finds one factor for all updates, as DoG,'
    ' DoWG and mechanize do, all is well',
    links and f'{links}: its gradient where it has no links, which trains nothing, changes the updates of other'
    ' weights. If a clip is in front of sparse_training, it clips by gradients of what is pruned, too: put it inside,'
    ' sparse_training(optax.chain(clip, optimizer), recipe)',
  )))  # fmt: skip


def asked_of_clips(recipe: Recipe, weights: Mapping[str, BoundWeight]) -> dict[str, Any]:
  """What to ask `try_chain` of a clip: outside it belongs where gradients have the decay, inside where links move."""
  links = next((path for path, w in weights.items() if (p := w.rule.policy.projection) and p.update), None)
  return dict(decays=links is None and recipe.decay_on == 'gradients' and recipe.decays, links=links)
