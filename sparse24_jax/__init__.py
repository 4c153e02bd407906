"""Pre-training transformers with 2:4-sparse weights in JAX, Flax and Optax."""

from sparse24_jax import linen, nnx, recipes
from sparse24_jax.activation_sparsity import neuron_level_ffn
from sparse24_jax.attention import AttentionPattern
from sparse24_jax.binding.bound import bind, Bound, BoundWeight
from sparse24_jax.block_gain import block_gain, BlockGain
from sparse24_jax.density import CosineDecay, DensitySchedule, Stage
from sparse24_jax.dot import dot, dot_general
from sparse24_jax.ffn import ffn
from sparse24_jax.glu import gated_linear_unit
from sparse24_jax.integration.check import check, Checked, CheckedWeight
from sparse24_jax.integration.check_step import check_step, CheckedStep
from sparse24_jax.integration.functional import project, verify_weights
from sparse24_jax.integration.sparsify import sparse_variables, SparseVariable, sparsify, states_of
from sparse24_jax.masks import compress, Compressed24, decompress, magnitude_mask, transposable_mask, verify24
from sparse24_jax.metrics import flip_rate
from sparse24_jax.mvue import mvue24
from sparse24_jax.neurons import cluster_neurons
from sparse24_jax.only_where_it_pays import only_where_it_pays
from sparse24_jax.optim import (
  add_masked_decay,
  carry_over,
  FlipRate,
  get_flip_rate,
  mvue_gradients,
  regroup_neurons,
  scale_by_step_adam,
  sparse_training,
  SparseTrainingState,
  step_adam,
  step_has_settled,
)
from sparse24_jax.packing import PackedWeight
from sparse24_jax.policy import ActivationPolicy, Clusters, DotPolicy, TwoOfFour, VNM
from sparse24_jax.projection import Projection
from sparse24_jax.projections import dynamic_sparse, magnitude, soft_threshold_projection, transposable
from sparse24_jax.recipe import Phase, Recipe, Rule
from sparse24_jax.schedules import attention_at, phase_at, refresh_at
from sparse24_jax.soft_threshold import soft_threshold, soft_threshold_scale
from sparse24_jax.topology import layer_densities, Topology
from sparse24_jax.tuning import DecayChoice, DecayTrial, tune_masked_decay
from sparse24_jax.vnm import compress_vnm, CompressedVNM, decompress_vnm, verify_vnm, vnm_mask
from sparse24_jax.where_it_pays import LayerGain, where_it_pays

__version__ = '0.1.0'

__all__ = [
  'VNM',
  'ActivationPolicy',
  'AttentionPattern',
  'BlockGain',
  'Bound',
  'BoundWeight',
  'Checked',
  'CheckedStep',
  'CheckedWeight',
  'Clusters',
  'Compressed24',
  'CompressedVNM',
  'CosineDecay',
  'DecayChoice',
  'DecayTrial',
  'DensitySchedule',
  'DotPolicy',
  'FlipRate',
  'LayerGain',
  'PackedWeight',
  'Phase',
  'Projection',
  'Recipe',
  'Rule',
  'SparseTrainingState',
  'SparseVariable',
  'Stage',
  'Topology',
  'TwoOfFour',
  'add_masked_decay',
  'attention_at',
  'bind',
  'block_gain',
  'carry_over',
  'check',
  'check_step',
  'cluster_neurons',
  'compress',
  'compress_vnm',
  'decompress',
  'decompress_vnm',
  'dot',
  'dot_general',
  'dynamic_sparse',
  'ffn',
  'flip_rate',
  'gated_linear_unit',
  'get_flip_rate',
  'layer_densities',
  'linen',
  'magnitude',
  'magnitude_mask',
  'mvue24',
  'mvue_gradients',
  'neuron_level_ffn',
  'nnx',
  'only_where_it_pays',
  'phase_at',
  'project',
  'recipes',
  'refresh_at',
  'regroup_neurons',
  'scale_by_step_adam',
  'soft_threshold',
  'soft_threshold_projection',
  'soft_threshold_scale',
  'sparse_training',
  'sparse_variables',
  'sparsify',
  'states_of',
  'step_adam',
  'step_has_settled',
  'transposable',
  'transposable_mask',
  'tune_masked_decay',
  'verify24',
  'verify_vnm',
  'verify_weights',
  'vnm_mask',
  'where_it_pays',
]
