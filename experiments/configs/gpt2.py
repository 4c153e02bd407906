"""What the four GPT-2 experiments share. Not an experiment itself."""

from experiments.configs import base
from experiments.runs.experiment import Config


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
    model={'bias': False, 'dropout': 0.0, 'dtype': 'bfloat16', 'remat': size in ('774m', '1558m')},
    vocab_multiple=64,
    data={'corpus': 'openwebtext', 'tokenizer': 'gpt2', 'seq_len': 1024, 'batch_size': 512},
    optimizer={
      'peak_lr': 1.5e-4,
      'end_lr': 1e-5,
      'warmup_steps': 3000,
      'b1': 0.9,
      'b2': 0.95,
      'weight_decay': 0.1,
      'clip': 1.0,
    },
    recipe={
      'name': 'transposable_srste',
      'kwargs': {
        'path': r'.*/mlp/.*',
        'masked_decay': masked_decay,
        'refresh_every': 40,
        'dense_fraction': 1 / 6,
      },
    },
    mesh={'data': 8, 'fsdp': 1},
    log_every=50,
    eval_every=1000,
    eval_batches=100,
    checkpoint_every=1000,
  )
