"""Attention under a mask and its gradients, written out in NumPy."""

import numpy as np


def masked_form(q, k, v, dy, mask, scale):
  """(y, dq, dk, dv) in float64 by the definitions; mask [queries, keys]."""
  q, k, v, dy = (np.asarray(x, np.float64) for x in (q, k, v, dy))
  groups, shared = k.shape[2], q.shape[2] // k.shape[2]
  k, v = (np.repeat(x, shared, axis=2) for x in (k, v))
  weights = np.where(mask, np.exp(scale * np.einsum('bqhd,bkhd->bhqk', q, k)), 0)
  weights /= weights.sum(-1, keepdims=True)
  dweights = np.einsum('bqhd,bkhd->bhqk', dy, v)
  dscores = scale * weights * (dweights - (weights * dweights).sum(-1, keepdims=True))
  dk, dv = np.einsum('bhqk,bqhd->bkhd', dscores, q), np.einsum('bhqk,bqhd->bkhd', weights, dy)
  dk, dv = (x.reshape(*x.shape[:2], groups, shared, x.shape[3]).sum(3) for x in (dk, dv))
  return np.einsum('bhqk,bkhd->bqhd', weights, v), np.einsum('bhqk,bkhd->bqhd', dscores, k), dk, dv
