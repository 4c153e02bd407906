"""MVUE as a transformation of finished gradients."""

from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import optax

from sparse24_jax.mvue import mvue24


class MvueGradientsState(NamedTuple):
  """The key and how often it was used."""

  key_data: Array  # uint32, as jax.random.key_data gives it
  count: Array  # int32 scalar


def mvue_gradients(key: Array, *, axis: int = -1) -> optax.GradientTransformation:
  """Replaces each gradient matrix by an unbiased 2:4 sample of it.

  This is for experiments on gradient sparsity. It is not what the papers do and makes nothing faster: they sample the
  *output* gradient inside the weight-gradient matmul, which `DotPolicy(weight_grad='mvue')` does.

  Args:
    key: a JAX random key; step and leaf are folded in.
    axis: the grouped axis of each matrix. Leaves of fewer than two axes, without that axis, or whose length along it is
      no multiple of four, pass unchanged.

  Returns:
    A gradient transformation.

  Raises:
    ValueError: of `update`, a gradient that is not float32, bfloat16 or float16, or no matrix has the axis.

  Source: Chmiel et al., arXiv 2203.10991.

  >>> import jax, jax.numpy as jnp, sparse24_jax as s24
  >>> tx = s24.mvue_gradients(jax.random.key(0))
  >>> grads = {'w': jnp.ones((2, 8)), 'b': jnp.ones(8)}
  >>> updates, _ = tx.update(grads, tx.init(grads))
  >>> int((updates['w'] != 0).sum()), updates['b'].tolist() == [1.0] * 8
  (8, True)
  """
  typed = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
  impl = jax.random.key_impl(typed)

  def init(params: Any) -> MvueGradientsState:
    # A copy: donating the state must not take the caller's key along.
    return MvueGradientsState(jnp.array(jax.random.key_data(typed), copy=True), jnp.zeros((), jnp.int32))

  def update(updates: Any, state: MvueGradientsState, params: Any = None):
    step_key = jax.random.fold_in(jax.random.wrap_key_data(state.key_data, impl=impl), state.count)
    leaves, structure = jax.tree.flatten(updates)
    matrices = [g for g in leaves if g.ndim >= 2]
    if matrices and not any(_has_axis(g, axis) for g in matrices):
      raise ValueError(f'axis={axis}: no gradient has that axis, of shapes {sorted({g.shape for g in matrices})}')
    sampled = [
      mvue24(g, jax.random.fold_in(step_key, i), axis=axis)
      if g.ndim >= 2 and _has_axis(g, axis) and g.shape[axis] % 4 == 0 else g
      for i, g in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, sampled), MvueGradientsState(state.key_data, optax.safe_increment(state.count))

  return optax.GradientTransformation(init, update)


def _has_axis(g: Array, axis: int) -> bool:
  return -g.ndim <= axis < g.ndim
