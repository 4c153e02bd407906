"""Which weights a recipe takes: paths, matching, and the checks that belong to a match."""

import collections
from collections.abc import Callable, Collection, Iterable, Mapping
import dataclasses
import functools
import logging
import math
import re
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType

from pallas_kernels import _dispatch
from pallas_kernels.formats import check_floating
from sparse24_jax.alternatives import alternatives, idle
from sparse24_jax.dot import check_divisible
from sparse24_jax.layout import Layout
from sparse24_jax.policy import DotPolicy
from sparse24_jax.projection import Projection, stored_as
from sparse24_jax.recipe import Recipe, Rule
from sparse24_jax.suggestions import meant
from sparse24_jax.weight_errors import WeightError

# Arrays that a layer-wide pattern such as '.*/mlp/.*' must not take, also where scanned layers give them two axes.
NOT_WEIGHTS = ('bias', 'scale', 'embedding')
# Where linen's dictionaries of variables have the parameters.
VARIABLES = 'params/'
_EQUINOX = 'Equinox: give the arrays alone, eqx.filter(model, eqx.is_inexact_array)'
_IN_ONE = '. params is one array, not a tree of them: arguments in another order, or optax.flatten around it?'
# An alternative for numbers alone.
_NUMBERS = re.compile(r'(?:\d|\\d|\[[-\d]+\]|[?*+]|\{[\d,]+\})+')


def leaves_by_path(tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
  """(path, leaf) in the order of the tree; the attribute at which a box of Flax holds its array is left out.

  A box holds nothing else: a field `value` among others keeps its name, whatever the others hold. So None and empty
  nodes such as `optax.MaskedNode()`, which stand for what a tree leaves out, count here, and are not returned.

  >>> leaves_by_path({'h_0': {'mlp': [1, (), 2]}})
  [('h_0/mlp/0', 1), ('h_0/mlp/2', 2)]
  """
  chosen = is_leaf or (lambda node: False)
  found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: _stands_for_nothing(node) or chosen(node))[0]
  children: dict[tuple, set] = {}
  for keys, _ in found:
    for i, key in enumerate(keys):
      children.setdefault(keys[:i], set()).add(key)

  def path(keys: tuple) -> str:
    if keys and names_value(keys[-1]) and len(children[keys[:-1]]) == 1:
      keys = keys[:-1]
    return '/'.join(str(getattr(k, 'key', getattr(k, 'name', getattr(k, 'idx', k)))) for k in keys)

  return [(path(keys), leaf) for keys, leaf in found if chosen(leaf) or not _stands_for_nothing(leaf)]


def map_by_path(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
  """`jax.tree.map` of f(path, leaf, ...) with the paths of `leaves_by_path`."""
  paths = iter([path for path, _ in leaves_by_path(tree, is_leaf=is_leaf)])
  return jax.tree.map(lambda *leaves: f(next(paths), *leaves), tree, *rest, is_leaf=is_leaf)


def listed(paths: Iterable[str]) -> str:
  """Paths in a message, those that differ in numbers as one; what is in brackets behind a path must be the same.

  >>> listed(['h_0/up', 'h_1/up', 'head'])
  '2 of h_*/up, head'
  >>> listed(['h_0/up (8, 4)', 'h_1/up (8, 4)', 'h_2/up (8, 2)'])
  '2 of h_*/up (8, 4), h_2/up (8, 2)'
  """
  alike: dict[str, list[str]] = {}
  for path in paths:
    alike.setdefault(re.sub(r'\d+(?![^(]*\))', '*', path), []).append(path)
  return ', '.join(same[0] if len(same) == 1 else f'{len(same)} of {name}' for name, same in alike.items())


def nested(by_path: Mapping[str, Any]) -> dict[str, Any]:
  """The nested dictionary of what has these paths.

  >>> nested({'h_0/mlp': 1, 'h_0/attn': 2})
  {'h_0': {'mlp': 1, 'attn': 2}}
  """
  tree: dict[str, Any] = {}
  for path, leaf in by_path.items():
    *folders, name = path.split('/')
    functools.reduce(lambda node, folder: node.setdefault(folder, {}), folders, tree)[name] = leaf
  return tree


def _stands_for_nothing(node: Any) -> bool:
  return node is None or (isinstance(node, tuple | list | dict) and not node)


def names_value(key: Any) -> bool:
  """Whether `key` is the attribute at which a box of Flax holds its array."""
  return isinstance(key, jax.tree_util.GetAttrKey) and key.name in ('value', 'raw_value')


def is_array(leaf: Any) -> bool:
  """Whether a leaf is an array of any library, a number of NumPy, or the shape of one."""
  return hasattr(leaf, 'shape') and hasattr(leaf, 'dtype')


def require_arrays(params: Any, *, or_numbers: bool = False) -> None:
  """ValueError for parameters with a leaf that is no array, as whole modules of Equinox have them.

  `or_numbers` takes Python's floats too, but no int and no bool: those are settings, and have no gradient.
  """
  odd = [
    f'{path} ({type(leaf).__name__})' for path, leaf in leaves_by_path(params)
    if not (is_array(leaf) or (or_numbers and isinstance(leaf, float | complex)))
  ]  # fmt: skip
  if odd:
    raise ValueError(
      f'parameters must be arrays or shapes with a dtype; found others at {listed(odd)}. {_EQUINOX}. For a function'
      ' of them: params, static = eqx.partition(model, eqx.is_inexact_array), and in the function'
      ' eqx.combine(params, static)'
    )


def require_gradients(params: Any, gradients: Any) -> None:
  """ValueError for parameters without a gradient, as integers and numbers of a whole Equinox module are."""
  having = {path for path, _ in leaves_by_path(gradients)}
  if absent := [path for path, _ in leaves_by_path(params) if path not in having]:
    raise ValueError(
      f'the gradients have nothing for {listed(absent)}: give init and update the parameters that they are of.'
      f' {_EQUINOX}'
    )


def is_weight(path: str, leaf: Any) -> bool:
  return getattr(leaf, 'ndim', 0) >= 2 and path.rsplit('/', 1)[-1] not in NOT_WEIGHTS


def rule_for(path: str, recipe: Recipe) -> Rule | None:
  """The first rule whose pattern matches the whole path, as it is for that weight."""
  given = _given_rule(path, recipe)
  return None if given is None else given.of(path)


def _given_rule(path: str, recipe: Recipe) -> Rule | None:
  return next((rule for rule in recipe.rules if re.fullmatch(rule.path, path)), None)


def matched_rules(params: Any, recipe: Recipe) -> dict[str, Rule]:
  """Like `match_rules`, but for weights of any shape and with policies of weights as they are stored."""
  return {path: rule.of(path) for path, rule in _given_rules(params, recipe).items()}


def _given_rules(params: Any, recipe: Recipe) -> dict[str, Rule]:
  """Path of each weight to the rule that decides for it, as the recipe has it.

  ValueError for a rule, or a pattern of exact gradients, that decides for none.
  """
  leaves = leaves_by_path(params)
  if not leaves:  # a tree of placeholders, as optax.tree_map_params makes
    return {}
  weights = [path for path, leaf in leaves if is_weight(path, leaf)]
  matched = {path: rule for path in weights if (rule := _given_rule(path, recipe)) is not None}
  for rule in recipe.rules:
    others = _others(rule.path, leaves)
    if rule not in matched.values() and not (rule.is_plain and others):  # what it names is dense as it says
      alone = [path for path, _ in leaves] == ['']
      raise ValueError(
        f'rule {rule.path!r} of recipe {recipe.name!r} decides for no weight; weights are'
        f' {listed(weights) or weights}: a rule takes those whose whole path it matches and no earlier rule does'
        f'{f". It matches {listed(others)}; these are dense without a rule: leave this one out" if others else ""}'
        f'{_whole_variables(rule.path, weights) or _meant_deeper(rule.path, weights)}'
        f'{_IN_ONE if alone else ""}'
      )
  for pattern in dict.fromkeys(pattern for rule in recipe.rules for pattern in rule.exact):
    if not any(re.fullmatch(pattern, path) for path in matched):
      raise ValueError(
        f'with_exact_gradients({pattern!r}) of recipe {recipe.name!r} is of no weight that a rule matches: these are'
        f' {listed(matched)}{_meant_deeper(pattern, matched)}'
      )
  return matched


def _others(pattern: str, leaves: Collection[tuple[str, Any]]) -> list[str]:
  """The arrays that a pattern matches, if none of them is one that a rule takes."""
  matched = [(path, leaf) for path, leaf in leaves if re.fullmatch(pattern, path)]
  return [] if any(is_weight(*each) for each in matched) else [path for path, _ in matched]


def _whole_variables(pattern: str, weights: Collection[str]) -> str:
  """What to say if a pattern fits parameters inside of a dictionary of variables."""
  inside = [path.removeprefix(VARIABLES) for path in weights if path.startswith(VARIABLES)]
  if not any(re.fullmatch(pattern, path) for path in inside):
    return ''
  return ". These are a whole dictionary of variables: give the parameters in it, variables['params']"


def _meant_deeper(pattern: str, weights: Collection[str]) -> str:
  """A question for the end of a message: whether a pattern that matches nothing was meant at any depth."""
  deeper = f'.*/(?:{pattern})' if '|' in pattern else f'.*/{pattern}'
  try:
    found = any(re.fullmatch(deeper, path) for path in weights)
  except re.error:  # flags, which stand in front of a pattern alone
    return ''
  if not found or any(re.fullmatch(pattern, path) for path in weights):
    return ''
  return f'; did you mean {deeper!r}?'


def idle_alternatives(params: Any, recipe: Recipe) -> list[str]:
  """What to say of alternatives in the patterns of rules that match no array, as mistyped ones do."""
  paths = [path for path, _ in leaves_by_path(params)]
  if not paths:  # placeholders, as for `matched_rules`
    return []
  names = {name for path in paths for name in path.split('/')}
  said = []
  for rule in recipe.rules:
    makes = 'makes none sparse' if rule.policy.projection else 'leaves none dense'
    for text in (found := idle(rule.path, paths)):
      said.append(f'{text!r} in the rule {rule.path!r} matches no weight, and {makes}{_hint(text, rule, found, names)}')
  return said


def _hint(text: str, rule: Rule, found: Collection[str], names: Collection[str]) -> str:
  """What an alternative that matches nothing was meant for."""
  if _NUMBERS.fullmatch(text):  # of layers, say, that another model has
    return ''
  others = [each.text for each in alternatives(rule.path) if each.text not in found]
  close = meant(text, sorted(names))
  if close is None or any(re.fullmatch(other, close) for other in others):
    return ': mistyped, or of another model?'
  if close == text:
    return ': a rule matches whole paths'
  return f'; did you mean {close!r}?'


def keep_dense(params: Any, recipe: Recipe, paths: Collection[str]) -> Recipe:
  """`recipe` with these of its weights dense, and without the rules that then decide for none."""
  given = _given_rules(params, recipe)
  left = [rule for rule in recipe.rules if any(found is rule for path, found in given.items() if path not in paths)]
  return recipe.without(paths, (Rule('|'.join(map(re.escape, paths)), DotPolicy()), *left)) if paths else recipe


def leaving_dense(path: str) -> str:
  """What to write to leave a weight dense."""
  return f'recipe.with_dense({re.escape(path)!r})'


def match_rules(params: Any, recipe: Recipe) -> dict[str, Rule]:
  """Path of each matched weight to its rule, in the order of the tree.

  Args:
    params: a pytree of arrays, or of anything with shape and dtype.
    recipe: its rules are tried in order. With a recipe from `bind` the projections follow how the weights are stored;
      any other recipe takes weights for `[..., in, out]`.

  Raises:
    ValueError: a rule matches no weight; a matched weight is not float32, bfloat16 or float16, does not hold whole
      groups, shares its path with another parameter, or is not what the recipe was bound to; or, where the sharding is
      known, a shard does not hold whole groups.

  >>> import jax.numpy as jnp
  >>> import sparse24_jax as s24
  >>> params = {'mlp': {'up': {'kernel': jnp.ones((8, 4)), 'bias': jnp.ones(4)}}}
  >>> list(match_rules(params, s24.recipes.ste('mlp/.*')))
  ['mlp/up/kernel']
  """
  leaves = leaves_by_path(params)
  weights, matched = dict(leaves), matched_rules(params, recipe)
  count = collections.Counter(path for path, _ in leaves)
  layouts = recipe.layouts_of({path: weights[path] for path in matched}) if matched else {}
  for path, rule in matched.items():
    if count[path] > 1:
      raise ValueError(f'{count[path]} parameters have the path {path!r}: a slash in a name is read as a folder')
    projection, layout = rule.policy.projection, layouts.get(path)
    check_groups(path, weights[path], projection, layout)
    if projection is not None and layout is not None and not layout.is_standard:
      policy = dataclasses.replace(rule.policy, projection=stored_as(projection, layout))
      matched[path] = dataclasses.replace(rule, policy=policy)
  return matched


def check_groups(path: str, leaf: Any, projection: Projection | None, found: Layout | None) -> None:
  """ValueError unless a weight, and each of its shards where they are known, holds whole groups of its projection.

  Along the axes that `bind` found, or as a weight `[stacked..., in, out]`.
  """
  if projection is None:
    return
  shape, layout = tuple(leaf.shape), found or Layout.standard(leaf.ndim)
  name = path if layout.is_standard else f'{path} of shape {shape}, as [in, out]'
  check_floating(leaf, path)
  try:
    check_divisible(layout.matrix_shape(shape), projection, name)
  except ValueError as error:
    dense = f'or leave it dense: {leaving_dense(path)}'
    # Where no choice of axes has whole groups the shape is at fault, not the layout.
    if found is not None or len(shape) < 3 or math.prod(shape) % math.prod(projection.divisor):
      raise WeightError(f'{error}, {dense}', path, leave_dense=True) from error
    raise WeightError(
      f'{error}: by itself a recipe takes a weight for [stacked..., in, out]; what the model contracts,'
      f' sparse24_jax.bind(recipe, f, params, *example) finds out, {dense}',
      path, leave_dense=True,
    ) from error  # fmt: skip
  _check_shards(path, leaf, projection, layout)


def log_matches(params: Any, recipe: Recipe, *, whole: bool = True) -> None:
  """Logs what `match_rules` finds: path, shape and projection; a table that this process has logged is not repeated.

  Warns of alternatives in a pattern that match nothing, if these are the `whole` parameters of a model.
  """
  for said in idle_alternatives(params, recipe) if whole else ():
    _dispatch.log_once(said, 'sparse24_jax', logging.WARNING)
  rules = match_rules(params, recipe)
  shapes = {path: str(leaf.shape) for path, leaf in leaves_by_path(params) if path in rules}
  if not rules:
    return
  names, widths = max(map(len, rules)), max(map(len, shapes.values()))
  rows = [
    f'  {path:{names}}  {shapes[path]:{widths}}  {p.label if (p := rule.policy.projection) else "no projection"}'
    for path, rule in rules.items()
  ]
  _dispatch.log_once('\n'.join([f'recipe {recipe.name!r} matches {len(rows)} weights:', *rows]), 'sparse24_jax')


def _check_shards(path: str, leaf: Any, projection: Projection, layout: Layout) -> None:
  """ValueError if a group of `leaf` straddles two shards, a warning if joined axes are gathered; silent if not known.

  Joined axes that a mesh of explicit axes divides on an inner one are a ValueError, too: JAX joins none of them there.

  Under jit it is known on meshes of explicit axes only: on others, check concrete arrays, as `init` outside jit does.
  """
  if isinstance(leaf, Tracer):
    sharding = jax.typeof(leaf).sharding
    if not (sharding.mesh.shape and sharding.mesh.are_all_axes_explicit):
      return
  elif (sharding := getattr(leaf, 'sharding', None)) is None:
    return
  shard = sharding.shard_shape(leaf.shape)
  for axes, divisor in zip((layout.contracted, layout.outputs), projection.divisor, strict=True):
    # Axes are joined with the last one innermost: a shard holds neighbours if those behind a divided one are whole.
    divided = [i for i, axis in enumerate(axes) if shard[axis] != leaf.shape[axis]]
    run = math.prod(shard[axis] for axis in axes[divided[-1] :]) if divided else divisor
    if run % divisor:
      axis = axes[divided[-1]]
      raise ValueError(
        f'{path} of shape {leaf.shape} is sharded to {shard}: a shard holds {run} entries along axis'
        f' {axis - leaf.ndim}, and projection {projection.name!r} needs a multiple of {divisor} in each'
      )
    if divided and any(leaf.shape[axis] > 1 for axis in axes[: divided[-1]]):
      found = (
        f'{path} of shape {leaf.shape} is sharded to {shard}, along axis {axes[divided[-1]] - leaf.ndim}: masks and'
        f' matmuls join axes {axes} to one'
      )
      what_to_do = 'Divide the first of them, or store it as several weights'
      if AxisType.Explicit in getattr(getattr(sharding, 'mesh', None), 'axis_types', ()):
        raise ValueError(
          f'{found}, which a mesh of explicit axes does not. {what_to_do}; a mesh of Auto axes gathers it'
        )
      _dispatch.log_once(f'{found}, and gather it. {what_to_do}', 'sparse24_jax', logging.WARNING)
