"""Rounding to float8 with a scale a tensor, and the dense matmul of such tensors.

`current_scale` has the rule of arXiv 2409.09099, section 5 (per-tensor, current, no margin), with the guards that the
rule lacks. Back ends of `quantize`: `reference` (plain jnp, everywhere) and `triton` (compute capability 8.9 on).
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch, _partitioning
from pallas_kernels.pack.api import candidates, matrix_scale
from pallas_kernels.pack.reference import is_float8

__all__ = ['amax', 'current_scale', 'fp8_dot', 'quantize']

Array = jax.Array
TRANSPOSE = ('no', 'both', 'only')

# Scales stay within 2^-126 and 2^126, so that neither a scale nor its inverse is subnormal or infinite. Ours.
_LARGEST_SCALE = 2.0**126


def amax(x: Array) -> Array:
  """The largest magnitude of each matrix of `x`, float32 of shape `x.shape[:-2]`; NaN if it holds one.

  An XLA reduction, a pass of its own over `x` (two bytes an entry in bfloat16): the scale must be known before the
  first entry is rounded.

  Args:
    x: floats, `[..., R, C]`.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.quantize.api import amax
  >>> float(amax(jnp.array([[1.0, -3.0], [2.0, 0.5]])))
  3.0
  """
  return jnp.max(jnp.abs(x), axis=(-2, -1)).astype(jnp.float32)


def current_scale(amax: Array, dtype: Any) -> Array:
  """What to multiply a tensor with before rounding it to `dtype`, and to divide a result by after.

  It is largest / amax, largest being that of `dtype`. Guards, which are ours: an amax of zero, or so small that the
  scale would leave float32's range, gives the largest scale, 2^126. One that is NaN gives NaN, and an infinite one
  zero. A tensor that is multiplied with either gives results that are NaN once they are divided by it: an overflow
  upstream shows, and does not pass for a clipped number.

  Args:
    amax: largest magnitudes, float32, any shape.
    dtype: float8_e4m3fn (largest 448) or float8_e5m2 (57344).

  Raises:
    ValueError: another dtype.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.quantize.api import current_scale
  >>> float(current_scale(jnp.array(7.0), jnp.float8_e4m3fn))
  64.0
  """
  largest = float(jnp.finfo(_float8(dtype)).max)
  amax = jnp.asarray(amax, jnp.float32)
  bounded = jnp.maximum(amax, jnp.float32(largest / _LARGEST_SCALE))
  return jnp.float32(largest) / bounded


def quantize(
  x: Array, scale: Array, *, dtype: Any, transpose: str = 'no', implementation: _dispatch.Implementation = None
) -> Array | tuple[Array, Array]:
  """x times `scale` in float8, and its transpose, from one read of `x`.

  float8 matmuls want both operands with the contracted axis contiguous, so a tensor that is contracted along either
  axis (activations: along features forward, along tokens in the weight gradient) is needed both ways. The matmul is
  taken in float32 and rounded to nearest even; what exceeds the largest value, infinities included, becomes it; NaN
  stays NaN.

  Args:
    x: [..., R, C], bfloat16, float16 or float32.
    scale: float32, shape `x.shape[:-2]`, from `current_scale`.
    dtype: float8_e4m3fn or float8_e5m2.
    transpose: 'no' for [..., R, C], 'only' for [..., C, R], 'both' for the pair.
    implementation: 'reference', 'triton' (R and C multiples of four), a tuple of them in order, or None to choose:
      without a transpose, XLA.

  Raises:
    ValueError: shapes, dtypes or `transpose` do not fit, or the named implementation refuses.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.quantize.api import quantize
  >>> x = jnp.array([[1.0, 1.03], [-1000.0, 0.0]])
  >>> plain, transposed = quantize(x, jnp.float32(1), dtype=jnp.float8_e4m3fn, transpose='both')
  >>> plain.tolist(), transposed.tolist()
  ([[1.0, 1.0], [-448.0, 0.0]], [[1.0, -448.0], [1.0, 0.0]])
  """
  if x.ndim < 2 or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
    raise ValueError(f'x must be bfloat16, float16 or float32 with at least two axes, found {x.dtype} of {x.shape}')
  if transpose not in TRANSPOSE:
    raise ValueError(f'transpose={transpose!r} is unknown; accepted are {TRANSPOSE}')
  dtype, scale = _float8(dtype), matrix_scale(scale, x, 'x')
  # Without a transpose XLA's own element-wise pass is at copy speed.
  names = ('reference',) if transpose == 'no' else tuple(candidates(dtype))
  lead = ' '.join(f'l{i}' for i in range(x.ndim - 2))
  plain, transposed = f'{lead} r*4 c*4', f'{lead} c*4 r*4'
  results = {'no': (plain,), 'only': (transposed,), 'both': (plain, transposed)}[transpose]
  return _partitioning.partitioned(
    'quantize', _on_a_part, _partitioning.Rule((plain, lead), results, ('r', 'c', *lead.split())), x, scale,
    asked=(implementation, names), dtype=dtype, transpose=transpose,
  )  # fmt: skip


def _on_a_part(shard: _partitioning.Shard, *args: Array, asked: tuple[Any, Any], **options: Any) -> Any:
  del shard
  backends = _dispatch.in_jnp_and_triton('quantize', 'quantize')
  return _dispatch.dispatch('quantize', backends, *asked, *args, **options)


def fp8_dot(a: Array, b: Array, a_scale: Array, b_scale: Array, *, out_dtype: Any = jnp.bfloat16) -> Array:
  """a . b^T / (a_scale b_scale) with float32 sums: the dense float8 matmul, both operands with K contiguous.

  For the input gradient dx[T, I] = dz[T, O] W~[I, O]^T. Written so that XLA on compute capability 8.9 and newer makes
  it one cuBLASLt float8 matmul that takes the scales (`__cublas$lt$matmul$f8`): the float8 operands go into the matmul
  as they are, which keeps every other lowering exact too, the result is asked for in the 16-bit type, and one number
  made of the scales multiplies it.

  Args:
    a: [M, K], float8_e4m3fn or float8_e5m2.
    b: [N, K], float8_e4m3fn or float8_e5m2; cuBLASLt lacks e5m2 for both.
    a_scale: float32 scalar, what `a` was multiplied with before it was rounded.
    b_scale: what `b` was.
    out_dtype: bfloat16 or float16 (whose range must hold the sum before it is scaled), or float32.

  Returns:
    [M, N].

  Raises:
    ValueError: shapes or dtypes do not fit.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.quantize.api import fp8_dot
  >>> a, b = jnp.ones((2, 16), jnp.float8_e5m2), jnp.ones((3, 16), jnp.float8_e4m3fn)
  >>> fp8_dot(a, b, jnp.float32(0.5), jnp.float32(4))[0].tolist()
  [8.0, 8.0, 8.0]
  """
  for operand in (a, b):
    _float8(operand.dtype)
  if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
    raise ValueError(f'a [M, K] and b [N, K] must be matrices with the same K, found {a.shape} and {b.shape}')
  if jnp.shape(a_scale) or jnp.shape(b_scale):
    raise ValueError(f'scales must be scalars, found shapes {jnp.shape(a_scale)} and {jnp.shape(b_scale)}')
  # Each inverted by itself: the product of two large scales would be infinite.
  factor = 1 / jnp.asarray(a_scale, jnp.float32) * (1 / jnp.asarray(b_scale, jnp.float32))
  d = jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.dtype(out_dtype))
  return d * factor.astype(d.dtype)


def _float8(dtype: Any) -> jnp.dtype:
  if not is_float8(jnp.dtype(dtype)):
    raise ValueError(f'dtype must be float8_e4m3fn or float8_e5m2, found {jnp.dtype(dtype)}')
  return jnp.dtype(dtype)
