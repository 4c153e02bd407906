"""The Optax side: where masks live and change."""

from sparse24_jax.optim._chain import Tried, try_chain
from sparse24_jax.optim._named import DENSE_UPDATE, name_of, named_one
from sparse24_jax.optim._training_state import (
  begins_projected,
  FlipRate,
  get_flip_rate,
  holds_state,
  note_read,
  require_made_for,
  require_same_weights,
  sparse_states,
  SparseTrainingState,
  wait_until_known,
  warn_of_other_weights,
)
from sparse24_jax.optim._weights import contexts, first_states, projections_of, unboxed
from sparse24_jax.optim.carry_over import carry_over
from sparse24_jax.optim.masked_decay import add_masked_decay
from sparse24_jax.optim.mvue_gradients import mvue_gradients, MvueGradientsState
from sparse24_jax.optim.regroup_neurons import regroup_neurons
from sparse24_jax.optim.sparse_training import sparse_training
from sparse24_jax.optim.step_adam import scale_by_step_adam, step_adam, step_has_settled, StepAdamState

__all__ = [
  'DENSE_UPDATE',
  'FlipRate',
  'MvueGradientsState',
  'SparseTrainingState',
  'StepAdamState',
  'Tried',
  'add_masked_decay',
  'begins_projected',
  'carry_over',
  'contexts',
  'first_states',
  'get_flip_rate',
  'holds_state',
  'mvue_gradients',
  'name_of',
  'named_one',
  'note_read',
  'projections_of',
  'regroup_neurons',
  'require_made_for',
  'require_same_weights',
  'scale_by_step_adam',
  'sparse_states',
  'sparse_training',
  'step_adam',
  'step_has_settled',
  'try_chain',
  'unboxed',
  'wait_until_known',
  'warn_of_other_weights',
]
