"""The feed-forward block as one op: up-projection, activation, down-projection, six sparse matmuls.

On kernels nothing stands between the matmuls but what has to: the first matmul writes z and its activation (with a
gate, a pass of its own makes h); the backward reads them and dh once, and the pass that makes dz also draws the MVUE
sample of dz and packs it.

                      sparse operand        dense operand    written
    z  = x W_up       W_up^T along d        x                z [tokens, h]
    y  = h W_down     W_down^T along h      h = act(z)       y [tokens, d]
    dW_down           V(dy)^T along tokens  h                dW_down [h, d]; exact it is dense, h^T dy
    dh = dy W_down^T  W_down along d        dy               dh [tokens, h]
    dW_up             V(dz)^T along tokens  x                dW_up [d, h]
    dx = dz W_up^T    W_up along h          dz = dh act'(z)  dx [tokens, d]

All of them are row-major in tokens and features, so nothing is transposed in memory. With a gate, W_up stands for
[W_gate | W_up] and z for the two side by side: one matmul each.
"""

from collections.abc import Mapping
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import _partitioning
from pallas_kernels._varying import vary_over, varying_axes
from pallas_kernels.activations import activation_of, Name
from pallas_kernels.two_of_four.philox import two_keys
from sparse24_jax import linear_layer
from sparse24_jax.asked import Asked
from sparse24_jax.block_plan import BlockPlan, plan_block
from sparse24_jax.derivatives import once
from sparse24_jax.dot import check_operands, dot_at
from sparse24_jax.matmuls import add_bias
from sparse24_jax.mvue import check_sampling, Sampled, what_is_sampled
from sparse24_jax.policy import DotPolicy
from sparse24_jax.precision import Rounded
from sparse24_jax.sizes import tokens_of


def ffn(
  x: Array,
  w_up: Array,
  w_down: Array,
  state: Mapping[str, Any] | None = None,
  *,
  policy: DotPolicy,
  activation: Name = 'gelu',
  w_gate: Array | None = None,
  b_up: Array | None = None,
  b_gate: Array | None = None,
  b_down: Array | None = None,
  key: Array | None = None,
  precision: Any = None,
  hidden_sharding: jax.NamedSharding | None = None,
) -> Array:
  """act(x W~_up + b_up) W~_down + b_down, or with a gate (act(x W~_gate + b_gate) * (x W~_up + b_up)) W~_down + b_down.

  The gradients are those of `dot` for each weight. Where the policy's plan puts all six matmuls on one kernel, the
  block runs fused; elsewhere it is made of `dot`s, with the same MVUE samples.

  Args:
    x: `[..., d]`, float32, bfloat16 or float16; the product of its leading axes is a multiple of four under MVUE.
    w_up: `[d, h]`, dtype of `x`.
    w_down: `[h, d_out]`.
    state: projection states or `PackedWeight`s of the weights, under 'up', 'down' and, with a gate, 'gate'.
    policy: how the matmuls are done, the same for all weights.
    activation: 'gelu' (tanh form), 'gelu_exact' (by erf), 'silu', 'relu' or 'squared_relu'.
    w_gate: `[d, h]`, or None. With it 'silu' makes SwiGLU and 'gelu' GEGLU.
    b_up: `[h]`, or None.
    b_gate: `[h]`, or None; only with a gate.
    b_down: `[d_out]`, or None.
    key: random key for MVUE, needed where a gradient is taken.
    precision: of all matmuls, as `jax.lax.dot_general` takes it.
    hidden_sharding: how a mesh divides the hidden layer `[..., h]` and its gradient, as
      `jax.lax.with_sharding_constraint` takes it. None leaves it to the compiler.

  Returns:
    `[..., d_out]`, dtype of `x`.

  Raises:
    ValueError: unknown activation, shapes, dtypes, states or key do not fit.

  Source: Hu et al., arXiv 2404.01847, equations 2 to 4 and section 5.2; Shazeer, arXiv 2002.05202.

  >>> import jax, sparse24_jax as s24
  >>> policy = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue')
  >>> keys = jax.random.split(jax.random.key(0), 3)
  >>> x, up, down = (jax.random.normal(k, s) for k, s in zip(keys, [(8, 16), (16, 64), (64, 16)]))
  >>> state = {'up': policy.projection.init(up), 'down': policy.projection.init(down)}
  >>> s24.ffn(x, up, down, state, policy=policy).shape
  (8, 16)
  """
  weights = {'up': w_up, 'down': w_down} | ({} if w_gate is None else {'gate': w_gate})
  return ffn_at(
    x, weights, {'up': b_up, 'down': b_down, 'gate': b_gate}, state, policy=policy, activation=activation, key=key,
    precision=precision, hidden_sharding=hidden_sharding,
  )  # fmt: skip


def ffn_at(
  x: Array, weights: Mapping[str, Array], biases: Mapping[str, Array | None], state: Mapping[str, Any] | None, *,
  policy: DotPolicy, activation: Name, key: Array | None, precision: Any, hidden_sharding: jax.NamedSharding | None,
  down: DotPolicy | None = None, plan: BlockPlan | None = None,
) -> Array:  # fmt: skip
  """`ffn` of weights and biases by role, by a plan that was made before, if there is one; `down` as in `plan_block`."""
  act = activation_of(activation).function
  x, weights = jax.tree.map(jnp.asarray, (x, dict(weights)))
  biases = {role: biases.get(role) for role in ('up', 'down', 'gate')}
  states = _states(state, weights, policy)
  _check(x, weights, biases, states, policy)
  hidden_key, down_key = (None, None) if key is None else two_keys(key)
  keys = {'hidden': hidden_key, 'down': down_key}
  asked = Asked.of(precision, None, x.dtype)
  hidden = _Hidden(x.shape[:-1], hidden_sharding)
  if plan is None:
    sides = {name: w.shape for name, w in weights.items()}
    plain = policy.is_plain and (down is None or down.is_plain)
    tokens = math.prod(x.shape[:-1]) if plain else tokens_of(x)  # which a plain plan may leave open
    plan = plan_block(policy, tokens, sides, x.dtype, (x, weights), down=down, asked=asked)
  if not plan.fused:
    policies = dict.fromkeys(weights, policy) | {'down': down or policy}
    return _composed(plan, x, weights, biases, states, keys, policies, act, asked, hidden)
  packed = {
    name: linear_layer.packed_weight(plan.layers[name], policy, w, states[name]) for name, w in weights.items()
  }
  # Rounded as a `dot`'s bias is, and outside the op, so that their gradients have the dtype that they came in.
  biases = {role: None if b is None else b.astype(x.dtype) for role, b in biases.items()}
  b_up, b_gate, b_down = biases['up'], biases['gate'], biases['down']
  if b_gate is not None or (plan.gate is not None and b_up is not None):
    # The gate's bias in front, as its columns are.
    biases['up'] = jnp.concatenate([jnp.zeros(plan.up.d_out, x.dtype) if b is None else b for b in (b_gate, b_up)])
  # As in `dot`: replicated weights that meet tokens that vary over mesh axes get their gradients summed.
  axes = frozenset().union(*map(varying_axes, jax.tree.leaves((x, weights, packed, keys))))
  x, weights, biases = jax.tree.map(lambda a: vary_over(a, axes), (x, weights, dict(up=biases['up'], down=b_down)))
  # Where types say how arrays are divided: the op gives gradients on every device, and JAX takes the parts it wants.
  weights, biases = jax.tree.map(_partitioning.whole, (weights, biases))
  static = _Static(plan, activation, what_is_sampled(x, 'mvue', keys['down']), hidden)
  return _of_blocks_alike(static, x.reshape(-1, x.shape[-1]), weights, biases, packed, keys).reshape(*x.shape[:-1], -1)


def _states(state: Mapping[str, Any] | None, weights: Mapping[str, Array], policy: DotPolicy) -> dict[str, Any]:
  if policy.projection is None:
    return dict.fromkeys(weights)
  if not isinstance(state, Mapping) or set(state) != set(weights):
    found = sorted(state) if isinstance(state, Mapping) else type(state).__name__
    raise ValueError(f'state must be a dict with the keys {sorted(weights)}, found {found}')
  return dict(state)


def _check(
  x: Array, weights: Mapping[str, Array], biases: Mapping[str, Array | None], states: Mapping[str, Any],
  policy: DotPolicy,
) -> None:  # fmt: skip
  w_up, w_down = weights['up'], weights['down']
  if w_up.ndim != 2 or w_down.ndim != 2 or w_down.shape[0] != w_up.shape[1]:
    raise ValueError(f'w_up and w_down must be [d, h] and [h, d_out], found {w_up.shape} and {w_down.shape}')
  if 'gate' in weights and weights['gate'].shape != w_up.shape:
    raise ValueError(f'w_gate and w_up must have one shape, found {weights["gate"].shape} and {w_up.shape}')
  hidden = jax.ShapeDtypeStruct((*x.shape[:-1], w_up.shape[1]), x.dtype)
  for name, w in weights.items():
    check_operands(hidden if name == 'down' else x, w, states[name], policy)
  for name, bias in biases.items():
    if bias is not None and name not in weights:
      raise ValueError(f'b_{name} is given and w_{name} is not')
    if bias is not None and bias.shape != weights[name].shape[1:]:
      raise ValueError(f'b_{name} must have shape {weights[name].shape[1:]}, found {bias.shape}')


def _composed(plan: BlockPlan, x, weights, biases, states, keys, policies, act, asked, hidden) -> Array:
  """The block from `dot`s, each by its part of the plan."""

  def linear(name: str, x: Array, key: Array | None, column: int = 0) -> Array:
    z = dot_at(
      x, weights[name], states[name], policy=policies[name], key=key, column=column, asked=asked,
      plan=plan.layers[name],
    )
    return add_bias(z, biases[name])

  if 'gate' not in weights:
    h = act(linear('up', x, keys['hidden']))
  else:
    h = act(linear('gate', x, keys['hidden'])) * linear('up', x, keys['hidden'], weights['up'].shape[1])
  return linear('down', hidden.constrained(h), keys['down'])


class _Hidden(NamedTuple):
  """How the hidden layer is divided: its axes of tokens, and the sharding of it with these."""

  tokens: tuple[int, ...]
  sharding: jax.NamedSharding | None

  def constrained(self, h: Array, *stacked: int) -> Array:
    """`h` `[..., stacked..., h]`, or a gradient of it, divided so; its tokens may be one axis."""
    if self.sharding is None:
      return h
    spec = (*self.sharding.spec, *(None,) * (len(self.tokens) + 1 - len(self.sharding.spec)))
    sharding = self.sharding.update(spec=jax.P(*spec[:-1], *(None,) * len(stacked), spec[-1]))
    whole = h.reshape(*self.tokens, *stacked, h.shape[-1])
    return jax.lax.with_sharding_constraint(whole, sharding).reshape(h.shape)


class _Static(NamedTuple):
  """The static arguments of a fused block: plan, activation, names for errors, how its hidden layer is divided."""

  plan: BlockPlan
  activation: str
  where: Sampled
  hidden: _Hidden

  @property
  def gated(self) -> bool:
    """Whether it has a gate."""
    return self.plan.gate is not None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sparse24_ffn(static: _Static, x: Array, weights: Any, biases: Any, packed: Any, keys: Any) -> Array:
  return _forward(static, x, biases, packed, keep=False)[0]


def _forward(static: _Static, x: Array, biases: Any, packed: Any, *, keep: bool) -> tuple[Array, Any, Any, Any]:
  """(y, x, z, h), x and h rounded; without a gate z is None unless kept, with one `[tokens, 2, h]`."""
  plan, activation = static.plan, static.activation
  precision = plan.precision
  up, down = (dict(backend=layer.backends.forward, dtype=x.dtype) for layer in (plan.up, plan.down))
  rows, amax = precision.rounded(x, keep=keep), None
  if static.gated:
    bias = None if biases['up'] is None else biases['up'].reshape(2, -1)
    z = linear_layer.multiply_pair('forward', packed['gate'], packed['up'], rows, precision=precision, bias=bias, **up)
    z = static.hidden.constrained(z, 2)
    h = jax.custom_batching.sequential_vmap(functools.partial(linear_layer.gate, activation=activation))(z)
  else:
    asked = dict(keep_preactivation=keep, amax=precision.notes_amax)
    found = precision.forward(packed['up'], rows, bias=biases['up'], activation=activation, **asked, **up)
    h, *others = found if any(asked.values()) else (found,)
    z = static.hidden.constrained(others.pop(0)) if keep else None
    amax = others.pop() if others else None
  h = precision.rounded(static.hidden.constrained(h), keep=keep, amax=amax)
  return precision.forward(packed['down'], h, bias=biases['down'], **down), rows, z, h


def _fused_fwd(static, x, weights, biases, packed, keys):
  check_sampling(x, 'mvue', keys['down'], static.where)
  x, weights, biases = once((x, weights, biases))
  y, rows, z, h = _forward(static, x, biases, packed, keep=True)
  backend = static.plan.up.backends.input_grad
  operands = {name: static.plan.precision.reads(p, 'input_grad', backend) for name, p in packed.items()}
  there = {name: () for name, bias in biases.items() if bias is not None}
  return y, (rows.for_backward, z, h.for_backward, operands, there, keys, _partitioning.division(x))


def _fused_bwd(static, residuals, dy):
  precision, (x, z, h, packed, there, keys, divided) = static.plan.precision, residuals
  backends = static.plan.up.backends  # the same in all of its layers, but for the forward
  sampling = dict(backend=backends.weight_grad, precision=precision)
  dense = dict(backend=backends.input_grad, dtype=dy.dtype)
  key = keys['down'] if static.plan.down.sampled else None
  dy_rounded, dw_down = linear_layer.kernel_weight_grad(dy, key, h, **sampling)
  notes = precision.notes_of_dh(static.activation, gated=static.gated)
  found = precision.input_grad(packed['down'], dy_rounded, amax=notes, **dense)
  dh, amax = found if notes else (found, None)
  dz, dw_hidden = linear_layer.activation_and_weight_grad(
    static.hidden.constrained(dh), z, keys['hidden'], x, amax, activation=static.activation, gated=static.gated,
    **sampling,
  )
  if static.gated:
    dx = linear_layer.multiply_pair('input_grad', packed['gate'], packed['up'], dz, precision=precision, **dense)
  else:
    dx = precision.input_grad(packed['up'], dz, **dense)
  dx = _partitioning.like(dx, divided)
  dw = dict(zip(('down', 'gate', 'up') if static.gated else ('down', 'up'), (dw_down, *dw_hidden), strict=True))
  given = {'up': dz, 'down': Rounded(dy, None)}
  made = {name: _partitioning.whole(precision.bias_grad(g, dy.dtype)) for name, g in given.items() if name in there}
  db = {name: made[name].reshape(-1) if name in made else None for name in given}
  return dx, dw, db, None, None


# Under `jax.checkpoint` a forward whose residuals are thrown away writes none: see `keep`.
_sparse24_ffn.defvjp(_fused_fwd, _fused_bwd, optimize_remat=True)
# As in `dot`: traced and differentiated once.
_of_blocks_alike = jax.jit(_sparse24_ffn, static_argnums=0, inline=True)
