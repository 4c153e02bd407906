"""Llama-like model of 3 billion parameters (28 layers, width 3,072, SwiGLU of 8,192) with FST.

docs/speed.md has the times of its step. It was not trained, and the settings of the optimizer are those of the GPT-2
experiments, not tuned for this model.
Cost: 300,000 steps of 512 x 2,048 tokens, 315 billion tokens; about 5.7e21 floating-point operations (6 x parameters x
tokens); ours, chosen to match the GPT-2 experiments in steps.
Command: python -m experiments train --config llama_3b --set data.manual_dir=FOLDER
"""

from experiments.runs.configs import base
from experiments.runs.experiment import Config


def get_config(tiny: bool = False) -> Config:
  """Returns the experiment, or its tiny twin."""
  return base.make(
    'llama_3b',
    size='3b',
    tiny=tiny,
    steps=300_000,
    accumulate=8,
    model={'family': 'llama', 'dtype': 'bfloat16', 'remat': True, 'scan_layers': True, 'attention': 'cudnn'},
    vocab_multiple=64,
    data={'corpus': 'openwebtext', 'tokenizer': 'gpt2', 'seq_len': 2048, 'batch_size': 512},
    optimizer={'peak_lr': 1.5e-4, 'end_lr': 1e-5, 'warmup_steps': 3000},
    recipe={
      'name': 'transposable_srste',
      'kwargs': {'path': r'.*/mlp/.*', 'masked_decay': 6e-5, 'refresh_every': 40, 'dense_fraction': 1 / 6},
    },
    mesh={'fsdp': 8},
    eval_every=1000,
    eval_batches=100,
    checkpoint_every=1000,
  )
