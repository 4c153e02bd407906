"""BERT-base as cramming trains it (16 layers, width 768, GEGLU), with FST on the feed-forward matrices.

Source of the settings: layers, decay, refresh and the dense sixth as in FST's release for cramming; learning rate and
schedule are GPT-2's here. Data: any corpus of `experiments.runs.data`.
Command: python -m experiments train --config bert --set data.manual_dir=FOLDER
"""

from experiments.runs.configs import base
from experiments.runs.experiment import Config


def get_config(tiny: bool = False) -> Config:
  """Returns the experiment, or its tiny twin."""
  return base.make(
    'bert',
    task='masked_lm',
    size='124m',
    tiny=tiny,
    steps=300_000,
    model={'num_layers': 16, 'seq_len': 128, 'mlp': 'geglu', 'ffn_width': 1.0, 'dtype': 'bfloat16'},
    vocab_multiple=64,
    data={'corpus': 'openwebtext', 'tokenizer': 'bpe:32768', 'seq_len': 128, 'batch_size': 1024},
    optimizer={'peak_lr': 1e-3, 'warmup_steps': 3000, 'b2': 0.98, 'weight_decay': 0.01, 'clip': 0.5},
    recipe={
      'name': 'transposable_srste',
      'kwargs': {'path': r'.*/mlp/.*', 'masked_decay': 6e-6, 'refresh_every': 40, 'dense_fraction': 1 / 6},
    },
    mesh={'data': 8},
    eval_every=1000,
    eval_batches=40,
    checkpoint_every=1000,
  )
