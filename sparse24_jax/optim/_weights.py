"""Trees like the parameters, with something at each sparse weight."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import optax

from sparse24_jax.projection import is_searched, Projection
from sparse24_jax.recipe import Recipe
from sparse24_jax.rules import leaves_by_path, map_by_path, match_rules, names_value
from sparse24_jax.topology import Context


class Absent(NamedTuple):
  """Stands for no projection; a leaf for `map_sparse`."""


def projections_of(params: Any, recipe: Recipe) -> Any:
  """Tree like `params` with a `Projection` at each sparse weight and `Absent` elsewhere."""
  rules = match_rules(params, recipe)

  def of(path: str, leaf: Any) -> Projection | Absent:
    rule = rules.get(path)
    return (rule and rule.policy.projection) or Absent()

  return map_by_path(of, params)


def _is_box(node: Any) -> bool:
  """Whether `node` is what Flax puts around one array: metadata of sharding, or a variable of nnx."""
  if isinstance(node, dict | list | tuple | Array):
    return False
  inside = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda n: n is not node)[0]
  return len(inside) == 1 and bool(inside[0][0]) and names_value(inside[0][0][-1])


def unboxed(tree: Any) -> Any:
  """`tree` with its arrays as they are, in none of Flax's boxes."""
  return jax.tree.map(
    lambda node: jax.tree.leaves(node, is_leaf=lambda n: n is not node)[0] if _is_box(node) else node,
    tree, is_leaf=_is_box,
  )  # fmt: skip


def boxed(params: Any, states: Any) -> Any:
  """States in the boxes of their weights, but for those that do not have the shape of what a box says is sharded.

  Checkpoints know a tree by its boxes. So the variables of nnx stay where they can, empty ones included; the boxes of
  linen are there for sharding alone, and Flax would read from them how an empty one is sharded.
  """

  def one(node: Any, state: Any) -> Any:
    if not _is_box(node):
      return state
    (leaf,), structure = jax.tree.flatten(node, is_leaf=lambda n: n is not node)
    fits = getattr(state, 'shape', None) == getattr(leaf, 'shape', ())
    if hasattr(node, 'get_metadata'):  # a variable of nnx
      sharded = {'out_sharding', 'optimizer_sharding'} & set(node.get_metadata())
      fits = fits or not sharded or not jax.tree.leaves(state)
    return jax.tree.unflatten(structure, [state]) if fits else state

  return jax.tree.map(one, params, states, is_leaf=_is_box)


def map_sparse(f: Any, projections: Any, *rest: Any) -> Any:
  """f(projection, ...) at each sparse weight, `optax.MaskedNode()` elsewhere."""
  return jax.tree.map(
    lambda p, *r: optax.MaskedNode() if isinstance(p, Absent) else f(p, *r),
    projections,
    *rest,
    is_leaf=is_leaf,
  )


def is_leaf(node: Any) -> bool:
  """Whether `node` is a leaf of what `projections_of` makes."""
  return isinstance(node, Projection | Absent)


def some_searched(projections: Any, params: Any) -> bool:
  """Whether some state is what a search chose."""
  searched = map_sparse(lambda p, w: is_searched(p, jnp.shape(w), jnp.result_type(w)), projections, params)
  return any(jax.tree.leaves(searched))


def wider(update: Array, w: Array) -> jnp.dtype:
  """The dtype with room for what an update and its weight make together."""
  a, b = jnp.result_type(update), jnp.result_type(w)
  if a.itemsize == b.itemsize:  # float16 and bfloat16: neither holds the other's numbers
    return a if a == b else jnp.dtype(jnp.float32)
  return max(a, b, key=lambda dtype: dtype.itemsize)


def contexts(projections: Any, params: Any, step: Array) -> Any:
  """Tree like `params`, a `Context` at each leaf."""

  def of_matrix(p: Any) -> Any:  # one density is shared out among weights, however they are stored
    return p.matrix or p if isinstance(p, Projection) else p

  shapes: dict[Any, dict[str, tuple[int, ...]]] = {}
  for (path, p), w in zip(leaves_by_path(projections, is_leaf=is_leaf), jax.tree.leaves(params), strict=True):
    shape = p.layout_of(w).matrix_shape(w.shape) if isinstance(p, Projection) else jnp.shape(w)
    shapes.setdefault(of_matrix(p), {})[path] = shape
  return map_by_path(lambda path, p: Context(step, path, shapes[of_matrix(p)]), projections, is_leaf=is_leaf)


def first_states(projections: Any, params: Any, begin: Callable[[Projection], int] = lambda p: 0) -> Any:
  """Tree like `params`, the states of sparse weights in a run that begins at step `begin(projection)`."""

  def first(p: Projection, w: Array, context: Context) -> Array:
    state = p.init(w)
    if p.update is None:
      return state
    return p.update(w, None, state, context._replace(step=jnp.int32(begin(p)))).state

  return map_sparse(first, projections, params, contexts(projections, params, jnp.zeros((), jnp.int32)))


def flip_rates(projections: Any, old: Any, new: Any, weights: Any) -> tuple[Array, Any]:
  """Share of entries in which two trees of masks differ: over all of them, and for each matrix.

  NaN where a weight that `new` was chosen from is NaN or infinite, so that whoever looks at flip rates sees it.
  """

  def count(p: Projection, a: Array, b: Array, w: Array) -> Array:
    return jnp.sum(p.layout_of(a).matrix(flips(a, b, w)), axis=(-2, -1))

  # Counted once: of an unrolled model XLA compiles each weight's count by itself.
  counts = map_sparse(count, projections, old, new, weights)
  rates = map_sparse(lambda p, n, a: n / (a.size // n.size), projections, counts, new)
  sizes = [mask.size for mask in jax.tree.leaves(new)]
  if not sizes:
    return jnp.zeros((), jnp.float32), rates
  return jnp.sum(jnp.stack([jnp.sum(n) for n in jax.tree.leaves(counts)])) / float(sum(sizes)), rates


def flips(old: Array, new: Array, w: Array) -> Array:
  """float32, 1 where two masks differ, 0 elsewhere, and NaN where the weight is not finite."""
  return jnp.where(jnp.isfinite(w), (old != new).astype(jnp.float32), jnp.nan)
