"""Byte-level BERT of 2 layers, width 64, with GEGLU, on embedded real text: masked tokens from both sides.

Source of the settings: pre-norm, no biases and GEGLU as in cramming (Geiping and Goldstein, arXiv 2212.14034), which
FST trains; of the tokens 15% are masked, 80% of these shown as the mask and 10% as another. Size and rates are ours.
Cost: 6,000 steps, about two minutes on 2 cores, 0.1 M parameters.
Command: python -m experiments compare --config bert_nano --methods dense fst s_ste
"""

from experiments.runs.configs import base
from experiments.runs.experiment import Config


def get_config(tiny: bool = False) -> Config:
  """Returns the dense experiment; `experiments.runs.methods` puts each method's recipe in."""
  return base.make(
    'bert_nano',
    task='masked_lm',
    size='nano',
    tiny=tiny,
    steps=6000,
    # With learnt positions runs stay at the loss of single bytes, 2.82, for all their steps (docs/tasks.md).
    model={'mlp': 'geglu', 'ffn_width': 0.75, 'positions': 'rotary', 'qk_norm': True},
    data={'seq_len': 64, 'batch_size': 16},
    optimizer={'peak_lr': 3e-3, 'warmup_steps': 300},
    eval_every=1000,
    checkpoint_every=1000,
  )
