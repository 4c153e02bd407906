"""What the four GPT-2 experiments with FST share. Not an experiment itself.

The paper's claim: the final loss is that of dense training (compare with --set recipe.name=dense --set
recipe.kwargs={}). None of the four was trained here.
Source of every value: the released training scripts of 'Accelerating Transformer Pre-training with 2:4 Sparsity'
(arXiv 2404.01847), with bfloat16 in place of float16 and a loss scale.
"""

from experiments.runs.configs import base
from experiments.runs.experiment import Config
from experiments.runs.recipes import FFN


def make(name: str, *, size: str, masked_decay: float, tiny: bool, accumulate: int) -> Config:
  """Returns GPT-2 of one size with FST.

  Args:
    name: experiment name.
    size: '124m', '350m', '774m' or '1558m'.
    masked_decay: the factor that the released scripts use for this size.
    tiny: return the twin for tests.
    accumulate: micro-batches a step, for memory only.
  """
  return base.make(
    name,
    size=size,
    tiny=tiny,
    steps=300_000,
    accumulate=accumulate,
    model={'dtype': 'bfloat16', 'remat': size in ('774m', '1558m')},
    vocab_multiple=64,
    data={'corpus': 'openwebtext', 'tokenizer': 'gpt2', 'seq_len': 1024, 'batch_size': 512},
    optimizer={'peak_lr': 1.5e-4, 'end_lr': 1e-5, 'warmup_steps': 3000},
    recipe={
      'name': 'transposable_srste',
      'kwargs': {'path': FFN, 'masked_decay': masked_decay, 'refresh_every': 40, 'dense_fraction': 1 / 6},
    },
    mesh={'data': 8},
    eval_every=1000,
    eval_batches=100,
    checkpoint_every=1000,
  )
