"""Who takes part in a race: what each changes in the model, and its recipe."""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from experiments.runs.method_table import METHODS
from experiments.runs.models import gpt2
from experiments.runs.recipes import as_published, FFN, FFN_DOWN, LINEAR, recipe_of, TWO_OF_FOUR, with_implementation
import sparse24_jax as s24

# Steps of a run whose length does not matter.
MANY_STEPS = 10**6
# The period in which recipes choose masks or, where links come and go, a multiple of it.
SEARCH_EVERY = 40
# With which searches of a masked decay begin: near the best so far at 124M (docs/quality.md).
DECAY = 2e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
  """One method.

  Attributes:
    label: what tables say.
    recipe: name in `sparse24_jax.recipes`; of a dense run nothing is watched.
    kwargs: arguments of the recipe, see `recipe_of`; a masked decay is that of the trial.
    model: changes to the model of the race.
    dense_from: what a dense phase after a sparse one starts from: 'weights', or 'projected' ones, with which the sparse
      steps computed.
    fp8: regular expression of weights that are dense in FP8, unless the recipe makes them sparse.
    dense_end: share of the steps, at the end, that run dense, for a recipe that has no dense end of its own.
    plain: whether it runs by plain jax.numpy, whatever the GPU.
    size: a size of its own in place of that of the race.
    rate: the only learning rate, in place of a search.
    decay: the masked decay with which a search begins, unless told.
  """

  label: str
  recipe: str = 'dense'
  kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  dense_from: str = 'weights'
  fp8: str | None = None
  dense_end: float = 0.0
  plain: bool = False
  size: str | None = None
  rate: float | None = None
  decay: float = DECAY

  @property
  def decays(self) -> bool:
    """Whether its recipe has a masked decay, which is searched as rates are."""
    return 'masked_decay' in self.kwargs

  @property
  def dense_phase(self) -> str | None:
    """'fp8' where layers of its dense phase are in FP8, as they were not in records without this."""
    recipe = self.make(DECAY, MANY_STEPS)
    return 'fp8' if recipe.fraction_of('dense') and recipe.in_dense_phase() else None

  def make(self, decay: Any, steps: Any) -> s24.Recipe:
    """Its recipe, by the masked decay and the steps of a run.

    Both are arrays while a step is traced, which serves runs of any decay and length.

    Raises:
      ValueError: so few steps, a number, that the recipe cannot keep to its schedule.
    """
    if self.recipe == 'dense':
      recipe = s24.Recipe('dense_fp8') if self.fp8 else s24.recipes.dense()
    else:
      # A function of the step in place of a number, so that all decays share a program.
      kwargs = {**self.kwargs, **({'masked_decay': lambda _: decay} if self.decays else {})}
      traced = isinstance(steps, jax.core.Tracer)
      recipe = recipe_of(self.recipe, kwargs, MANY_STEPS if traced else int(steps))
      recipe = _shortened(recipe, MANY_STEPS / steps) if traced else recipe
    if self.dense_end:
      phases = s24.Phase('sparse', 1 - self.dense_end), s24.Phase('dense', self.dense_end)
      recipe = dataclasses.replace(recipe, phases=phases)
    if self.fp8:
      rule = s24.Rule(self.fp8, s24.DotPolicy(precision='fp8'))
      recipe = dataclasses.replace(recipe, rules=(*recipe.rules, rule))
    return with_implementation(recipe, 'reference') if self.plain else recipe


def _shortened(recipe: s24.Recipe, scale: Any) -> s24.Recipe:
  """The recipe of a run `scale` times as short, which may be traced; the steps that a recipe is made for may not."""

  def of_run(schedule: Any) -> Any:
    return (lambda step: schedule(jnp.asarray(step, jnp.float32) * scale)) if callable(schedule) else schedule

  @functools.cache  # rules that have a projection in common keep it so: their weights share out one density
  def shortened(projection: Any) -> Any:
    topology = projection.update
    return projection._replace(update=dataclasses.replace(
      topology, density=of_run(topology.density), drop_fraction=of_run(topology.drop_fraction)
    ))  # fmt: skip

  def of_rule(rule: s24.Rule) -> s24.Rule:
    if rule.policy.projection is None or rule.policy.projection.update is None:
      return rule
    return dataclasses.replace(
      rule, policy=dataclasses.replace(rule.policy, projection=shortened(rule.policy.projection))
    )

  return dataclasses.replace(recipe, rules=tuple(map(of_rule, recipe.rules)), total_steps=None)


def of(
  method: str, *changes: str, kwargs: Mapping[str, Any] | None = None, model: Mapping[str, Any] | None = None,
  **fields: Any,
) -> Contender:  # fmt: skip
  """A method of `METHODS` with further arguments of its recipe, changes to the model and `fields` of `Contender`.

  `changes` say in its label what they make of it.
  """
  base = METHODS[method]
  return Contender(
    label=', '.join([base.label, *changes]), recipe=base.recipe, kwargs={**base.kwargs, **(kwargs or {})},
    model={**base.model, **(model or {})}, **{'dense_from': base.dense_from, **fields},
  )  # fmt: skip


def neuron_level(label: str, *, features: str = '64:2:8', **policy: Any) -> Contender:
  """Squared-ReLU blocks with sparse activations, by fields of `s24.ActivationPolicy`.

  Of blocks of tokens each holds one position in different sequences, or a token would be told what follows it. The
  dense end begins with the pruned weights, since nothing pulls the raw ones towards what the sparse steps trained. On
  the kernels by name: no GPU's records have V:N:M matmuls near a width of 768, so that the library would multiply dense
  masked ones there, and a race would time the masks.
  """
  policy = as_published(features, **{**TWO_OF_FOUR, 'implementation': 'sparse', **policy})
  return Contender(
    label=f'neuron level, {features}, {label}', recipe='neuron_level', kwargs={'policy': policy},
    model={'mlp': 'relu2', 'ffn_order': 'position'}, dense_from='projected',
  )  # fmt: skip


# Features of GPT-2 and of later models that all contenders of a race share, for stability.
STYLES: Mapping[str, Mapping[str, Any]] = {
  'gpt2': {},
  'qk_norm': {'qk_norm': True},
  'untied': {'tied': False},
  'scaled': {'tied': False, 'scale_embeddings': True},
  'rotary': {'positions': 'rotary'},
  'rotary_qk_norm': {'positions': 'rotary', 'qk_norm': True},
  'scaled_qk_norm': {'tied': False, 'scale_embeddings': True, 'qk_norm': True},
}

_HALF, _QUARTER, _EIGHTH = ({'ffn_width': width} for width in (0.5, 0.25, 0.125))
_EXACT, _EXACT_DOWN = {'weight_grad': 'dense'}, {'exact': FFN_DOWN}
_E4M3 = {'fp8': 'e4m3'}
CONTENDERS: Mapping[str, Contender] = {
  'dense': of('dense'),
  'half_ffn': of('half_ffn'),
  'dense_fp8': of('dense', 'all linear layers in FP8', fp8=LINEAR),
  'half_ffn_fp8': of('half_ffn', 'in FP8', fp8=LINEAR),
  'fst': of('fst'),
  's_ste_fp8': of('s_ste_fp8'),
  'fst_all': of('fst_all'),
  's_ste_fp8_all': of('s_ste_fp8_all'),
  'fst_fp8': of('fst_fp8'),
  'fst_fp8_all': of('fst_fp8_all'),
  # Links change every ten steps, since the warm-up has to hold a change: it is a fortieth of the run, which takes 400
  # steps at least. Runs of all seeds draw the same links.
  'mst_half_dense': of('mixed_sparsity_transposable_full', kwargs={'refresh_every': 10}),
  's_ste_fp8_rest_fp8': of('s_ste_fp8', 'attention dense in FP8', fp8=r'.*/attn/.*'),
  # What FST's dense end is worth: begun with the pruned weights, so that no loss jumps, and left out.
  'fst_from_pruned': of('fst_from_pruned'),
  'fst_to_the_end': of('fst_to_the_end'),
  # What it is worth to choose the masks four times as often, in runs of 1,600 steps.
  'fst_refresh_10': of('fst', 'masks every 10 steps', kwargs={'refresh_every': 10}),
  # What sampling the weight gradients costs.
  'fst_unsampled': of('fst_unsampled'),
  's_ste_fp8_all_unsampled': of('s_ste_fp8_all', 'exact weight gradients', kwargs=_EXACT),
  # And what the largest part of it costs.
  'fst_exact_down': of('fst', 'exact weight gradients of down', kwargs=_EXACT_DOWN),
  's_ste_fp8_all_exact_down': of('s_ste_fp8_all', 'exact weight gradients of down', kwargs=_EXACT_DOWN),
  'fst_fp8_all_exact_down': of('fst_fp8_all', 'exact weight gradients of down', kwargs=_EXACT_DOWN),
  'fst_fp8_all_exact_down_to_the_end': of(
    'fst_fp8_all', 'exact weight gradients of down', 'sparse to the end', kwargs=_EXACT_DOWN | {'dense_fraction': 0.0}
  ),
  'fst_fp8_all_exact_down_dense_third': of(
    'fst_fp8_all', 'exact weight gradients of down', 'dense for a third', kwargs=_EXACT_DOWN | {'dense_fraction': 1 / 3}
  ),
  'fst_fp8_all_exact_down_dense_third_from_pruned': of(
    'fst_fp8_all', 'exact weight gradients of down', 'dense for a third, from pruned weights',
    kwargs=_EXACT_DOWN | {'dense_fraction': 1 / 3}, dense_from='projected',
  ),
  # What the format of gradients costs.
  's_ste_fp8_all_e4m3': of('s_ste_fp8_all', 'gradients in e4m3', kwargs=_E4M3),
  # Both.
  's_ste_fp8_all_e4m3_exact_down': of(
    's_ste_fp8_all', 'gradients in e4m3', 'exact weight gradients of down', kwargs=_E4M3 | _EXACT_DOWN
  ),
  # S-STE with a dense end, which is ours. It begins with the weights that the sparse steps computed with.
  's_ste_fp8_all_e4m3_exact_down_dense_third': of(
    's_ste_fp8_all', 'gradients in e4m3', 'exact weight gradients of down', 'dense for a third',
    kwargs=_E4M3 | _EXACT_DOWN, dense_end=1 / 3, dense_from='projected',
  ),
  # What FST's masks cost: transposable ones, those of rows, and the soft threshold of rows, each sparse to the end.
  'fst_to_the_end_unsampled': of('fst_to_the_end', 'exact weight gradients', kwargs=_EXACT),
  'row_masks': Contender(
    label='masks of rows, decay on gradients', recipe='sr_ste',
    kwargs={'path': FFN, 'masked_decay': DECAY, 'decay_on': 'gradients'},
  ),
  's_ste_unsampled': of('s_ste_unsampled'),
  # Its decay is times the learning rate; this one was the best at 10.7 M (docs/quality.md).
  'sr_ste': of('sr_ste', decay=0.3),
  # Each recipe may take the width that suits it: the best shape of one is raced against the best of the other.
  'half_ffn_fst_fp8_all': of('fst_fp8_all', 'FFN half as wide', model=_HALF),
  'half_ffn_fst_fp8_all_exact_down': of(
    'fst_fp8_all', 'exact weight gradients of down', 'FFN half as wide', kwargs=_EXACT_DOWN, model=_HALF
  ),
  'half_ffn_s_ste_fp8_all': of('s_ste_fp8_all', 'FFN half as wide', model=_HALF),
  'half_ffn_s_ste_fp8_all_unsampled': of(
    's_ste_fp8_all', 'exact weight gradients', 'FFN half as wide', kwargs=_EXACT, model=_HALF
  ),
  'half_ffn_s_ste_fp8_all_e4m3': of(
    's_ste_fp8_all', 'gradients in e4m3', 'FFN half as wide', kwargs=_E4M3, model=_HALF
  ),
  'half_ffn_s_ste_fp8_all_e4m3_exact_down': of(
    's_ste_fp8_all', 'gradients in e4m3', 'exact weight gradients of down', 'FFN half as wide',
    kwargs=_E4M3 | _EXACT_DOWN, model=_HALF,
  ),
  'quarter_ffn_fp8': of('dense', 'FFN a quarter as wide', 'in FP8', model=_QUARTER, fp8=LINEAR),
  'quarter_ffn_s_ste_fp8_all': of('s_ste_fp8_all', 'FFN a quarter as wide', model=_QUARTER),
  'eighth_ffn_fp8': of('dense', 'FFN an eighth as wide', 'in FP8', model=_EIGHTH, fp8=LINEAR),
  'eighth_ffn_s_ste_fp8_all': of('s_ste_fp8_all', 'FFN an eighth as wide', model=_EIGHTH),
  # A smaller model is another rival for the same seconds.
  'dense_124m': of('dense', '124M (85M on bytes)', size='124m'),
  'dense_124m_fp8': of('dense', '124M (85M on bytes)', 'in FP8', size='124m', rate=1e-3, fp8=LINEAR),
  # GPT-2 124M at a rate at which it loses its footing as it was published.
  'steep_124m': of('dense', '124M at a rate of 2e-3', size='124m', rate=2e-3),
  # Which style is stable at a rate that is steep for a wide model.
  **{f'style_{name}': of('dense', name, model=style, rate=1e-3) for name, style in STYLES.items()},
  # Sparse activations and their dense rivals.
  'dense_relu2': of('dense_relu2'),
  'half_ffn_relu2': of('dense_relu2', 'FFN half as wide', model=_HALF),
  'neuron_level': neuron_level('two of four tokens'),
  'neuron_level_128': neuron_level('two of four tokens', features='128:2:8'),
  'neuron_level_published': neuron_level('as published', **as_published('64:2:8')),
  # Beside `fst` and `s_ste_fp8`, with --steps: whether the kernels train the model that the plain op does.
  'fst_plain': of('fst', 'plain op', plain=True),
  's_ste_fp8_plain': of('s_ste_fp8', 'plain op', plain=True),
}

# Sizes beside those of GPT-2: few wide layers, of which a step on a GPU is made of large matmuls.
SIZES: Mapping[str, Mapping[str, int]] = {
  'wide2048_3': dict(num_layers=3, num_heads=16, embed_dim=2048, seq_len=1024),
  'wide2048': dict(num_layers=6, num_heads=16, embed_dim=2048, seq_len=1024),
  'wide4096': dict(num_layers=4, num_heads=32, embed_dim=4096, seq_len=1024),
  # Short sequences, of which a step has enough for blocks of tokens of one position.
  '124m_short': {**gpt2.SIZES['124m'], 'seq_len': 256},
  'wide2048_3_short': dict(num_layers=3, num_heads=16, embed_dim=2048, seq_len=256),
}
_TINY_LENGTH = 16
_TINY: Mapping[str, Any] = dict(
  num_layers=2, num_heads=2, embed_dim=32, seq_len=_TINY_LENGTH, attention='xla', dtype='float32',
  logits_dtype='float32',
)  # fmt: skip


def length_of(size: str, *, tiny: bool = False) -> int:
  """Tokens of a sequence in a race of this size."""
  return _TINY_LENGTH if tiny else {**gpt2.SIZES, **SIZES}[size]['seq_len']


def layers_of(size: str) -> tuple[int, int]:
  """How many layers a model of this size has, and their width."""
  found = {**gpt2.SIZES, **SIZES}[size]
  return found['num_layers'], found['embed_dim']


def make_model(
  name: str, size: str, vocab: int, *, style: str = 'gpt2', tiny: bool = False, scan: bool = False
) -> gpt2.GPT2:
  """The model of a contender in a race of this size: layers unrolled, nothing recomputed, unless told."""
  changes, length = CONTENDERS[name].model, length_of(size)
  size = CONTENDERS[name].size or size
  fields: dict[str, Any] = dict(
    vocab_size=-(-vocab // 64) * 64, dtype='bfloat16', logits_dtype='bfloat16', scan_layers=scan, attention='cudnn',
  ) | dict(SIZES.get(size, {}), seq_len=length) | dict(STYLES[style]) | dict(changes)  # fmt: skip
  if tiny:
    fields |= _TINY
  return gpt2.GPT2(gpt2.make_config('nano' if size in SIZES else size, **fields))


def make_contender(name: str, *, tiny: bool = False) -> Contender:
  """A contender; without kernels for tiny models, whose float32 not all of them take."""
  return dataclasses.replace(CONTENDERS[name], plain=True) if tiny else CONTENDERS[name]
