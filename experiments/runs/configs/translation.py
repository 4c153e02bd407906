"""Transformer-base for WMT14 English to German, prepared by TFDS, with FST on the feed-forward matrices.

Source of the settings: sizes of Vaswani et al., arXiv 1706.03762; normalised before each branch; the decay is the order
that FST names for this model. Rate and schedule are ours.
Command: python -m experiments train --config translation --set data.data_dir=FOLDER
"""

from experiments.runs.configs import base
from experiments.runs.experiment import Config


def get_config(tiny: bool = False) -> Config:
  """Returns the experiment, or its tiny twin."""
  return base.make(
    'translation',
    task='translation',
    size='base',
    tiny=tiny,
    steps=100_000,
    model={'dropout': 0.1, 'dtype': 'bfloat16', 'seq_len': 128},
    vocab_multiple=64,
    data={'corpus': 'wmt14_translate/de-en', 'tokenizer': 'bpe:32768', 'seq_len': 128, 'batch_size': 512},
    optimizer={'peak_lr': 7e-4, 'warmup_steps': 4000, 'b2': 0.98, 'weight_decay': 0.01},
    recipe={
      'name': 'transposable_srste',
      'kwargs': {'path': r'.*/mlp/.*', 'masked_decay': 1e-6, 'refresh_every': 40, 'dense_fraction': 1 / 6},
    },
    mesh={'data': 8},
    eval_every=2000,
    eval_batches=20,
    checkpoint_every=2000,
  )
