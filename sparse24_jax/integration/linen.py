"""Flax linen: runs a model with the kernels of its matched layers sparse.

Nothing is patched. The wrapper shares its scope with the model, so the parameter tree is the model's own, and while
it runs, a method interceptor lends each matched layer a `dot_general`, the hook that Flax offers for this.
"""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any

from flax import core
from flax import linen as nn
import jax

from sparse24_jax.dot import check_layer, dot_general, note_replaced
from sparse24_jax.integration.linen_mlp import COLLECTION, Sparse24MLP, SparseHook
from sparse24_jax.recipe import Recipe
from sparse24_jax.rules import errors_name, match_rules, NEEDS_BLOCK, rule_for

RNG = 'mvue'
HOOKED = (nn.Dense, nn.DenseGeneral)


class SparseModule(nn.Module):
  """A model with the recipe's policies in its layers; made by `sparsify`.

  Parameters, checkpoints and arguments are those of the model; methods other than `__call__` go through `run`. Apply it
  with the collection `'sparse24'` (`sparse_variables`) and, where gradients are taken with MVUE, an rng named
  `'mvue'`. Under `nn.scan` both must be let through: `variable_axes={'params': 0, 'sparse24': 0}`,
  `split_rngs={'params': True, 'mvue': True}`.
  """

  # The model's own names live in the scope that both share: no model has this one.
  sparse24_model: nn.Module
  recipe: Recipe

  def setup(self):
    nn.share_scope(self, self.sparse24_model)

  def __call__(self, *args, **kwargs):
    return self._run(self.sparse24_model, args, kwargs)

  def run(self, method: str, *args, **kwargs):
    """Another method of the model, by name, with its matched layers sparse."""
    return self._run(getattr(self.sparse24_model, method), args, kwargs)

  @nn.nowrap
  def __getattr__(self, name: str) -> Any:
    try:
      return super().__getattr__(name)
    except AttributeError as error:
      # Not by an attribute of this object, which Flax would look for here again.
      if name.startswith('_') or not callable(getattr(type(vars(self).get('sparse24_model')), name, None)):
        raise
      raise AttributeError(
        f"{name!r} is a method of the model: apply(variables, {name!r}, x, method='run') runs it with its layers sparse"
      ) from error

  def _run(self, function: Callable, args: tuple, kwargs: dict):
    if self.is_initializing():
      return function(*args, **kwargs)
    reached: set[str] = set()
    ran: set[str] = set()
    for module in (self, self.sparse24_model):
      _flag(module, self.recipe)
    with nn.intercept_methods(_interceptor(self.recipe, len(self.path), reached, ran)):
      out = function(*args, **kwargs)
    # A layer that this call skipped is no error; one that ran without a hook is.
    matched = match_rules(self.variables['params'], self.recipe)
    missed = [path for path in matched if path not in reached and path.rpartition('/')[0] in ran]
    if missed:
      raise ValueError(
        f'{missed} match rules of recipe {self.recipe.name!r}, but no layer with a dot_general hook used them: only'
        f' kernels of {[c.__name__ for c in (*HOOKED, Sparse24MLP)]} can be sparse, and of their subclasses that call'
        ' dot_general or their parent; narrow the rule, or call sparse24_jax.dot in the layer and leave its rule out of'
        ' the recipe given to sparsify'
      )
    return out


def _interceptor(recipe: Recipe, depth: int, reached: set[str], ran: set[str]) -> Callable:
  """Notes the modules that ran and the kernels that a hook reached, by their path in the model, `depth` names deep."""

  def intercept(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext):
    module = context.module
    # Layers that came in by a field of a model were named when that model was still a field of its wrapper.
    place = tuple(name for name in module.path[depth:] if name != 'sparse24_model')
    ran.add('/'.join(place))
    _flag(module, recipe)
    if isinstance(module, Sparse24MLP) and context.method_name == '__call__' and module.sparse is None:
      hook = _mlp_hook(module, place, recipe, reached)
      if hook is None:
        return call(*args, **kwargs)
      with _lent(module, sparse=hook):
        return call(*args, **kwargs)
    if context.method_name != '__call__' or not isinstance(module, HOOKED) or isinstance(module.dot_general, _Hook):
      return call(*args, **kwargs)
    path = '/'.join((*place, 'kernel'))
    rule = rule_for(path, recipe)
    if rule is None:
      return call(*args, **kwargs)
    if rule.activation is not None:
      raise ValueError(f'{path}: {NEEDS_BLOCK}')
    if rule.policy.projection is not None and not module.has_variable(COLLECTION, 'kernel'):
      raise ValueError(_no_state(path))
    note_replaced(path, module.dot_general, module.dot_general_cls)
    hook = _Hook(path, rule.policy, module.get_variable(COLLECTION, 'kernel'), _key(module), reached)
    with _lent(module, dot_general=hook, dot_general_cls=None):  # Flax would prefer the class to the hook
      return call(*args, **kwargs)

  return intercept


def _flag(module: nn.Module, recipe: Recipe) -> None:
  """Makes the recipe known to `nn.jit`, which keeps programs by the flags of a scope, among others.

  A scope hands its flags on to those of its layers, when they are made.
  """
  if module.scope is not None and COLLECTION not in module.scope.flags:
    module.scope.flags = core.freeze({**module.scope.flags, COLLECTION: _Rules(recipe)})


class _Rules:
  """The rules of a recipe, as something that only tells them apart: Flax looks into what it knows."""

  def __init__(self, recipe: Recipe):
    self._rules = recipe.rules

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Rules) and self._rules == other._rules

  def __hash__(self) -> int:
    return hash(self._rules)


@contextlib.contextmanager
def _lent(module: nn.Module, **attributes: Any) -> Iterator[None]:
  """Gives a module other attributes for one call; to who watches calls, a copy run in its place would be one more."""
  own = {name: getattr(module, name) for name in attributes if hasattr(module, name)}
  try:
    for name in own:
      object.__setattr__(module, name, attributes[name])
    yield
  finally:
    for name, value in own.items():
      object.__setattr__(module, name, value)


def _mlp_hook(module: Sparse24MLP, place: tuple[str, ...], recipe: Recipe, reached: set[str]) -> SparseHook | None:
  """What the rules say of the layer's kernels; None if they say nothing."""
  paths = {role: '/'.join((*place, name, 'kernel')) for role, name in module.roles.items()}
  rules = {role: rule for role, path in paths.items() if (rule := rule_for(path, recipe)) is not None}
  states = module.variables.get(COLLECTION, {})
  for role, rule in rules.items():
    reached.add(paths[role])
    if rule.policy.projection is not None and 'kernel' not in states.get(module.roles[role], {}):
      raise ValueError(_no_state(paths[role]))
  if not rules:
    return None
  activations = {rule.activation for rule in rules.values()}
  if len(activations) > 1 or (None not in activations and len(rules) < len(paths)):
    raise ValueError(f'{list(paths.values())}: sparse activations take one rule setting for all maps of the layer')
  return SparseHook({role: rule.policy for role, rule in rules.items()}, _key(module), activations.pop())


def _key(module: nn.Module) -> jax.Array | None:
  return module.make_rng(RNG) if module.has_rng(RNG) else None


def _no_state(path: str) -> str:
  return (
    f'{path}: no state in collection {COLLECTION!r}; apply with variables {{"params": params, "{COLLECTION}":'
    f' sparse_variables(params, opt_state, recipe, phase=phase)}}, and under nn.scan let it through with'
    f' variable_axes={{..., "{COLLECTION}": 0}}'
  )


class _Hook:
  """A `dot_general` for one layer."""

  def __init__(self, path: str, policy: Any, state: Any, key: jax.Array | None, reached: set[str]):
    self.path, self.policy, self.state, self.key = path, policy, state, key
    self.reached = reached

  def __call__(self, lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, **kwargs):
    del kwargs
    self.reached.add(self.path)
    with errors_name(self.path):
      check_layer(precision, preferred_element_type, lhs.dtype)
      return dot_general(lhs, rhs, dimension_numbers, self.state, policy=self.policy, key=self.key)
