"""The methods that are compared: what each changes in an experiment, and running them all."""

from collections.abc import Mapping, Sequence
import dataclasses
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from experiments import flops, train
from experiments.build import FFN, LINEAR, make_recipe
from experiments.experiment import Config, load_config, refuse_overrides

# Intervals that fit in a run of 60 steps, whose mixed sparsity has stages of one or two.
_TINY_REFRESH = {'dense': 5, 'transposable_srste': 5, 'mixed_sparsity': 1, 'rigl': 5, 'set_': 5}

# What `run_all` sets for every run, so that nobody else can, and what to use instead.
_SET_BY_METHOD = dict.fromkeys(('recipe', 'label'), 'every method brings its own; use compare --methods, or train')
_SET_BY_SEED = dict.fromkeys(('seed', 'data.seed'), 'every run gets its own; use --seeds (main-job: --seed), or train')


@dataclasses.dataclass(frozen=True)
class Method:
  """One row of a comparison.

  Attributes:
    label: what tables and legends say.
    recipe: name in `sparse24_jax.recipes`.
    kwargs: arguments of the recipe; a `refresh_every` below 1 is a share of the optimizer steps.
    model: changes to the model.
    steps: share of the experiment's optimizer steps.
    dense_from: what a dense phase after a sparse one starts from, see `configs.base`.
  """

  label: str
  recipe: str
  kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  steps: float = 1.0
  dense_from: str = 'weights'


# Where the search for a density begins.
_FIRST_DENSITIES = (0.1, 0.2)

# Sparse activations take the whole feed-forward block.
_SQUARED_RELU = {'mlp': 'relu2', 'fused_mlp': True}
_BY_POSITION = {**_SQUARED_RELU, 'ffn_order': 'position'}

# Decay factors belong to the nano experiment. FST's is what `python -m experiments tune-decay --config nano` chose
# (results/tune_decay_nano.json); that of SR-STE is the best of 2e-4 (the paper's, with SGD), 0.3, 3 and 30 with seed 0
# (results/decay_sweep_nano.jsonl).
METHODS: Mapping[str, Method] = {
  'dense': Method('dense', 'dense', {'path': FFN, 'watch': 'transposable', 'refresh_every': 40}),
  'fst': Method('FST', 'transposable_srste', {'path': FFN, 'masked_decay': 6e-3}),
  's_ste': Method('S-STE', 's_ste', {'path': FFN}),
  'sr_ste': Method('SR-STE, decay on weights', 'sr_ste', {'path': FFN, 'masked_decay': 3.0, 'decay_on': 'weights'}),
  'sr_ste_published': Method(
    'SR-STE, published decay', 'sr_ste', {'path': FFN, 'masked_decay': 2e-4, 'decay_on': 'weights'}
  ),
  'ste': Method('plain STE', 'ste', {'path': FFN}),
  'half_ffn': Method(
    'dense, FFN half as wide',
    'dense',
    {'path': FFN, 'watch': 'transposable', 'refresh_every': 40},
    {'ffn_width': 0.5},
  ),
  'fst_no_decay': Method('FST without decay', 'transposable_srste', {'path': FFN, 'masked_decay': 0.0}),
  # Dynamic sparse training, on all linear layers. Densities and shares are such that nano's 2,000 steps take the same
  # FLOPs with each, the head not counted (`experiments.flops`); topology changes every 25 steps of so short a run.
  'mixed_sparsity': Method('MST', 'mixed_sparsity', {'path': LINEAR, 'refresh_every': 25}),
  'mixed_sparsity_keep_moments': Method(
    'MST, moments kept', 'mixed_sparsity', {'path': LINEAR, 'refresh_every': 25, 'reset_moments': False}
  ),
  'mixed_sparsity_24': Method(
    'MST, 2:4 masks',
    'mixed_sparsity',
    {'path': LINEAR, 'refresh_every': 25, 'structure': '2:4', 'warm_up': 0.025, 'density': 0.0911},
  ),
  # What the pattern saves in the ultra-sparse stage goes into links: density 0.14 in place of 0.09. The window is about
  # the root of nano's 64 tokens, as in Child et al., arXiv 1904.10509; 34% of the causal triangle are attended to.
  'mixed_sparsity_attention': Method(
    'MST, sparse attention',
    'mixed_sparsity',
    {'path': LINEAR, 'refresh_every': 25, 'density': 0.1424, 'attention': {'kind': 'combined', 'window': 8}},
  ),
  # What tells the pattern from the links: as many links with full attention, which takes more FLOPs than the others,
  # and the pattern (in all steps) with a static mask, at the FLOPs of the others.
  'mixed_sparsity_denser': Method(
    'MST, the links of sparse attention',
    'mixed_sparsity',
    {'path': LINEAR, 'refresh_every': 25, 'density': 0.1424},
  ),
  'static_attention': Method(
    'static mask, sparse attention',
    'static',
    {'path': LINEAR, 'density': 0.2313},
    {'attention_pattern': {'kind': 'combined', 'window': 8}},
  ),
  # Samples where the fused block takes them, as on a card. The second has the time of the first there, and its links
  # fill the places that the kernels multiply anyway.
  'mixed_sparsity_transposable': Method(
    'MST, transposable 2:4 masks',
    'mixed_sparsity',
    {'path': LINEAR, 'refresh_every': 25, 'structure': 'transposable', 'mvue_path': FFN, 'warm_up': 0.025,
     'density': 0.0911},
  ),
  'mixed_sparsity_transposable_full': Method(
    'MST, transposable 2:4 masks, half dense',
    'mixed_sparsity',
    {'path': LINEAR, 'refresh_every': 25, 'structure': 'transposable', 'mvue_path': FFN, 'warm_up': 0.025,
     'density': 0.5},
  ),
  'rigl': Method('RigL', 'rigl', {'path': LINEAR, 'refresh_every': 25, 'density': 0.1672}),
  'set_': Method('SET', 'set_', {'path': LINEAR, 'refresh_every': 25, 'density': 0.1754}),
  'static': Method('static mask', 'static', {'path': LINEAR, 'density': 0.1754}),
  'dense_short': Method('dense, as many FLOPs', 'dense', steps=0.24),
  # Sparse activations, in squared-ReLU blocks. A batch of nano is 16 sequences, so the tokens of one position are a
  # block of 16; blocks along a sequence tell a token what follows it, and are here to show what that does. The dense
  # tail starts from the projected weights: the soft threshold leaves raw ones that the sparse phase never used.
  'dense_relu2': Method(
    'dense, squared ReLU', 'dense', {'path': FFN, 'watch': 'soft_threshold_projection'}, _SQUARED_RELU
  ),
  'neuron_level': Method(
    'neuron level, 16:2:8', 'neuron_level', {'policy': {'v': 16, 'm': 8}}, _BY_POSITION, dense_from='projected'
  ),
  'neuron_level_even': Method(
    'neuron level, 16:2:8, half of the steps',
    'neuron_level',
    {'policy': {'v': 16, 'm': 8}, 'dense_fraction': 0.4},
    _BY_POSITION,
    dense_from='projected',
  ),
  # Blocks of 64 are what the kernels run. In the small experiment a step has 64 sequences, in nano it has too few.
  'neuron_level_64': Method(
    'neuron level, 64:2:8, half of the steps',
    'neuron_level',
    {'policy': {'v': 64, 'm': 8}, 'dense_fraction': 0.4},
    _BY_POSITION,
    dense_from='projected',
  ),
  # These need 128 sequences in a step, or a block would hold tokens of two positions.
  'neuron_level_128': Method(
    'neuron level, 128:2:8, half of the steps',
    'neuron_level',
    {'policy': {'v': 128, 'm': 8}, 'dense_fraction': 0.4},
    _BY_POSITION,
    dense_from='projected',
  ),
  'neuron_level_128_16': Method(
    'neuron level, 128:2:16, half of the steps',
    'neuron_level',
    {'policy': {'v': 128, 'm': 16}, 'dense_fraction': 0.4},
    _BY_POSITION,
    dense_from='projected',
  ),
  # Tokens are routed among those of one position, a step's sequences.
  'neuron_level_clusters': Method(
    'neuron level, 16:2:8, clusters and router, half of the steps',
    'neuron_level',
    {'policy': {'v': 16, 'm': 8, 'clusters': 4, 'route_within': 16}, 'dense_fraction': 0.4},
    _BY_POSITION,
    dense_from='projected',
  ),
  'neuron_level_24': Method(
    'neuron level, 2:4', 'neuron_level', {'policy': {'pattern': '2:4'}}, _SQUARED_RELU, dense_from='projected'
  ),
  'neuron_level_24_unprojected': Method(
    'neuron level, 2:4, tail from unprojected weights',
    'neuron_level',
    {'policy': {'pattern': '2:4'}},
    _SQUARED_RELU,
  ),
  'activations_24': Method(
    '2:4 activations, dense weights',
    'neuron_level',
    {'policy': {'pattern': '2:4', 'up': None, 'down': None}},
    _SQUARED_RELU,
  ),
  'neuron_level_along': Method(
    'neuron level, 16:2:8 along sequences',
    'neuron_level',
    {'policy': {'v': 16, 'm': 8}},
    _SQUARED_RELU,
    dense_from='projected',
  ),
}

# The methods of a comparison at equal steps, and of one at equal FLOPs (with dense at equal steps).
AT_EQUAL_STEPS = (
  'dense', 'fst', 's_ste', 'sr_ste', 'sr_ste_published', 'ste', 'half_ffn', 'fst_no_decay',
)  # fmt: skip
AT_EQUAL_FLOPS = (
  'dense', 'mixed_sparsity', 'mixed_sparsity_keep_moments', 'mixed_sparsity_attention', 'mixed_sparsity_24',
  'mixed_sparsity_transposable', 'rigl', 'set_', 'static', 'static_attention', 'dense_short',
)  # fmt: skip
# The methods with sparse activations, at equal steps with their dense twin.
WITH_ACTIVATIONS = (
  'dense_relu2', 'neuron_level_24', 'neuron_level', 'neuron_level_even', 'activations_24', 'neuron_level_along',
  'neuron_level_24_unprojected',
)  # fmt: skip

# Those of them that the small experiment compares, with clusters, and with blocks that the kernels run.
SPARSE_ACTIVATIONS = (
  'dense_relu2', 'activations_24', 'neuron_level_24', 'neuron_level_even', 'neuron_level', 'neuron_level_64',
  'neuron_level_clusters',
)  # fmt: skip

# The patterns that the kernels run, with their dense twin.
KERNEL_PATTERNS = ('dense_relu2', 'neuron_level_64', 'neuron_level_128', 'neuron_level_128_16')

GROUPS: Mapping[str, Sequence[str]] = {
  'equal-steps': AT_EQUAL_STEPS, 'equal-flops': AT_EQUAL_FLOPS, 'activations': WITH_ACTIVATIONS,
  'sparse-activations': SPARSE_ACTIVATIONS, 'kernel-patterns': KERNEL_PATTERNS,
}  # fmt: skip


def expand(names: Sequence[str]) -> list[str]:
  """Names of methods, from those of methods and of `GROUPS`; each once.

  >>> expand(['dense', 'activations'])[:4]
  ['dense', 'dense_relu2', 'neuron_level_24', 'neuron_level']
  """
  return list(dict.fromkeys(method for name in names for method in GROUPS.get(name, (name,))))


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
    raise ValueError(f'method is {method!r}; known: {", ".join(METHODS)}')
  chosen, config = METHODS[method], config.copy_and_resolve_references()
  own = _own(config, method)
  share = own.pop('steps', chosen.steps)
  if isinstance(share, str):
    share = _flops(configure(config, share, seed)) / _flops(configure(config, 'dense', seed))
  kwargs = {**chosen.kwargs, **own}
  if isinstance(kwargs.get('density'), str):
    kwargs['density'] = _density_with_flops_of(config, method, kwargs['density'])
  if config.name.endswith('-tiny') and chosen.recipe in _TINY_REFRESH:
    kwargs['refresh_every'] = _TINY_REFRESH[chosen.recipe]
  steps = max(1, round(share * config.steps))
  # A period that follows the steps stays shorter than every stage of a schedule in shares of them.
  if 0 < kwargs.get('refresh_every', 1) < 1:
    kwargs['refresh_every'] = max(1, round(kwargs['refresh_every'] * steps))
  # Searching anew at every step puts flip rates of different refresh intervals on one scale.
  recipe = ConfigDict({
    'name': chosen.recipe, 'kwargs': kwargs, 'flip_rate': 'step', 'dense_from': chosen.dense_from,
    'implementation': config.recipe.implementation,
  })  # fmt: skip
  with config.unlocked():
    config.recipe = recipe
    config.model.update(chosen.model)
  config.label, config.seed, config.data.seed, config.steps = chosen.label, seed, seed, steps
  return config


def _own(config: Config, method: str) -> dict[str, Any]:
  """What an experiment sets for a method."""
  own = config.methods.get(method, {})
  return own.to_dict() if isinstance(own, ConfigDict) else dict(own)


def check(config: Config, methods: Sequence[str]) -> None:
  """Builds the recipe of every method, and of those whose FLOPs one takes; counts none, so it is done in no time.

  Args:
    config: the experiment, any recipe.
    methods: keys of `METHODS` or `GROUPS`.

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
    fixed = config.copy_and_resolve_references()
    with fixed.unlocked():
      fixed.methods[method] = {**dict(config.methods.get(method, {})), 'density': density}
    return _flops(configure(fixed, method, 0)) - wanted

  points = [(density, excess(density)) for density in _FIRST_DENSITIES]
  for _ in range(2):
    (a, at_a), (b, at_b) = sorted(points, key=lambda point: abs(point[1]))[:2]
    density = min(max(a - at_a * (b - a) / (at_b - at_a), 1e-3), 0.5)
    points.append((density, excess(density)))
  return round(min(points, key=lambda point: abs(point[1]))[0], 4)


def load_checked(
  experiment: str, methods: Sequence[str], *, tiny: bool = False, overrides: Sequence[str] = ()
) -> Config:
  """The experiment that methods are put into, after everything that `run_all` refuses has been looked for."""
  refuse_overrides(overrides, _SET_BY_METHOD | _SET_BY_SEED)
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
    methods: keys of `METHODS` or `GROUPS`.
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
  configs = {f'{method}-seed{seed}': configure(base, method, seed) for seed in seeds for method in expand(methods)}
  folders = []
  programs: dict[str, list[train.Programs]] = {}
  for name, config in configs.items():
    with config.unlocked():
      config.name = name
    shared = programs.setdefault(name.rpartition('-seed')[0], [])
    train.train(config, Path(folder) / name, data=data, programs=shared)
    folders.append(Path(folder) / name)
  return folders
