"""What `check` finds wrong with the chain of an optimizer."""

from collections.abc import Mapping
import re
from typing import Any

from sparse24_jax.binding.bound import BoundWeight
from sparse24_jax.optim import try_chain
from sparse24_jax.recipe import Recipe

GIVE_BOUND = 'Give sparse_training and all else what bind(recipe, f, params, ...) gives'


def problems_of(
  optimizer: Any, recipe: Recipe, weights: Mapping[str, BoundWeight], params: Any
) -> dict[str, str]:
  """What a chain does wrong, by the path of a weight.

  Args:
    optimizer: the whole chain.
    recipe: for its decay.
    weights: that are to be sparse, as the model reads them.
    params: arrays.
  """
  tried = try_chain(optimizer, params)
  problems = {}
  for path, weight in weights.items():
    taken = tried.layouts.layout_of(path, len(weight.shape))
    if taken != weight.layout:
      problems[path] = (
        f'{path} of shape {weight.shape}: the model reads it as {weight.layout.describe()}, and the optimizer takes it'
        f' for {taken.describe()}. {GIVE_BOUND}'
      )
  if tried.clipped and _decays_gradients(recipe):
    problems[tried.clipped] = (
      f'{tried.clipped}: masked decay, which is added to its gradient, changes the updates of other weights: a clip'
      ' inside sparse_training clips gradient and decay together. Put it outside,'
      ' optax.chain(clip, sparse_training(optimizer, recipe)). An optimizer that finds one factor for all updates, as'
      ' Prodigy does, looks the same'
    )
  problems |= {
    path: f'{path}: not trained by the optimizer, and pruned: leave it dense with'
    f' recipe.with_dense({re.escape(path)!r}), in sparse_training too'
    for path in tried.still
  }
  for path, step in tried.changed.items():
    problems[path] = (
      f'{path}: the weights after step {step} differ from those the masks were chosen from: a transformation after'
      ' sparse_training changed the update, a learning rate say: put it inside, sparse_training(chain(...), recipe)'
    )
  return problems


def _decays_gradients(recipe: Recipe) -> bool:
  """Whether a clip belongs outside: of links that come and go it belongs inside."""
  links_move = any(p is not None and p.update for p in (rule.policy.projection for rule in recipe.rules))
  return recipe.decay_on == 'gradients' and recipe.decays and not links_move
