"""GPT-2 124M on OpenWebText with MST: dense to 9.5% of the weights and back, with a topology that changes.

Claim: 4.0x fewer training FLOPs than dense, counting every matmul of the blocks, forward and backward, and causal
attention, over the whole run and with the dense gradients of topology updates; the language-model head is not counted
(with it: 2.1x). See `python -m experiments flops --config gpt2_124m_mst`. No loss of it is known: it was not run.
Source: arXiv 2408.11746 and its released code for batch 480 x 1,024, 600,000 steps, AdamW 6e-4 to 6e-5, topology period
100, drop fraction 0.3, mixed growing 3:1 and Erdos-Renyi densities; stages and density are ours.
Cost: 600,000 steps of 480 x 1,024 tokens: 4.2e19 floating-point operations by that count, and 6.8e19 for the head; no
GPU makes use of unstructured masks, so it takes the time of a dense run.
Command: python -m experiments train --config gpt2_124m_mst --set data.manual_dir=FOLDER
"""

from experiments.runs.configs import base
from experiments.runs.experiment import Config
from experiments.runs.recipes import LINEAR


def get_config(tiny: bool = False) -> Config:
  """Returns the experiment, or its tiny twin."""
  config = base.make(
    'gpt2_124m_mst',
    size='124m',
    tiny=tiny,
    steps=600_000,
    accumulate=4,
    model={'dtype': 'bfloat16'},
    vocab_multiple=64,
    data={'corpus': 'openwebtext', 'tokenizer': 'gpt2', 'seq_len': 1024, 'batch_size': 480},
    optimizer={'peak_lr': 6e-4, 'end_lr': 6e-5, 'warmup_steps': 2000},
    recipe={
      'name': 'mixed_sparsity',
      'kwargs': {'path': LINEAR, 'density': 0.095, 'warm_up': 0.1, 'restoration': 0.05, 'refresh_every': 100},
    },
    mesh={'data': 4},
    eval_every=1000,
    eval_batches=100,
    checkpoint_every=1000,
  )
  if tiny:
    config.recipe.kwargs.refresh_every = 3
  return config
