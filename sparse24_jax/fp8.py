"""S-STE in real FP8: sparse products in the forward and the weight gradient, a dense one in the input gradient.

    z  = x W~       sparse e4m3: W~^T packed along in         x [tokens, in]    (dense where that measured faster)
    dx = dz W~^T    dense: dz in e5m2                         W~ [in, out] in e4m3
    dw = x^T V(dz)  sparse e5m2: V(dz)^T packed along tokens  x^T [in, tokens] in e4m3

Scales are per tensor and current, those of weights powers of two. FP8 products read both operands with the contracted
axis contiguous, so a tensor that is contracted along either axis is written both ways, by the one pass that also rounds
it: x and its transpose; W~ packed and dense; dz dense and its sample packed. The backward keeps x^T alone, at a byte an
entry.
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
from pallas_kernels.sparse_matmul.reference import ACTIVATIONS
from sparse24_jax.mvue import check_sampling
from sparse24_jax.packing8 import E4M3, PackedWeight8, side_by_side

E5M2 = jnp.dtype('float8_e5m2')
# Bounds of the derivatives, where there are any: dz then has a bound that needs dh alone.
STEEPEST = {'gelu': 1.13, 'silu': 1.1, 'relu': 1.0}


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


def rounded(x: Array, *, keep: bool) -> Rounded:
  """x `[tokens, features]` in e4m3; both ways if a backward is to `keep` it."""
  scale, factor = quantize.current_scale(quantize.amax(x), E4M3)
  if not keep:
    return Rounded(quantize.quantize(x, scale, dtype=E4M3), None, factor)
  values, transposed = quantize.quantize(x, scale, dtype=E4M3, transpose='both')
  return Rounded(values, transposed, factor)


def forward(
  x: Rounded, w: PackedWeight8, *, backend: str | None, dtype: Any, bias: Array | None = None,
  activation: str | None = None, keep_preactivation: bool = False,
) -> Any:  # fmt: skip
  """z `[tokens, out]`, its activation, or (activation(z), z) to keep; without a back end by a dense product."""
  if backend is None:
    return _dense_forward(x, w, dtype, bias, activation, keep_preactivation)
  with jax.named_scope('forward'):
    z = sparse_matmul.sparse_matmul(
      w.operand, x.values, bias=bias, a_scale=w.factor, b_scale=x.factor, out_dtype=dtype, out_layout='nm',
      activation=activation, keep_preactivation=keep_preactivation, implementation=backend,
    )  # fmt: skip
  # As in `products.multiply`: or the kernel runs twice inside a scan.
  return jax.lax.optimization_barrier(z)


def _dense_forward(
  x: Rounded, w: PackedWeight8, dtype: Any, bias: Array | None, activation: str | None, keep_preactivation: bool
) -> Any:
  with jax.named_scope('forward'):
    z = _dense_product(x.values, x.factor, _partitioning.whole(w.matrix).T, w.factor, dtype)
  if bias is not None:
    z = z + bias.astype(dtype)[None]
  if activation is None:
    return z
  h = ACTIVATIONS[activation](z.astype(jnp.float32)).astype(dtype)
  return (h, z) if keep_preactivation else h


def _dense_product(x: Array, x_factor: Array, w: Array, w_factor: Array, dtype: Any) -> Array:
  # Sums of FP8 numbers, before the factors scale them, exceed the range of float16.
  wide = jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype
  return quantize.fp8_dot(x, w, x_factor, w_factor, out_dtype=wide).astype(dtype)


def input_grad(dz: Array, factor: Array, w: PackedWeight8, *, dtype: Any) -> Array:
  """dx `[tokens, in]` from dz in e5m2."""
  with jax.named_scope('input_grad'):
    return _dense_product(dz, factor, _partitioning.whole(w.matrix), w.factor, dtype)


def multiply_pair(
  role: str, b: Array, b_factor: Array, gate: PackedWeight8, up: PackedWeight8, *, backend: str | None, dtype: Any,
  bias: Array | None = None,
) -> Array:
  """`forward` or `input_grad` by [W_gate | W_up]: z `[tokens, 2, h]` from `[tokens, d]`, or dx `[tokens, d]` from dz.

  As in `products.multiply_pair`, each device puts its parts of the two side by side; `bias` is `[2, h]`.
  """
  sparse = role == 'forward' and backend is not None
  unread = dict(state=None, dense=None) if sparse else dict(state=None, forward=None)
  pair = [dataclasses.replace(p, **unread) for p in (gate, up)]
  of_b, dense, d = {
    'forward': ('n k*64', 'k*64 m*64', 'n . m*64'), 'input_grad': ('n . k*64', 'm*64 k*64', 'n m*64')
  }[role]  # fmt: skip
  of_pair = (*(('m*64 k*32', 'm k .') if sparse else (dense,)), '') * 2
  of_bias = () if bias is None else ('. m*64',)
  rule = _partitioning.Rule((of_b, '', *of_pair, *of_bias), (d,), order=('n', 'k', 'm'), sums=('k',))
  return _partitioning.partitioned(
    'multiply_pair8', _multiply_pair, rule, b, b_factor, *pair, bias, role=role, backend=backend, dtype=jnp.dtype(dtype)
  )


def _multiply_pair(shard, b, b_factor, gate, up, bias, *, role, backend, dtype):
  w, rows = side_by_side(gate, up), b.reshape(b.shape[0], -1)
  if role == 'input_grad':
    return shard.sum(input_grad(rows, b_factor, w, dtype=dtype), 'k')
  bias, partial = None if bias is None else bias.reshape(-1), shard.sums('k')
  given = Rounded(rows, None, b_factor)
  z = shard.sum(forward(given, w, backend=backend, dtype=dtype, bias=None if partial else bias), 'k')
  if partial and bias is not None:
    z = z + bias[None]
  return z.reshape(b.shape[0], 2, -1)


def _weight_grad(
  shard: Any, dz: Packed8, x: Array, factors: Sequence[Array], *, backend: str, dtype: Any, parts: int = 1
) -> Any:
  """dz in e5m2, and dw `[in, out]`, or so many parts of it, from x^T `[in, tokens]` and the operand of sampled dz."""
  x_factor, factor = factors
  with jax.named_scope('weight_grad'):
    dw = sparse_matmul.sparse_matmul(
      dz.operand, x, a_scale=MVUE_HEADROOM * factor, b_scale=x_factor, out_dtype=dtype, out_layout='nm',
      implementation=backend,
    )  # fmt: skip
  return dz.dense, *(shard.sum(part, 'k') for part in jnp.split(dw, parts, axis=1))


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
) -> tuple[Array, Array, Sequence[Array]]:
  """(dz in e5m2, its factor, dw = x^T V(dz)), with a gate its gradient and that of up.

  One pass makes dz from dh and z, rounds and samples it.
  """
  if gated or activation not in STEEPEST:
    largest = activations.activation_backward_amax(dh, z, activation=activation, gated=gated)
  else:
    largest = STEEPEST[activation] * quantize.amax(dh)
  scale, factor = quantize.current_scale(largest, E5M2)
  # With a gate a part of the columns of z would be none of either half.
  dz_text = 'k*4 .' if gated else 'k*4 m*4'
  rule = _partitioning.Rule(
    (dz_text, dz_text, _partitioning.undivided(key), '', 'n k*4', '', ''),
    (dz_text, *(('n .',) * 2 if gated else ('n m*4',))), ('k', 'n', 'm'), ('k',),
  )  # fmt: skip
  with jax.named_scope('weight_grad'):
    dz8, *dw = _partitioning.partitioned(
      'activation_and_weight_grad8', _activation_and_weight_grad, rule, dh, z, key, scale, x, (x_factor, factor),
      backend=backend, activation=activation, gated=gated,
    )  # fmt: skip
  return dz8, factor, [_partitioning.whole(part) for part in dw]


def _activation_and_weight_grad(shard, dh, z, key, scale, x, factors, *, backend, activation, gated):
  origin = (0, shard.offset('k'), shard.offset('m', 4))
  packed = activations.activation_backward_pack8(
    dh, z, key, scale, activation=activation, gated=gated, origin=origin
  )
  return _weight_grad(shard, packed, x, factors, backend=backend, dtype=dh.dtype, parts=2 if gated else 1)


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


dot8.defvjp(_dot8_fwd, _dot8_bwd, optimize_remat=True)  # see `ffn8`


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
  """(y, x, z, h), x and h rounded; without a gate z is None unless kept."""
  one = functools.partial(_ffn8_of_one, static, gated, keep)
  return jax.custom_batching.sequential_vmap(one)(x, biases, packed)


def _ffn8_of_one(static, gated, keep, x, biases, packed):
  up_backend, down_backend, _, activation = static
  rows = rounded(x, keep=keep)
  if gated:
    bias = None if biases['up'] is None else biases['up'].reshape(2, -1)
    pair = packed['gate'], packed['up']
    z = multiply_pair('forward', rows.values, rows.factor, *pair, backend=up_backend, dtype=x.dtype, bias=bias)
    z = _partitioning.whole(z, 1).reshape(x.shape[0], -1)
    h = rounded(activations.gated_activation(z, activation=activation), keep=keep)
  else:
    found = forward(
      rows, packed['up'], backend=up_backend, dtype=x.dtype, bias=biases['up'], activation=activation,
      keep_preactivation=keep,
    )  # fmt: skip
    h, z = found if keep else (found, None)
    h = rounded(h, keep=keep)
  return forward(h, packed['down'], backend=down_backend, dtype=x.dtype, bias=biases['down']), rows, z, h


def _ffn8_fwd(static, x, weights, biases, packed, keys):
  check_sampling(x, 'mvue', keys['down'])
  y, rows, z, h = _ffn8(static, x, biases, packed, gated='gate' in weights, keep=True)
  kept = (rows.transposed, rows.factor, z, h.transposed, h.factor)
  there = {name: () for name, bias in biases.items() if bias is not None}
  return y, (kept, packed, there, keys, _partitioning.division(x))


def _ffn8_bwd(static, residuals, dy):
  kept, packed, there, keys, divided = residuals
  one = functools.partial(_ffn8_bwd_of_one, static, there, 'gate' in packed, divided)
  return *jax.custom_batching.sequential_vmap(one)(kept, packed, keys, dy), None, None


def _ffn8_bwd_of_one(static, there, gated, divided, kept, packed, keys, dy):
  (_, _, backend, activation), (x, x_factor, z, h, h_factor), dtype = static, kept, dy.dtype
  dy8, dy_factor, dw_down = sampled_weight_grad(dy, keys['down'], h, h_factor, backend=backend)
  dh = input_grad(dy8, dy_factor, packed['down'], dtype=dtype)
  dz8, factor, dw_hidden = activation_and_weight_grad(
    dh, z, keys['hidden'], x, x_factor, backend=backend, activation=activation, gated=gated
  )
  if gated:
    halves, pair = dz8.reshape(dz8.shape[0], 2, -1), (packed['gate'], packed['up'])
    dx = multiply_pair('input_grad', halves, factor, *pair, backend=None, dtype=dtype)
  else:
    dx = input_grad(dz8, factor, packed['up'], dtype=dtype)
  dx = _partitioning.like(dx, divided)
  dw = dict(zip(('down', 'gate', 'up') if gated else ('down', 'up'), (dw_down, *dw_hidden), strict=True))

  def bias_grad(g: Array, factor: Array) -> Array:
    return (jnp.sum(g.astype(jnp.float32), axis=0) * factor).astype(dtype)

  db = {
    'up': bias_grad(dz8, factor) if 'up' in there else None,
    'down': bias_grad(dy, jnp.float32(1)) if 'down' in there else None,
  }
  return dx, dw, db


# Under `jax.checkpoint` a forward whose residuals are thrown away writes none: see `keep`.
ffn8.defvjp(_ffn8_fwd, _ffn8_bwd, optimize_remat=True)
