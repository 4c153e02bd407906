"""Byte-level GPT-2 of 6 layers, width 384, on embedded real text: methods compared on one GPU in minutes.

Questions: whether sparse activations reach the loss of dense squared ReLU; and in what order static masks, SET, RigL
and mixed sparsity training end at equal training FLOPs (without the head).
Source of the settings: ours. The learning rate falls to a tenth, as in the release of mixed sparsity training.
Densities, and the share of steps of `dense_short`, give every method the FLOPs of mixed sparsity training; the topology
changes every fortieth of so short a run.
Cost: a run is 2,000 steps of 64 x 128 bytes, 10.7 M parameters, 16 M bytes of text.
Commands: python -m experiments sweep --config small --methods equal-flops --minutes 5
python -m experiments sweep --config small --methods sparse-activations --set steps=900 --minutes 5
python -m experiments sweep --config small --methods kernel-patterns --set steps=450 --set data.batch_size=128
"""

from experiments.runs.configs import base
from experiments.runs.experiment import Config

# A share of the steps, so that every stage of mixed sparsity training changes its topology in short runs, too.
_EVERY = {'refresh_every': 0.025}
# A quarter of the dense FLOPs with 2,000 steps.
_MIXED = {**_EVERY, 'density': 0.145}


def get_config(tiny: bool = False) -> Config:
  """Returns the dense experiment; `experiments.runs.methods` puts each method's recipe in."""
  return base.make(
    'small',
    size='small',
    tiny=tiny,
    steps=2000,
    # Layers under a scan compile in a fraction of the time; the positions are those of nano.
    model={'dtype': 'bfloat16', 'scan_layers': True, 'positions': 'rotary', 'qk_norm': True},
    data={'seq_len': 128, 'batch_size': 64},
    optimizer={'peak_lr': 2e-3, 'end_lr': 2e-4, 'warmup_steps': 100, 'weight_decay': 0.1, 'clip': 1.0},
    # What a method does to the loss is shown here, and not how fast its kernels are.
    recipe={'implementation': 'reference', 'flip_rate': 'step'},
    methods={
      'mixed_sparsity': _MIXED,
      'mixed_sparsity_keep_moments': _MIXED,
      'mixed_sparsity_attention': {
        **_EVERY, 'density': 'mixed_sparsity', 'attention': {'kind': 'combined', 'window': 16},
      },
      'mixed_sparsity_24': {**_EVERY, 'density': 'mixed_sparsity', 'warm_up': 0.05},
      'mixed_sparsity_transposable': {**_EVERY, 'density': 'mixed_sparsity', 'warm_up': 0.05},
      'rigl': {**_EVERY, 'density': 'mixed_sparsity'},
      'set_': {**_EVERY, 'density': 'mixed_sparsity'},
      'static': {'density': 'mixed_sparsity'},
      'static_attention': {'density': 'mixed_sparsity'},
      'mixed_sparsity_restored': {**_EVERY, 'density': 'mixed_sparsity'},
      'dense_small': {'steps': 'mixed_sparsity'},
      'dense_short': {'steps': 'mixed_sparsity'},
      'neuron_level_clusters': {
        'policy': {'clusters': {'number': 4, 'within': 64}},
        'dense_fraction': 0.4,
      },
    },
    log_every=50,
    eval_every=250,
    eval_batches=30,
    checkpoint_every=0,
  )
