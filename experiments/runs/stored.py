"""Configurations of runs as their folders keep them, which mean the same when a default of the library has changed."""

from collections.abc import Mapping
import json
from pathlib import Path
from typing import Any

from experiments.runs import build
from experiments.runs.experiment import Config
from sparse24_jax.activation_sparsity import PUBLISHED_DENSE_SHARE

# Of V:N:M policies that do not say so: before it was written out, the published pattern was the default.
_PUBLISHED = {'token_pattern': 'v:n:m', 'dense_features': PUBLISHED_DENSE_SHARE}


def spelt_out(config: Config) -> dict[str, Any]:
  """Plain values of a configuration, with what its V:N:M activations leave to the library."""
  plain = config.to_dict()
  policy = next((rule.activation for rule in build.make_recipe(config).rules if rule.activation), None)
  if policy is None or policy.pattern == '2:4':
    return plain
  tokens = '2:4' if policy.keeps_two_of_four_tokens else 'v:n:m'
  return _with_policy(plain, _policy(plain) | {'token_pattern': tokens, 'dense_features': policy.dense_share})


def as_meant(config: Mapping[str, Any]) -> dict[str, Any]:
  """What `config.json` says, also one from before V:N:M activations were `spelt_out`.

  >>> as_meant({'recipe': {'name': 'neuron_level', 'kwargs': {'policy': {'v': 16}}}})['recipe']['kwargs']
  {'policy': {'v': 16, 'token_pattern': 'v:n:m', 'dense_features': 0.05}}
  """
  if config['recipe']['name'] != 'neuron_level' or (policy := _policy(config)).get('pattern') == '2:4':
    return dict(config)
  left_open = {key: value for key, value in _PUBLISHED.items() if policy.get(key) is None}
  return _with_policy(config, policy | left_open)


def read(folder: str | Path) -> dict[str, Any]:
  """The configuration of a run, `as_meant`.

  Raises:
    ValueError: the folder is not a run's.
  """
  file = Path(folder) / 'config.json'
  if not file.is_file():
    raise ValueError(f'{folder} is not the folder of a run: it has no config.json')
  return as_meant(json.loads(file.read_text()))


def _policy(config: Mapping[str, Any]) -> dict[str, Any]:
  return dict(config['recipe']['kwargs'].get('policy') or {})


def _with_policy(config: Mapping[str, Any], policy: Mapping[str, Any]) -> dict[str, Any]:
  recipe = config['recipe']
  return {**config, 'recipe': {**recipe, 'kwargs': {**recipe['kwargs'], 'policy': dict(policy)}}}
