"""The squared-ReLU feed-forward block in which all six matmuls have a sparse operand.

With H = X W1, Y = relu(H)^2, Z = Y W2 and cotangents d., every product takes its sparse side from a weight in the
direction in which the projection makes it 2:4, or from the activations, whose zeros are data:

    product           sparse operand    2:4 (2:M) along
    H  = X W1         W1                its input
    Z  = Y W2         Y                 features
    dY = dZ W2^T      W2                its output
    dW2 = Y^T dZ      Y                 tokens
    dX = dH W1^T      dH                features
    dW1 = X^T dH      dH                tokens

dH = 2 dY relu(H) is zero wherever Y is, so it inherits Y's pattern. No weight is needed 2:4 in two directions, hence no
transposable mask; and no gradient has to be made sparse by sampling, hence no MVUE.
"""

import dataclasses
import functools
import math
import numbers
from typing import Any, Literal

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels.prune.reference import magnitude_mask
from pallas_kernels.vnm.reference import vnm_mask
from sparse24_jax import _activation_products as products
from sparse24_jax.dot import check_divisible, check_state
from sparse24_jax.neurons import invert, route_tokens, spread, unspread
from sparse24_jax.projection import Projection, soft_threshold_projection

# The share of neurons whose weight gradients run dense in arXiv 2503.16672.
PUBLISHED_DENSE_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class ActivationPolicy:
  """How a squared-ReLU feed-forward block is made sparse; frozen data, a static argument.

  The default differs from the paper in what the weight gradients keep: `token_pattern` says how, why, and how to have
  the published pattern. Fields stay as given, so that `dataclasses.replace` decides anew what None means;
  `keeps_two_of_four_tokens` and `dense_share` are what they come to.

  Attributes:
    pattern: `'v:n:m'` (arXiv 2602.06183): blocks of `v` tokens keep four of each `m` neurons and each token two of
      these. `'2:4'` (arXiv 2503.16672): each token keeps two of each four neurons.
    v: V of V:2:M. No paper gives it; 64 and 128 are those of the format's authors.
    m: M of V:2:M. No paper gives it. The defaults of V, M and clusters are ours; no search chose them.
    dense_features: share of the neurons, those most often active, whose weight gradients run dense, 0 to 1. None is 0
      where V:N:M keeps two of four tokens, which loses next to nothing without, and 0.05 elsewhere, that of arXiv
      2503.16672: tokens that use such a neuron are too many for two of four. In blocks of V:N:M along tokens, which
      drop half of them, 0.2 ended a small model 0.8% above dense, 0.05 2.3% (`docs/quality.md`); it costs time.
    token_pattern: of the weight gradients, along tokens, for `pattern='v:n:m'`. `'2:4'`: a neuron keeps two of four
      neighbouring tokens, of which the forward has left few. Ours. `'v:n:m'`: a block of neurons drops half of the
      tokens; the published pattern (arXiv 2602.06183). None is the former, with clusters the latter, as these put
      tokens side by side that use the same neurons. With 128:2:8 a model of 10.7 M parameters ended 0.4% above dense
      by `'2:4'` and 2.3% by `'v:n:m'`, a smaller one 2.4% and 9.9% (`docs/quality.md`). A block of 64:2:8 is faster by
      `'2:4'`, one of 128:2:8 slower, where a step of 1.3B parameters took as long (`docs/speed.md`).
    clusters: of neurons, to which tokens are sent, so that a block's tokens use the same neurons; needs the state
      `'neurons'`. 0 leaves tokens and neurons in their order.
    route_within: how many neighbouring tokens are routed among each other, a multiple of `v`; 0 is all of them. In a
      causal model: the sequences of a step, with their tokens of one position as neighbours. Ours.
    up: projection of `w_up`, along its input; None leaves it dense.
    down: projection of `w_down`, along its output; None leaves it dense.
    implementation: `'kernels'` runs the products on sparse tensor cores; `'reference'` is plain `jax.numpy`; None is
      the former where they are known to pay, and logs once why not elsewhere. That takes the pattern `'v:n:m'` without
      clusters and both soft thresholds; one Hopper GPU, no mesh, with jax-triton; tokens and neurons in multiples of
      `v` and `16 m` and a width in multiples of 64; and records of that card, of products with sizes within a factor of
      two, by which the block gains 10% or more. Of experts each is a block with its own share of the tokens; the
      kernels serve them one after another.

  >>> import sparse24_jax as s24
  >>> policy = s24.ActivationPolicy(v=128, m=16)  # each token keeps 2 of 16 neurons, in blocks of 128 tokens
  >>> recipe = s24.recipes.neuron_level('.*/up/kernel', '.*/down/kernel', policy=policy)
  >>> {rule.activation == policy for rule in recipe.rules}
  {True}
  >>> published = s24.ActivationPolicy(v=128, m=16, token_pattern='v:n:m')
  >>> policy.dense_share, published.dense_share
  (0.0, 0.05)
  """

  pattern: Literal['v:n:m', '2:4'] = 'v:n:m'
  v: int = 64
  m: int = 8
  dense_features: float | None = None
  token_pattern: Literal['v:n:m', '2:4'] | None = None
  clusters: int = 0
  route_within: int = 0
  up: Projection | None = dataclasses.field(default_factory=soft_threshold_projection)
  down: Projection | None = dataclasses.field(default_factory=lambda: soft_threshold_projection(axis=-1))
  implementation: Literal['reference', 'kernels'] | None = None

  def __post_init__(self):
    for name, accepted in (
      ('pattern', ('v:n:m', '2:4')), ('token_pattern', (None, 'v:n:m', '2:4')),
      ('implementation', (None, 'reference', 'kernels')),
    ):
      if getattr(self, name) not in accepted:
        raise ValueError(f'{name}={getattr(self, name)!r}: known are {list(accepted)}')
    for name, least in (('v', 1), ('m', 4), ('clusters', 0), ('route_within', 0)):
      value = getattr(self, name)
      if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f'{name}={value!r} must be a whole number, {least} or more')
    if not 0 <= self.dense_share <= 1:
      raise ValueError(f'dense_features={self.dense_features} must be from 0 to 1')
    if self.route_within % self.v or (self.route_within and not self.clusters):
      raise ValueError(f'route_within={self.route_within} must be a multiple of v={self.v}, and takes clusters')
    if (self.pattern, self.token_pattern) == ('2:4', 'v:n:m'):
      raise ValueError("token_pattern='v:n:m' is for pattern='v:n:m': blocks of neurons drop tokens that 2:4 keeps")
    if self.clusters and self.token_pattern == '2:4':
      raise ValueError(f"clusters={self.clusters} put tokens side by side that use the same neurons, of which"
                       " token_pattern='2:4' would drop two of four")
    if self.clusters and self.pattern == '2:4':
      raise ValueError(f"clusters={self.clusters} are for pattern='v:n:m': 2:4 treats each token by itself")
    if self.up is not None and self.up.divisor[0] % 4:
      raise ValueError(f'up={self.up.name!r} must be 2:4 along the input: soft_threshold_projection()')
    if self.down is not None and self.down.divisor[1] % 4:
      raise ValueError(f'down={self.down.name!r} must be 2:4 along the output: soft_threshold_projection(axis=-1)')

  @property
  def group(self) -> int:
    """Columns of a group: M, or 4."""
    return 4 if self.pattern == '2:4' else self.m

  @property
  def block(self) -> int:
    """Rows of a block: V, or 1."""
    return 1 if self.pattern == '2:4' else self.v

  @property
  def token_group(self) -> int:
    """Tokens of a group in the weight gradients: M, or 4."""
    return 4 if self.keeps_two_of_four_tokens else self.group

  @property
  def keeps_two_of_four_tokens(self) -> bool:
    """Whether blocks of tokens choose their neurons, but neurons two of four tokens."""
    if self.pattern == '2:4':
      return False
    return self.token_pattern == '2:4' or (self.token_pattern is None and not self.clusters)

  @property
  def dense_share(self) -> float:
    """Share of the neurons whose weight gradients run dense: `dense_features`, or what None is."""
    if self.dense_features is not None:
      return self.dense_features
    return 0.0 if self.keeps_two_of_four_tokens else PUBLISHED_DENSE_SHARE

  def describe(self) -> dict[str, Any]:
    """Plain values for logs and checkpoints, without the choice of kernels: what it comes to, however it was asked for.

    >>> import sparse24_jax as s24
    >>> s24.ActivationPolicy().describe()['token_pattern']
    '2:4'
    """
    # Checkpoints of blocks of V:N:M along tokens, and those without a window, say nothing of these.
    token_pattern, within = '2:4' if self.keeps_two_of_four_tokens else None, self.route_within
    return dict(
      pattern=f'{self.v}:2:{self.m}' if self.pattern == 'v:n:m' else '2:4', dense_features=self.dense_share,
      clusters=self.clusters, up=self.up.name if self.up else None, down=self.down.name if self.down else None,
    ) | {name: value for name, value in (('route_within', within), ('token_pattern', token_pattern)) if value}


def feature_mask(y: Array, policy: ActivationPolicy) -> Array:
  """The forward's pattern, along neurons."""
  if policy.pattern == '2:4':
    return magnitude_mask(y, axis=-1) | jnp.isnan(y)
  if not policy.clusters:
    return vnm_mask(y, v=policy.v, m=policy.m)
  # Neurons come sorted by cluster, and a group takes one from each part of them.
  return unspread(vnm_mask(spread(y, policy.m, 1), v=policy.v, m=policy.m), policy.m, 1)


def token_mask(y: Array, policy: ActivationPolicy) -> Array:
  """The weight gradients' pattern, along tokens, of activations `y` that are zero outside the forward's pattern.

  Tokens are grouped across the batch, a quarter (an M-th) of it apart: neighbours use the same neurons, and of four
  that do, two would be lost. This is the fixed permutation of arXiv 2503.16672, which does not say which one. In blocks
  of V:N:M neighbours are tokens of different sequences, which 2:4 along tokens takes as they come.
  """
  if policy.keeps_two_of_four_tokens:
    return magnitude_mask(y, axis=-2)
  m = policy.group
  apart = spread(y, m, 0)
  mask = magnitude_mask(apart, axis=-2) if policy.pattern == '2:4' else vnm_mask(apart.T, v=policy.v, m=m).T
  return unspread(mask, m, 0)


def densest(uses: Array, policy: ActivationPolicy) -> Array:
  """The neurons that most tokens use, a `dense_share` of them; `uses` says how many do, for each."""
  # In order: neighbours share cache lines where their columns are taken.
  return jnp.sort(jax.lax.top_k(uses, round(policy.dense_share * uses.shape[0]))[1])


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
  their projections. In the weight gradients the activations are, beyond that, 2:4 along tokens, or 2:M with that
  `token_pattern`, except for the densest features, which is where the backward departs from the derivative.

  The choice of a block's neurons sees all its tokens, later ones included. Evaluate and finish training dense, as the
  recipe does; with `pattern='2:4'` the forward treats each token by itself.

  Args:
    x: `[..., d]`; all axes but the last are tokens, in multiples of `v` and `m`. With experts `[experts, ..., d]`.
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
  arXiv 2503.16672 (2:4 activations, dense features). Which operand is sparse in which product, the rule for the columns
  and the pattern along tokens are ours where the papers' abstracts do not say; two of four tokens beside V:N:M are ours
  throughout.

  >>> import jax, sparse24_jax as s24
  >>> from sparse24_jax.activation_sparsity import ActivationPolicy, neuron_level_ffn
  >>> policy = ActivationPolicy(v=4, m=8)
  >>> x, w_up, w_down = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(16, 8), (8, 32), (32, 8)]))
  >>> state = {'up': policy.up.init(w_up), 'down': policy.down.init(w_down)}
  >>> neuron_level_ffn(x, w_up, w_down, state, policy=policy).shape
  (16, 8)
  """
  del key
  for name, bias, w in (('b_up', b_up, w_up), ('b_down', b_down, w_down)):
    if bias is not None and bias.shape != (*w.shape[:-2], w.shape[-1]):
      raise ValueError(f'{name} must be of shape {(*w.shape[:-2], w.shape[-1])}, found {bias.shape}')
  if w_up.ndim == 3:
    def expert(x, w_up, w_down, state, b_up, b_down):
      return neuron_level_ffn(x, w_up, w_down, state, policy=policy, b_up=b_up, b_down=b_down)

    if x.ndim < 2 or not x.shape[0] == w_up.shape[0] == w_down.shape[0]:
      raise ValueError(f'x of shape {x.shape}, w_up {w_up.shape} and w_down {w_down.shape} differ in their experts')
    batched = (x, w_up, w_down, state, b_up, b_down)
    if products.takes_kernels(policy, math.prod(x.shape[1:-1]), w_up.shape[1:], x.dtype):  # they know no batch axis
      experts = [expert(*jax.tree.map(lambda a, i=i: a[i], batched)) for i in range(x.shape[0])]
      return jnp.stack(experts)
    return jax.vmap(expert)(*batched)
  _check(x, w_up, w_down, state, policy)
  tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
  how = policy, products.takes_kernels(policy, tokens.shape[0], w_up.shape, x.dtype)
  if not tokens.size:
    z = jnp.dot(jnp.square(jax.nn.relu(jnp.dot(tokens, w_up))), w_down)
  elif not policy.clusters:
    z = _ffn(how, tokens, w_up, w_down, b_up, {k: state.get(k) for k in ('up', 'down')})
  else:
    neurons = state['neurons']
    route = route_tokens(tokens, w_up, neurons, clusters=policy.clusters, within=policy.route_within)
    order = jax.lax.stop_gradient(route)
    columns = jnp.argsort(neurons, stable=True)
    states = {
      'up': _with_weight(state.get('up'), w_up, columns, 1), 'down': _with_weight(state.get('down'), w_down, columns, 0)
    }
    z = _ffn(
      how, _take(tokens, order, 0), _take(w_up, columns, 1), _take(w_down, columns, 0),
      None if b_up is None else _take(b_up, columns, 0), states,
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


def _with_weight(state: Array | None, w: Array, order: Array, axis: int) -> Array | None:
  """The projection's state of the permuted weight: a mask moves along, a scale of the matrix stays."""
  return state if state is None or state.shape != w.shape else jnp.take(state, order, axis=axis)


def _check(x: Array, w_up: Array, w_down: Array, state: dict[str, Array], policy: ActivationPolicy) -> None:
  if w_up.ndim != 2 or w_down.ndim != 2 or w_up.shape[1] != w_down.shape[0]:
    raise ValueError(f'w_up must be [d, h] and w_down [h, d], found shapes {w_up.shape} and {w_down.shape}')
  if x.ndim < 1 or x.shape[-1] != w_up.shape[0]:
    raise ValueError(f'x of shape {x.shape} does not fit w_up of shape {w_up.shape}: axis -1 must be {w_up.shape[0]}')
  if not x.dtype == w_up.dtype == w_down.dtype:
    raise ValueError(f'x is {x.dtype}, w_up {w_up.dtype} and w_down {w_down.dtype}; cast them to one')
  for name, w, projection in (('up', w_up, policy.up), ('down', w_down, policy.down)):
    if projection is not None:
      check_divisible(w.shape, projection, f'w_{name}')
      check_state(state.get(name), jax.eval_shape(projection.init, w), projection)
  neurons = state.get('neurons')
  if policy.clusters and (neurons is None or neurons.shape != w_up.shape[1:]):
    found = None if neurons is None else neurons.shape
    raise ValueError(
      f"state['neurons'] must be int32 of shape {w_up.shape[1:]} for clusters={policy.clusters}, found {found}; make it"
      ' with cluster_neurons'
    )
  tokens = math.prod(x.shape[:-1])
  if policy.route_within and tokens % policy.route_within:
    raise ValueError(f'x has {tokens} tokens; route_within={policy.route_within} must divide them')
  for name, size, divisor, why in (
    ('x', tokens, policy.block, 'rows of a block'), ('h', w_up.shape[1], policy.group, 'columns of a group')
  ):
    if size % divisor:
      raise ValueError(f'{name} has {size} {"tokens" if name == "x" else "neurons"}; {divisor} are the {why}')


def _check_backward(tokens: int, neurons: int, policy: ActivationPolicy) -> None:
  """What the weight gradients need, asked only where a gradient is taken."""
  if tokens % policy.token_group or neurons % policy.block:
    raise ValueError(
      f'the weight gradients group tokens by {policy.token_group} and neurons by {policy.block}: found {tokens} tokens'
      f' and {neurons} neurons'
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ffn(how: tuple, x: Array, w_up: Array, w_down: Array, b_up: Array | None, state: Any) -> Array:
  # `how` is the policy, and whether the kernels serve it.
  return _ffn_fwd(how, x, w_up, w_down, b_up, state, backward=False)[0]


def _ffn_fwd(how, x, w_up, w_down, b_up, state, *, backward=True):
  policy, kernels = how
  if backward:
    _check_backward(x.shape[0], w_up.shape[1], policy)
  ops = products.make(policy, kernels, feature_mask, token_mask)
  up = ops.weight(w_up, policy.up, state['up'], -2)
  down = ops.weight(w_down, policy.down, state['down'], -1)
  h = ops.by_weight(x, up)
  h = h if b_up is None else h + b_up[None, :]
  y = ops.activate(h, backward)
  return ops.over_neurons(y, down), (x, ops.save(y) if backward else None, up, down, b_up)


def _ffn_bwd(how, residuals, dz):
  policy, kernels = how
  x, saved, up, down, b_up = residuals
  ops = products.make(policy, kernels, feature_mask, token_mask)
  y = ops.restore(saved)
  dh = ops.pull_back(y, ops.by_weight(dz, down), b_up is not None)
  pattern = ops.token_pattern(y, densest(ops.uses(y), policy))
  dw2 = ops.over_tokens(y, pattern, True, dz)
  dx = ops.over_neurons(dh, up)
  dw1 = ops.over_tokens(dh, pattern, False, x).T
  db = None if b_up is None else jnp.sum(dh.entries, axis=0, dtype=jnp.float32).astype(b_up.dtype)
  return dx, dw1, dw2, db, None


_ffn.defvjp(_ffn_fwd, _ffn_bwd)
