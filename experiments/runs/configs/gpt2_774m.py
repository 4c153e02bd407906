"""GPT-2 774M on OpenWebText with FST: transposable 2:4 masks, masked decay, MVUE, dense fine-tuning in the last sixth.

Claim and source of the settings: see `experiments.runs.configs.gpt2`.
Masked decay 2e-4 as in the script; the README of the same release says 6e-5.
Cost: 300,000 steps of 512 x 1,024 tokens, 157 billion tokens; about 7.3e20 floating-point operations (6 x parameters x
tokens).
Command: python -m experiments train --config gpt2_774m --set data.manual_dir=FOLDER
"""

from experiments.runs.configs import gpt2
from experiments.runs.experiment import Config


def get_config(tiny: bool = False) -> Config:
  """Returns the experiment, or its tiny twin."""
  return gpt2.make('gpt2_774m', size='774m', masked_decay=2e-4, tiny=tiny, accumulate=8)
