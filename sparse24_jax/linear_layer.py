"""The three matmuls of a linear layer, each on a kernel or as a plain matmul: how a `plan` is carried out.

A matmul that runs on a kernel takes a `PackedWeight` or an MVUE operand; one that does not takes the projected weight.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import _partitioning
from pallas_kernels.gated_activation import api as activations
from pallas_kernels.two_of_four.mvue import mvue24
from sparse24_jax.asked import Asked, PLAIN
from sparse24_jax.layer_plan import LayerPlan
from sparse24_jax.matmuls import add_bias, matmul, Role
from sparse24_jax.packing import PackedWeight, side_by_side
from sparse24_jax.plan import packed_form, PRECISIONS
from sparse24_jax.policy import DotPolicy
from sparse24_jax.precision import NATIVE, Precision, Rounded


def multiply_pair(
  role: Role, gate: PackedWeight, up: PackedWeight, b: Rounded, *, backend: str | None, dtype: Any,
  precision: Precision, bias: Array | None = None,
) -> Array:  # fmt: skip
  """Forward or input gradient by [W_gate | W_up]: z `[tokens, 2, h]` from x `[tokens, d]`, or dx `[tokens, d]` from dz.

  Each device puts its parts of the two side by side: put together before, the mesh would divide them anew, some
  devices with gate alone and some with up. `bias` is `[2, h]`.
  """
  pair = [precision.reads(p, role, backend) for p in (gate, up)]
  of_b, dense, d = {
    'forward': ('n k*64', 'k*64 m*64', 'n . m*64'), 'input_grad': ('n . k*64', 'm*64 k*64', 'n m*64')
  }[role]  # fmt: skip
  of_weight = ('m*64 k*32', 'm k .') if pair[0].dense is None else (dense,)
  of_scale = () if b.scale is None else ('',)
  arguments = (of_b, *of_scale, *(*of_weight, *of_scale) * 2, *(() if bias is None else ('. m*64',)))
  rule = _partitioning.Rule(arguments, (d,), order=('n', 'k', 'm'), sums=('k',))
  return _partitioning.partitioned(
    'multiply_pair', _multiply_pair, rule, b.values, b.scale, *pair, bias,
    role=role, backend=backend, dtype=jnp.dtype(dtype), precision=precision,
  )  # fmt: skip


def _multiply_pair(shard, b, scale, gate, up, bias, *, role, backend, dtype, precision):
  w, given = side_by_side(gate, up), Rounded(b.reshape(b.shape[0], -1), None, scale)
  if role == 'input_grad':
    return shard.sum(precision.input_grad(w, given, backend=backend, dtype=dtype), 'k')
  bias, partial = None if bias is None else bias.reshape(-1), shard.sums('k')
  z = precision.forward(w, given, backend=backend, dtype=dtype, bias=None if partial else bias)
  z = add_bias(shard.sum(z, 'k'), bias) if partial else z
  return z.reshape(b.shape[0], 2, -1)


def gate(z: Array, *, activation: str) -> Array:
  """h `[tokens, h]` from gate and up, z `[tokens, 2, h]`."""
  rule = _partitioning.Rule(('n . m',), ('n m',), order=('n', 'm'))
  return _partitioning.partitioned('gated_activation', _gate, rule, z, activation=activation)


def _gate(shard, z, *, activation):
  return activations.gated_activation(z.reshape(z.shape[0], -1), activation=activation)


def kernel_weight_grad(
  dz: Array, key: Array | None, x: Rounded, *, backend: str | None, precision: Precision = NATIVE, column: int = 0
) -> tuple[Rounded, Array]:
  """(dz as the input gradient reads it, dw = x^T V(dz) `[in, out]`) from dz `[tokens, out]` and the residual of x.

  V(dz) is the sample that `mvue24` draws; without a key dz itself.
  """
  if key is None and not precision.scales and _partitioning.division(dz).sharding is None:
    # XLA divides it by itself.
    return Rounded(dz, None), matmul(x.residual.T, dz)
  # Whole groups of four tokens a device, and of columns, since neighbours share a call of the generator.
  made = ('k*4 m*4',) if precision.scales else ()
  rule = _rule(('k*4 m*4',), key, precision, (*made, 'n m*4'))

  def one(dz, key, x):
    scale = precision.scale_of(dz)
    with jax.named_scope('weight_grad'):
      *made, dw = _partitioning.partitioned(
        'kernel_weight_grad', _kernel_weight_grad, rule, dz, key, x.residual, scale, x.scale,
        backend=backend, column=column, precision=precision,
      )  # fmt: skip
    return (made[0] if made else dz), scale, dw

  made, scale, dw = jax.custom_batching.sequential_vmap(one)(dz, key, x.for_backward)
  return Rounded(made, None, scale), _partitioning.whole(dw)


def _kernel_weight_grad(shard, dz, key, x, scale, x_scale, *, backend, column, precision):
  if key is None:
    dz, dw = precision.exact_weight_grad(dz, x, (scale, x_scale))
    return *((dz,) if precision.scales else ()), shard.sum(dw, 'k')
  origin = (0, shard.offset('k'), column + shard.offset('m', 4))
  made = precision.sample(dz, key, scale, origin)
  dw = precision.weight_grad(made.operand, x, (scale, x_scale), backend=backend, dtype=dz.dtype)
  return *(() if made.dense is None else (made.dense,)), shard.sum(dw, 'k')


def activation_and_weight_grad(
  dh: Array, z: Array, key: Array, x: Rounded, amax: Array | None = None, *, backend: str, activation: str, gated: bool,
  precision: Precision,
) -> tuple[Rounded, list[Array]]:  # fmt: skip
  """(dz from dh, dw = x^T V(dz)); the pass that makes dz also samples it.

  With a gate z and dz are `[tokens, 2, h]`, and dw that of gate and that of up. `amax` is the largest magnitude of dh,
  if known.
  """
  dz = 'k*4 . m*4' if gated else 'k*4 m*4'
  rule = _rule(('k*4 m*4', dz), key, precision, (dz, *('n m*4',) * (2 if gated else 1)))

  def one(dh, z, key, x, amax):
    scale = precision.scale_of_activation(dh, z, amax, activation=activation, gated=gated)
    with jax.named_scope('weight_grad'):
      dz, *dw = _partitioning.partitioned(
        'activation_and_weight_grad', _activation_and_weight_grad, rule, dh, z, key, x.residual, scale,
        x.scale, backend=backend, activation=activation, gated=gated, precision=precision,
      )  # fmt: skip
    return dz, scale, dw

  dz, scale, dw = jax.custom_batching.sequential_vmap(one)(dh, z, key, x.for_backward, amax)
  return Rounded(dz, None, scale), [_partitioning.whole(part) for part in dw]


def _activation_and_weight_grad(
  shard, dh, z, key, x, scale, x_scale, *, backend, activation, gated, precision
):  # fmt: skip
  def weight_grad(operand):
    return precision.weight_grad(operand, x, (scale, x_scale), backend=backend, dtype=dh.dtype)

  row, column, rows = shard.offset('k'), shard.offset('m', 4), dh.shape[0]
  if gated and shard.divided.get('m'):
    # Gate and up are sampled as one matrix, all columns of the gate first: a device has two parts of it with a gap.
    dz = activations.activation_backward(dh, z.reshape(rows, -1), activation=activation).reshape(z.shape)
    gap = dh.shape[1] * shard.count('m')
    halves = [precision.sample(dz[:, i], key, scale, (0, row, column + i * gap)) for i in range(2)]
    dz = jnp.stack([half.dense for half in halves], 1) if precision.scales else dz
    dw = [weight_grad(half.operand) for half in halves]
  else:
    made = precision.activation_and_sample(
      dh, z.reshape(rows, -1), key, scale, (0, row, column), activation=activation, gated=gated
    )
    dz, dw = made.dense.reshape(z.shape), weight_grad(made.operand)
    dw = jnp.split(dw, 2, axis=1) if gated else [dw]
  return dz, *(shard.sum(part, 'k') for part in dw)


def _rule(gradients: tuple[str, ...], key: Array | None, precision: Precision, results: tuple[str, ...]) -> Any:
  """The partitioning rule of a weight gradient: of gradients, a key or none, the residual of x, any scales."""
  scales = ('',) * 2 if precision.scales else ()
  of_key = () if key is None else (_partitioning.undivided(key),)
  arguments = (*gradients, *of_key, precision.residual_axes, *scales)
  return _partitioning.Rule(arguments, results, order=('k', 'n', 'm'), sums=('k',))


def forward(plan: LayerPlan, x: Rounded, w: Any, packed: Any, asked: Asked = PLAIN) -> Array:
  """z = x W~, `[..., out]`, from x `[..., in]` and the packed weight of the plan, or the projected weight `w`."""
  if plan.served('forward'):
    return plan.precision.forward(packed, x, backend=plan.backends.forward, dtype=jnp.dtype(plan.dtype))
  return _plain(plan, 'forward', x.values, w, asked=asked, dtype=asked.result(plan.dtype))


def plain_input_grad(plan: LayerPlan, dz: Array, w: Array, *, like: Array, asked: Asked) -> Array:
  """dx = dz W~^T, `[..., in]`, from the projected weight, as no kernel serves it; of the dtype and division of x."""
  return _plain(plan, 'input_grad', dz, w.T, like=like, asked=asked, dtype=like.dtype)


def weight_grad(
  plan: LayerPlan, x: Rounded, dz: Array, key: Array | None, like: Array | None, column: int = 0, asked: Asked = PLAIN
) -> tuple[Rounded, Array]:
  """(dz as the input gradient reads it, dw = x^T V(dz) `[in, out]`) from dz `[..., out]` and the residual of x.

  `column` is where dz stands in what is sampled.
  """
  x = dataclasses.replace(x, residual=x.residual.reshape(-1, x.residual.shape[-1]))
  rows, given = dz.reshape(-1, dz.shape[-1]), Rounded(dz, None)
  if plan.served('weight_grad'):
    backend, precision = plan.backends.weight_grad, plan.precision
    key = key if plan.sampled else None  # whole gradients, whatever other layers sample
    rounded, dw = kernel_weight_grad(rows, key, x, backend=backend, precision=precision, column=column)
    return rounded if precision.scales else given, dw
  if plan.sampled:
    rows = mvue24(rows, key, axis=-2, origin=(0, 0, column))
  return given, _plain(plan, 'weight_grad', x.residual.T, rows, like=like, asked=asked)


def _plain(
  plan: LayerPlan, role: Role, a: Array, b: Array, like: Array | None = None, *, asked: Asked, dtype: Any = None
) -> Array:
  """a b without a kernel, in the plan's precision."""
  return matmul(*plan.precision.plain_operands(role, a, b), like=like, asked=asked, dtype=dtype)


def packed_weight(plan: LayerPlan, policy: DotPolicy, w: Array, state: Any) -> PackedWeight | None:
  """The weight as the plan's matmuls read it: what was handed over, or packed here; None if the plan packs nothing."""
  if not plan.packs:
    return None
  if isinstance(state, PackedWeight) and state.dtype == plan.precision.packed_dtype(plan.dtype):
    return state
  one = jax.custom_batching.sequential_vmap(functools.partial(_pack, plan.precision, policy, dtype=plan.dtype))
  return one(jax.lax.stop_gradient(w), projection_state(state))


def pack_weight(policy: DotPolicy, w: Array, state: Array, dtype: Any) -> PackedWeight:
  """`w` `[..., in, out]` packed under its state. Its cotangent is the straight-through one, so packing has none."""
  if packed_form(policy) is None:
    raise ValueError(f'{policy} has no packed form')
  return _pack(PRECISIONS[policy.precision], policy, w, state, dtype)


def _pack(precision: Precision, policy: DotPolicy, w: Array, state: Array | None, dtype: Any) -> PackedWeight:
  return precision.pack(packed_form(policy), jax.lax.stop_gradient(w), state, dtype)


def projection_state(state: Any) -> Any:
  """The projection's state, from it or from a packed weight."""
  return state.state if isinstance(state, PackedWeight) else state
