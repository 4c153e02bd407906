"""The squared-ReLU feed-forward block in which all six matmuls have a sparse operand.

With H = X W1, Y = relu(H)^2, Z = Y W2 and cotangents d., every matmul takes its sparse side from a weight in the
direction in which the projection makes it 2:4, or from the activations, whose zeros are data:

    matmul            sparse operand    2:4 (2:M) along
    H  = X W1         W1                its input
    Z  = Y W2         Y                 features
    dY = dZ W2^T      W2                its output
    dW2 = Y^T dZ      Y                 tokens
    dX = dH W1^T      dH                features
    dW1 = X^T dH      dH                tokens

dH = 2 dY relu(H) is zero wherever Y is, so it inherits Y's pattern. No weight is needed 2:4 in two directions, hence no
transposable mask; and no gradient has to be made sparse by sampling, hence no MVUE.
"""

import functools
import logging
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels._dispatch import log_once
from sparse24_jax._activation_kernels import SparseVNM, SparseVNMTwoOfFour
from sparse24_jax._activation_reference import Reference
from sparse24_jax.derivatives import once
from sparse24_jax.dot import check_divisible, check_state
from sparse24_jax.neuron_plan import NeuronLevelPlan, plan_neurons
from sparse24_jax.neurons import invert, route_tokens
from sparse24_jax.policy import ActivationPolicy, TwoOfFour
from sparse24_jax.projection import abstract_state
from sparse24_jax.projections import projections_of
from sparse24_jax.sizes import tokens_of


def densest(uses: Array, policy: ActivationPolicy) -> Array:
  """The neurons that most tokens use, a share of `dense_features`; `uses` says how many do, for each."""
  # In order: neighbours share cache lines where their columns are taken.
  return jnp.sort(jax.lax.top_k(uses, round(policy.dense_features * uses.shape[0]))[1])


def neuron_level_ffn(
  x: Array,
  w_up: Array,
  w_down: Array,
  state: dict[str, Array],
  *,
  policy: ActivationPolicy,
  b_up: Array | None = None,
  b_down: Array | None = None,
  key: Array | None = None,
) -> Array:
  """relu(x w_up + b_up)^2 w_down + b_down with sparse weights and activations, forward and backward.

  Gradients are those of the block with the pattern of its activations held fixed; the weights' pass straight through
  their projections. In the weight gradients the activations are, beyond that, 2:4 or 2:M along tokens, as the policy's
  `tokens` say, except for the densest features, which is where the backward departs from the derivative.

  The choice of a block's neurons sees all its tokens, later ones included. Evaluate and finish training dense, as the
  recipe does; with features `TwoOfFour()` the forward treats each token by itself.

  Args:
    x: `[..., d]`; all axes but the last are tokens, in multiples of V and M. With experts `[experts, ..., d]`. V tokens
      in a row share their features: in a causal model they must be of one position, so that none sees what follows it
      (`x.swapaxes(0, 1).reshape(-1, d)` of `[sequences, positions, d]`). Several axes of tokens give a warning; one
      sequence at a time, as under `jax.vmap`, gives none.
    w_up: `[d, h]`, or `[experts, d, h]`: each expert is a block of its own.
    w_down: `[h, d]`, or `[experts, h, d]`.
    state: `'up'` and `'down'`, the states of the two projections, and with clusters `'neurons'`, int32 `[h]`, from
      `cluster_neurons`; all with the axis of experts in front if there is one.
    policy: the pattern and the rest.
    b_up: `[h]`, `[experts, h]` or None.
    b_down: `[d]`, `[experts, d]` or None.
    key: not used, since nothing is sampled; every feed-forward function takes one.

  Returns:
    Shape and dtype of `x`.

  Raises:
    ValueError: shapes, dtypes or states do not fit.

  Source: arXiv 2602.06183 (soft-thresholded weights, V:N:M activations, clustered neurons, routed tokens) and
  arXiv 2503.16672 (2:4 activations, dense features). Which operand is sparse in which matmul, the rule for the columns
  and the pattern along tokens are ours where the papers' abstracts do not say; two of four tokens beside V:N:M are ours
  throughout.

  >>> import jax, sparse24_jax as s24
  >>> policy = s24.ActivationPolicy(s24.VNM(4, 8))
  >>> x, w_up, w_down = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(16, 8), (8, 32), (32, 8)]))
  >>> up, down = s24.soft_threshold_projection(), s24.soft_threshold_projection(axis=-1)
  >>> state = {'up': up.init(w_up), 'down': down.init(w_down)}
  >>> s24.neuron_level_ffn(x, w_up, w_down, state, policy=policy).shape
  (16, 8)
  """
  for name, bias, w in (('b_up', b_up, w_up), ('b_down', b_down, w_down)):
    if bias is not None and bias.shape != (*w.shape[:-2], w.shape[-1]):
      raise ValueError(f'{name} must be of shape {(*w.shape[:-2], w.shape[-1])}, found {bias.shape}')
  if w_up.ndim == 3:
    if x.ndim < 2 or not x.shape[0] == w_up.shape[0] == w_down.shape[0]:
      raise ValueError(f'x of shape {x.shape}, w_up {w_up.shape} and w_down {w_down.shape} differ in their experts')
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), (x, w_up, w_down, state))
    _check(*one, policy=policy)
  else:
    _check(x, w_up, w_down, state, policy)
  lead = x.shape[w_up.ndim - 2 : -1]
  if policy.features.block > 1 and sum(size > 1 for size in lead) > 1:
    _say_neighbours(x.shape, policy.features.block)
  tokens = math.prod(lead)
  plan = plan_neurons(policy, tokens, w_up.shape[-2], w_up.shape[-1], x.dtype)
  block, given = functools.partial(_block, plan), (x, w_up, w_down, state, b_up, b_down)
  if w_up.ndim == 2:
    return block(*given)
  if plan.plain is not None:
    return jax.vmap(block)(*given)
  # The kernels know no batch axis.
  return jnp.stack([block(*jax.tree.map(lambda a, i=i: a[i], given)) for i in range(x.shape[0])])


def _say_neighbours(shape: tuple[int, ...], v: int) -> None:
  message = (
    f'sparse activations choose features for {v} tokens in a row of x {list(shape)}, flattened to [tokens, d] whichever'
    ' axis a model maps over by jax.vmap. If these are of one sequence, a token depends on those behind it, and a'
    ' causal model sees what it is to predict. Give such a block [tokens, d] with tokens of one position in a row'
    ' (x.swapaxes(0, 1).reshape(-1, d) of [sequences, positions, d]), or take features=TwoOfFour(), which treats each'
    ' token by itself'
  )
  log_once(message, 'sparse24_jax', logging.WARNING)


def _block(
  plan: NeuronLevelPlan, x: Array, w_up: Array, w_down: Array, state: dict[str, Array], b_up: Array | None,
  b_down: Array | None,
) -> Array:  # fmt: skip
  policy, tokens = plan.policy, x.reshape(plan.tokens, plan.d)
  if not tokens.size:
    z = jnp.dot(jnp.square(jax.nn.relu(jnp.dot(tokens, w_up))), w_down)
  elif not policy.clusters:
    z = _ffn(plan, tokens, w_up, w_down, b_up, {k: state.get(k) for k in ('up', 'down')})
  else:
    neurons = state['neurons']
    route = route_tokens(tokens, w_up, neurons, clusters=policy.clusters.number, within=policy.clusters.within)
    order = jax.lax.stop_gradient(route)
    columns = jnp.argsort(neurons, stable=True)
    z = _ffn(
      plan, _take(tokens, order, 0), _take(w_up, columns, 1), _take(w_down, columns, 0),
      None if b_up is None else _take(b_up, columns, 0), {k: state.get(k) for k in ('up', 'down')},
    )
    z = _take(z, invert(order), 0)
  z = z.reshape(*x.shape[:-1], w_down.shape[1])
  return z if b_down is None else z + jnp.broadcast_to(b_down, z.shape)


@jax.custom_vjp
def _permute(x: Array, order: Array) -> Array:
  return x.at[order].get(unique_indices=True, mode='promise_in_bounds')


# The cotangent of a permutation is its inverse: a gather again, where JAX's own rule would scatter.
_permute.defvjp(lambda x, order: (_permute(x, order), order), lambda order, dx: (_permute(dx, invert(order)), None))


def _take(x: Array, order: Array, axis: int) -> Array:
  return _permute(x, order) if axis == 0 else _permute(x.T, order).T


def _check(x: Array, w_up: Array, w_down: Array, state: dict[str, Array], policy: ActivationPolicy) -> None:
  if w_up.ndim != 2 or w_down.ndim != 2 or w_up.shape[1] != w_down.shape[0]:
    raise ValueError(f'w_up must be [d, h] and w_down [h, d], found shapes {w_up.shape} and {w_down.shape}')
  if x.ndim < 1 or x.shape[-1] != w_up.shape[0]:
    raise ValueError(f'x of shape {x.shape} does not fit w_up of shape {w_up.shape}: axis -1 must be {w_up.shape[0]}')
  if not x.dtype == w_up.dtype == w_down.dtype:
    raise ValueError(f'x is {x.dtype}, w_up {w_up.dtype} and w_down {w_down.dtype}; cast them to one')
  projections = projections_of(policy)
  for name, w in (('up', w_up), ('down', w_down)):
    if (projection := projections[name]) is not None:
      check_divisible(w.shape, projection, f'w_{name}')
      check_state(state.get(name), abstract_state(projection, w.shape, w.dtype), projection)
  neurons = state.get('neurons')
  if policy.clusters and (neurons is None or neurons.shape != w_up.shape[1:]):
    found = None if neurons is None else neurons.shape
    raise ValueError(
      f"state['neurons'] must be int32 of shape {w_up.shape[1:]} for {policy.clusters}, found {found}; make it with"
      ' cluster_neurons'
    )
  tokens = tokens_of(x)
  if policy.clusters and policy.clusters.within and tokens % policy.clusters.within:
    raise ValueError(f'x has {tokens} tokens; within={policy.clusters.within} of clusters must divide them')
  for name, size, divisor, why in (
    ('x', tokens, policy.features.block, 'rows of a block'),
    ('h', w_up.shape[1], policy.features.group, 'columns of a group'),
  ):
    if size % divisor:
      what = 'tokens' if name == 'x' else 'neurons'
      raise ValueError(f'{name} has {size} {what}, not a multiple of the {divisor} {why}')


def _check_backward(tokens: int, neurons: int, policy: ActivationPolicy) -> None:
  """Checks what the weight gradients need, only where a gradient is taken."""
  group, block = policy.tokens.group, policy.features.block
  if tokens % group or neurons % block:
    raise ValueError(
      f'the weight gradients group tokens by {group} and neurons by {block}: found {tokens} tokens'
      f' and {neurons} neurons'
    )


def matmuls_of(plan: NeuronLevelPlan) -> Reference:
  """The matmuls of a plan: on kernels, or in plain jnp with the masks that define the policy's patterns."""
  if plan.plain is not None:
    return Reference(plan.policy)
  kernels = SparseVNMTwoOfFour if isinstance(plan.policy.tokens, TwoOfFour) else SparseVNM
  return kernels(plan.policy, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ffn(plan: NeuronLevelPlan, x: Array, w_up: Array, w_down: Array, b_up: Array | None, state: Any) -> Array:
  return _ffn_fwd(plan, x, w_up, w_down, b_up, state, backward=False)[0]


def _ffn_fwd(plan, x, w_up, w_down, b_up, state, *, backward=True):
  if backward:
    _check_backward(x.shape[0], w_up.shape[1], plan.policy)
    x, w_up, w_down, b_up = once((x, w_up, w_down, b_up))
  ops, projections = matmuls_of(plan), projections_of(plan.policy)
  up = ops.weight(w_up, projections['up'], state['up'], -2)
  down = ops.weight(w_down, projections['down'], state['down'], -1)
  h = ops.by_weight(x, up)
  h = h if b_up is None else h + b_up[None, :]
  y = ops.activate(h, backward)
  return ops.over_neurons(y, down), (x, ops.save(y) if backward else None, up, down, b_up)


def _ffn_bwd(plan, residuals, dz):
  x, saved, up, down, b_up = residuals
  ops = matmuls_of(plan)
  y = ops.restore(saved)
  dh = ops.pull_back(y, ops.by_weight(dz, down), b_up is not None)
  pattern = ops.token_pattern(y, densest(ops.uses(y), plan.policy))
  dw2 = ops.over_tokens(y, pattern, True, dz)
  dx = ops.over_neurons(dh, up)
  dw1 = ops.over_tokens(dh, pattern, False, x).T
  db = None if b_up is None else jnp.sum(dh.entries, axis=0, dtype=jnp.float32).astype(b_up.dtype)
  return dx, dw1, dw2, db, None


_ffn.defvjp(_ffn_fwd, _ffn_bwd)
