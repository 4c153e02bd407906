"""Loading an experiment, and changing it from the command line.

An experiment is a Python file with `get_config`. That is code: it may do anything, so load only files that you would
run. A file from elsewhere should be JSON or TOML, which is data: an object with `base`, the name of an experiment, and
the fields that are others, or the `config.json` of a run.
"""

import ast
from collections.abc import Mapping, Sequence
import importlib
import importlib.util
import json
from pathlib import Path
import pkgutil
import re
import tomllib
from typing import Any

from ml_collections import ConfigDict

from experiments.runs import configs

_SHARED = ('base', 'gpt2')
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9_+.-]*')

# A `ConfigDict`, whose fields have no static types.
type Config = Any


def known_experiments() -> list[str]:
  """Names of the experiments in `experiments/runs/configs`."""
  return sorted(module.name for module in pkgutil.iter_modules(configs.__path__) if module.name not in _SHARED)


def load_config(name: str, overrides: Sequence[str] = (), *, tiny: bool = False) -> Config:
  """Loads an experiment.

  Args:
    name: a file name in `experiments/runs/configs` without its ending, or a path to a file, see the module.
    overrides: 'section.key=value' strings; the value is a Python literal or a plain string.
    tiny: load the experiment's tiny twin.

  Raises:
    ValueError: no such experiment, no such field, or a value of the wrong type.
  """
  if name in known_experiments():
    config = importlib.import_module(f'experiments.runs.configs.{name}').get_config(tiny=tiny)
  elif name.endswith('.py') and Path(name).is_file():
    spec = importlib.util.spec_from_file_location('experiment_config', name)
    assert spec is not None and spec.loader is not None  # A file that exists and ends in .py has both.
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(tiny=tiny)
  elif name.endswith(('.json', '.toml')) and Path(name).is_file():
    config = _from_data(Path(name), tiny)
  else:
    known = ', '.join(known_experiments())
    raise ValueError(f'no experiment {name!r}; known: {known}, or a file that ends in .py, .json or .toml')
  for override in overrides:
    apply_override(config, override)
  if not _NAME.fullmatch(config.name):  # Run folders are called after it.
    raise ValueError(f'name is {config.name!r}; it takes letters, digits and -_+. and begins with a letter or digit')
  return config


def _from_data(path: Path, tiny: bool) -> Config:
  """The experiment that a JSON or TOML file describes."""
  try:
    fields = json.loads(path.read_text()) if path.suffix == '.json' else tomllib.loads(path.read_text())
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} cannot be read: {error}') from error
  if not isinstance(fields, dict):
    raise ValueError(f'{path} holds no object of fields but {type(fields).__name__}')
  whole = 'base' not in fields  # the config.json of a run
  base = fields.pop('base', 'nano')
  if base not in (known := known_experiments()):  # never a file: that could be code
    raise ValueError(f'{path}: base is {base!r}; known: {", ".join(known)}')
  config = load_config(base, tiny=tiny)
  if whole and (missing := _missing(config, fields)):
    raise ValueError(f'{path} names no base, and lacks {", ".join(missing)}; add base, the name of an experiment')
  for key, value in fields.items():
    if key in ('model', 'methods') and isinstance(value, dict):
      with config.unlocked():
        config[key] = ConfigDict(value if whole else {**config[key].to_dict(), **value})
    elif isinstance(value, dict):
      for name, entry in value.items():
        _assign(config, f'{key}.{name}', entry)
    else:
      _assign(config, key, value)
  return config


def _missing(config: Config, fields: Mapping[str, Any]) -> list[str]:
  """The fields of an experiment that a file does not have, 'section.key'; sections that take any field are whole."""
  missing = [key for key in config if key not in fields]
  for key in ('data', 'optimizer', 'mesh', 'recipe'):
    section = fields.get(key)
    missing += [f'{key}.{name}' for name in config[key] if isinstance(section, dict) and name not in section]
  return missing


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
  _assign(config, key, value)


def _assign(config: Config, key: str, value: Any) -> None:
  """Sets the field 'section.key' to a plain value, in place."""
  *sections, last = key.split('.')
  node: Any = config
  for section in sections:
    if section not in node or not isinstance(node[section], ConfigDict):
      raise ValueError(f'--set {key}: no section {section!r}; known: {", ".join(node)}')
    node = node[section]
  open_ended = key.startswith(('model.', 'recipe.kwargs.'))
  if last not in node and not open_ended:
    raise ValueError(f'--set {key}: no field {last!r}; known: {", ".join(node)}')
  try:
    if value is None and not open_ended and _needs_a_value(key, node[last]):
      raise TypeError
    with node.unlocked():
      node[last] = ConfigDict(value) if isinstance(value, dict) else value
  except TypeError as error:
    kinds = ('a section' if isinstance(v, ConfigDict) else type(v).__name__ for v in (node[last], value))
    raise ValueError('--set {}={}: it takes {}, found {}'.format(key, value, *kinds)) from error


def _needs_a_value(key: str, old: Any) -> bool:
  """Whether a field may not be None, which a `ConfigDict` takes in every place; names of folders and limits may."""
  return key == 'name' or (isinstance(old, ConfigDict | int | float) and key != 'data.max_tokens')


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
