"""GPT-2 124M on OpenWebText with FST: transposable 2:4 masks, masked decay, MVUE, dense fine-tuning in the last sixth.

Claim and source of the settings: see `experiments.runs.configs.gpt2`.
Masked decay 6e-5 in both the script and the README.
Cost: 300,000 steps of 512 x 1,024 tokens, 157 billion tokens; about 1.2e20 floating-point operations (6 x parameters x
tokens).
Command: python -m experiments train --config gpt2_124m --set data.manual_dir=FOLDER
"""

from experiments.runs.configs import gpt2
from experiments.runs.experiment import Config


def get_config(tiny: bool = False) -> Config:
  """Returns the experiment, or its tiny twin."""
  return gpt2.make('gpt2_124m', size='124m', masked_decay=6e-5, tiny=tiny, accumulate=4)
