"""Which side makes the products of the squared-ReLU block: plain jnp or sparse tensor cores."""

from collections.abc import Callable
from typing import Any

from jax import Array

from pallas_kernels import _device, _dispatch
from sparse24_jax._activation_kernels import Sparse24, SparseVNM, SpreadVNM
from sparse24_jax._activation_reference import Products, Reference


def make(policy: Any, feature_mask: Callable[..., Array], token_mask: Callable[..., Array]) -> Products:
  """The functions for an `ActivationPolicy`, given the masks that define its patterns."""
  if not _takes_kernels(policy):
    ops: Any = Reference(policy, feature_mask, token_mask)
  elif policy.pattern == '2:4':
    ops = Sparse24(policy, feature_mask, token_mask)
  else:
    ops = SpreadVNM(policy) if policy.clusters else SparseVNM(policy)
  return Products(*(getattr(ops, name) for name in Products._fields))


def _takes_kernels(policy: Any) -> bool:
  """Kernels when named: the block as it is now was checked on a card and not timed there, so they are no default."""
  if policy.implementation is None and _device.current().platform != 'cpu':
    message = "neuron_level_ffn takes dense products; ActivationPolicy(implementation='kernels') takes sparse ones"
    _dispatch.log_once(message, 'sparse24_jax')
  return policy.implementation == 'kernels'
