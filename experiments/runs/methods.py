"""Methods put into an experiment, and run, every one with every seed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flax import traverse_util
import jax
from ml_collections import ConfigDict

from experiments.runs import flops, train
from experiments.runs.experiment import Config, load_config, refuse_overrides
from experiments.runs.method_table import expand, GROUPS, METHODS
from experiments.runs.models.gpt2 import SIZES
from experiments.runs.programs import Programs
from experiments.runs.recipes import make_recipe
from sparse24_jax.suggestions import meant

# Intervals that fit in a run of 60 steps, whose mixed sparsity has stages of one or two.
_TINY_REFRESH = {'dense': 5, 'transposable_srste': 5, 'mixed_sparsity': 1, 'rigl': 5, 'set_': 5}

# What `run_all` sets for every run, so that nobody else can, and what to use instead.
SET_BY_METHOD = dict.fromkeys(
  ('recipe', 'label', 'method'), 'every method brings its own; use compare --methods, or train without --method'
)
_SET_BY_SEED = dict.fromkeys(('seed', 'data.seed'), 'every run gets its own; use --seeds (main-job: --seed), or train')

# Where the search for a density begins.
_FIRST_DENSITIES = (0.1, 0.2)


def configure(config: Config, method: str, seed: int) -> Config:
  """Returns a copy of an experiment with a method's recipe and a seed put in.

  Args:
    config: the experiment, any recipe.
    method: a key of `METHODS`.
    seed: for parameters, sampling and the order of the data.

  Raises:
    ValueError: unknown method.
  """
  if method not in METHODS:
    close = meant(method, [*METHODS, *GROUPS])
    hint = f'; did you mean {close!r}?' if close else ''
    raise ValueError(f'method is {method!r}{hint}; known: {", ".join(METHODS)}; groups: {", ".join(GROUPS)}')
  chosen, config = METHODS[method], config.copy_and_resolve_references()
  own = _own(config, method)
  share = own.pop('steps', chosen.steps)
  own = _with_policy(chosen.kwargs, own)
  if isinstance(share, str):
    whole = configure(_with_own(config, method, steps=1.0), method, seed)
    share = _flops(configure(config, share, seed)) / _flops(whole)
  kwargs = {**chosen.kwargs, **own}
  if isinstance(kwargs.get('density'), str):
    kwargs['density'] = _density_with_flops_of(config, method, kwargs['density'])
  if config.name.endswith('-tiny') and chosen.recipe in _TINY_REFRESH:
    kwargs['refresh_every'] = _TINY_REFRESH[chosen.recipe]
  steps = max(1, round(share * config.steps))
  # A period that follows the steps stays shorter than every stage of a schedule in shares of them.
  if 0 < kwargs.get('refresh_every', 1) < 1:
    kwargs['refresh_every'] = max(1, round(kwargs['refresh_every'] * steps))
  recipe = ConfigDict({
    'name': chosen.recipe, 'kwargs': kwargs, 'flip_rate': config.recipe.flip_rate, 'dense_from': chosen.dense_from,
    'implementation': config.recipe.implementation,
  })  # fmt: skip
  with config.unlocked():
    config.recipe = recipe
    config.model.update({**chosen.model, **_narrowed(config, chosen.width)})
  config.method, config.label, config.steps = method, chosen.label, steps
  config.seed = config.data.seed = seed
  return config


def _narrowed(config: Config, width: float) -> dict[str, int]:
  """Width and heads of a model `width` times as wide."""
  if width == 1:
    return {}
  usual = {**SIZES[config.model.size], **config.model}
  return {name: round(width * usual[name]) for name in ('embed_dim', 'num_heads')}


def _own(config: Config, method: str) -> dict[str, Any]:
  """What an experiment sets for a method."""
  own = config.methods.get(method, {})
  return own.to_dict() if isinstance(own, ConfigDict) else dict(own)


def _with_own(config: Config, method: str, **changes: Any) -> Config:
  """A copy of an experiment that sets something else for a method."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.methods[method] = {**_own(config, method), **changes}
  return config


def check(config: Config, methods: Sequence[str]) -> None:
  """Builds the recipe of every method, and of those whose FLOPs one takes; counts none, so it is done in no time.

  Args:
    config: the experiment, any recipe.
    methods: keys of `METHODS` or `GROUPS` of `method_table`.

  Raises:
    ValueError: unknown methods, and settings that their recipes refuse; of all of them.
  """
  refused, asked, todo = [], set(), expand(methods)
  while todo:
    method = todo.pop(0)
    if method in asked:
      continue
    asked.add(method)
    stand_in, own = config.copy_and_resolve_references(), _own(config, method)
    for name, value in (('density', _FIRST_DENSITIES[0]), ('steps', 1.0)):
      if isinstance(own.get(name), str):
        todo.append(own[name])
        own[name] = value
    with stand_in.unlocked():
      stand_in.methods[method] = own
    try:
      make_recipe(configure(stand_in, method, 0))
    except ValueError as error:
      refused.append(str(error) if method not in METHODS else f'{method} with {config.steps} steps: {error}')
  if refused:
    raise ValueError('; '.join(refused))


def _flops(config: Config) -> float:
  """Training FLOPs of a run, the head not counted."""
  recipe = make_recipe(config)
  # Dozens of tiny programs, which an accelerator compiles for longer than it runs them.
  with jax.default_device(jax.local_devices(backend='cpu')[0]):
    counted = flops.of_experiment(config, recipe, vocab_size=flops.VOCABULARIES[config.data.tokenizer])
  return counted.sum().total(head=False)


def _density_with_flops_of(config: Config, method: str, other: str) -> float:
  """The density, to four places, with which a method takes as many FLOPs as another; FLOPs are nearly linear in it."""
  wanted = _flops(configure(config, other, 0))

  def excess(density: float) -> float:
    fixed = _with_own(config, method, density=density)
    return _flops(configure(fixed, method, 0)) - wanted

  points = [(density, excess(density)) for density in _FIRST_DENSITIES]
  for _ in range(2):
    (a, at_a), (b, at_b) = sorted(points, key=lambda point: abs(point[1]))[:2]
    density = min(max(a - at_a * (b - a) / (at_b - at_a), 1e-3), 0.5)
    points.append((density, excess(density)))
  return round(min(points, key=lambda point: abs(point[1]))[0], 4)


def _with_policy(table: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
  """An experiment's arguments; a `policy` keeps what it does not name of the table's."""
  policy = own.get('policy')
  return {**own, 'policy': {**table.get('policy', {}), **policy}} if isinstance(policy, Mapping) else dict(own)


def _changes(experiment: Config, changed: Config, method: str) -> list[str]:
  """What overrides set for a method otherwise than experiment and table, which its label does not say."""
  table = METHODS[method].kwargs
  usual, own = (
    traverse_util.flatten_dict(kwargs, sep='.')
    for kwargs in ({**table, **_with_policy(table, _own(experiment, method))}, _own(changed, method))
  )
  return [f'{key}={own[key]}' for key in own if key not in usual or own[key] != usual[key]]


def load_checked(
  experiment: str, methods: Sequence[str], *, tiny: bool = False, overrides: Sequence[str] = ()
) -> Config:
  """The experiment that methods are put into, after everything that `run_all` refuses has been looked for."""
  refuse_overrides(overrides, SET_BY_METHOD | _SET_BY_SEED)
  config = load_config(experiment, overrides, tiny=tiny)
  check(config, methods)
  return config


def run_all(
  experiment: str,
  methods: Sequence[str],
  seeds: Sequence[int],
  folder: str | Path,
  *,
  tiny: bool = False,
  overrides: Sequence[str] = (),
  data: Any = None,
) -> list[Path]:
  """Trains every method with every seed, seed by seed; finished runs are not run again, cut ones resume.

  Args:
    experiment: name or path of the experiment, see `load_config`.
    methods: keys of `METHODS` or `GROUPS` of `method_table`.
    seeds: one run a method and seed.
    folder: gets one run folder each, `<method>-seed<seed>`.
    tiny: use the experiment's tiny twin.
    overrides: 'section.key=value' strings.
    data: batches in place of the corpus, for tests.

  Returns:
    The run folders.

  Raises:
    ValueError: an unknown method, settings that a method's recipe refuses, or an override of what methods and seeds
      decide; before anything is trained.
  """
  base = load_checked(experiment, methods, tiny=tiny, overrides=overrides)
  configs = [configure(base, method, seed) for seed in seeds for method in expand(methods)]
  usual = load_config(experiment, tiny=tiny)
  folders = []
  programs: dict[str, list[Programs]] = {}
  for config in configs:
    with config.unlocked():
      config.name = f'{config.method}-seed{config.seed}'
    config.label = '; '.join([config.label, *_changes(usual, base, config.method)])
    folders.append(Path(folder) / config.name)
    train.train(config, folders[-1], data=data, programs=programs.setdefault(config.method, []))
  return folders
