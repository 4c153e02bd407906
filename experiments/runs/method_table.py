"""The methods that are compared: what each changes in an experiment, and which belong together."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from experiments.runs.recipes import as_published, DENSE_SHARE, FFN, FFN_DOWN, LINEAR, MORE_DENSE, TWO_OF_FOUR


@dataclasses.dataclass(frozen=True)
class Method:
  """One row of a comparison.

  Attributes:
    label: what tables and legends say.
    recipe: name in `sparse24_jax.recipes`.
    kwargs: arguments of the recipe; a `refresh_every` below 1 is a share of the optimizer steps.
    model: changes to the model.
    width: of the model, and number of its heads, as a multiple of the experiment's.
    steps: share of the experiment's optimizer steps.
    dense_from: what a dense phase after a sparse one starts from, see `configs.base`.
  """

  label: str
  recipe: str
  kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  width: float = 1.0
  steps: float = 1.0
  dense_from: str = 'weights'

  @property
  def baseline(self) -> str:
    """The method that is dense and otherwise the same."""
    return 'dense_relu2' if self.model.get('mlp') == 'relu2' else 'dense'


# Flip rates of the masks that a dense run does not have.
_WATCHED = {'path': FFN, 'watch': 'transposable', 'refresh_every': 40}
# Topology changes every 25 steps of so short a run.
_DYNAMIC = {'path': LINEAR, 'refresh_every': 25}
# Sparse activations take the whole feed-forward block.
_SQUARED_RELU = {'mlp': 'relu2'}
_OF_EACH_TOKEN = {'features': '2:4', 'dense_features': DENSE_SHARE}
_BY_POSITION = {**_SQUARED_RELU, 'ffn_order': 'position'}


def _vnm(v: int, m: int, what: str = '', *, half: bool = False, **policy: Any) -> Method:
  """V:2:M activations, as published but for `policy`; `what` says what it changes.

  `half` of the steps are sparse or, as the recipe has it, 70%.
  """
  pattern = f'{v}:2:{m}'
  label = ', '.join(filter(None, [f'neuron level, {pattern}', what, 'half of the steps' if half else '']))
  kwargs = {'policy': as_published(pattern, **policy), **({'dense_fraction': 0.4} if half else {})}
  return Method(label, 'neuron_level', kwargs, _BY_POSITION, dense_from='projected')


# Decay factors belong to the nano experiment: FST's was chosen by flip rates, SR-STE's by the loss of one seed. `grid`
# and `compare --tune` search them (docs/quality.md).
METHODS: Mapping[str, Method] = {
  'dense': Method('dense', 'dense', _WATCHED),
  'fst': Method('FST', 'transposable_srste', {'path': FFN, 'masked_decay': 6e-3}),
  'fst_fp8': Method('FST, FP8', 'transposable_srste', {'path': FFN, 'masked_decay': 6e-3, 'fp8': True}),
  's_ste': Method('S-STE', 's_ste', {'path': FFN}),
  's_ste_fp8': Method('S-STE, FP8', 's_ste', {'path': FFN, 'fp8': True}),
  's_ste_fp8_e4m3': Method('S-STE, FP8, gradients in e4m3', 's_ste', {'path': FFN, 'fp8': 'e4m3'}),
  # Attention's projections too: steps gain more, and losses may.
  'fst_all': Method('FST, all linear layers', 'transposable_srste', {'path': LINEAR, 'masked_decay': 6e-3}),
  'fst_fp8_all': Method(
    'FST, FP8, all linear layers', 'transposable_srste', {'path': LINEAR, 'masked_decay': 6e-3, 'fp8': True}
  ),
  's_ste_all': Method('S-STE, all linear layers', 's_ste', {'path': LINEAR}),
  's_ste_fp8_all': Method('S-STE, FP8, all linear layers', 's_ste', {'path': LINEAR, 'fp8': True}),
  'sr_ste': Method('SR-STE, decay on weights', 'sr_ste', {'path': FFN, 'masked_decay': 3.0, 'decay_on': 'weights'}),
  'sr_ste_published': Method(
    'SR-STE, published decay', 'sr_ste', {'path': FFN, 'masked_decay': 2e-4, 'decay_on': 'weights'}
  ),
  'ste': Method('plain STE', 'ste', {'path': FFN}),
  'ste_all': Method('plain STE, all linear layers', 'ste', {'path': LINEAR}),
  'half_ffn': Method(
    'dense, FFN half as wide',
    'dense',
    _WATCHED,
    {'ffn_width': 0.5},
  ),
  'fst_no_decay': Method('FST without decay', 'transposable_srste', {'path': FFN, 'masked_decay': 0.0}),
  # What FST's dense end is worth: begun with the pruned weights, so that no loss jumps, and left out.
  'fst_from_pruned': Method(
    'FST, dense end from pruned weights', 'transposable_srste', {'path': FFN, 'masked_decay': 6e-3},
    dense_from='projected',
  ),
  'fst_to_the_end': Method(
    'FST, sparse to the end', 'transposable_srste', {'path': FFN, 'masked_decay': 6e-3, 'dense_fraction': 0.0}
  ),
  # What sampling the weight gradients costs.
  's_ste_unsampled': Method('S-STE, exact weight gradients', 's_ste', {'path': FFN, 'weight_grad': 'dense'}),
  's_ste_exact_down': Method('S-STE, exact weight gradients of down', 's_ste', {'path': FFN, 'exact': FFN_DOWN}),
  'fst_unsampled': Method(
    'FST, exact weight gradients', 'transposable_srste', {'path': FFN, 'masked_decay': 6e-3, 'weight_grad': 'dense'}
  ),
  # Dynamic sparse training, on all linear layers. Densities and shares are such that nano's 2,000 steps take the same
  # FLOPs with each, the head not counted (`experiments.runs.flops`).
  'mixed_sparsity': Method('MST', 'mixed_sparsity', _DYNAMIC),
  'mixed_sparsity_keep_moments': Method(
    'MST, moments kept', 'mixed_sparsity', {**_DYNAMIC, 'reset_moments': False}
  ),
  'mixed_sparsity_24': Method(
    'MST, 2:4 masks',
    'mixed_sparsity',
    {**_DYNAMIC, 'structure': '2:4', 'warm_up': 0.025, 'density': 0.0911},
  ),
  # What the pattern saves in the ultra-sparse stage goes into links: density 0.14 in place of 0.09. The window is about
  # the root of nano's 64 tokens, as in Child et al., arXiv 1904.10509; 34% of the causal triangle are attended to.
  'mixed_sparsity_attention': Method(
    'MST, sparse attention',
    'mixed_sparsity',
    {**_DYNAMIC, 'density': 0.1424, 'attention': {'kind': 'combined', 'window': 8}},
  ),
  # What tells the pattern from the links: as many links with full attention, which takes more FLOPs than the others,
  # and the pattern (in all steps) with a static mask, at the FLOPs of the others.
  'mixed_sparsity_denser': Method(
    'MST, the links of sparse attention',
    'mixed_sparsity',
    {**_DYNAMIC, 'density': 0.1424},
  ),
  'static_attention': Method(
    'static mask, sparse attention',
    'static',
    {'path': LINEAR, 'density': 0.2313},
    {'attention_pattern': {'kind': 'combined', 'window': 8}},
  ),
  # Samples where the fused block takes them, as on a GPU; what they save, 5% of nano's FLOPs, buys no links. The
  # second has the time of the first there; its links fill the places that the kernels multiply anyway.
  'mixed_sparsity_transposable': Method(
    'MST, transposable 2:4 masks',
    'mixed_sparsity',
    {**_DYNAMIC, 'structure': 'transposable', 'mvue_path': FFN, 'warm_up': 0.025,
     'density': 0.0911},
  ),
  'mixed_sparsity_transposable_full': Method(
    'MST, transposable 2:4 masks, half dense',
    'mixed_sparsity',
    {**_DYNAMIC, 'structure': 'transposable', 'mvue_path': FFN, 'warm_up': 0.025,
     'density': 0.5},
  ),
  # The published period, of which nano's stages hold few.
  'mixed_sparsity_100': Method(
    'MST, topology changes every 100 steps', 'mixed_sparsity', {'path': LINEAR, 'refresh_every': 100, 'density': 0.0743}
  ),
  'rigl_100': Method(
    'RigL, topology changes every 100 steps', 'rigl', {'path': LINEAR, 'refresh_every': 100, 'density': 0.1735}
  ),
  'rigl': Method('RigL', 'rigl', {**_DYNAMIC, 'density': 0.1672}),
  'set_': Method('SET', 'set_', {**_DYNAMIC, 'density': 0.1754}),
  'static': Method('static mask', 'static', {'path': LINEAR, 'density': 0.1754}),
  # More of the steps dense again at the end, fewer links before.
  'mixed_sparsity_restored': Method(
    'MST, a tenth of the steps restored', 'mixed_sparsity', {**_DYNAMIC, 'restoration': 0.1, 'density': 0.0376}
  ),
  # What the FLOPs buy without any sparsity: half the width, and 89% of the steps.
  'dense_small': Method(
    'dense, half as wide, as many FLOPs', 'dense', width=0.5, steps=0.89
  ),
  'dense_short': Method('dense, as many FLOPs', 'dense', steps=0.24),
  # Sparse activations, in squared-ReLU blocks. A batch of nano is 16 sequences, so the tokens of one position are a
  # block of 16; blocks along a sequence tell a token what follows it, and are here to show what that does. The dense
  # tail starts from the projected weights: the soft threshold leaves raw ones that the sparse phase never used.
  'dense_relu2': Method(
    'dense, squared ReLU', 'dense', {'path': FFN, 'watch': 'soft_threshold_projection'}, _SQUARED_RELU
  ),
  'neuron_level': _vnm(16, 8),
  'neuron_level_even': _vnm(16, 8, half=True),
  # Four times as many neurons whose weight gradients see every token.
  'neuron_level_dense_neurons': _vnm(16, 8, '20% dense neurons', half=True, **MORE_DENSE),
  # Weight gradients see the two largest of four neighbouring tokens, and so nearly all that the forward kept.
  'neuron_level_two_of_four_tokens': _vnm(16, 8, '2:4 along tokens', **TWO_OF_FOUR),
  'neuron_level_two_of_four_tokens_even': _vnm(16, 8, '2:4 along tokens', half=True, **TWO_OF_FOUR),
  # Blocks of 64 are what the kernels run. In the small experiment a step has 64 sequences, in nano it has too few.
  'neuron_level_64': _vnm(64, 8, half=True),
  'neuron_level_64_two_of_four_tokens': _vnm(64, 8, '2:4 along tokens', half=True, **TWO_OF_FOUR),
  # These need 128 sequences in a step, or a block would hold tokens of two positions.
  'neuron_level_128': _vnm(128, 8, half=True),
  'neuron_level_128_dense_neurons': _vnm(128, 8, '20% dense neurons', half=True, **MORE_DENSE),
  'neuron_level_128_two_of_four_tokens': _vnm(128, 8, '2:4 along tokens', half=True, **TWO_OF_FOUR),
  'neuron_level_128_16': _vnm(128, 16, half=True),
  'neuron_level_128_16_two_of_four_tokens': _vnm(128, 16, '2:4 along tokens', half=True, **TWO_OF_FOUR),
  # Tokens are routed among those of one position, a step's sequences.
  'neuron_level_clusters': _vnm(16, 8, 'clusters and router', half=True, clusters={'number': 4, 'within': 16}),
  'neuron_level_24': Method(
    'neuron level, 2:4', 'neuron_level', {'policy': _OF_EACH_TOKEN}, _SQUARED_RELU, dense_from='projected'
  ),
  'neuron_level_24_unprojected': Method(
    'neuron level, 2:4, tail from unprojected weights',
    'neuron_level',
    {'policy': _OF_EACH_TOKEN},
    _SQUARED_RELU,
  ),
  'activations_24': Method(
    '2:4 activations, dense weights',
    'neuron_level',
    {'policy': {**_OF_EACH_TOKEN, 'sparse_weights': False}},
    _SQUARED_RELU,
  ),
  'neuron_level_along': Method(
    'neuron level, 16:2:8 along sequences',
    'neuron_level',
    {'policy': as_published('16:2:8')},
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
  'mixed_sparsity_transposable', 'rigl', 'set_', 'static', 'static_attention', 'dense_small', 'dense_short',
)  # fmt: skip
# What FST's dense end is worth.
DENSE_END = ('dense', 'fst', 'fst_from_pruned', 'fst_to_the_end')
# What sampling the weight gradients costs.
SAMPLING = ('s_ste', 's_ste_unsampled', 'fst', 'fst_unsampled')
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

# What the weight gradients of more neurons in full bring.
DENSE_NEURONS = ('dense_relu2', 'neuron_level_even', 'neuron_level_dense_neurons')

# The patterns that the kernels run, with their dense twin.
KERNEL_PATTERNS = (
  'dense_relu2', 'neuron_level_64', 'neuron_level_64_two_of_four_tokens', 'neuron_level_128',
  'neuron_level_128_dense_neurons', 'neuron_level_128_two_of_four_tokens', 'neuron_level_128_16',
  'neuron_level_128_16_two_of_four_tokens',
)  # fmt: skip

TWO_OF_FOUR_TOKENS = ('dense_relu2', 'neuron_level_two_of_four_tokens', 'neuron_level_two_of_four_tokens_even')
GROUPS: Mapping[str, Sequence[str]] = {
  'equal-steps': AT_EQUAL_STEPS, 'equal-flops': AT_EQUAL_FLOPS, 'activations': WITH_ACTIVATIONS,
  'sparse-activations': SPARSE_ACTIVATIONS, 'kernel-patterns': KERNEL_PATTERNS,
  'dense-end': DENSE_END, 'sampling': SAMPLING,
  'dense-neurons': DENSE_NEURONS, 'two-of-four-tokens': TWO_OF_FOUR_TOKENS,
}  # fmt: skip


def expand(names: Sequence[str]) -> list[str]:
  """Names of methods, from those of methods and of `GROUPS`; each once.

  >>> expand(['dense', 'activations'])[:4]
  ['dense', 'dense_relu2', 'neuron_level_24', 'neuron_level']
  """
  return list(dict.fromkeys(method for name in names for method in GROUPS.get(name, (name,))))
