"""Problems for the squared-ReLU block, and the block by its written formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import sparse24_jax as s24
from sparse24_jax.activation_sparsity import neuron_level_ffn
from sparse24_jax.neurons import cluster_neurons
from sparse24_jax.policy import ActivationPolicy, TwoOfFour
from sparse24_jax.projections import projections_of
from tests import oracles
from tests.quick import jit

TOKENS, D, HIDDEN = 32, 8, 64
VNM = ActivationPolicy(s24.VNM(8, 8), s24.VNM(8, 8), dense_features=0.05)
POLICIES = {
  'vnm': VNM, '2:4': ActivationPolicy(TwoOfFour(), dense_features=0.05),
  'no_dense': ActivationPolicy(s24.VNM(4, 8), s24.VNM(4, 8)),
  # The default, and with dense neurons beside it.
  'two_of_four_tokens': ActivationPolicy(s24.VNM(8, 8)),
  'two_of_four_tokens_and_dense': ActivationPolicy(s24.VNM(8, 8), dense_features=0.05),
}  # fmt: skip


def draw(dtype=jnp.float32, lead=(), seed=0):
  rng = np.random.default_rng(seed)
  shapes = ((*lead, TOKENS, D), (*lead, D, HIDDEN), (*lead, HIDDEN, D), (*lead, TOKENS, D))
  return [jnp.asarray(rng.standard_normal(s, np.float32).astype(dtype)) for s in shapes]


@functools.partial(jax.jit, static_argnums=0)
def init(projection, w):
  return projection.init(w)


def state_of(policy, w_up, w_down):
  weights = {'up': w_up, 'down': w_down}
  state = {role: init(p, weights[role]) for role, p in projections_of(policy).items() if p is not None}
  if policy.clusters:
    state['neurons'] = cluster_neurons(w_up, clusters=policy.clusters.number)
  return state


def written_all_dense(policy, x, w_up, w_down, dz, b_up=0.0):
  """Values, gradients and that of `b_up` where all weights and neurons are dense: the derivative of what is kept."""
  x, w1, w2, dz = (np.asarray(a, np.float64) for a in (x, w_up, w_down, dz))
  r = np.maximum(x @ w1 + b_up, 0)
  v, m = (1, 4) if policy.features == TwoOfFour() else (policy.features.v, policy.features.m)
  mask = block_mask(r * r, v, m)
  dh = np.where(mask, 2 * (dz @ w2.T) * r, 0)
  y = np.where(mask, r * r, 0)
  return [y @ w2, dh @ w1.T, x.T @ dh, y.T @ dz, dh.sum(0)]


def relative_error(found, expected):
  norm = np.linalg.norm(np.asarray(expected, np.float64))
  return np.linalg.norm(np.asarray(found - expected, np.float64)) / norm


def forward_and_grads(policy, x, w_up, w_down, dz, state=None, **kwargs):
  state = state_of(policy, w_up, w_down) if state is None else state
  return jitted(policy, x, w_up, w_down, dz, state, **kwargs)


def eager(policy, x, w_up, w_down, dz, state, **kwargs):
  f = functools.partial(neuron_level_ffn, policy=policy, **kwargs)
  z, vjp = jax.vjp(lambda x, w_up, w_down: f(x, w_up, w_down, state), x, w_up, w_down)
  return [z, *vjp(dz)]


jitted = jit(eager, static_argnums=0)


def largest(a, n):
  """Places of the n largest of each row, ties to the left, by Python's sort."""
  out = np.zeros(a.shape, bool)
  for i, row in enumerate(a):
    for j in sorted(range(len(row)), key=lambda j: (-row[j], j))[:n]:
      out[i, j] = True
  return out


def block_mask(y, v, m, columns=4):
  """V:2:M of non-negative y by loops over blocks; v=1 and m=4 give 2:4."""
  mask = np.zeros(y.shape, bool)
  for top in range(0, y.shape[0], v):
    for left in range(0, y.shape[1], m):
      block = y[top : top + v, left : left + m]
      used = largest(block.sum(0)[None], columns)
      mask[top : top + v, left : left + m] = largest(np.where(used, block, -1), 2)
  return mask


def apart(n, m):
  """Order in which entries n / m apart are neighbours."""
  return np.array([i + j * (n // m) for i in range(n // m) for j in range(m)])


def written_block(policy, x, w_up, w_down, dz):
  """Values and gradients by the written formulas, in float64."""
  x, w1, w2, dz = (np.asarray(a, np.float64) for a in (x, w_up, w_down, dz))
  state = state_of(policy, w_up, w_down)
  w1 = oracles.soft_threshold(w1, axis=-2) * float(state['up'])
  w2 = oracles.soft_threshold(w2, axis=-1) * float(state['down'])
  v, m = (1, 4) if policy.features == TwoOfFour() else (policy.features.v, policy.features.m)
  h = x @ w1
  r = np.maximum(h, 0)
  features = block_mask(r * r, v, m)
  y = np.where(features, r * r, 0)
  count = round(policy.dense_features * HIDDEN)
  dense = largest((y != 0).sum(0)[None], count)[0]
  rest = np.where(dense, 0, y)
  tokens = apart(TOKENS, m)
  if policy.tokens == TwoOfFour() != policy.features:
    tokens, v, m = np.arange(TOKENS), 1, 4
  mask = np.zeros(y.shape, bool)
  mask[tokens] = block_mask(rest[tokens].T, v, m).T
  keep = mask | dense
  dh = np.where(features, 2 * (dz @ w2.T) * r, 0)
  return [y @ w2, dh @ w1.T, x.T @ np.where(keep, dh, 0), np.where(keep, y, 0).T @ dz]
