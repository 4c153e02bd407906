"""GPT-2 124M on bytes of embedded real text: dense and FST on the kernels of one GPU, against the clock.

Question: how much time FST with its dense last sixth saves, and what it costs in loss.
Source of the settings: ours. Sizes and arithmetic are those of the training step that `experiments.bench.best_steps`
times, but for the vocabulary: 256 bytes in place of 50,304 tokens leave 85 M parameters and make a step shorter. One
learning rate for all and masked decay 2e-5, near the best of the race of 1,600 steps (docs/quality.md). The released
script for this size has a decay of 6e-5, for runs 375 to 500 times as long.
Cost: a run is 800 steps of 32 x 1,024 bytes, one pass over the corpus; on an H100 a minute, and 8 to 18 s of compiling.
Commands: python -m experiments train --config gpt2_124m_bytes
python -m experiments compare --config gpt2_124m_bytes --methods dense fst s_ste_fp8 --seeds 0
python -m experiments compare --config gpt2_124m_bytes --methods dense_relu2 neuron_level_128_two_of_four_tokens
--seeds 0 --set data.batch_size=128 --set data.seq_len=256
"""

from experiments.runs.configs import base
from experiments.runs.experiment import Config
from experiments.runs.recipes import FFN

_DECAY = {'masked_decay': 2e-5}
_DENSE = {'path': None, 'watch': None}
# By name: no GPU's records have V:N:M matmuls near this size, so that the library would stay dense.
_KERNELS = {'policy': {'implementation': 'sparse'}}


def get_config(tiny: bool = False) -> Config:
  """Returns the experiment with FST, or its tiny twin; `experiments.runs.methods` puts each method's recipe in."""
  return base.make(
    'gpt2_124m_bytes',
    size='124m',
    tiny=tiny,
    steps=800,
    model={'dtype': 'bfloat16', 'scan_layers': True, 'attention': 'cudnn'},
    vocab_multiple=64,
    data={'seq_len': 1024, 'batch_size': 32},
    optimizer={'peak_lr': 1e-3, 'end_lr': 1e-4, 'warmup_steps': 80},
    recipe={'name': 'transposable_srste', 'kwargs': {'path': FFN, **_DECAY}},
    # Dense is not watched: looking for the masks that it would have takes time.
    methods={
      'dense': _DENSE,
      'fst': _DECAY,
      'dense_relu2': _DENSE,
      'neuron_level_128_two_of_four_tokens': _KERNELS,
    },
    log_every=20,
    eval_every=100,
    eval_batches=25,
    checkpoint_every=400,
    keep_checkpoints=1,
  )
