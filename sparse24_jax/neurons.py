"""Neurons in clusters, tokens sent to them: what makes neighbouring tokens share neurons.

V:N:M wants two things of a block: rows (tokens) that use the same columns (neurons), and columns of one group of M that
are not used together, since only four of them stay. So tokens are *sorted* by the cluster of neurons that answers them
most, and neurons, sorted by cluster, are *spread*: a group of M takes one from each M-th part of them. The weight
gradients contract over tokens, and there the roles change: rows are neurons, sorted, and tokens are spread.
"""

import functools

import jax
from jax import Array, lax
import jax.numpy as jnp

_LLOYD_STEPS = 10


@functools.partial(jax.jit, static_argnames='clusters')
def cluster_neurons(w_up: Array, *, clusters: int) -> Array:
  """Groups the columns of an up-projection into clusters of equal size, by direction.

  K-means on the columns scaled to length one, from starts that are far apart, then each neuron, the surest first, to
  the nearest cluster that is not full. No data, no random numbers: done once, at the end of the dense warm-up. That
  neurons are clustered offline, by column, is the paper's; how, it does not say, and this is ours.

  Args:
    w_up: `[..., d, h]`.
    clusters: a divisor of `h`.

  Returns:
    int32 `[..., h]`, the cluster of each neuron.

  Raises:
    ValueError: `clusters` does not fit.

  >>> import jax, sparse24_jax as s24
  >>> ids = s24.cluster_neurons(jax.random.normal(jax.random.key(0), (8, 64)), clusters=4)
  >>> [int((ids == cluster).sum()) for cluster in range(4)]
  [16, 16, 16, 16]
  """
  h = w_up.shape[-1]
  if clusters < 1 or h % clusters:
    raise ValueError(f'clusters={clusters} must divide the {h} neurons of w_up')
  if w_up.ndim > 2:
    return jax.vmap(lambda w: cluster_neurons(w, clusters=clusters))(w_up)
  x = _unit_columns(w_up).T  # [h, d]

  def farthest(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    centres, nearest = carry
    centres = centres.at[i].set(x[jnp.argmin(nearest)])
    return centres, jnp.maximum(nearest, jnp.dot(x, centres[i]))

  start = jnp.zeros((clusters, x.shape[1]), jnp.float32).at[0].set(x[0])
  centres, _ = lax.fori_loop(1, clusters, farthest, (start, jnp.dot(x, x[0])))

  def lloyd(_: Array, centres: Array) -> Array:
    ids = jnp.argmax(jnp.dot(x, centres.T), axis=1)
    means = jnp.dot(_one_hot(ids, clusters).T, x)
    length = jnp.linalg.norm(means, axis=1, keepdims=True)
    return jnp.where(length > 0, means / jnp.where(length > 0, length, 1.0), centres)

  likeness = jnp.dot(x, lax.fori_loop(0, _LLOYD_STEPS, lloyd, centres).T)  # [h, clusters]
  order = jnp.argsort(-jnp.max(likeness, axis=1), stable=True)

  def assign(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    ids, room = carry
    cluster = jnp.argmax(jnp.where(room > 0, likeness[order[i]], -jnp.inf)).astype(jnp.int32)
    return ids.at[order[i]].set(cluster), room.at[cluster].add(-1)

  room = jnp.full((clusters,), h // clusters, jnp.int32)
  return lax.fori_loop(0, h, assign, (jnp.zeros((h,), jnp.int32), room))[0]


def _one_hot(ids: Array, n: int) -> Array:
  return (ids[:, None] == lax.broadcasted_iota(ids.dtype, (ids.shape[0], n), 1)).astype(jnp.float32)


def route_tokens(x: Array, w_up: Array, neurons: Array, *, clusters: int, within: int = 0) -> Array:
  """The order in which tokens that excite the same cluster of neurons are neighbours.

  A token goes to the cluster whose mean direction has the largest inner product with it; tokens of one cluster keep
  their order. This costs a matmul with `clusters` columns. The router is ours: the paper has one and does not describe
  it.

  Args:
    x: `[tokens, d]`.
    w_up: `[d, h]`.
    neurons: int32 `[h]`, from `cluster_neurons`.
    clusters: their number.
    within: tokens stay among their `within` neighbours, a divisor of the tokens; 0 is all of them.

  Returns:
    int32 `[tokens]`, a permutation.

  >>> import jax.numpy as jnp
  >>> route_tokens(jnp.eye(4)[jnp.array([0, 3, 0, 3])], jnp.eye(4), jnp.array([0, 0, 1, 1]), clusters=2).tolist()
  [0, 2, 1, 3]
  >>> route_tokens(
  ...   jnp.eye(4)[jnp.array([3, 0, 3, 0])], jnp.eye(4), jnp.array([0, 0, 1, 1]), clusters=2, within=2
  ... ).tolist()
  [1, 0, 3, 2]
  """
  means = jnp.dot(_unit_columns(w_up), _one_hot(neurons, clusters))
  answer = jnp.dot(x.astype(jnp.float32), means)
  cluster = jnp.argmax(answer, axis=-1).astype(jnp.int32)
  if within:
    cluster += clusters * (jnp.arange(x.shape[0], dtype=jnp.int32) // within)
  return jnp.argsort(cluster, stable=True).astype(jnp.int32)


def _unit_columns(w: Array) -> Array:
  w = w.astype(jnp.float32)
  return w / jnp.maximum(jnp.linalg.norm(w, axis=0, keepdims=True), 1e-30)


def invert(order: Array) -> Array:
  """The permutation that undoes `order`."""
  return jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype), unique_indices=True)


def spread(x: Array, m: int, axis: int) -> Array:
  """`x` with entries that lie a `1/m` of the axis apart brought together in groups of `m`; a transposition, no gather.

  >>> spread(jnp.arange(6), 3, 0).tolist()
  [0, 2, 4, 1, 3, 5]
  """
  return _transpose_axis(x, m, axis)


def unspread(x: Array, m: int, axis: int) -> Array:
  """Inverse of `spread`."""
  return _transpose_axis(x, x.shape[axis] // m, axis)


def _transpose_axis(x: Array, first: int, axis: int) -> Array:
  axis = axis % x.ndim
  split = x.reshape(*x.shape[:axis], first, x.shape[axis] // first, *x.shape[axis + 1 :])
  return jnp.swapaxes(split, axis, axis + 1).reshape(x.shape)
