"""Who takes part in a race: what each changes in the model, and its recipe."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax.numpy as jnp

from experiments.models import gpt2
from experiments.runs.method_table import METHODS
from experiments.runs.recipes import FFN_DOWN, FFN_UP, with_implementation
import sparse24_jax as s24

# Masked decay and steps of the run -> recipe. Both are arrays while a step is traced, which serves all decays and
# lengths; with numbers a recipe refuses a run that is too short for it.
type Make = Callable[[Any, Any], s24.Recipe]
# For a recipe of which only what no length changes is asked.
MANY_STEPS = 10**6

FFN = r'.*/mlp/.*'
# Every matrix of the blocks; each layer is one matmul by itself but for the fused feed-forward layer.
LINEAR = r'.*/(attn|mlp)/.*/kernel'
ATTENTION = r'.*/attn/.*/kernel'
SEARCH_EVERY = 40
# With which searches of a masked decay begin: near the best so far at 124M (docs/quality.md).
DECAY = 2e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
  """One method.

  Attributes:
    label: what tables say.
    model: changes to the model of the race.
    recipe: what makes its recipe; None trains dense.
    decays: whether its recipe has a masked decay, which is searched as rates are.
    size: a size of its own in place of that of the race.
    rate: the only learning rate, in place of a search.
    from_pruned: whether a dense end begins with the weights that the sparse steps computed with, not with all of them.
  """

  label: str
  model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  recipe: Make | None = None
  decays: bool = False
  size: str | None = None
  rate: float | None = None
  from_pruned: bool = False


def fst(path: str, **options: Any) -> Make:
  """FST on the weights of `path`."""

  def make(decay: Any, steps: Any) -> s24.Recipe:
    # A function of the step in place of a number, so that all factors share a program.
    return s24.recipes.transposable_srste(
      path, masked_decay=lambda _: decay, refresh_every=SEARCH_EVERY, **options
    )

  return make


def s_ste_fp8(path: str, **options: Any) -> Make:
  """S-STE in FP8 on the weights of `path`, from the first step to the last."""
  return lambda decay, steps: s24.recipes.s_ste(path, fp8=True, refresh_every=SEARCH_EVERY, **options)


def neuron_level(*policy: Any, **fields: Any) -> Make:
  """Squared-ReLU blocks with sparse activations, by these fields of `s24.ActivationPolicy`.

  On the kernels by name: no GPU's records have V:N:M matmuls near a width of 768, so that the library would multiply
  dense masked ones there, and a race would time the masks.
  """
  made = s24.ActivationPolicy(*policy, implementation='sparse', **fields)
  return lambda decay, steps: s24.recipes.neuron_level(FFN_UP, FFN_DOWN, policy=made, refresh_every=SEARCH_EVERY)


def mst(**options: Any) -> Make:
  """MST by these arguments of `s24.recipes.mixed_sparsity`; runs of all seeds draw the same links."""

  def make(decay: Any, steps: Any) -> s24.Recipe:
    if isinstance(steps, int):
      return s24.recipes.mixed_sparsity(**options, total_steps=steps)
    # A schedule takes a whole number of steps, no array: that of another run is stretched over this one.
    recipe, scale = s24.recipes.mixed_sparsity(**options, total_steps=MANY_STEPS), MANY_STEPS / steps

    def stretched(schedule: Any) -> Callable[[Any], Any]:
      return lambda step: schedule(jnp.asarray(step, jnp.float32) * scale)

    # One projection of all rules, whose weights share out one density.
    projection: Any = recipe.rules[0].policy.projection
    topology = projection.update
    projection = projection._replace(update=dataclasses.replace(
      topology, density=stretched(topology.density), drop_fraction=stretched(topology.drop_fraction)
    ))  # fmt: skip
    policies = [dataclasses.replace(rule.policy, projection=projection) for rule in recipe.rules]
    rules = [dataclasses.replace(rule, policy=policy) for rule, policy in zip(recipe.rules, policies, strict=True)]
    return dataclasses.replace(recipe, rules=tuple(rules))

  return make


def dense_fp8(path: str) -> Make:
  """The weights of `path` stay dense, in FP8."""
  return lambda decay, steps: s24.Recipe('dense_fp8', (s24.Rule(path, s24.DotPolicy(precision='fp8')),))


def both(*recipes: Make) -> Make:
  """The first recipe with the rules of all."""

  def make(decay: Any, steps: Any) -> s24.Recipe:
    made = [recipe(decay, steps) for recipe in recipes]
    return dataclasses.replace(made[0], rules=tuple(rule for recipe in made for rule in recipe.rules))

  return make


def plain(recipe: Make) -> Make:
  """The recipe by plain jax.numpy, whatever the GPU."""
  return lambda decay, steps: with_implementation(recipe(decay, steps), 'reference')


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

_MST = METHODS['mixed_sparsity_transposable_full']
_RELU2 = {'mlp': 'relu2'}
# Of blocks of tokens: each holds one position in different sequences, or a token would be told what follows it.
_BLOCKS = dict(model={**_RELU2, 'ffn_order': 'position'}, from_pruned=True)
CONTENDERS: Mapping[str, Contender] = {
  'dense': Contender(label='dense'),
  'half_ffn': Contender(label='dense, FFN half as wide', model={'ffn_width': 0.5}),
  'dense_fp8': Contender(label='dense, all linear layers in FP8', model={'fp8_linear': True}),
  'half_ffn_fp8': Contender(
    label='dense, FFN half as wide, in FP8', model={'ffn_width': 0.5, 'fp8_linear': True}
  ),
  'fst': Contender(label='FST', recipe=fst(FFN), decays=True),
  's_ste_fp8': Contender(label='S-STE, FP8', recipe=s_ste_fp8(FFN)),
  'fst_all': Contender(label='FST, all linear layers', recipe=fst(LINEAR), decays=True),
  's_ste_fp8_all': Contender(label='S-STE, FP8, all linear layers', recipe=s_ste_fp8(LINEAR)),
  # Links change every ten steps, since the warm-up has to hold a change: it is a fortieth of the run, which takes 400
  # steps at least.
  'mst': Contender(label=_MST.label, recipe=mst(**{**_MST.kwargs, 'refresh_every': 10})),
  # FP8 by the library's rules: where `dense_fp8` is written in the model, and in the layers that S-STE leaves dense.
  'dense_fp8_rules': Contender(label='dense, all linear layers in FP8, by rules', recipe=dense_fp8(LINEAR)),
  's_ste_fp8_rest_fp8': Contender(
    label='S-STE, FP8, attention dense in FP8', recipe=both(s_ste_fp8(FFN), dense_fp8(ATTENTION))
  ),
  # What FST's dense end is worth: begun with the pruned weights, so that no loss jumps, and left out.
  'fst_from_pruned': Contender(
    label='FST, dense end from pruned weights', recipe=fst(FFN), decays=True, from_pruned=True
  ),
  'fst_to_the_end': Contender(label='FST, sparse to the end', recipe=fst(FFN, dense_fraction=0.0), decays=True),
  # What sampling the weight gradients costs.
  'fst_unsampled': Contender(label='FST, exact weight gradients', recipe=fst(FFN, weight_grad='dense'), decays=True),
  's_ste_fp8_all_unsampled': Contender(
    label='S-STE, FP8, all linear layers, exact weight gradients', recipe=s_ste_fp8(LINEAR, weight_grad='dense')
  ),
  # Each recipe may take the width that suits it: the best shape of one is raced against the best of the other.
  'half_ffn_s_ste_fp8_all': Contender(
    label='S-STE, FP8, all linear layers, FFN half as wide', model={'ffn_width': 0.5}, recipe=s_ste_fp8(LINEAR)
  ),
  'half_ffn_s_ste_fp8_all_unsampled': Contender(
    label='S-STE, FP8, all linear layers, exact weight gradients, FFN half as wide', model={'ffn_width': 0.5},
    recipe=s_ste_fp8(LINEAR, weight_grad='dense'),
  ),
  'quarter_ffn_fp8': Contender(
    label='dense, FFN a quarter as wide, in FP8', model={'ffn_width': 0.25, 'fp8_linear': True}
  ),
  'quarter_ffn_s_ste_fp8_all': Contender(
    label='S-STE, FP8, all linear layers, FFN a quarter as wide', model={'ffn_width': 0.25}, recipe=s_ste_fp8(LINEAR)
  ),
  # A smaller model is another rival for the same seconds.
  'dense_124m': Contender(label='dense, 124M (85M on bytes)', size='124m'),
  'dense_124m_fp8': Contender(
    label='dense, 124M (85M on bytes), in FP8', model={'fp8_linear': True}, size='124m', rate=1e-3
  ),
  # GPT-2 124M at a rate at which it loses its footing as it was published.
  'steep_124m': Contender(label='dense, 124M at a rate of 2e-3', size='124m', rate=2e-3),
  # Which style is stable at a rate that is steep for a wide model.
  **{
    f'style_{name}': Contender(label=f'dense, {name}', model=style, rate=1e-3)
    for name, style in STYLES.items()
  },
  # Sparse activations and their dense rivals. The dense end begins with the pruned weights, since nothing pulls the raw
  # ones towards what the sparse steps trained.
  'dense_relu2': Contender(label='dense, squared ReLU', model=_RELU2),
  'half_ffn_relu2': Contender(label='dense, squared ReLU, FFN half as wide', model={**_RELU2, 'ffn_width': 0.5}),
  'neuron_level': Contender(
    label='neuron level, 64:2:8, two of four tokens', recipe=neuron_level(), **_BLOCKS
  ),
  'neuron_level_128': Contender(
    label='neuron level, 128:2:8, two of four tokens', recipe=neuron_level(s24.VNM(128, 8)), **_BLOCKS
  ),
  'neuron_level_published': Contender(
    label='neuron level, 64:2:8, as published',
    recipe=neuron_level(s24.VNM(64, 8), s24.VNM(64, 8), dense_features=0.05),
    **_BLOCKS,
  ),
  # Beside `fst` and `s_ste_fp8`, with --steps: whether the kernels train the model that the plain op does.
  'fst_plain': Contender(label='FST, plain op', recipe=plain(fst(FFN)), decays=True),
  's_ste_fp8_plain': Contender(label='S-STE, FP8, plain op', recipe=plain(s_ste_fp8(FFN))),
  'neuron_level_plain': Contender(
    label='neuron level, 64:2:8, two of four tokens, plain op', recipe=plain(neuron_level()), **_BLOCKS
  ),
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


def make_model(
  name: str, size: str, vocab: int, *, style: str = 'gpt2', tiny: bool = False, scan: bool = False
) -> gpt2.GPT2:
  """The model of a contender in a race of this size: layers unrolled, nothing recomputed, unless told."""
  contender, length = CONTENDERS[name], length_of(size)
  size = contender.size or size
  fields: dict[str, Any] = dict(
    vocab_size=-(-vocab // 64) * 64, dtype='bfloat16', logits_dtype='bfloat16', scan_layers=scan, attention='cudnn',
  ) | dict(SIZES.get(size, {}), seq_len=length) | dict(STYLES[style]) | dict(contender.model)  # fmt: skip
  if tiny:
    fields |= _TINY
  return gpt2.GPT2(gpt2.make_config('nano' if size in SIZES else size, **fields))


def make_recipe(name: str, *, tiny: bool = False) -> Make | None:
  """The recipe of a contender; without kernels for tiny models, whose float32 not all of them take."""
  recipe = CONTENDERS[name].recipe
  return plain(recipe) if tiny and recipe else recipe
