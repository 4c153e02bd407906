"""What `best_steps` offers: models, the methods that are timed of each, and the layouts that all are offered alike."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from experiments.runs.race.contenders import Contender, CONTENDERS
from experiments.runs.recipes import as_published, FFN, LINEAR, MORE_DENSE, TWO_OF_FOUR

_CUBLAS = '--xla_gpu_enable_triton_gemm=false'
# Flags of XLA by name: cuBLAS for all dense matmuls, with it what else may help a step, and all tilings of XLA's own.
FLAGS = {
  '': '', 'cublas': _CUBLAS,
  'hiding': f'{_CUBLAS} --xla_gpu_enable_latency_hiding_scheduler=true',
  'launches': f'{_CUBLAS} --xla_gpu_enable_command_buffer=',
  'exhaustive': '--xla_gpu_exhaustive_tiling_search=true',
}  # fmt: skip

_LINEAR = ('dense', 'dense_fp8', 'fst', 's_ste_fp8', 'fst_all', 's_ste_fp8_all')
_EXACT_DOWN = ('fst_exact_down', 'fst_fp8_all_exact_down', 's_ste_fp8_all_e4m3_exact_down')


def _neuron_level(features: str, what: str = '', **policy: Any) -> Contender:
  return Contender(
    label=', '.join(filter(None, ['neuron level', features, what])), recipe='neuron_level',
    model={'ffn_order': 'position'}, kwargs={'policy': as_published(features, **policy)},
  )  # fmt: skip


METHODS: Mapping[str, Contender] = {
  **{
    name: CONTENDERS[name]
    for name in (*_LINEAR, 'fst_fp8', 'fst_fp8_all', 's_ste_fp8_rest_fp8', *_EXACT_DOWN)
  },
  'mst': Contender(
    label='MST, all linear layers', recipe='mixed_sparsity',
    kwargs={'path': LINEAR, 'structure': 'transposable', 'mvue_path': FFN},
  ),
  'mst_24': Contender(
    label='MST within 2:4, all linear layers', recipe='mixed_sparsity', kwargs={'path': LINEAR, 'structure': '2:4'}
  ),
  **{
    f'neuron_level_{v}': _neuron_level(f'{v}:2:8', 'two of four tokens', **TWO_OF_FOUR) for v in (64, 128)
  },
  # As published: the pattern along tokens, too, and 5% dense neurons; then with more of these.
  **{f'neuron_level_128x2x{m}': _neuron_level(f'128:2:{m}') for m in (8, 16)},
  'neuron_level_128x2x8_dense_neurons': _neuron_level('128:2:8', '20% dense neurons', **MORE_DENSE),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """How a model is laid out: the name is `unrolled` or `scan`, what is recomputed, and flags, as `scan-dots+cublas`.

  >>> Layout.named('scan-dots+cublas')
  Layout(scan=True, remat='dots', flags='cublas')
  >>> Layout.named('unrolled')
  Layout(scan=False, remat=False, flags='')
  """

  scan: bool
  remat: Any
  flags: str

  @classmethod
  def named(cls, name: str) -> 'Layout':
    """The layout of this name.

    Raises:
      ValueError: there is none.
    """
    rest, _, flags = name.partition('+')
    layers, _, remat = rest.partition('-')
    kinds = {'': False, 'dots': 'dots', 'block': True}
    if layers not in ('scan', 'unrolled') or remat not in kinds or flags not in FLAGS:
      raise ValueError(
        f'layout {name!r}: known are scan and unrolled, then -dots or -block or nothing, then'
        f' {" or ".join("+" + flag for flag in FLAGS if flag)} or nothing'
      )
    return cls(scan=layers == 'scan', remat=kinds[remat], flags=flags)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One model.

  Attributes:
    family: 'gpt2' or 'llama'.
    size: a key of the family's `SIZES`.
    batch: sequences a step.
    steps: of a timed burst; two to five seconds, so that a GPU is warm.
    layouts: what is searched.
    fields: of the model's configuration.
    methods: what is timed of it.
    moment: dtype of AdamW's first moment.
  """

  family: str
  size: str
  batch: int
  steps: int
  layouts: tuple[str, ...]
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  methods: tuple[str, ...] = _LINEAR
  moment: str = 'float32'


CASES = {
  'gpt2-124m': Case(
    family='gpt2', size='124m', batch=32, steps=30, layouts=('unrolled', 'scan', 'unrolled+cublas'),
    methods=(*_LINEAR, 'mst', 'mst_24'),
  ),
  'gpt2-774m': Case(
    family='gpt2', size='774m', batch=24, steps=14, layouts=('unrolled', 'unrolled+cublas')
  ),
  # 105 GB with nothing recomputed. A GPU with less memory takes `--layouts unrolled-dots unrolled-block scan-block`.
  'gpt2-1558m': Case(
    family='gpt2', size='1558m', batch=24, steps=8, layouts=('unrolled', 'unrolled+cublas'),
    methods=(*_LINEAR, 'mst'),
  ),
  # The width of 8B models; as many layers as fit with float32 weights and moments and nothing recomputed.
  'gpt2-8x4096': Case(
    family='gpt2', size='wide', batch=8, steps=12, layouts=('unrolled', 'unrolled+cublas'),
    fields=dict(num_layers=8, seq_len=2048),
  ),
  'llama-1b': Case(
    family='llama', size='1b', batch=8, steps=16, layouts=('unrolled', 'unrolled+cublas'),
    fields=dict(vocab_size=32000),
  ),
  'llama-3b': Case(
    family='llama', size='3b', batch=6, steps=8, layouts=('unrolled', 'unrolled+cublas'),
    fields=dict(vocab_size=32000), moment='bfloat16',
  ),
  # Many short sequences: V tokens of one position are a block.
  'gpt2-1300m-relu2': Case(
    family='gpt2', size='1300m', batch=128, steps=8, layouts=('unrolled', 'unrolled+cublas'),
    fields=dict(mlp='relu2', seq_len=256),
    methods=(
      'dense', 'neuron_level_64', 'neuron_level_128', 'neuron_level_128x2x8', 'neuron_level_128x2x16',
      'neuron_level_128x2x8_dense_neurons',
    ),
  ),
  # Six layers of width 4,096.
  'gpt2-wide-relu2': Case(
    family='gpt2', size='wide', batch=128, steps=8, layouts=('unrolled', 'unrolled+cublas'),
    fields=dict(mlp='relu2', seq_len=256),
    methods=('dense', 'neuron_level_64', 'neuron_level_128', 'neuron_level_128x2x8', 'neuron_level_128x2x16'),
  ),
}  # fmt: skip
