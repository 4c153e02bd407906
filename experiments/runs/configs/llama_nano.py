"""Byte-level Llama of 2 layers, width 64, with SwiGLU, on embedded real text: the methods on a gated layer.

Cost: 4,000 steps, about two minutes on 2 cores, 0.1 M parameters.
Command: python -m experiments compare --config llama_nano --methods dense fst s_ste
"""

from experiments.runs.configs import base
from experiments.runs.experiment import Config


def get_config(tiny: bool = False) -> Config:
  """Returns the dense experiment; `experiments.runs.methods` puts each method's recipe in."""
  return base.make(
    'llama_nano',
    size='nano',
    tiny=tiny,
    steps=4000,
    model={'family': 'llama'},
    data={'seq_len': 64, 'batch_size': 16},
    optimizer={'peak_lr': 3e-3, 'warmup_steps': 200},
    eval_every=1000,
    checkpoint_every=1000,
  )
