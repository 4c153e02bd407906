"""Clusters of neurons as part of a weight's projection state, so that they live where masks and scales do."""

from typing import Any

from jax import Array
import jax.numpy as jnp

from sparse24_jax.neurons import cluster_neurons
from sparse24_jax.policy import ActivationPolicy
from sparse24_jax.projection import Projection, remembered


@remembered
def clustered(projection: Projection | None, clusters: int) -> Projection:
  """A projection of an up-projection `[..., d, h]` whose state also says which cluster each neuron is in.

  Its state is one array, float32 `[..., h + 1]`: the cluster of each neuron (whole numbers, exact up to 2^24), then the
  state of `projection`, a scale a matrix. It starts with the clusters of the initial weights, and keeps them until
  `regroup_neurons`.

  Args:
    projection: of the weight; None leaves it dense.
    clusters: of neurons, a divisor of `h`.

  Returns:
    The projection, without a packed form: the block that uses clusters permutes the weight first.

  >>> import jax, sparse24_jax as s24
  >>> w = jax.random.normal(jax.random.key(0), (8, 64))
  >>> state = clustered(s24.soft_threshold_projection(), 4).init(w)
  >>> scale, neurons = split_clusters(state)
  >>> state.shape, scale.shape, neurons.shape, int((neurons == 0).sum())
  ((65,), (), (64,), 16)
  """

  def init(w: Array) -> Array:
    scale = jnp.zeros(w.shape[:-2], jnp.float32) if projection is None else projection.init(w)
    if scale.shape != w.shape[:-2]:
      raise ValueError(f'{inner.name!r} has a state of shape {scale.shape}; clusters go with a scale a matrix')
    return join_clusters(cluster_neurons(w, clusters=clusters), scale)

  def refresh(w: Array, state: Array) -> Array:
    scale = state[..., -1]
    new = inner.refresh(w, scale)
    return state if new is scale else join_clusters(state[..., :-1], new)

  inner = projection or Projection(
    'dense', init, lambda w, _: w, lambda w, scale: scale, lambda w, _: jnp.ones_like(w, jnp.bool_), divisor=(1, 1)
  )
  return Projection(
    name=f'clustered {clusters}, {inner.name}',
    init=init,
    apply=lambda w, state: inner.apply(w, state[..., -1]),
    refresh=refresh,
    mask=lambda w, state: inner.mask(w, state[..., -1]),
    divisor=inner.divisor,
    clusters=clusters,
  )


def split_clusters(state: Array) -> tuple[Array, Array]:
  """The scale, float32 `[...]`, and the cluster of each neuron, int32 `[..., h]`, in a state of `clustered`."""
  return state[..., -1], state[..., :-1].astype(jnp.int32)


def with_neurons(state: dict[str, Any], policy: ActivationPolicy) -> dict[str, Any]:
  """The states by role as `neuron_level_ffn` takes them: that of 'up' without its clusters, and these as 'neurons'."""
  if not policy.clusters:
    return state
  scale, neurons = split_clusters(state['up'])
  return {**state, 'up': scale if policy.sparse_weights else None, 'neurons': neurons}


def join_clusters(neurons: Array, scale: Array) -> Array:
  """The state of `clustered` with these clusters and this scale."""
  return jnp.concatenate([neurons.astype(jnp.float32), scale[..., None]], axis=-1)
