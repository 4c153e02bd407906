"""Gated linear units over the sparse op."""

from jax import Array

from pallas_kernels.activations import activation_of, Name
from pallas_kernels.two_of_four.philox import two_keys
from sparse24_jax.dot import dot
from sparse24_jax.policy import DotPolicy


def gated_linear_unit(
  x: Array,
  w_gate: Array,
  w_up: Array,
  state: tuple[Array, Array] | None = None,
  *,
  policy: DotPolicy,
  activation: Name = 'silu',
  key: Array | None = None,
) -> Array:
  """activation(x W~_gate) * (x W~_up): SwiGLU with `'silu'`, GEGLU with `'gelu'` (tanh form).

  Args:
    x: `[..., in]`.
    w_gate: `[in, out]`.
    w_up: `[in, out]`.
    state: the projection states of `w_gate` and `w_up`.
    policy: as for `dot`, the same for both weights.
    activation: the gate's.
    key: random key for MVUE; the two weights draw independently.

  Returns:
    `[..., out]`, dtype of `x`.

  Raises:
    ValueError: unknown activation, the weights' shapes differ, or as `dot`.

  Source: Shazeer, arXiv 2002.05202; Hu et al., arXiv 2404.01847, section 5.2.

  >>> import jax.numpy as jnp, sparse24_jax as s24
  >>> policy = s24.DotPolicy(s24.magnitude())
  >>> w = jnp.ones((4, 2))
  >>> state = policy.projection.init(w)
  >>> s24.gated_linear_unit(jnp.ones((1, 4)), w, w, (state, state), policy=policy).shape
  (1, 2)
  """
  act = activation_of(activation).function
  if w_gate.shape != w_up.shape:
    raise ValueError(f'w_gate and w_up must have one shape, found {w_gate.shape} and {w_up.shape}')
  if state is not None and not (isinstance(state, tuple | list) and len(state) == 2):
    raise ValueError('state must be a pair, the states of w_gate and w_up')
  gate_state, up_state = (None, None) if state is None else state
  gate_key, up_key = (None, None) if key is None else two_keys(key)
  gate = dot(x, w_gate, gate_state, policy=policy, key=gate_key)
  return act(gate) * dot(x, w_up, up_state, policy=policy, key=up_key)
