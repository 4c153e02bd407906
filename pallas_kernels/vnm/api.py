"""The V:N:M ops, on whatever does them best here."""

import logging
from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp

from pallas_kernels import _device, _dispatch, _records
from pallas_kernels.operand import SparseOperand
from pallas_kernels.pack.api import candidates
from pallas_kernels.vnm.format import check, check_blocks, CompressedVNM, VNMOperand

OP = 'vnm_matmul'
OUT_LAYOUTS = ('mn', 'nm')

MATMULS = {
  'reference': 'pallas_kernels.vnm.reference:vnm_matmul',
  'dense': 'pallas_kernels.vnm.dense:vnm_matmul',
  'mosaic_gpu': 'pallas_kernels.vnm.mosaic_gpu:vnm_matmul',
}


PACKERS, TRANSPOSERS, TRANSPOSERS_24, TAKERS, EXPANDERS = (
  _dispatch.in_jnp_and_triton(op, 'vnm')
  for op in ('vnm_pack', 'transpose_pack', 'transpose_pack_24', 'take_columns', 'expand')
)
ACTIVATIONS = (None, 'squared_relu')


def _say_what_a_mesh_costs() -> None:
  if not _device.arrays_are_whole():
    _dispatch.log_once('V:N:M: its kernels cannot be divided by a mesh; arrays that one divides are gathered')


def vnm_matmul(
  a: CompressedVNM | VNMOperand,
  b: Array,
  *,
  out_dtype: Any = None,
  out_layout: str = 'mn',
  implementation: str | None = None,
) -> Array:
  """D = A . B with A V:2:M-sparse along the sum, accumulated in float32.

  Each block of V rows of A reads only the rows of B that its kept columns name, 4 of each M, and sparse tensor cores
  halve the sum once more. The kernel has no derivative: it is for matmuls within a rule of one's own. 'dense' and
  'reference' are differentiable in the values of A and in B.

  Args:
    a: A, [R, K].
    b: B, [K, N], same dtype.
    out_dtype: float32, bfloat16 or float16; None is A's dtype.
    out_layout: 'mn' for D [R, N], 'nm' for D [N, R].
    implementation: 'sparse' (the kernel, `mosaic_gpu`, on Hopper), 'dense' (decompress and multiply), 'reference', or
      None: the fastest by the records of this GPU, dense where sparse loses or nothing near was measured.

  Returns:
    D.

  Raises:
    ValueError: an argument is off, or the named implementation cannot serve the call. A concrete A whose positions,
      columns or index cannot be is refused, too; of a traced `CompressedVNM` that is an error under `checkify`.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.vnm.format import compress
  >>> from pallas_kernels.vnm.reference import vnm_mask
  >>> from pallas_kernels.vnm.api import vnm_matmul
  >>> x = jnp.arange(16.0).reshape(2, 8)
  >>> a = compress(x, vnm_mask(x, v=2, m=8), v=2, m=8)
  >>> vnm_matmul(a, jnp.ones((8, 1))).tolist()
  [[13.0], [29.0]]
  """
  _dispatch.check_type('a', a, CompressedVNM, VNMOperand)
  _dispatch.check_type('b', b, *_dispatch.ARRAYS)
  if len(a.shape) != 2 or b.ndim != 2:
    raise ValueError(f'a and b must be matrices, found a of shape {a.shape} and b of shape {b.shape}')
  check(a)
  if b.shape[0] != a.shape[1]:
    raise ValueError(f'b of shape {b.shape} has {b.shape[0]} rows along K, a of shape {a.shape} has {a.shape[1]}')
  if a.dtype != b.dtype:
    raise ValueError(f'a is {a.dtype} and b is {b.dtype}; they must be equal')
  if out_layout not in OUT_LAYOUTS:
    raise ValueError(f'out_layout={out_layout!r} is unknown; accepted are {OUT_LAYOUTS}')
  implementation = _dispatch.backend_of(OP, implementation, MATMULS)
  out_dtype = jnp.dtype(a.dtype if out_dtype is None else out_dtype)
  _dispatch.check_out_dtype(out_dtype)
  _say_what_a_mesh_costs()
  names = ('dense',) if implementation else _candidates(a, b.shape[1], out_dtype, out_layout)
  return _dispatch.dispatch(
    OP, MATMULS, implementation, names, a, b, out_dtype=out_dtype, out_layout=out_layout
  )


def key(a: CompressedVNM | VNMOperand, n: int, out_dtype: Any, out_layout: str) -> dict[str, Any]:
  """What measured records are looked up by."""
  r, k = a.shape
  return problem_key(r, k, n, a.v, a.m, a.dtype, out_dtype, out_layout)


def problem_key(
  r: int, k: int, n: int, v: int, m: int, dtype: Any, out_dtype: Any = None, out_layout: str = 'mn'
) -> dict[str, Any]:
  """`key` by the sizes of A [R, K] and B [K, N]; V and M are text, since only equal ones compare."""
  dtype = jnp.dtype(dtype)
  out_dtype = dtype if out_dtype is None else jnp.dtype(out_dtype)
  return dict(
    m=r, n=n, k=k, pattern=f'{v}:2:{m}', dtype=dtype.name, out_dtype=out_dtype.name, out_layout=out_layout
  )


def _candidates(a: CompressedVNM | VNMOperand, n: int, out_dtype: Any, out_layout: str) -> tuple[str, ...]:
  device = _device.current()
  if device.platform == 'cpu':
    return ('reference',)
  if not _device.arrays_are_whole():  # a kernel would gather what XLA divides
    return ('dense',)
  choice = _records.lookup(device.slug, OP, key(a, n, out_dtype, out_layout))
  if choice is None:
    logging.info('%s: nothing like %s was measured on %s; taking the dense matmul', OP, a.shape, device.name)
    return ('dense',)
  return ('dense',) if choice.implementation == 'dense' else (choice.implementation, 'dense')


class Packed(NamedTuple):
  """What `vnm_pack` makes.

  Attributes:
    operand: for `vnm_matmul`.
    masked: the same entries as a dense array, zero outside the pattern; None if not asked for.
    inputs: what `x` itself holds where the operand has its values, the shape of these; with `residuals`.
    counts: int32, how many rows of each column store an entry that is not zero; with `residuals`.
  """

  operand: VNMOperand
  masked: Array | None
  inputs: Array | None = None
  counts: Array | None = None


def vnm_pack(
  x: Array,
  *,
  v: int,
  m: int,
  activation: str | None = None,
  gradient: Array | None = None,
  pattern: VNMOperand | None = None,
  masked: bool = False,
  residuals: bool = False,
  implementation: _dispatch.Implementation = None,
) -> Packed:  # fmt: skip
  """The V:2:M operand of `activation(x)`, pattern included, in one pass over `x` on a GPU; or that of a gradient.

  Args:
    x: [R, K], whole blocks; bfloat16 or float16. Among NaNs with different bits a kernel may prefer the larger. With a
      gradient `Packed.inputs` of the call that made the pattern.
    v: rows of a block.
    m: columns of a block.
    activation: None or 'squared_relu'.
    gradient: [R, K] in the dtype of `x`: packed under `pattern`, or, with 'squared_relu', its pull-back
      `2 gradient relu(x)`. Without 'squared_relu' x is not read.
    pattern: with `gradient`, the operand whose positions are used again.
    masked: with `gradient`, also return what is packed as a dense array.
    residuals: without, also return what a backward pass needs of `x`.
    implementation: 'triton', 'reference', a tuple of them in order, or None: Triton on a GPU where it takes the call.

  Returns:
    `Packed`. Where the sums of two columns agree to rounding, the order in which a back end adds decides.

  Raises:
    ValueError: arguments do not fit, or the named implementation cannot serve the call.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.vnm.api import vnm_pack
  >>> x = jnp.array([[-1, 2, 0, 0, 3, 0, 0, 1]], jnp.bfloat16)
  >>> a = vnm_pack(x, v=1, m=8, activation='squared_relu').operand
  >>> a.compact.values.tolist(), a.rows.tolist()
  ([[4.0, 9.0]], [[0, 1, 4, 7]])
  """
  if activation not in ACTIVATIONS:
    raise ValueError(f'activation={activation!r} is unknown; accepted are {ACTIVATIONS}')
  _dispatch.check_type('x', x, *_dispatch.ARRAYS)
  _dispatch.check_type('gradient', gradient, *_dispatch.ARRAYS, type(None))
  _dispatch.check_type('pattern', pattern, VNMOperand, type(None))
  if x.ndim != 2:
    raise ValueError(f'x must be a matrix, found shape {x.shape}')
  if gradient is not None and pattern is not None:
    _check_gradient(x, gradient, pattern, v, m, residuals)
  elif gradient is not None or pattern is not None:
    raise ValueError('gradient and pattern belong together, found one of them')
  elif masked:
    raise ValueError('masked=True takes a gradient')
  else:
    check_blocks(x, v, 2, m)
  _say_what_a_mesh_costs()
  return Packed(*_dispatch.dispatch(
    'vnm_pack', PACKERS, implementation, candidates(), x, v=v, m=m, activation=activation, gradient=gradient,
    pattern=pattern, masked=masked, residuals=residuals,
  ))


def _check_gradient(x: Array, gradient: Array, pattern: VNMOperand, v: int, m: int, residuals: bool) -> None:
  if residuals:
    raise ValueError('residuals=True takes no gradient')
  if (pattern.v, pattern.m) != (v, m) or gradient.shape != pattern.shape or gradient.dtype != x.dtype:
    raise ValueError(
      f'pattern must be {v}:2:{m} of {gradient.shape} and the gradient {x.dtype}, as x; found {pattern.v}:2:{pattern.m}'
      f' of {pattern.shape} and {gradient.dtype}'
    )
  if x.shape != pattern.compact.values.shape:
    raise ValueError(f'x must be the inputs that were kept, {pattern.compact.values.shape}, found shape {x.shape}')


def transpose_pack(
  a: VNMOperand, *, used: Array | None = None, pattern: VNMOperand | None = None,
  implementation: _dispatch.Implementation = None,
) -> VNMOperand:  # fmt: skip
  """The V:2:M operand of A's transpose, its own pattern on top of A's.

  The groups of the result are spread: its columns, rows of A, are taken `R / m` apart, and its index says which.

  Args:
    a: A, [R, K]. Its groups lie side by side, not spread; R and K are multiples of V and of M.
    used: bool [K], columns of A that do not count as zeros; None is all.
    pattern: an earlier result, of another A, whose positions are used again.
    implementation: 'triton', 'reference', a tuple of them in order, or None: Triton on a GPU where it takes the call.

  Returns:
    [K, R]; where the sums of two rows agree to rounding, the order in which a back end adds decides.

  Raises:
    ValueError: arguments do not fit, or the named implementation cannot serve the call.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.vnm.api import transpose_pack, vnm_pack
  >>> x = jnp.array([[1, 2, 0, 0, 3, 0, 0, 1]] * 8, jnp.bfloat16)
  >>> b = transpose_pack(vnm_pack(x, v=8, m=8, activation='squared_relu').operand)
  >>> b.shape, b.compact.values.tolist()[4]
  ((8, 8), [9.0, 9.0])
  """
  _dispatch.check_type('a', a, VNMOperand)
  _dispatch.check_type('pattern', pattern, VNMOperand, type(None))
  r, k = a.shape
  for axis, size in ((-2, r), (-1, k)):
    if size % a.v or size % a.m:
      raise ValueError(f'a of shape {a.shape} has length {size} along axis {axis}, no multiple of {a.v} and {a.m}')
  if pattern is not None and (used is not None or (pattern.v, pattern.m, pattern.shape) != (a.v, a.m, (k, r))):
    raise ValueError(
      f'pattern must be {a.v}:2:{a.m} of {(k, r)} and come without used; found {pattern.v}:2:{pattern.m} of'
      f' {pattern.shape}'
    )
  _check_used(used, k)
  _say_what_a_mesh_costs()
  return _dispatch.dispatch('transpose_pack', TRANSPOSERS, implementation, candidates(), a, used=used, pattern=pattern)


def transpose_pack_24(
  a: VNMOperand, *, used: Array | None = None, pattern: SparseOperand | None = None,
  implementation: _dispatch.Implementation = None,
) -> SparseOperand:  # fmt: skip
  """The 2:4 operand of A's transpose: of each column the two larger ones of four neighbouring entries.

  In one pass from what A stores, where `expand` and a packer would write and read the dense matrix.

  Args:
    a: A, [R, K]. Its groups lie side by side, not spread; R is a multiple of 4.
    used: bool [K], columns of A that do not count as zeros; None is all.
    pattern: an earlier result, of another A, whose positions are used again.
    implementation: 'triton', 'reference', a tuple of them in order, or None: Triton on a GPU where it takes the call.

  Returns:
    [K, R]. Among equals the earlier rows stay.

  Raises:
    ValueError: arguments do not fit, or the named implementation cannot serve the call.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.vnm.api import transpose_pack_24, vnm_pack
  >>> x = jnp.array([[1, 2, 0, 0, 3, 0, 0, 1]] * 2 + [[4, 5, 0, 0, 0, 0, 0, 0]] * 2, jnp.bfloat16)
  >>> b = transpose_pack_24(vnm_pack(x, v=4, m=8).operand)
  >>> b.shape, b.values.tolist()[:2], b.values.tolist()[4]
  ((8, 4), [[4.0, 4.0], [5.0, 5.0]], [3.0, 3.0])
  """
  _dispatch.check_type('a', a, VNMOperand)
  _dispatch.check_type('pattern', pattern, SparseOperand, type(None))
  r, k = a.shape
  if r % 4:
    raise ValueError(f'a of shape {a.shape} has {r} rows, no multiple of 4')
  if pattern is not None and used is not None:
    raise ValueError('pattern and used do not go together: positions are chosen once')
  if pattern is not None and pattern.shape != (k, r):
    raise ValueError(f'pattern must be of shape {(k, r)}, found {pattern.shape}')
  _check_used(used, k)
  _say_what_a_mesh_costs()
  return _dispatch.dispatch(
    'transpose_pack_24', TRANSPOSERS_24, implementation, candidates(), a, used=used, pattern=pattern
  )


def _check_used(used: Array | None, k: int) -> None:
  if used is not None and (used.shape != (k,) or used.dtype != jnp.bool_):
    raise ValueError(f'used must be bool of shape {(k,)}, found {used.dtype} of shape {used.shape}')


def take_columns(a: VNMOperand, columns: Array, *, implementation: _dispatch.Implementation = None) -> Array:
  """Some columns of the dense matrix that A stands for.

  Args:
    a: A, [R, K], its groups side by side.
    columns: int32 [n], 0 to K - 1; negative ones count from the end, and others take the nearest column, as when JAX
      indexes.
    implementation: 'triton', 'reference', a tuple of them in order, or None: Triton on a GPU where it takes the call.

  Returns:
    [R, n].

  Raises:
    ValueError: arguments do not fit, or the named implementation cannot serve the call.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.vnm.api import take_columns, vnm_pack
  >>> x = jnp.array([[1, 2, 0, 0, 3, 0, 0, 1]], jnp.bfloat16)
  >>> a = vnm_pack(x, v=1, m=8, activation='squared_relu').operand
  >>> take_columns(a, jnp.array([4, 0, 1], jnp.int32)).tolist()
  [[9.0, 0.0, 4.0]]
  """
  _dispatch.check_type('a', a, VNMOperand)
  _dispatch.check_type('columns', columns, *_dispatch.ARRAYS)
  if columns.ndim != 1 or columns.dtype != jnp.int32:
    raise ValueError(f'columns must be int32 [n], found {columns.dtype} of shape {columns.shape}')
  return _dispatch.dispatch('take_columns', TAKERS, implementation, candidates(), a, columns)


def expand(operand: SparseOperand | VNMOperand, *, implementation: _dispatch.Implementation = None) -> Array:
  """The dense matrix of an operand, 2:4 or V:N:M, for a matmul in which it is the side that is not sparse.

  A pass over operand and result; making the dense matrix again from what was packed takes XLA several.

  Args:
    operand: a matrix of 16 bits.
    implementation: 'triton', 'reference', a tuple of them in order, or None: Triton on a GPU where it takes the call.

  Returns:
    A matrix in the dtype of the operand.

  Raises:
    ValueError: arguments do not fit, or the named implementation cannot serve the call.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.pack.api import soft_threshold_pack
  >>> from pallas_kernels.vnm.api import expand
  >>> w = jnp.tile(jnp.array([1.0, -4.0, 2.0, 3.0], jnp.bfloat16), (64, 16))
  >>> expand(soft_threshold_pack(w, jnp.float32(1.0), axis=-1).operand)[0, :4].tolist()
  [0.0, -2.0, 0.0, 1.0]
  """
  _dispatch.check_type('operand', operand, SparseOperand, VNMOperand)
  if len(operand.shape) != 2:
    raise ValueError(f'operand must be a matrix, found shape {operand.shape}')
  return _dispatch.dispatch('expand', EXPANDERS, implementation, candidates(), operand)
