"""Which side makes the matmuls of the squared-ReLU block: plain jnp or sparse tensor cores."""

from collections.abc import Callable
from typing import Any

from jax import Array

from pallas_kernels import _device, _dispatch
from sparse24_jax._activation_kernels import SparseVNM, SparseVNMTwoOfFour
from sparse24_jax._activation_reference import Matmuls, Reference
from sparse24_jax.neuron_plan import why_dense
from sparse24_jax.policy import ActivationPolicy, TwoOfFour


def make(
  policy: ActivationPolicy, kernels: bool, feature_mask: Callable[..., Array], token_mask: Callable[..., Array]
) -> Matmuls:
  """The functions for an `ActivationPolicy`, given what `takes_kernels` said and the masks that define its patterns."""
  if not kernels:
    ops: Any = Reference(policy, feature_mask, token_mask)
  else:
    ops = SparseVNMTwoOfFour(policy) if isinstance(policy.tokens, TwoOfFour) else SparseVNM(policy)
  return Matmuls(*(getattr(ops, name) for name in Matmuls._fields))


def takes_kernels(policy: ActivationPolicy, tokens: int, weight: tuple[int, ...], dtype: Any) -> bool:
  """Whether a block takes the kernels: where its policy names them, or names nothing and they are known to pay.

  Args:
    policy: `ActivationPolicy`.
    tokens: of the block.
    weight: shape of `w_up`, [d, h].
    dtype: of activations and weights.
  """
  if policy.implementation is not None or not tokens or _device.current().platform == 'cpu':
    return policy.implementation == 'sparse'
  d, hidden = weight
  reason = why_dense(policy, tokens, d, hidden, dtype)
  how = 'sparse matmuls, which pay here' if reason is None else f'dense matmuls: {reason}'
  _dispatch.log_once(f'neuron_level_ffn of {tokens} tokens, {d} x {hidden}, takes {how}', 'sparse24_jax')
  return reason is None
