"""The recipe that a configuration describes, from plain values."""

from collections.abc import Mapping, Sequence
import dataclasses
import inspect
import re
from typing import Any

from experiments.runs import patterns
from experiments.runs.experiment import Config
import sparse24_jax as s24

# The feed-forward matrices, which every paper here makes sparse.
FFN = r'.*/mlp/.*'
# The same one by one, for recipes that tell them apart.
FFN_UP = r'.*/mlp/c_fc/kernel'
FFN_DOWN = r'.*/mlp/c_proj/kernel'
# Every linear layer of the blocks, which mixed sparsity training takes.
LINEAR = r'.*/(attn|mlp)/.*'

# The published share of neurons that are dense in the weight gradients.
DENSE_SHARE = 0.05
# Changes of the published V:N:M activations that lose less (`docs/quality_runs.md`).
MORE_DENSE = {'dense_features': 0.2}
TWO_OF_FOUR = {'tokens': '2:4', 'dense_features': 0.0}

WATCHABLE = ('transposable', 'magnitude', 'soft_threshold_projection')


def make_recipe(config: Config) -> s24.Recipe:
  """Returns the library's recipe that the configuration describes.

  `recipe.kwargs` is what `recipe_of` takes; `recipe.flip_rate` overrides the recipe's own.

  Raises:
    ValueError: no such recipe, or arguments that it does not take.
  """
  recipe = recipe_of(config.recipe.name, config.recipe.kwargs.to_dict(), config.steps, config.get('seed', 0))
  recipe = dataclasses.replace(recipe, flip_rate=config.recipe.flip_rate)
  if (implementation := config.recipe.get('implementation', 'auto')) in ('auto', 'reference'):
    return with_implementation(recipe, implementation)
  # The kernels of a block with sparse activations are named in its own policy, which these names do not fit.
  policies = [dataclasses.replace(rule.policy, implementation=implementation) for rule in recipe.rules]
  rules = (dataclasses.replace(rule, policy=policy) for rule, policy in zip(recipe.rules, policies, strict=True))
  return dataclasses.replace(recipe, rules=tuple(rules))


def recipe_of(name: str, given: Mapping[str, Any], steps: int, seed: int = 0) -> s24.Recipe:
  """The library's recipe of this name, from plain values.

  `watch`, a projection, is given by its name; `path` is `FFN` unless given, for recipes that need one, and so are `up`
  and `down`, `FFN_UP` and `FFN_DOWN`; `total_steps` and `seed` are those of the run; `attention` is what `attention_of`
  takes, `policy` what `policy_of` takes, `exact` what `Recipe.with_exact_gradients` takes.

  Raises:
    ValueError: no such recipe, or arguments that it does not take.
  """
  kwargs = dict(given)
  exact = kwargs.pop('exact', None)
  if name not in s24.recipes.__all__:
    raise ValueError(f'recipe.name is {name!r}; known: {", ".join(s24.recipes.__all__)}')
  if kwargs.get('watch') is not None:
    if kwargs['watch'] not in WATCHABLE:
      raise ValueError(f'recipe.kwargs.watch is {kwargs["watch"]!r}; known: {", ".join(WATCHABLE)}')
    kwargs['watch'] = getattr(s24, kwargs['watch'])()
  make = s24.recipes.KNOWN[name].make
  signature = inspect.signature(make)
  for key, path in (('path', FFN), ('up', FFN_UP), ('down', FFN_DOWN)):
    if key in signature.parameters and signature.parameters[key].default is inspect.Parameter.empty:
      kwargs.setdefault(key, path)
  if 'total_steps' in signature.parameters:
    kwargs.setdefault('total_steps', steps)
  if 'seed' in signature.parameters:
    kwargs.setdefault('seed', seed)
  try:
    if 'attention' in kwargs:
      kwargs['attention'] = attention_of(kwargs['attention'])
    if isinstance(kwargs.get('policy'), dict):
      kwargs['policy'] = policy_of(kwargs['policy'])
    signature.bind(**kwargs)
  except TypeError as error:
    raise ValueError(f'recipe.kwargs of {name}{signature}: {error}') from error
  recipe = make(**kwargs) if exact is None else make(**kwargs).with_exact_gradients(exact)
  for rule in recipe.rules:
    for path in (rule.path, *rule.exact):
      patterns.require_fast('recipe.kwargs: the path', path)
  return recipe


def policy_of(stored: Mapping[str, Any]) -> s24.ActivationPolicy:
  """`ActivationPolicy` from plain values, as `describe` gives them: patterns as text, clusters by name.

  >>> policy = policy_of({'features': '16:2:8', 'clusters': {'number': 4}, 'tokens': '16:2:8'})
  >>> policy.features, policy.clusters
  (VNM(v=16, m=8), Clusters(number=4, within=0))
  """
  fields = dict(stored)
  for name in {'features', 'tokens'} & fields.keys():
    fields[name] = _pattern_of(name, fields[name])
  if isinstance(fields.get('clusters'), Mapping):
    fields['clusters'] = s24.Clusters(**fields['clusters'])
  return s24.ActivationPolicy(**fields)


def as_published(features: str, **changes: Any) -> dict[str, Any]:
  """Activations as in arXiv 2602.06183 but for `changes`, as `policy_of` takes them: V:2:M along tokens too.

  >>> policy_of(as_published('64:2:8', clusters={'number': 4})).tokens
  VNM(v=64, m=8)
  """
  return {'features': features, 'tokens': features, 'dense_features': DENSE_SHARE, **changes}


def _pattern_of(name: str, text: str) -> s24.TwoOfFour | s24.VNM:
  if text == '2:4':
    return s24.TwoOfFour()
  found = re.fullmatch(r'(\d+):2:(\d+)', str(text))
  if found is None:
    raise ValueError(f"{name}={text!r} of a policy must be '2:4' or 'V:2:M', '128:2:8' say")
  return s24.VNM(*map(int, found.groups()))


def attention_of(stored: Any) -> Any:
  """Patterns from plain values: {'kind': ..., 'window': ...}, None, or a list of these and of lists of them.

  >>> attention_of([None, [{'kind': 'local', 'window': 4}]])
  (None, (AttentionPattern(kind='local', window=4),))
  """
  if isinstance(stored, Mapping):
    return s24.AttentionPattern(**stored)
  return tuple(map(attention_of, stored)) if isinstance(stored, Sequence) and not isinstance(stored, str) else stored


def with_implementation(recipe: s24.Recipe, name: str) -> s24.Recipe:
  """The recipe with a back end named in its policies; 'auto' leaves the choice to the records."""
  if name == 'auto':
    return recipe
  change = dataclasses.replace

  def named(rule: s24.Rule) -> s24.Rule:
    if rule.activation:  # it chooses for the whole block
      rule = change(rule, activation=change(rule.activation, implementation=name))
    if rule.activation and name != 'reference':
      return rule
    return change(rule, policy=change(rule.policy, implementation=name))  # also where activations are evaluated dense

  return change(recipe, rules=tuple(map(named, recipe.rules)))


def eval_recipe(recipe: s24.Recipe) -> s24.Recipe:
  """The recipe that is evaluated: weights as in training, activations dense.

  Which neurons a V:N:M pattern keeps for a token depends on all tokens of its block, later ones included, so a loss
  under the pattern would know something of the very token that it predicts.
  """
  return dataclasses.replace(recipe, rules=tuple(dataclasses.replace(r, activation=None) for r in recipe.rules))
