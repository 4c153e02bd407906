"""S-STE in real FP8: sparse products in the forward and the weight gradient, a dense one in the input gradient.

    z  = x W~       sparse e4m3: W~^T packed along in         x [tokens, in]    (dense where that measured faster)
    dx = dz W~^T    dense: dz in e5m2                         W~ [in, out] in e4m3
    dw = x^T V(dz)  sparse e5m2: V(dz)^T packed along tokens  x^T [in, tokens] in e4m3

Scales are per tensor and current. FP8 products read both operands with the contracted axis contiguous, so a tensor
that is contracted along either axis is written both ways, by the one pass that also rounds it: x and its transpose; W~
packed and dense; dz dense and its sample packed. The backward keeps x^T alone, at a byte an entry.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import _partitioning
from pallas_kernels.gated_activation import api as activations
from pallas_kernels.pack import api as pack
from pallas_kernels.pack.reference import MVUE_HEADROOM, Packed8
from pallas_kernels.quantize import api as quantize
from pallas_kernels.sparse_matmul import api as sparse_matmul
from pallas_kernels.sparse_matmul.operand import concatenate, SparseOperand
from pallas_kernels.sparse_matmul.reference import ACTIVATIONS
from sparse24_jax.mvue import check_sampling

E4M3, E5M2 = jnp.dtype('float8_e4m3fn'), jnp.dtype('float8_e5m2')
# Bounds of the derivatives, where there are any: dz then has a bound that needs dh alone.
STEEPEST = {'gelu': 1.13, 'silu': 1.1, 'relu': 1.0}


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=['state', 'forward', 'dense', 'factor'], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class PackedWeight8:
  """A weight `[..., in, out]` in e4m3 for the three products.

  Its values are held as bytes: what `jax.checkpoint` keeps it rounds with `reduce_precision`, and the format of 4 and 3
  bits known there makes a NaN of every number above 240, which e4m3fn has up to 448.

  Attributes:
    state: the projection's state.
    forward: operand of the transposed weight, `[..., out, in]`, 2:4 along `in`, its values as uint8.
    dense: the projected weight, `[..., in, out]`, as uint8.
    factor: float32, `[...]`: what a product is multiplied with to undo the scale.
  """

  state: Any
  forward: SparseOperand
  dense: Array
  factor: Array

  @property
  def dtype(self) -> jnp.dtype:
    return E4M3

  @property
  def operand(self) -> SparseOperand:
    """`forward` in e4m3."""
    return dataclasses.replace(self.forward, values=_as(E4M3, self.forward.values))

  @property
  def matrix(self) -> Array:
    """`dense` in e4m3."""
    return _as(E4M3, self.dense)


@dataclasses.dataclass(frozen=True)
class Rounded:
  """A tensor in FP8.

  Attributes:
    values: `[tokens, features]`.
    transposed: `[features, tokens]`, for the weight gradient; None where no gradient is taken.
    factor: float32 scalar that undoes the scale.
  """

  values: Array
  transposed: Array | None
  factor: Array


jax.tree_util.register_dataclass(Rounded, ['values', 'transposed', 'factor'], [])


def _as(dtype: Any, x: Array) -> Array:
  return jax.lax.bitcast_convert_type(x, dtype)


def pack_soft_threshold8(w: Array, beta: Array) -> PackedWeight8:
  """beta S(w) in e4m3, packed and dense, in one pass over `w` after one for its largest magnitude."""
  return pack_alike([w], [beta])[0]


def pack_alike(weights: Sequence[Array], betas: Sequence[Array]) -> list[PackedWeight8]:
  """Weights packed under one common scale, so that their products can be one product.

  The scale takes |S(w)| by its bound |w|, whose maximum needs no groups: one plain reduction reads the weight once. A
  float loses no precision by a scale that is too small, only range at its lower end.
  """
  largest = [jnp.abs(beta) * quantize.amax(w) for w, beta in zip(weights, betas, strict=True)]
  scale, factor = quantize.current_scale(functools.reduce(jnp.maximum, largest), E4M3)
  packed = [pack.soft_threshold_pack8(w, scale * beta, axis=-2) for w, beta in zip(weights, betas, strict=True)]

  def held(beta: Array, p: Packed8) -> PackedWeight8:
    operand = dataclasses.replace(p.operand, values=_as(jnp.uint8, p.operand.values))
    return PackedWeight8(beta, operand, _as(jnp.uint8, p.dense), factor)

  return [held(beta, p) for beta, p in zip(betas, packed, strict=True)]


def side_by_side(gate: PackedWeight8, up: PackedWeight8) -> PackedWeight8:
  """[W_gate | W_up], of two that `pack_alike` made."""
  operand = concatenate(gate.forward, up.forward, axis=-2)
  return PackedWeight8(up.state, operand, jnp.concatenate([gate.dense, up.dense], axis=-1), up.factor)


def rounded(x: Array, *, keep: bool) -> Rounded:
  """x `[tokens, features]` in e4m3; both ways if a backward is to `keep` it."""
  scale, factor = quantize.current_scale(quantize.amax(x), E4M3)
  if not keep:
    return Rounded(quantize.quantize(x, scale, dtype=E4M3), None, factor)
  values, transposed = quantize.quantize(x, scale, dtype=E4M3, transpose='both')
  return Rounded(values, transposed, factor)


def forward(
  x: Rounded, w: PackedWeight8, *, backend: str | None, dtype: Any, bias: Array | None = None,
  activation: str | None = None,
) -> Any:  # fmt: skip
  """z `[tokens, out]`, or with an activation (activation(z), z); without a back end by a dense product."""
  if backend is None:
    return _dense_forward(x, w, dtype, bias, activation)
  with jax.named_scope('forward'):
    z = sparse_matmul.sparse_matmul(
      w.operand, x.values, bias=bias, a_scale=w.factor, b_scale=x.factor, out_dtype=dtype, out_layout='nm',
      activation=activation, keep_preactivation=activation is not None, implementation=backend,
    )  # fmt: skip
  # As in `products.multiply`: or the kernel runs twice inside a scan.
  return jax.lax.optimization_barrier(z)


def _dense_forward(
  x: Rounded, w: PackedWeight8, dtype: Any, bias: Array | None, activation: str | None
) -> Any:
  with jax.named_scope('forward'):
    z = _dense_product(x.values, x.factor, _partitioning.whole(w.matrix).T, w.factor, dtype)
  if bias is not None:
    z = z + bias.astype(dtype)[None]
  if activation is None:
    return z
  return ACTIVATIONS[activation](z.astype(jnp.float32)).astype(dtype), z


def _dense_product(x: Array, x_factor: Array, w: Array, w_factor: Array, dtype: Any) -> Array:
  # Sums of FP8 numbers, before the factors scale them, exceed the range of float16.
  wide = jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype
  return quantize.fp8_dot(x, w, x_factor, w_factor, out_dtype=wide).astype(dtype)


def input_grad(dz: Array, factor: Array, w: PackedWeight8, *, dtype: Any) -> Array:
  """dx `[tokens, in]` from dz in e5m2."""
  with jax.named_scope('input_grad'):
    return _dense_product(dz, factor, _partitioning.whole(w.matrix), w.factor, dtype)


def _weight_grad(shard: Any, dz: Packed8, x: Array, factors: Sequence[Array], *, backend: str, dtype: Any) -> Any:
  """dz in e5m2, and dw `[in, out]` from x^T `[in, tokens]` and the operand of the sampled dz."""
  x_factor, factor = factors
  with jax.named_scope('weight_grad'):
    dw = sparse_matmul.sparse_matmul(
      dz.operand, x, a_scale=MVUE_HEADROOM * factor, b_scale=x_factor, out_dtype=dtype, out_layout='nm',
      implementation=backend,
    )  # fmt: skip
  return dz.dense, shard.sum(dw, 'k')


def sampled_weight_grad(
  dz: Array, key: Array, x: Array, x_factor: Array, *, backend: str, column: int = 0
) -> tuple[Array, Array, Array]:
  """(dz in e5m2, its factor, dw = x^T V(dz) `[in, out]`) from dz `[tokens, out]` and x^T `[in, tokens]`."""
  scale, factor = quantize.current_scale(quantize.amax(dz), E5M2)
  rule = _partitioning.Rule(
    ('k*4 m*4', _partitioning.undivided(key), '', 'n k*4', '', ''), ('k*4 m*4', 'n m*4'), ('k', 'n', 'm'), ('k',)
  )
  with jax.named_scope('weight_grad'):
    dz8, dw = _partitioning.partitioned(
      'sampled_weight_grad8', _sampled_weight_grad, rule, dz, key, scale, x, (x_factor, factor),
      backend=backend, column=column,
    )  # fmt: skip
  return dz8, factor, _partitioning.whole(dw)


def _sampled_weight_grad(shard, dz, key, scale, x, factors, *, backend, column):
  origin = (0, shard.offset('k'), column + shard.offset('m', 4))
  packed = pack.mvue_pack8(dz, key, scale, axis=-2, origin=origin, dtype=E5M2)
  return _weight_grad(shard, packed, x, factors, backend=backend, dtype=dz.dtype)


def activation_and_weight_grad(
  dh: Array, z: Array, key: Array, x: Array, x_factor: Array, *, backend: str, activation: str, gated: bool
) -> tuple[Array, Array, Array]:
  """(dz in e5m2, its factor, dw = x^T V(dz)); one pass makes dz from dh and z, rounds and samples it."""
  if gated or activation not in STEEPEST:
    largest = activations.activation_backward_amax(dh, z, activation=activation, gated=gated)
  else:
    largest = STEEPEST[activation] * quantize.amax(dh)
  scale, factor = quantize.current_scale(largest, E5M2)
  # With a gate a part of the columns of z would be none of either half.
  dz_text = 'k*4 .' if gated else 'k*4 m*4'
  rule = _partitioning.Rule(
    (dz_text, dz_text, _partitioning.undivided(key), '', 'n k*4', '', ''),
    (dz_text, 'n .' if gated else 'n m*4'), ('k', 'n', 'm'), ('k',),
  )  # fmt: skip
  with jax.named_scope('weight_grad'):
    dz8, dw = _partitioning.partitioned(
      'activation_and_weight_grad8', _activation_and_weight_grad, rule, dh, z, key, scale, x, (x_factor, factor),
      backend=backend, activation=activation, gated=gated,
    )  # fmt: skip
  return dz8, factor, _partitioning.whole(dw)


def _activation_and_weight_grad(shard, dh, z, key, scale, x, factors, *, backend, activation, gated):
  origin = (0, shard.offset('k'), shard.offset('m', 4))
  packed = activations.activation_backward_pack8(
    dh, z, key, scale, activation=activation, gated=gated, origin=origin
  )
  return _weight_grad(shard, packed, x, factors, backend=backend, dtype=dh.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def dot8(
  backends: tuple[str | None, str], column: int, x: Array, w: Array, packed: PackedWeight8, key: Array | None
) -> Array:
  """z `[tokens, out]` from x `[tokens, in]`; `w` is there for its cotangent.

  `backends` are those of the forward, None for a dense product, and of the weight gradient.
  """
  del w, column, key
  return _forward8(backends[0], x, packed, keep=False)[0]


def _forward8(backend: str | None, x: Array, packed: PackedWeight8, *, keep: bool) -> tuple[Array, Rounded]:
  def one(x: Array, packed: PackedWeight8) -> tuple[Array, Rounded]:
    rows = rounded(x, keep=keep)
    return forward(rows, packed, backend=backend, dtype=x.dtype), rows

  # The kernels have no batching rule: under vmap they run one after the other.
  return jax.custom_batching.sequential_vmap(one)(x, packed)


def _dot8_fwd(backends, column, x, w, packed, key):
  del column, w
  check_sampling(x, 'mvue', key)
  z, rows = _forward8(backends[0], x, packed, keep=True)
  return z, (rows.transposed, rows.factor, packed, key, _partitioning.division(x))


def _dot8_bwd(backends, column, residuals, dz):
  def one(x, x_factor, packed, key, divided, dz):
    dz8, factor, dw = sampled_weight_grad(dz, key, x, x_factor, backend=backends[1], column=column)
    return _partitioning.like(input_grad(dz8, factor, packed, dtype=dz.dtype), divided), dw

  return *jax.custom_batching.sequential_vmap(one)(*residuals, dz), None, None


dot8.defvjp(_dot8_fwd, _dot8_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ffn8(
  static: tuple[Any, Any, str, str], x: Array, weights: Any, biases: Mapping[str, Array | None], packed: Any, keys: Any
) -> Array:
  """The feed-forward block of `sparse24_jax.ffn` in FP8.

  `static` is (back end of the up-projection or None, of the down-projection, of weight gradients, activation).
  """
  del keys
  return _ffn8(static, x, biases, packed, gated='gate' in weights, keep=False)[0]


def _ffn8(static, x, biases, packed, *, gated, keep):
  """(y, x, z, h), x and h rounded."""
  one = functools.partial(_ffn8_of_one, static, gated, keep)
  return jax.custom_batching.sequential_vmap(one)(x, biases, packed)


def _ffn8_of_one(static, gated, keep, x, biases, packed):
  up_backend, down_backend, _, activation = static
  rows = rounded(x, keep=keep)
  up = functools.partial(forward, rows, packed['up'], backend=up_backend, dtype=x.dtype, bias=biases['up'])
  if gated:
    z = up()
    h = rounded(activations.gated_activation(z, activation=activation), keep=keep)
  else:
    h, z = up(activation=activation)
    h = rounded(h, keep=keep)
  return forward(h, packed['down'], backend=down_backend, dtype=x.dtype, bias=biases['down']), rows, z, h


def _ffn8_fwd(static, x, weights, biases, packed, keys):
  check_sampling(x, 'mvue', keys['down'])
  gated = 'gate' in weights
  y, rows, z, h = _ffn8(static, x, biases, packed, gated=gated, keep=True)
  kept = (rows.transposed, rows.factor, z, h.transposed, h.factor)
  there = {name: bias is not None for name, bias in biases.items()}
  return y, (kept, packed, there, gated, keys, _partitioning.division(x))


def _ffn8_bwd(static, residuals, dy):
  kept, packed, there, gated, keys, divided = residuals
  one = functools.partial(_ffn8_bwd_of_one, static, there, gated, divided)
  return *jax.custom_batching.sequential_vmap(one)(kept, packed, keys, dy), None, None


def _ffn8_bwd_of_one(static, there, gated, divided, kept, packed, keys, dy):
  (_, _, backend, activation), (x, x_factor, z, h, h_factor), dtype = static, kept, dy.dtype
  dy8, dy_factor, dw_down = sampled_weight_grad(dy, keys['down'], h, h_factor, backend=backend)
  dh = input_grad(dy8, dy_factor, packed['down'], dtype=dtype)
  dz8, factor, dw_up = activation_and_weight_grad(
    dh, z, keys['hidden'], x, x_factor, backend=backend, activation=activation, gated=gated
  )
  dx = _partitioning.like(input_grad(dz8, factor, packed['up'], dtype=dtype), divided)
  if gated:
    dw_gate, dw_up = jnp.split(dw_up, 2, axis=1)
    dw = {'down': dw_down, 'gate': dw_gate, 'up': dw_up}
  else:
    dw = {'down': dw_down, 'up': dw_up}

  def bias_grad(g: Array, factor: Array) -> Array:
    return (jnp.sum(g.astype(jnp.float32), axis=0) * factor).astype(dtype)

  db = {
    'up': bias_grad(dz8, factor) if there['up'] else None,
    'down': bias_grad(dy, jnp.float32(1)) if there['down'] else None,
  }
  return dx, dw, db


ffn8.defvjp(_ffn8_fwd, _ffn8_bwd)
