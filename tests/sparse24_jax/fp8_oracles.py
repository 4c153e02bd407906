"""The FP8 layer and block written out in NumPy and ml_dtypes: what the kernels' path answers to."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.activations import ACTIVATIONS
from pallas_kernels.two_of_four.philox import two_keys
import sparse24_jax as s24
from tests import oracles

BF16, F32 = jnp.bfloat16, jnp.float32
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def scale_of(largest, dtype):
  """(scale, what undoes it) for a tensor with this largest magnitude."""
  top = np.float32(ml_dtypes.finfo(dtype).max)
  return top / np.float32(largest), np.float32(largest) / top


def rounded(a, scale, dtype):
  """float64 of float32 `a` times `scale` in an 8-bit format."""
  top = np.float32(ml_dtypes.finfo(dtype).max)
  return np.clip(a.astype(np.float32) * np.float32(scale), -top, top).astype(dtype).astype(np.float64)


def f8(a, dtype, largest=None):
  """`a` in FP8, and what its matmuls are multiplied with."""
  scale, factor = scale_of(abs(a).max() if largest is None else largest, dtype)
  return rounded(a, scale, dtype), factor


def f8_weights(weights, states):
  """beta S(w), or w under masks, in e4m3, side by side, under a power of two above beta |w|, a bound of all of them."""
  masked = np.asarray(states[0]).dtype == bool
  betas = [np.float32(1 if masked else s) for s in states]
  largest = max(abs(b) * np.float32(abs(oracles.wide(w)).max()) for w, b in zip(weights, betas, strict=True))
  factor = np.exp2(np.ceil(np.log2(largest / 448)))
  scale = 1 / factor
  sparse = [
    oracles.wide(w) * np.asarray(state) if masked else oracles.soft_threshold(w)
    for w, state in zip(weights, states, strict=True)
  ]  # fmt: skip
  return np.concatenate([rounded(s, scale * b, E4M3) for s, b in zip(sparse, betas, strict=True)], axis=1), factor


def f8_sample(a, key, largest=None):
  """V(a) in e5m2, its scale leaving room for twice the largest entry of `a`."""
  sample = oracles.wide(s24.mvue24(jnp.asarray(a, F32), key, axis=0))
  return f8(sample, E5M2, 2 * (abs(a).max() if largest is None else largest))


def sparse_matmul(a, b):
  """Scaled in float32."""
  return a[0] @ b[0] * (a[1] * b[1])


def dense_matmul(a, b):
  """Sums and scale are rounded to bfloat16 before they meet."""
  return bf16(bf16(a[0] @ b[0]) * bf16(a[1] * b[1]))


def input_grad(dz, w, state, dense=dense_matmul):
  """Sparse under masks, else dense."""
  return (sparse_matmul if np.asarray(state).dtype == bool else dense)(dz, transposed(w))


def transposed(a):
  return a[0].T, a[1]


def bf16(a):
  return np.asarray(a).astype(ml_dtypes.bfloat16).astype(np.float64)


def wide(a):
  return oracles.wide(a).reshape(-1, a.shape[-1])


def written_dot(x, w, state, dz, key):
  """z, dx, dw; without a key dw is that of all of dz."""
  matmul = dense_matmul if x.dtype == BF16 else sparse_matmul
  x, dz, w8 = f8(wide(x), E4M3), wide(dz), f8_weights([w], [state])
  dx = input_grad(f8(dz, E5M2), w8, state, matmul)
  dw = matmul(transposed(x), f8(dz, E5M2)) if key is None else sparse_matmul(transposed(x), f8_sample(dz, key))
  return sparse_matmul(x, w8), dx, dw


def written_dense_dot(x, w, dz):
  """z, dx, dw of a layer without sparsity, the scale of the weight a power of two."""
  matmul = dense_matmul if x.dtype == BF16 else sparse_matmul
  factor = np.exp2(np.ceil(np.log2(abs(oracles.wide(w)).max() / 448)))
  w8, x8, dz8 = (rounded(oracles.wide(w), 1 / factor, E4M3), factor), f8(wide(x), E4M3), f8(wide(dz), E5M2)
  return matmul(x8, w8), matmul(dz8, transposed(w8)), matmul(transposed(x8), dz8)


def written_ffn(activation, x, weights, biases, states, dy, key, *, dense=None):
  """y, dx, dW, db; what a step writes in bfloat16 is rounded to it. The forward of one role can be a dense matmul."""

  def linear(role, a, w, bias):
    return bf16(dense_matmul(a, w) + bias) if role == dense else sparse_matmul(a, w) + bias

  x, dy = f8(wide(x), E4M3), wide(dy)
  hidden_key, down_key = two_keys(key)
  names = ('gate', 'up') if 'gate' in weights else ('up',)
  first = f8_weights([weights[n] for n in names], [states[n] for n in names])
  down = f8_weights([weights['down']], [states['down']])
  b_first, b_down = (np.concatenate([wide(biases[n])[0] for n in n]) if biases else 0.0 for n in (names, ('down',)))
  z = linear('up', x, first, b_first)
  if 'gate' in weights:  # the product is written, then read
    gate, up = np.split(bf16(z), 2, axis=1)
    value, slope = oracles.activation_and_slope(activation, gate)
    h = bf16(value * up)
  else:
    h = bf16(oracles.activation_and_slope(activation, z)[0])
    slope = oracles.activation_and_slope(activation, bf16(z))[1]
  dh = bf16(input_grad(f8(dy, E5M2), down, states['down']))
  dz = bf16(np.concatenate([dh * up * slope, dh * value], axis=1) if 'gate' in weights else dh * slope)
  steepest = None if 'gate' in weights else ACTIVATIONS[activation].steepest
  largest = abs(dz).max() if steepest is None else np.float32(steepest) * np.float32(abs(dh).max())
  dz8, h = f8(dz, E5M2, largest), f8(h, E4M3)
  dw = sparse_matmul(transposed(x), f8_sample(dz, hidden_key, largest))
  dw = dict(zip(names, np.split(dw, len(names), axis=1), strict=True))
  dw['down'] = sparse_matmul(transposed(h), f8_sample(dy, down_key))
  db = dict(zip(names, np.split(dz8[0].sum(0) * dz8[1], len(names)), strict=True)) | {'down': dy.sum(0)}
  dx = input_grad(dz8, first, states['up'])
  return linear('down', h, down, b_down), dx, dw, db if biases else {}
