"""Loading an experiment, which is a Python file with `get_config`, and changing it from the command line."""

import ast
from collections.abc import Mapping, Sequence
import importlib
import importlib.util
from pathlib import Path
import pkgutil
from typing import Any

from ml_collections import ConfigDict

from experiments import configs

_SHARED = ('base', 'gpt2')

# A `ConfigDict`, whose fields have no static types.
type Config = Any


def known_experiments() -> list[str]:
  """Names of the experiments in `experiments/configs`."""
  return sorted(module.name for module in pkgutil.iter_modules(configs.__path__) if module.name not in _SHARED)


def load_config(name: str, overrides: Sequence[str] = (), *, tiny: bool = False) -> Config:
  """Loads an experiment.

  Args:
    name: a file name in `experiments/configs` without its ending, or a path to a Python file with `get_config`.
    overrides: 'section.key=value' strings; the value is a Python literal or a plain string.
    tiny: load the experiment's tiny twin.

  Raises:
    ValueError: no such experiment, no such field, or a value of the wrong type.
  """
  if name in known_experiments():
    module = importlib.import_module(f'experiments.configs.{name}')
  elif name.endswith('.py') and Path(name).is_file():
    spec = importlib.util.spec_from_file_location('experiment_config', name)
    assert spec is not None and spec.loader is not None  # A file that exists and ends in .py has both.
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
  else:
    raise ValueError(f'no experiment {name!r}; known: {", ".join(known_experiments())}, or a Python file')
  config = module.get_config(tiny=tiny)
  for override in overrides:
    apply_override(config, override)
  return config


def apply_override(config: Config, override: str) -> None:
  """Sets one field from a 'section.key=value' string, in place."""
  key, found, text = override.partition('=')
  if not found:
    raise ValueError(f'--set {override!r} is not of the form key=value')
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    value = text
  if key == 'method':
    raise ValueError(f'--set {override} would name a method and not put it in: use train --method {value}, or compare')
  *sections, last = key.split('.')
  node = config
  for section in sections:
    if section not in node or not isinstance(node[section], ConfigDict):
      raise ValueError(f'--set {key}: no section {section!r}; known: {", ".join(node)}')
    node = node[section]
  open_ended = key.startswith(('model.', 'recipe.kwargs.'))
  if last not in node and not open_ended:
    raise ValueError(f'--set {key}: no field {last!r}; known: {", ".join(node)}')
  try:
    with node.unlocked():
      node[last] = ConfigDict(value) if isinstance(value, dict) else value
  except TypeError as error:
    kinds = ('a section' if isinstance(v, ConfigDict) else type(v).__name__ for v in (node[last], value))
    raise ValueError('--set {}={}: it takes {}, found {}'.format(key, text, *kinds)) from error


def refuse_overrides(overrides: Sequence[str], refused: Mapping[str, str]) -> None:
  """Refuses overrides that would have no effect because a program sets the field itself.

  Args:
    overrides: 'section.key=value' strings.
    refused: field or section -> why, and what to use instead.

  Raises:
    ValueError: names the field and what to use instead.
  """
  for override in overrides:
    key = override.partition('=')[0]
    for field, instead in refused.items():
      if key == field or key.startswith(f'{field}.'):
        raise ValueError(f'--set {key} has no effect here: {instead}')
