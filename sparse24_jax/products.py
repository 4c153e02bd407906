"""The three products of a linear layer, each on a kernel or as a plain matmul: how a `plan` is carried out.

A product that runs on a kernel takes a `PackedWeight` or an MVUE operand; one that does not takes the projected weight.
"""

import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import AxisType

from pallas_kernels import _partitioning
from pallas_kernels.gated_activation import api as activations
from pallas_kernels.mvue.reference import mvue24
from pallas_kernels.pack import api as packers
from pallas_kernels.sparse_matmul import api
from pallas_kernels.sparse_matmul.operand import concatenate, SparseOperand
from sparse24_jax.availability import kernels_are_here
from sparse24_jax.numerics import Format, round_to_fp8
from sparse24_jax.packing import pack, PackedWeight
from sparse24_jax.packing8 import pack8, PackedWeight8
from sparse24_jax.plan import Backends, packed_form, unfit
from sparse24_jax.policy import DotPolicy
from sparse24_jax.projection import Masked, SoftThreshold


def multiply(
  role: str, a: SparseOperand, b: Array, *, backend: str, bias: Array | None = None, activation: str | None = None,
  keep_preactivation: bool = False,
) -> Any:  # fmt: skip
  """`sparse_matmul` in a role: D `[..., m]` from b `[..., k]`, for a weight gradient `[n, m]` from `[k, n]`.

  With `keep_preactivation` (D, Z), as there. The role names the call in profiles and compiled programs.
  """
  b_layout = 'kn' if role == 'weight_grad' else 'nk'

  def one(a, b, bias):
    return api.sparse_matmul(
      a, b, bias=bias, activation=activation, b_layout=b_layout, out_layout='nm',
      keep_preactivation=keep_preactivation, implementation=backend,
    )  # fmt: skip

  lead = b.shape[:-1] if b_layout == 'nk' else b.shape[-1:]
  # Neither kernel has a batching rule: under vmap they run one after the other.
  with jax.named_scope(role):
    d = jax.custom_batching.sequential_vmap(one)(a, b.reshape(-1, b.shape[-1]), bias)
    if role == 'forward':
      # XLA joins a kernel with what writes its result into the residuals of a scan; where the result is read as well,
      # the kernel then runs twice.
      d = jax.lax.optimization_barrier(d)
  return jax.tree.map(lambda x: x.reshape(*lead, -1), d)


def multiply_pair(
  role: str, gate: SparseOperand, up: SparseOperand, b: Array, *, backend: str, bias: Array | None = None
) -> Array:
  """`multiply` by [W_gate | W_up]: z `[tokens, 2, h]` from x `[tokens, d]`, or dx `[tokens, d]` from dz.

  Each device puts its parts of the two side by side: put together before, the mesh would divide them anew, some
  devices with gate alone and some with up. `bias` is `[2, h]`.
  """
  of_b, d = {'forward': ('n k*64', 'n . m*64'), 'input_grad': ('n . k*64', 'n m*64')}[role]
  arguments = (of_b, *('m*64 k*32', 'm k .') * 2, *(() if bias is None else ('. m*64',)))
  rule = _partitioning.Rule(arguments, (d,), order=('n', 'k', 'm'), sums=('k',))
  return _partitioning.partitioned('multiply_pair', _multiply_pair, rule, b, gate, up, bias, role=role, backend=backend)


def _multiply_pair(shard, b, gate, up, bias, *, role, backend):
  a = concatenate(gate, up, axis=-2 if role == 'forward' else -1)
  bias = None if bias is None else bias.reshape(-1)
  partial = shard.sums('k')
  d = multiply(role, a, b.reshape(b.shape[0], -1), backend=backend, bias=None if partial else bias)
  if partial:
    d = add_bias(shard.sum(d, 'k'), bias)
  return d.reshape(b.shape[0], 2, -1) if role == 'forward' else d


def sampled_weight_grad(dz: Array, key: Array, x: Array, *, backend: str, column: int = 0) -> Array:
  """dw = x^T V(dz), `[in, out]`, from x `[tokens, in]` and the sample that `mvue24` draws of dz `[tokens, out]`."""
  # Whole groups of four tokens a device, and of columns, since neighbours share a call of the generator.
  rule = _partitioning.Rule(
    ('k*4 m*4', _partitioning.undivided(key), 'k*4 n'), ('n m*4',), order=('k', 'n', 'm'), sums=('k',)
  )

  def one(dz, key, x):
    with jax.named_scope('weight_grad'):
      return _partitioning.partitioned(
        'sampled_weight_grad', _sampled_weight_grad, rule, dz, key, x, backend=backend, column=column
      )

  return jax.custom_batching.sequential_vmap(one)(dz, key, x)


def _sampled_weight_grad(shard, dz, key, x, *, backend, column):
  origin = (0, shard.offset('k'), column + shard.offset('m', 4))
  operand = packers.mvue_pack(dz, key, axis=-2, origin=origin)
  return shard.sum(multiply('weight_grad', operand, x, backend=backend), 'k')


def activation_and_weight_grad(
  dh: Array, z: Array, key: Array, x: Array, *, backend: str, activation: str, gated: bool
) -> tuple[Array, ...]:
  """dz from dh, and dw = x^T V(dz), with a gate that of gate and that of up; the pass that makes dz also samples it."""
  # z holds gate and up side by side, so that a part of its columns is none of either.
  features = '.' if gated else 'm*4'
  rule = _partitioning.Rule(
    (f'k*4 {features}', f'k*4 {features}', _partitioning.undivided(key), 'k*4 n'),
    (f'k*4 {features}', *(f'n {features}',) * (2 if gated else 1)), order=('k', 'n', 'm'), sums=('k',),
  )

  def one(dh, z, key, x):
    with jax.named_scope('weight_grad'):
      return _partitioning.partitioned(
        'activation_and_weight_grad', _activation_and_weight_grad, rule, dh, z, key, x,
        backend=backend, activation=activation, gated=gated,
      )  # fmt: skip

  return jax.custom_batching.sequential_vmap(one)(dh, z, key, x)


def _activation_and_weight_grad(shard, dh, z, key, x, *, backend, activation, gated):
  origin = (0, shard.offset('k'), shard.offset('m', 4))
  dz, operand = activations.activation_backward_pack(dh, z, key, activation=activation, gated=gated, origin=origin)
  dw = multiply('weight_grad', operand, x, backend=backend)
  return dz, *(shard.sum(part, 'k') for part in (jnp.split(dw, 2, axis=1) if gated else [dw]))


def forward(
  p: Backends, policy: DotPolicy, x: Array, w: Any, operand: SparseOperand | None, bias: Array | None = None
) -> Array:
  """z = x W~ + bias, `[..., out]`, from x `[..., in]` and the operand of the plan, or the projected weight `w`."""
  if p.forward is not None:
    return multiply('forward', operand, x, backend=p.forward, bias=bias)
  z = matmul(x, w, policy.precision, ('e4m3', 'e4m3'))
  return add_bias(z, bias)


def add_bias(z: Array, bias: Array | None) -> Array:
  """z `[..., out]` plus a bias `[out]`, or None; ranks are made equal, as JAX can be told to ask."""
  return z if bias is None else z + bias.astype(z.dtype).reshape((1,) * (z.ndim - 1) + (-1,))


def input_grad(
  p: Backends, policy: DotPolicy, dz: Array, w: Any, operand: SparseOperand | None, like: Array
) -> Array:
  """dx = dz W~^T, `[..., in]`, from the operand of the plan, or the projected weight `w`."""
  if p.input_grad is not None:
    return _partitioning.like(multiply('input_grad', operand, dz, backend=p.input_grad), like)
  return matmul(dz, w.T, policy.precision, ('e5m2', 'e4m3'), like=like)


def weight_grad(
  p: Backends, policy: DotPolicy, x: Array, dz: Array, key: Array | None, like: Array | None, column: int = 0
) -> Array:
  """dw = x^T V(dz), `[in, out]`, from `[..., in]` and `[..., out]`; `column` is where dz stands in what is sampled."""
  x, dz = x.reshape(-1, x.shape[-1]), dz.reshape(-1, dz.shape[-1])
  if p.weight_grad is not None:
    return _partitioning.whole(sampled_weight_grad(dz, key, x, backend=p.weight_grad, column=column))
  if policy.weight_grad == 'mvue':
    dz = mvue24(dz, key, axis=-2, origin=(0, 0, column))
  return matmul(x.T, dz, policy.precision, ('e4m3', 'e5m2'), like=like)


def matmul(a: Array, b: Array, precision: str, formats: tuple[Format, Format], like: Array | None = None) -> Array:
  """a b over a's last and b's first axis, summed in float32, in the dtype of `a`; sharded as `like` if need be."""
  if precision == 'fp8':
    a, b = round_to_fp8(a, formats[0]), round_to_fp8(b, formats[1])
  # On a mesh of explicit axes JAX does not choose how a product is sharded; a gradient is sharded as its variable.
  sharding = None if like is None else jax.typeof(like).sharding
  if sharding is not None and AxisType.Explicit not in sharding.mesh.axis_types:
    sharding = None
  return jnp.dot(a, b, preferred_element_type=jnp.float32, out_sharding=sharding).astype(a.dtype)


def may_pack(policy: DotPolicy, w: Array) -> bool:
  """Whether some plan for `w` would read it packed: what a caller asks who knows neither tokens nor dtype."""
  form = packed_form(policy)
  if form is None or policy.implementation == 'reference':
    return False
  fits = unfit(policy, w.shape[-2], w.shape[-1], jnp.bfloat16) is None and not _partitioning.mixed(w)
  chosen = not isinstance(form, Masked) and kernels_are_here(policy.precision)
  return fits and (policy.implementation is not None or chosen)


def packed_weight(
  p: Backends, policy: DotPolicy, w: Array, state: Any, dtype: Any
) -> PackedWeight | PackedWeight8 | None:
  """The weight as the plan's products read it: what was handed over, or packed here; None if the plan packs nothing."""
  if not p.packs:
    return None
  if isinstance(state, PackedWeight8) if p.fp8 else isinstance(state, PackedWeight) and state.dtype == dtype:
    return state
  one = jax.custom_batching.sequential_vmap(functools.partial(pack_weight, policy, dtype=dtype))
  return one(jax.lax.stop_gradient(w), projection_state(state))


def pack_weight(policy: DotPolicy, w: Array, state: Array, dtype: Any) -> PackedWeight | PackedWeight8:
  """`w` `[..., in, out]` packed under its state. Its cotangent is the straight-through one, so packing has none."""
  form, w = packed_form(policy), jax.lax.stop_gradient(w)
  if form is None:
    raise ValueError(f'{policy} has no packed form')
  if policy.precision == 'fp8' and isinstance(form, SoftThreshold):
    return pack8(w, state)
  return pack(form, w, state, jnp.dtype(dtype))


def projection_state(state: Any) -> Any:
  """The projection's state, from it or from a packed weight."""
  return state.state if isinstance(state, PackedWeight | PackedWeight8) else state
