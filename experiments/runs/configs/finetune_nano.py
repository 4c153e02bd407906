"""Fine-tuning in GLUE's manner: which of twenty services a paragraph documents, from a pre-trained nano model or BERT.

Pre-train, dense or sparse, then fine-tune, dense or sparse:

  python -m experiments train --config bert_nano --method fst --folder runs/bert-fst
  python -m experiments train --config finetune_nano --set init_from=runs/bert-fst

Without `init_from` it trains from the beginning, which tells what pre-training brought. What the model was pre-trained
on may hold the paragraphs, without their classes. A nano GPT-2 takes model.mlp=gelu, model.ffn_width=1.0 and
model.causal=True.
Cost: 1,500 steps of 32 texts of 64 bytes, under a minute on 2 cores.
"""

from experiments.runs.configs import base
from experiments.runs.experiment import Config


def get_config(tiny: bool = False) -> Config:
  """Returns the dense experiment; `experiments.runs.methods` puts each method's recipe in."""
  return base.make(
    'finetune_nano',
    task='text_classification',
    size='nano',
    tiny=tiny,
    steps=1500,
    model={'mlp': 'geglu', 'ffn_width': 0.75, 'positions': 'rotary', 'qk_norm': True},
    data={'corpus': 'aws_services', 'seq_len': 64, 'batch_size': 32},
    optimizer={'peak_lr': 1e-3, 'warmup_steps': 100, 'weight_decay': 0.01},
    eval_every=500,
    eval_batches=49,
    checkpoint_every=500,
  )
