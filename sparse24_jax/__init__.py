"""Pre-training transformers with 2:4-sparse weights in JAX, Flax and Optax."""

from sparse24_jax import recipes
from sparse24_jax.dot import dot, dot_general, DotPolicy
from sparse24_jax.glu import gated_linear_unit
from sparse24_jax.integration.functional import project
from sparse24_jax.integration.sparsify import sparse_variables, SparseVariable, sparsify
from sparse24_jax.masks import compress, Compressed24, decompress, magnitude_mask, transposable_mask, verify24
from sparse24_jax.metrics import flip_rate
from sparse24_jax.mvue import mvue24
from sparse24_jax.optim import (
  add_masked_decay,
  FlipRate,
  get_flip_rate,
  mvue_gradients,
  scale_by_step_adam,
  sparse_training,
  SparseTrainingState,
  step_adam,
  step_has_settled,
)
from sparse24_jax.projection import magnitude, Projection, soft_threshold_projection, transposable
from sparse24_jax.recipe import Phase, Recipe, Rule
from sparse24_jax.schedules import phase_at
from sparse24_jax.soft_threshold import soft_threshold, soft_threshold_scale
from sparse24_jax.tuning import DecayChoice, DecayTrial, tune_masked_decay

__version__ = '0.1.0'

__all__ = [
  'Compressed24',
  'DecayChoice',
  'DecayTrial',
  'DotPolicy',
  'FlipRate',
  'Phase',
  'Projection',
  'Recipe',
  'Rule',
  'SparseTrainingState',
  'SparseVariable',
  'add_masked_decay',
  'compress',
  'decompress',
  'dot',
  'dot_general',
  'flip_rate',
  'gated_linear_unit',
  'get_flip_rate',
  'magnitude',
  'magnitude_mask',
  'mvue24',
  'mvue_gradients',
  'phase_at',
  'project',
  'recipes',
  'scale_by_step_adam',
  'soft_threshold',
  'soft_threshold_projection',
  'soft_threshold_scale',
  'sparse_training',
  'sparse_variables',
  'sparsify',
  'step_adam',
  'step_has_settled',
  'transposable',
  'transposable_mask',
  'tune_masked_decay',
  'verify24',
]
