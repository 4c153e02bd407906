"""English to German by a byte-level encoder-decoder of 2 and 2 layers, width 64, on short messages of a package.

The default data, a thousand messages, are too few to learn translation from; with a larger folder the methods can be
compared by loss and BLEU. Home Assistant's 36,000 messages are one, see `experiments.runs.data.pairs`.
Cost: 6,000 steps of 32 pairs, about six minutes on 2 cores.
Command: python -m experiments compare --config translation_nano --methods dense fst s_ste --set data.corpus=folder \
  --set data.manual_dir=FOLDER --set eval_batches=30
"""

from experiments.runs.configs import base
from experiments.runs.experiment import Config


def get_config(tiny: bool = False) -> Config:
  """Returns the dense experiment; `experiments.runs.methods` puts each method's recipe in."""
  return base.make(
    'translation_nano',
    task='translation',
    size='nano',
    tiny=tiny,
    steps=6000,
    data={'corpus': 'jupyterlab_de', 'seq_len': 64, 'batch_size': 32},
    optimizer={'peak_lr': 3e-3, 'warmup_steps': 300, 'weight_decay': 0.01},
    eval_every=1000,
    eval_batches=1,
    checkpoint_every=1000,
  )
