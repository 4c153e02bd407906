"""lambda (1 - M) W: what pulls pruned weights to zero."""

from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import optax

from sparse24_jax.optim._weights import wider
from sparse24_jax.recipe import is_decay


class AddMaskedDecayState(NamedTuple):
  """Counts steps, for a scheduled decay."""

  count: Array  # int32 scalar


def decayed(update: Array, w: Array, mask: Array, decay: Array | float) -> Array:
  """update + decay (1 - mask) w, in float32, in the wider of the dtypes of `update` and `w`."""
  # Not a sum with a term that is zero where the mask is: for XLA those zeros can be an array that it keeps in memory.
  moved = update.astype(jnp.float32) + jnp.float32(decay) * w.astype(jnp.float32)
  # A bfloat16 gradient of a float32 weight has no room for what is added: most of a decay of 1e-4 would be lost.
  dtype = wider(update, w)
  return jnp.where(mask, update.astype(dtype), moved.astype(dtype))


def add_decay(updates: Any, params: Any, masks: Any, decay: Array | float) -> Any:
  """`decayed` at each weight that has a mask."""
  return jax.tree.map(
    lambda u, w, m: u if isinstance(m, optax.MaskedNode) else decayed(u, w, m, decay), updates, params, masks
  )


def add_masked_decay(decay: optax.ScalarOrSchedule, masks: Any) -> optax.GradientTransformation:
  """Adds decay (1 - M) W to the updates, for masks that the caller holds.

  Before the inner optimizer this is masked decay on gradients, after it (and before the learning rate) on weights.
  `sparse_training` does the same with masks that it keeps and refreshes itself.

  Args:
    decay: a number of zero or more, or a schedule of the step count. Not multiplied by the learning rate here. The
      sum is made in float32 and rounded to the wider dtype of update and parameter: keep parameters in float32, as a
      decay of 1e-4 is lost in bfloat16. Inside `optax.apply_if_finite` and Optax's other conditional wrappers, which
      want updates in the dtype of the gradients, cast gradients to the parameters' dtype first.
    masks: a tree with the structure of the parameters: bool arrays, True = kept, or `optax.MaskedNode()` where
      nothing decays.

  Returns:
    A gradient transformation whose state counts steps.

  Raises:
    ValueError: a number that is negative or not finite; at update, no parameters.

  Source: Hu et al., arXiv 2404.01847, equation 10; Zhou et al., arXiv 2102.04010, equation 9.

  >>> import jax.numpy as jnp, optax, sparse24_jax as s24
  >>> params, masks = {'w': jnp.array([1.0, -2.0])}, {'w': jnp.array([True, False])}
  >>> tx = s24.add_masked_decay(0.1, masks)
  >>> updates, _ = tx.update({'w': jnp.zeros(2)}, tx.init(params), params)
  >>> updates['w'].tolist()
  [0.0, -0.20000000298023224]
  """
  if not callable(decay) and not is_decay(decay):
    raise ValueError(f'decay={decay} must be a finite number of zero or more, or a schedule')

  def init(params: Any) -> AddMaskedDecayState:
    return AddMaskedDecayState(jnp.zeros((), jnp.int32))

  def update(updates: Any, state: AddMaskedDecayState, params: Any = None):
    if params is None:
      raise ValueError('add_masked_decay needs the parameters: call update(updates, state, params)')
    factor = decay(state.count) if callable(decay) else decay
    return add_decay(updates, params, masks, factor), AddMaskedDecayState(optax.safe_increment(state.count))

  return optax.GradientTransformation(init, update)
