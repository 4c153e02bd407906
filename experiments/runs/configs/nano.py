"""Byte-level GPT-2 of 2 layers, width 64, on embedded real text: the model of the main job and of the comparison.

Question: in what order dense, 2:4 with and without masked decay, and a dense model of half the feed-forward width end;
docs/quality.md has the results. Speed is not shown: masks never make a CPU faster.
Cost: 4,000 steps, about one minute on 2 cores (11 ms a step), 0.1 M parameters, 4 M bytes of text.
Command: python -m experiments train --config nano --method ste
"""

from experiments.runs.configs import base
from experiments.runs.experiment import Config


def get_config(tiny: bool = False) -> Config:
  """Returns the dense experiment; `experiments.runs.methods` puts each method's recipe in."""
  return base.make(
    'nano',
    size='nano',
    tiny=tiny,
    steps=4000,
    # With learnt positions runs stay at the loss of pairs of bytes for hundreds of steps, sparse ones for longer, and
    # losses tell who left it first (docs/quality_runs.md).
    model={'positions': 'rotary', 'qk_norm': True},
    data={'seq_len': 64, 'batch_size': 16},
    optimizer={'peak_lr': 3e-3, 'end_lr': 0.0, 'warmup_steps': 100, 'weight_decay': 0.1, 'clip': 1.0},
    # Searching anew at every step puts flip rates of different refresh intervals on one scale.
    recipe={'flip_rate': 'step'},
  )
