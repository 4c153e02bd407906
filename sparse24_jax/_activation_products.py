"""Which side makes the products of the squared-ReLU block: plain jnp or sparse tensor cores."""

from collections.abc import Callable
from typing import Any

from jax import Array

from pallas_kernels import _device, _dispatch
from pallas_kernels.vnm.api import wins
from sparse24_jax._activation_kernels import Sparse24, SparseVNM, SpreadVNM
from sparse24_jax._activation_reference import Products, Reference


def make(
  policy: Any, feature_mask: Callable[..., Array], token_mask: Callable[..., Array], x: Array, hidden: int
) -> Products:
  """The functions for an `ActivationPolicy`, given the masks that define its patterns, for `x` and `hidden` neurons."""
  if not _takes_kernels(policy, x, hidden):
    ops: Any = Reference(policy, feature_mask, token_mask)
  elif policy.pattern == '2:4':
    ops = Sparse24(policy, feature_mask, token_mask)
  else:
    ops = SpreadVNM(policy) if policy.clusters else SparseVNM(policy)
  return Products(*(getattr(ops, name) for name in Products._fields))


def _takes_kernels(policy: Any, x: Array, hidden: int) -> bool:
  """What a policy that names no implementation gets: kernels where the records of one GPU have a V:N:M product win."""
  if policy.implementation is not None:
    return policy.implementation == 'kernels'
  if policy.pattern == '2:4' or _device.current().platform == 'cpu':
    return False
  tokens, d = x.shape
  sizes = ((tokens, hidden), (hidden, tokens))  # of Y and dH, and of their transposes
  said = [wins(policy.v, policy.m, rows, k, d, x.dtype) for rows, k in sizes]
  whole = _device.arrays_are_whole()
  taken = any(said) and whole
  why = 'as measured' if None not in said else 'part of it was not measured' if taken else 'nothing near was measured'
  why = why if whole else 'since the kernels would gather what a mesh divides'
  _dispatch.log_once(
    f'neuron_level_ffn, {policy.v}:2:{policy.m} of {tokens} x {d} x {hidden} {x.dtype}: '
    f'{"sparse kernels" if taken else "dense products"} on {_device.current().name}, {why}',
    'sparse24_jax',
  )
  return taken
