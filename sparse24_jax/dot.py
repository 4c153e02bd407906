"""The sparse matmul of training: one differentiable op, three matmuls, each with its sparse operand.

                     dense       sparse
    forward          z  = x W~           W~ is 2:4 along `in`
    input gradient   dx = dz W~^T        W~^T is 2:4 along `out` if the projection is transposable
    weight gradient  dw = x^T V(dz)      V(dz), the MVUE of dz, is 2:4 along tokens

W~ is the projected weight. The weight's cotangent is dw as it stands: the straight-through estimator, for kept and
pruned weights alike.
"""

import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import _partitioning
from pallas_kernels._varying import vary_over, varying_axes
from pallas_kernels.formats import check_floating
from sparse24_jax import linear_layer
from sparse24_jax.asked import Asked, PLAIN
from sparse24_jax.derivatives import once
from sparse24_jax.layer_plan import LayerPlan
from sparse24_jax.mvue import check_sampling, Sampled, what_is_sampled
from sparse24_jax.plan import plan_layer
from sparse24_jax.policy import DotPolicy
from sparse24_jax.precision import Rounded
from sparse24_jax.projection import abstract_state, Projection
from sparse24_jax.sizes import tokens_of


def dot(
  x: Array, w: Array, state: Any = None, *, policy: DotPolicy, key: Array | None = None, precision: Any = None,
  preferred_element_type: Any = None,
) -> Array:  # fmt: skip
  """x W~, with the gradients that `policy` names.

  Args:
    x: `[..., in]`, float32, bfloat16 or float16. All axes but the last are tokens; with MVUE their product must be a
      multiple of four.
    w: `[in, out]`, same dtype as `x`; dense. Sides as the projection asks: multiples of 4, or of 4 and 4.
    state: the projection's state for this weight, or the `PackedWeight` that `sparse_variables` makes of it. A mask is
      one of `w` as it is given here, `[in, out]`, and so must the weight be stored for which an optimizer chose it.
      With `w.T` of a stored `[out, in]` it is an error by its shape, but not if both sides are as long: there the
      groups would lie along the wrong axis, and nothing tells.
    policy: how the matmuls are done.
    key: random key for MVUE, needed where a gradient is taken; the same key gives the same sample. Fold in a
      step, a micro-batch and a layer, and under `shard_map` the index of the shard.
    precision: as in `jax.lax.dot_general`, of all three matmuls.
    preferred_element_type: dtype of the result; None is that of `x`. Where it is another one, so is that of the output
      gradient, and all three matmuls are plain ones.

  Returns:
    `[..., out]`, dtype of `x` or `preferred_element_type`; sums in float32.

  Raises:
    ValueError: shapes, dtypes, state or key do not fit the policy, or its gradient is differentiated again.

  Source: Hu et al., arXiv 2404.01847, equations 2 to 4; arXiv 2409.09099, section 4.

  >>> import jax, sparse24_jax as s24
  >>> policy = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue')
  >>> x, w = jax.random.normal(jax.random.key(0), (8, 16)), jax.random.normal(jax.random.key(1), (16, 4))
  >>> state = policy.projection.init(w)
  >>> loss = lambda w: s24.dot(x, w, state, policy=policy, key=jax.random.key(2)).sum()
  >>> jax.grad(loss)(w).shape, bool((jax.grad(loss)(w) != 0).all())
  ((16, 4), True)
  """
  asked = Asked.of(precision, preferred_element_type, jnp.result_type(x))
  return dot_at(x, w, state, policy=policy, key=key, asked=asked)


def dot_at(
  x: Array, w: Array, state: Any, *, policy: DotPolicy, key: Array | None, column: int = 0, asked: Asked = PLAIN,
  plan: LayerPlan | None = None,
) -> Array:  # fmt: skip
  """`dot` by a plan that was made before, if there is one.

  Its output gradient is columns `column` and following of what is sampled with `key`.
  """
  x, w = jnp.asarray(x), jnp.asarray(w)
  check_operands(x, w, state, policy)
  if policy.is_plain or not x.size:  # an expert without tokens has zeros for gradients, too
    z = jnp.dot(x, w, precision=asked.precision, preferred_element_type=asked.sums())
    return z.astype(asked.result(x.dtype))
  if plan is None:
    plan = plan_layer(policy, tokens_of(x), w.shape[0], w.shape[1], x.dtype, (x, w), asked=asked)
  packed = linear_layer.packed_weight(plan, policy, w, state)
  state = linear_layer.projection_state(state)
  # A custom_vjp must return cotangents that vary over the mesh axes of its arguments and no others: under shard_map,
  # say so here that a replicated weight meets tokens that are not, and let JAX sum its gradient.
  axes = frozenset().union(*map(varying_axes, jax.tree.leaves((x, w, state, key))))
  if plan.served('weight_grad'):
    # Where types say how arrays are divided: its gradient is made on every device, and JAX takes the part it wants.
    w = _partitioning.whole(w)
  x, w, where = vary_over(x, axes), vary_over(w, axes), what_is_sampled(x, policy.weight_grad, key)
  rows = x.reshape(-1, x.shape[-1]) if plan.precision.scales else x  # they are written both ways
  return _of_layers_alike(policy, plan, column, asked, where, rows, w, state, packed, key).reshape(*x.shape[:-1], -1)


def check_operands(x: Array, w: Array, state: Any, policy: DotPolicy) -> None:
  """ValueError unless activations, weight and state fit each other and the policy."""
  if w.ndim != 2:
    raise ValueError(f'w must be [in, out], found shape {w.shape}; use jax.vmap for stacked weights')
  if x.ndim < 1 or x.shape[-1] != w.shape[0]:
    raise ValueError(f'x of shape {x.shape} does not fit w of shape {w.shape}: axis -1 of x must be {w.shape[0]}')
  if x.dtype != w.dtype:
    raise ValueError(f'x is {x.dtype} and w is {w.dtype}; cast one, as nn.Dense(dtype=...) does')
  check_floating(x, 'x and w')
  if policy.projection is not None:
    check_divisible(w.shape, policy.projection, 'w')
    check_state(state, abstract_state(policy.projection, w.shape, w.dtype), policy.projection)


def check_state(state: Any, expected: jax.ShapeDtypeStruct, projection: Projection) -> None:
  """ValueError unless `state`, or the one inside a `PackedWeight`, is what the projection keeps for the weight."""
  state = linear_layer.projection_state(state)
  found = (getattr(state, 'shape', None), getattr(state, 'dtype', type(state).__name__))
  if found != (expected.shape, expected.dtype):
    raise ValueError(
      f'state of projection {projection.name!r} must be {expected.dtype} of shape {expected.shape}, found {found[1]} of'
      f' shape {found[0]}; pass what sparse_variables or projection.init gives (an optimizer around sparse_training'
      ' that computes with its state, as optax.contrib.sam does, belongs inside)'
    )


def check_divisible(shape: tuple[int, ...], projection: Projection, name: str) -> None:
  """ValueError unless `shape`, `[..., in, out]`, holds whole groups of the projection."""
  if len(shape) < 2:
    raise ValueError(f'{name} of shape {shape} is not a matrix [..., in, out]')
  for axis, divisor in zip((-2, -1), projection.divisor, strict=True):
    if shape[axis] % divisor or not shape[axis]:
      raise ValueError(
        f'{name} of shape {shape} has length {shape[axis]} along axis {axis}; projection {projection.name!r} needs a'
        f' multiple of {divisor}{"" if shape[axis] else ", one or more"}'
      )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def _sparse24_dot(
  policy: DotPolicy, plan: LayerPlan, column: int, asked: Asked, where: Sampled, x: Array, w: Array, state: Any,
  packed: Any, key: Array | None,
) -> Array:  # fmt: skip
  """z `[..., out]` from x `[..., in]`; where all three matmuls read what is packed, `w` is for its cotangent."""
  return _forward(policy, plan, asked, x, w, state, packed, keep=False)[0]


def _forward(
  policy: DotPolicy, plan: LayerPlan, asked: Asked, x: Array, w: Array, state: Any, packed: Any, *, keep: bool
) -> tuple[Array, Rounded, Array | None]:
  """(z, x rounded, the projected weight if that was multiplied)."""
  rows = plan.precision.rounded(x, keep=keep)
  projected = None if plan.served('forward') else _project(policy, w, state)
  return linear_layer.forward(plan, rows, projected, packed, asked), rows, projected


def _dot_fwd(policy, plan, column, asked, where, x, w, state, packed, key):
  check_sampling(x, policy.weight_grad, key, where)
  x, w = once((x, w))
  z, rows, projected = _forward(policy, plan, asked, x, w, state, packed, keep=True)
  # For what runs plain in the backward: the projected weight if it is there, else what to project again.
  served, reads = plan.served, plan.precision.reads
  weight = (w, state) if served('forward') else projected
  if served('input_grad') and served('weight_grad'):
    weight = None
  packed = reads(packed, 'input_grad', plan.backends.input_grad) if served('input_grad') else None
  return z, (rows.for_backward, weight, packed, key, _partitioning.division(x))


def _dot_bwd(policy, plan, column, asked, where, residuals, dz):
  x, weight, packed, key, divided = residuals
  projected = _project(policy, *weight) if isinstance(weight, tuple) else weight
  given, dw = linear_layer.weight_grad(plan, x, dz, key, like=projected, column=column, asked=asked)
  if plan.served('input_grad'):
    dx = plan.precision.input_grad(packed, given, backend=plan.backends.input_grad, dtype=dz.dtype)
    dx = _partitioning.like(dx, divided)
  else:
    dx = linear_layer.plain_input_grad(plan, dz, projected, like=x.residual, asked=asked)
  return dx, dw, None, None, None


# Under `jax.checkpoint` a forward whose residuals are thrown away writes none: see `keep`.
_sparse24_dot.defvjp(_dot_fwd, _dot_bwd, optimize_remat=True)
# Traced and differentiated once for layers that are alike; a program has it as if it were called.
_of_layers_alike = jax.jit(_sparse24_dot, static_argnums=(0, 1, 2, 3, 4), inline=True)


def _project(policy: DotPolicy, w: Array, state: Array | None) -> Array:
  return w if policy.projection is None else policy.projection.apply(w, state)


def dot_general(
  lhs: Array,
  rhs: Array,
  dimension_numbers: Any,
  state: Any = None,
  *,
  policy: DotPolicy,
  key: Array | None = None,
  precision: Any = None,
  preferred_element_type: Any = None,
) -> Array:
  """`dot` with the arguments of `jax.lax.dot_general`, for layers that take one.

  Args:
    lhs: activations.
    rhs: the weight, `[in, out]`, or `[batch..., in, out]` (experts) with leading batch axes.
    dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)); exactly one contracted axis,
      axis -2 of `rhs`; batch axes leading, in order, in both.
    state: as for `dot`, with the batch axes of `rhs` in front.
    policy: as for `dot`.
    key: as for `dot`; each batch entry folds its index in.
    precision: as for `dot`.
    preferred_element_type: as for `dot`.

  Returns:
    As `lax.dot_general`: batch axes, the free axes of `lhs`, then `out`.

  Raises:
    ValueError: as `dot`, or other dimension numbers.

  >>> import jax, jax.numpy as jnp, sparse24_jax as s24
  >>> policy = s24.DotPolicy(s24.magnitude())
  >>> x, w = jnp.ones((2, 3, 8)), jnp.ones((8, 5))
  >>> state = policy.projection.init(w)
  >>> s24.dot_general(x, w, (((2,), (0,)), ((), ())), state, policy=policy)[0, 0].tolist()
  [4.0, 4.0, 4.0, 4.0, 4.0]
  """
  (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
  batch = tuple(range(len(lhs_batch)))
  good = (
    len(lhs_contract) == 1
    and rhs.ndim >= 2
    and tuple(d % rhs.ndim for d in rhs_contract) == (rhs.ndim - 2,)
    and tuple(lhs_batch) == batch == tuple(rhs_batch)
    and len(batch) == rhs.ndim - 2
    and len(batch) - lhs.ndim <= lhs_contract[0] < lhs.ndim
    and lhs_contract[0] not in batch
    and lhs.shape[: len(batch)] == rhs.shape[: len(batch)]
  )
  if not good:
    raise ValueError(
      f'dot_general takes a weight [batch..., in, out] contracted over axis -2 and activations with the same'
      f' leading batch axes; found dimension_numbers {dimension_numbers} for shapes {lhs.shape} and {rhs.shape}'
    )
  lhs = jnp.moveaxis(lhs, lhs_contract[0], -1)
  asked = dict(precision=precision, preferred_element_type=preferred_element_type)
  if not batch:
    return dot(lhs, rhs, state, policy=policy, key=key, **asked)
  lead = rhs.shape[: len(batch)]
  if policy.projection is not None:
    check_state(state, abstract_state(policy.projection, rhs.shape, rhs.dtype), policy.projection)
  x, w, states = jax.tree.map(lambda a: a.reshape(-1, *a.shape[len(batch) :]), (lhs, rhs, state))
  keys = None if key is None else jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(w.shape[0]))
  out = jax.vmap(lambda x, w, s, k: dot(x, w, s, policy=policy, key=k, **asked))(x, w, states, keys)
  return out.reshape(*lead, *out.shape[1:])
