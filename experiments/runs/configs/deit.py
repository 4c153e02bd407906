"""DeiT-small on ImageNet with FST: 12 layers, width 384, images of 224 x 224 that TFDS prepared.

Source of the settings: sizes and schedule of DeiT (300 epochs of batches of 1,024), refresh every 10 steps and the
dense last sixth as in FST's release; its optimizer is LION and its augmentations are many: here are AdamW, moves and
mirroring, and no teacher, so that its accuracy is not to be expected.
Command: python -m experiments train --config deit --set data.data_dir=FOLDER
"""

from experiments.runs.configs import base
from experiments.runs.experiment import Config


def get_config(tiny: bool = False) -> Config:
  """Returns the experiment, or its tiny twin."""
  return base.make(
    'deit',
    task='image_classification',
    size='small',
    tiny=tiny,
    steps=375_000,
    model={'dtype': 'bfloat16'},
    data={'corpus': 'imagenet2012', 'seq_len': 197, 'batch_size': 1024},
    optimizer={'peak_lr': 1e-3, 'end_lr': 1e-5, 'warmup_steps': 6250, 'b2': 0.999, 'weight_decay': 0.05},
    recipe={
      'name': 'transposable_srste',
      'kwargs': {'path': r'.*/mlp/.*', 'masked_decay': 6e-5, 'refresh_every': 10, 'dense_fraction': 1 / 6},
    },
    mesh={'data': 8},
    eval_every=5000,
    eval_batches=40,
    checkpoint_every=5000,
  )
