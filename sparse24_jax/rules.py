"""Which weights a recipe takes: paths, matching, and the checks that belong to a match."""

import collections
from collections.abc import Iterator
import contextlib
import re
from typing import Any

import jax
from jax.core import Tracer

from sparse24_jax.dot import check_divisible
from sparse24_jax.projection import Projection
from sparse24_jax.recipe import Recipe, Rule

# Why a rule with an activation policy cannot be followed by a single linear layer.
NEEDS_BLOCK = 'the rule makes activations sparse, which takes the whole block: use Sparse24MLP or neuron_level_ffn'
# Arrays that a layer-wide pattern such as '.*/mlp/.*' must not take, also where scanned layers give them two axes.
NOT_WEIGHTS = ('bias', 'scale', 'embedding')


def path_string(key_path: tuple) -> str:
  """'h_0/mlp/c_fc/kernel' from a JAX key path; the attribute at which a Flax variable holds its array is left out."""
  names = [str(getattr(k, 'key', getattr(k, 'name', getattr(k, 'idx', k)))) for k in key_path]
  if key_path and names_value(key_path[-1]):
    names.pop()
  return '/'.join(names)


def names_value(key: Any) -> bool:
  """Whether `key` is the attribute at which a box of Flax holds its array."""
  return isinstance(key, jax.tree_util.GetAttrKey) and key.name in ('value', 'raw_value')


@contextlib.contextmanager
def errors_name(path: str) -> Iterator[None]:
  """Puts the path of a layer's weight before the message of a ValueError from inside."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error


def is_weight(path: str, leaf: Any) -> bool:
  return getattr(leaf, 'ndim', 0) >= 2 and path.rsplit('/', 1)[-1] not in NOT_WEIGHTS


def rule_for(path: str, recipe: Recipe) -> Rule | None:
  """The first rule whose pattern matches the whole path."""
  return next((rule for rule in recipe.rules if re.fullmatch(rule.path, path)), None)


def match_rules(params: Any, recipe: Recipe) -> dict[str, Rule]:
  """Path of each matched weight to its rule, in the order of the tree.

  Args:
    params: a pytree of arrays, or of anything with shape and dtype.
    recipe: its rules are tried in order.

  Raises:
    ValueError: a rule matches no weight; a matched weight does not hold whole groups, or shares its path with
      another parameter; or, where the sharding is known, a shard does not hold whole groups.

  >>> import jax.numpy as jnp
  >>> import sparse24_jax as s24
  >>> params = {'mlp': {'up': {'kernel': jnp.ones((8, 4)), 'bias': jnp.ones(4)}}}
  >>> list(match_rules(params, s24.recipes.ste('mlp/.*')))
  ['mlp/up/kernel']
  """
  leaves = [(path_string(key_path), leaf) for key_path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]]
  weights = {path: leaf for path, leaf in leaves if is_weight(path, leaf)}
  matched = {path: rule for path in weights if (rule := rule_for(path, recipe)) is not None}
  if not leaves:  # a tree of placeholders, as optax.tree_map_params makes
    return {}
  for rule in recipe.rules:
    if rule not in matched.values():
      raise ValueError(
        f'rule {rule.path!r} of recipe {recipe.name!r} decides for no weight; weights are {list(weights)}'
      )
  count = collections.Counter(path for path, _ in leaves)
  for path, rule in matched.items():
    if count[path] > 1:
      raise ValueError(f'{count[path]} parameters have the path {path!r}: a slash in a name is read as a folder')
    if rule.policy.projection is not None:
      check_divisible(weights[path].shape, rule.policy.projection, path)
      _check_shards(path, weights[path], rule.policy.projection)
  return matched


def _check_shards(path: str, leaf: Any, projection: Projection) -> None:
  """ValueError if a group of `leaf` straddles two shards; silent where the sharding is not known.

  Under jit it is known on meshes of explicit axes only: on others, check concrete arrays, as `init` outside jit does.
  """
  if isinstance(leaf, Tracer):
    sharding = jax.typeof(leaf).sharding
    if not (sharding.mesh.shape and sharding.mesh.are_all_axes_explicit):
      return
  elif (sharding := getattr(leaf, 'sharding', None)) is None:
    return
  shard = sharding.shard_shape(leaf.shape)
  for axis, divisor in zip((-2, -1), projection.divisor, strict=True):
    if shard[axis] % divisor:
      raise ValueError(
        f'{path} of shape {leaf.shape} is sharded to {shard}: a shard holds {shard[axis]} entries along axis {axis},'
        f' and projection {projection.name!r} needs a multiple of {divisor} in each'
      )
