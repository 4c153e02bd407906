"""Renewing the clusters of neurons that a recipe keeps in the optimizer state."""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from sparse24_jax.clusters import join_clusters
from sparse24_jax.neurons import cluster_neurons
from sparse24_jax.optim._state import find_state
from sparse24_jax.optim._training_state import SparseTrainingState
from sparse24_jax.optim._weights import boxed, unboxed
from sparse24_jax.recipe import Recipe
from sparse24_jax.rules import map_by_path, match_rules


def regroup_neurons(params: Any, opt_state: Any, recipe: Recipe) -> Any:
  """Clusters the neurons anew, by the weights as they are: once, where the dense warm-up of a recipe ends.

  A weight that is not finite keeps the clusters that it has.

  Args:
    params: any pytree of arrays.
    opt_state: optimizer state that holds a `sparse_training` state for `params`.
    recipe: the recipe of that state.

  Returns:
    The optimizer state with new clusters; the same object if the recipe has none.

  Raises:
    ValueError: `opt_state` holds no state of `sparse_training`, or several.

  Source: arXiv 2602.06183 clusters neurons offline, after a dense warm-up.

  >>> import jax, optax, sparse24_jax as s24
  >>> params = {'up': jax.random.normal(jax.random.key(0), (8, 64)), 'down': jax.numpy.ones((64, 8))}
  >>> policy = s24.ActivationPolicy(s24.VNM(4, 8), s24.VNM(4, 8), clusters=s24.Clusters(4))
  >>> recipe = s24.recipes.neuron_level('up', 'down', policy=policy)
  >>> opt_state = s24.sparse_training(optax.sgd(0.1), recipe, phase='dense').init(params)
  >>> s24.regroup_neurons(params, opt_state, recipe).projections['up'].shape
  (65,)
  """
  found = {
    path: p.clusters
    for path, rule in match_rules(params, recipe).items()
    if (p := rule.policy.projection) and p.clusters
  }
  find_state(opt_state, SparseTrainingState, 'sparse_training')
  if not found:
    return opt_state

  def one(path: str, w: Array, state: Any) -> Any:
    clusters = found.get(path)
    if clusters is None:
      return state
    new = join_clusters(cluster_neurons(w, clusters=clusters), state[..., -1])
    return jnp.where(jnp.isfinite(w).all(), new, state)

  def renew(node: Any) -> Any:
    if not isinstance(node, SparseTrainingState):
      return node
    renewed = map_by_path(one, unboxed(params), unboxed(node.projections))
    return node._replace(projections=boxed(params, renewed))

  return jax.tree.map(renew, opt_state, is_leaf=lambda node: isinstance(node, SparseTrainingState))
