"""Packers: one pass over a weight or a gradient gives the operands that the sparse matmul reads, or the mask alone.

Back ends: `reference` (plain jnp, everywhere) and `triton` (compute capability 8.0 and newer).
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _device, _dispatch, _partitioning
from pallas_kernels.formats import check_groups
from pallas_kernels.pack.reference import code_mask, FLOAT8, is_float8, MVUE_HEADROOM, Packed, PackedPair
from pallas_kernels.two_of_four import transposable

__all__ = [
  'MVUE_HEADROOM', 'Packed', 'PackedPair', 'masked_pack', 'mvue_pack', 'soft_threshold_pack', 'transposable_mask',
  'transposable_pack',
]  # fmt: skip

Array = jax.Array


def candidates(dtype: Any = jnp.bfloat16, device: _device.Device | None = None) -> list[str]:
  """Back ends that write `dtype` on a device, None being the one at hand; best first."""
  arch = (device or _device.current()).arch
  return ['triton', 'reference'] if (1 if is_float8(dtype) else 2) in arch.itemsizes else ['reference']


# How a weight [..., R, C], its codes and its operands are divided by a mesh: in whole 64 x 64 tiles of positions.
_WEIGHT, _CODES, _FACTORS = 'r*64 c*64', 'r*16 c*16', ('r', 'c')
_OPERANDS = {-1: ('r*64 c*32', 'r c .'), -2: ('c*64 r*32', 'c r .')}


def _call_on_parts(
  op: str, texts: tuple[str, ...], results: tuple[str, ...], implementation: _dispatch.Implementation, *args: Any,
  **options: Any,
) -> Any:  # fmt: skip
  """The op on each device's part of a weight; texts say how the last axes of arguments and results are divided."""
  lead = [f'l{i}' for i in range(args[0].ndim - 2)]
  rule = _partitioning.Rule(
    tuple(' '.join([*lead, t]) for t in texts), tuple(' '.join([*lead, t]) for t in results),
    (*_FACTORS, *lead),
  )  # fmt: skip
  asked = implementation, tuple(candidates(options['dtype']))
  return _partitioning.partitioned(op, _on_a_part, rule, *args, name=op, asked=asked, **options)


def _on_a_part(shard: _partitioning.Shard, *args: Any, name: str, asked: tuple[Any, Any], **options: Any) -> Any:
  del shard
  return _dispatch.dispatch(name, _dispatch.in_jnp_and_triton(name, 'pack'), *asked, *args, **options)


def transposable_pack(w: Array, *, dtype: Any = None, implementation: _dispatch.Implementation = None) -> PackedPair:
  """The best transposable mask of `w` and both operands under it.

  The mask is that of `transposable_mask`, bit for bit: 2:4 along rows and along columns at once, so one mask serves
  y = x w and dx = dy w^T.

  Args:
    w: [..., R, C], both multiples of four; bfloat16, float16 or float32.
    dtype: of the packed values; None is the dtype of `w`, bfloat16 for float32.
    implementation: 'reference', 'triton', a tuple of them in order, or None to choose.

  Returns:
    A `PackedPair`.

  Raises:
    ValueError: shapes or dtypes do not fit, or the named implementation refuses.

  >>> import jax, jax.numpy as jnp
  >>> from pallas_kernels.pack.api import transposable_pack
  >>> w = jax.random.normal(jax.random.key(0), (64, 128), jnp.bfloat16)
  >>> p = transposable_pack(w)
  >>> p.rows.shape, p.columns.shape, p.codes.shape
  ((64, 128), (128, 64), (16, 32))
  """
  _check_blocks(w)
  pair = (*_OPERANDS[-1], *_OPERANDS[-2], _CODES)
  return _call_on_parts('transposable_pack', (_WEIGHT,), pair, implementation, w, dtype=values_dtype(w, dtype))


def transposable_mask(w: Array) -> Array:
  """Bool mask of the shape of `w`, `[..., R, C]`; that of `two_of_four/transposable.py` bit for bit.

  On a GPU `transposable_pack` searches it, and its operands are dropped: that is faster than XLA's search. If a mesh
  divides the array, each device searches its own part.

  Args:
    w: float32, bfloat16 or float16, whole blocks of 4 x 4.

  Raises:
    ValueError: another dtype, or axes that are no multiples of four.

  >>> import jax
  >>> from pallas_kernels.pack.api import transposable_mask
  >>> w = jax.random.normal(jax.random.key(0), (4, 4))
  >>> transposable_mask(w).sum(axis=0).tolist()
  [2, 2, 2, 2]
  """
  w = jax.lax.stop_gradient(w)  # a choice has no derivative, and the packer no rule that says so
  floats = ('bfloat16', 'float16', 'float32')
  if 'triton' in candidates() and _partitioning.serves(w) and w.ndim >= 2 and w.dtype.name in floats:
    text = ' '.join([*(f'l{i}' for i in range(w.ndim - 2)), 'r*4 c*4'])
    rule = _partitioning.Rule((text,), (text,), tuple(word.split('*')[0] for word in text.split()))
    return _partitioning.partitioned('transposable_mask', _mask_on_a_part, rule, w)
  return transposable.transposable_mask(w)


def _mask_on_a_part(shard: _partitioning.Shard, w: Array) -> Array:
  del shard
  return code_mask(transposable_pack(w).codes)


def masked_pack(
  w: Array, codes: Array, scale: Array | None = None, *, dtype: Any = None,
  implementation: _dispatch.Implementation = None,
) -> PackedPair:  # fmt: skip
  """Both operands of `w`, in float8 of scale w, under a mask chosen earlier: new values, old pattern.

  Float8 is rounded as by `soft_threshold_pack`, but that -0.0 stays where it is kept.

  Args:
    w: [..., R, C], both multiples of four; bfloat16, float16 or float32.
    codes: uint16 [..., R/4, C/4] as in `PackedPair`; no row and no column of a block keeps more than two.
    scale: float32, shape `w.shape[:-2]`, in float8; else None.
    dtype: of the packed values, bfloat16, float16, float8_e4m3fn or float8_e5m2; None is the dtype of `w`, bfloat16 for
      float32.
    implementation: 'reference', 'triton' (float8: compute capability 8.9), a tuple of them in order, or None to choose.

  Raises:
    ValueError: shapes or dtypes do not fit, float8 lacks a scale or another dtype has one, or the named implementation
      refuses.

  >>> import jax, jax.numpy as jnp
  >>> from pallas_kernels.pack.api import masked_pack, transposable_pack
  >>> w = jax.random.normal(jax.random.key(0), (64, 64), jnp.bfloat16)
  >>> p = transposable_pack(w)
  >>> bool((masked_pack(2 * w, p.codes).rows.values == 2 * p.rows.values).all())
  True
  """
  _check_blocks(w)
  _check_codes(w, codes, 'codes')
  dtype = values_dtype(w, dtype, float8=True)
  scale = check_scale(scale, dtype, w, 'w')
  texts, pair = (_WEIGHT, _CODES, *(() if scale is None else ('',))), (*_OPERANDS[-1], *_OPERANDS[-2], _CODES)
  return _call_on_parts('masked_pack', texts, pair, implementation, w, codes, scale, dtype=dtype)


def soft_threshold_pack(
  w: Array, scale: Array, *, axis: int = -2, dtype: Any = None, implementation: _dispatch.Implementation = None
) -> Packed:
  """The operand of scale S(w), S the soft threshold of S-STE (arXiv 2409.09099, section 4.1), in one pass over `w`.

  In 16 bits `scale` is the frozen one of S-STE, as `soft_threshold_scale` gives it. In float8 it also brings the result
  to the range of the type: times `current_scale(frozen * quantize.amax(w), dtype)`, as |w| bounds |S(w)|.
  Rounded once, to nearest even; what exceeds the largest float8 becomes it, NaN stays NaN, and what rounds to zero is
  0.0.

  Args:
    w: [..., R, C]; bfloat16, float16 or float32, R and C multiples of four.
    scale: float32, shape `w.shape[:-2]`.
    axis: the grouped axis. -1: the operand of w, [R, C]; -2: that of its transpose, [C, R].
    dtype: of the packed values, bfloat16, float16, float8_e4m3fn or float8_e5m2; None is the dtype of `w`, bfloat16 for
      float32.
    implementation: 'reference', 'triton' (float8: compute capability 8.9), a tuple of them in order, or None to choose.

  Returns:
    The operand; in float8 also scale S(w) as it stands, shape of `w`, for the dense input gradient.

  Raises:
    ValueError: shapes or dtypes do not fit, or the named implementation refuses.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.pack.api import soft_threshold_pack
  >>> w = jnp.tile(jnp.array([[1.0, -4.0, 2.0, 3.0]]).T, (16, 64))  # [in, out]
  >>> soft_threshold_pack(w, jnp.float32(2.0)).operand.values[0, :2].tolist()
  [-4.0, 2.0]
  >>> soft_threshold_pack(w, jnp.float32(2.0), dtype=jnp.float8_e4m3fn).dense[:4, 0].tolist()
  [0.0, -4.0, 0.0, 2.0]
  """
  _check_blocks(w)
  dtype, scale = values_dtype(w, dtype, float8=True), matrix_scale(scale, w, 'w')
  if axis not in (-1, -2, w.ndim - 1, w.ndim - 2):
    raise ValueError(f'axis={axis} must be one of the last two axes of {w.shape}')
  axis = axis if axis < 0 else axis - w.ndim
  results = (*_OPERANDS[axis], *((_WEIGHT,) if is_float8(dtype) else ()))
  return _call_on_parts(
    'soft_threshold_pack', (_WEIGHT, ''), results, implementation, w, scale, axis=axis, dtype=dtype
  )


def mvue_pack(
  x: Array,
  key: Array,
  scale: Array | None = None,
  *,
  origin: tuple[Array | int, Array | int, Array | int] = (0, 0, 0),
  dtype: Any = None,
  implementation: _dispatch.Implementation = None,
) -> Packed:
  """The operand of an unbiased 2:4 sample of `x` along axis -2, the uniforms and decisions being those of `mvue24`.

  For a weight gradient dW = X^T dZ the sparse operand is dZ^T, compressed along tokens: `x` is dZ [tokens, features].

  In float8 the same pass writes `x` itself for the dense input gradient. The sample is drawn from `x` as it stands, in
  float32, and rounded after, once, to nearest even: to round first would sample other numbers than the gradient's. A
  sampled value is at most half the sum of its group's magnitudes, twice the largest entry, so the operand takes
  `scale / 2`, where `scale` brings `x` itself to the range of the type: nothing overflows, no second maximum is taken,
  and the binade costs no precision, only one of the 31 of e5m2 at the lower end. A result is divided by scale, and that
  of the operand multiplied with `MVUE_HEADROOM`; scale is `current_scale(amax(x), dtype)`.

  Args:
    x: [..., R, C]; bfloat16, float16 or float32, R and C multiples of four.
    key: a JAX random key.
    scale: float32, shape `x.shape[:-2]`, in float8; else None.
    origin: as in `mvue24`.
    dtype: of the packed values, bfloat16, float16, float8_e5m2 or float8_e4m3fn; None is the dtype of `x`, bfloat16 for
      float32.
    implementation: 'reference', 'triton' (float8: compute capability 8.9), a tuple of them in order, or None to choose.

  Returns:
    The operand of the transpose of x, [C, R]. In float8 that of the sample times scale / 2, and x times scale.

  Raises:
    ValueError: shapes or dtypes do not fit, float8 lacks a scale or another dtype has one, or the named implementation
      refuses.

  >>> import jax, jax.numpy as jnp
  >>> from pallas_kernels.pack.api import mvue_pack
  >>> dz = jax.random.normal(jax.random.key(0), (128, 64), jnp.bfloat16)
  >>> mvue_pack(dz, jax.random.key(1)).operand.shape
  (64, 128)
  >>> packed = mvue_pack(dz, jax.random.key(1), jnp.float32(10000), dtype=jnp.float8_e5m2)
  >>> packed.operand.shape, packed.dense.shape
  ((64, 128), (128, 64))
  """
  _check_blocks(x, 'x')
  if isinstance(origin[2], int) and origin[2] % 4:
    raise ValueError(f'origin column {origin[2]} is not a multiple of four')
  dtype = values_dtype(x, dtype, 'x', float8=True)
  scale = check_scale(scale, dtype, x, 'x')
  backends = _dispatch.in_jnp_and_triton('mvue_pack', 'pack')
  return _dispatch.dispatch(
    'mvue_pack', backends, implementation, candidates(dtype), x, key, scale, origin=origin, dtype=dtype
  )


def check_scale(scale: Array | None, dtype: jnp.dtype, x: Array, name: str) -> Array | None:
  """The `matrix_scale` of a sample of `x`, which has one in float8 alone; else None."""
  if scale is None and is_float8(dtype):
    raise ValueError(f'dtype={dtype} needs a scale of shape {x.shape[:-2]}, one a matrix of {name}, found None')
  if scale is not None and not is_float8(dtype):
    raise ValueError(f'dtype with a scale must be float8_e4m3fn or float8_e5m2, found {dtype}')
  return None if scale is None else matrix_scale(scale, x, name)


def matrix_scale(scale: Array, x: Array, name: str) -> Array:
  """`scale` in float32, one number a matrix of `x`, which messages call `name`."""
  scale = jnp.asarray(scale, jnp.float32)
  if scale.shape != x.shape[:-2]:
    raise ValueError(f'scale must have shape {x.shape[:-2]}, one a matrix of {name}, found {scale.shape}')
  return scale


def _check_blocks(w: Array, name: str = 'w') -> None:
  if w.ndim < 2:
    raise ValueError(f'{name} must have at least two axes, found shape {w.shape}')
  check_groups(w, -2, name=name)
  check_groups(w, -1, name=name)


def _check_codes(w: Array, codes: Array, name: str) -> None:
  expected = (*w.shape[:-2], w.shape[-2] // 4, w.shape[-1] // 4)
  if codes.shape != expected or codes.dtype != jnp.uint16:
    raise ValueError(f'{name} must be uint16 of shape {expected}, found {codes.dtype} of shape {codes.shape}')


def values_dtype(w: Array, dtype: Any, name: str = 'w', *, float8: bool = False) -> jnp.dtype:
  """The dtype in which a packer stores the values of `w`; None is that of `w`, bfloat16 for float32."""
  if w.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
    raise ValueError(f'{name} must be bfloat16, float16 or float32, found {w.dtype}')
  if dtype is None:
    dtype = jnp.bfloat16 if w.dtype == jnp.float32 else w.dtype
  dtype, accepted = jnp.dtype(dtype), ('bfloat16', 'float16', *(map(str, FLOAT8) if float8 else ()))
  if dtype.name not in accepted:
    raise ValueError(f'dtype of packed values must be {" or ".join(accepted)}, found {dtype}')
  if w.dtype not in (jnp.float32, dtype) and not is_float8(dtype):
    raise ValueError(f'dtype={dtype} differs from the 16-bit {name}, {w.dtype}; cast {name} first')
  return dtype
