"""`sparse_matmul`: the matmul of a 2:4-sparse and a dense matrix, on whatever does it best here."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _checks, _device, _dispatch, _partitioning, _records, formats, operand
from pallas_kernels.activations import ACTIVATIONS
from pallas_kernels.sparse_matmul import reference
from pallas_kernels.sparse_matmul.call import Call, Vectors

Array = jax.Array
OP = 'sparse_matmul'

BACKENDS = {
  'reference': 'pallas_kernels.sparse_matmul.reference:sparse_matmul',
  'dense': 'pallas_kernels.sparse_matmul.dense:sparse_matmul',
  'mosaic_gpu': 'pallas_kernels.sparse_matmul.mosaic_gpu:sparse_matmul',
  'mosaic_gpu_sm80': 'pallas_kernels.sparse_matmul.mosaic_gpu_sm80:sparse_matmul',
  'cusparselt': 'pallas_kernels.sparse_matmul.cusparselt:sparse_matmul',
}


def sparse_matmul(
  a: formats.Compressed24 | operand.SparseOperand,
  b: Array,
  *,
  bias: Array | None = None,
  activation: str | None = None,
  a_scale: Array | None = None,
  b_scale: Array | None = None,
  out_dtype: Any = None,
  b_layout: str = 'nk',
  out_layout: str = 'mn',
  keep_preactivation: bool = False,
  alpha: float = 1.0,
  amax: bool = False,
  implementation: str | None = None,
) -> Any:
  """D = activation(alpha A . B / scales + bias) with A 2:4-sparse along the sum, accumulated in float32.

  Only A can be sparse on the hardware, and D has A's rows. The three matmuls of a layer y[T, O] = x[T, I] W[I, O] are

  ============  =============================  ===========  =================
  matmul        A                              B            D
  ============  =============================  ===========  =================
  forward       W^T, compressed along I        x 'nk'       y 'nm'
  input grad    W, compressed along O          dy 'nk'      dx 'nm'
  weight grad   dy^T, compressed along T       x 'kn'       dW[I, O] 'nm'
  ============  =============================  ===========  =================

  Differentiable in the values of A, B, bias and scales; the cotangents are those of the reference, at dense cost.

  Args:
    a: A as [M, K] compressed along its last axis, or as [K, M] compressed along its first (A's transpose, such as a
      kernel [in, out]); or a `SparseOperand`, which saves the conversion on every call. bfloat16, float16, or float8
      (e4m3fn, e5m2); float32 where no kernel has to run. K is a multiple of four.
    b: B, [N, K] for 'nk' or [K, N] for 'kn'; same dtype as A, or any float8 if A is float8.
    bias: [M], one entry a row of A (an output feature), or None.
    activation: None, 'gelu' (tanh form), 'gelu_exact' (by erf), 'silu', 'relu' or 'squared_relu'.
    a_scale: what A, or each of its rows, was multiplied with before it was rounded, by which D is divided before bias
      and activation; scalar or [M], as `quantize.current_scale` gives it, or None.
    b_scale: the same of B, or of its columns; scalar or [N], or None.
    out_dtype: float32, bfloat16 or float16; None is A's dtype, or bfloat16 if A is float8.
    b_layout: 'nk' or 'kn'.
    out_layout: 'mn' for D [M, N], 'nm' for D [N, M].
    keep_preactivation: also return Z, what the activation is applied to, which its backward needs; the kernel stores
      it on its way to D. Needs an activation.
    alpha: a number that A . B is multiplied with.
    amax: also return the largest magnitude of D, float32, NaN if it holds one: what a scale of D is made of. The Hopper
      kernel notes it on its way to D; a pass over D finds it on other back ends, where a mesh divides the arrays, and
      with a bias if N is no multiple of a tile.
    implementation: 'sparse' (this package's kernel for the GPU at hand: `mosaic_gpu` on Hopper, `mosaic_gpu_sm80` on
      Ampere and Ada, which have these names as well), 'cusparselt', 'dense' (decompress and multiply), 'reference', or
      None: the fastest by the records of this GPU under `pallas_kernels/tuned`; where nothing near was measured, by a
      check of this package's kernel against dense at first use (`_checks`).

  Returns:
    D, or (D, Z) with `keep_preactivation`, of one shape and dtype. Both are rounded from float32 once: D is not the
    activation of the rounded Z. With `amax` a tuple that ends with it.

  Raises:
    ValueError: an argument is off, or the named implementation cannot serve the call. Positions of a concrete A that
      are none are refused, too; of a traced `Compressed24` they are an error under `checkify`.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels import formats
  >>> from pallas_kernels.sparse_matmul.api import sparse_matmul
  >>> w = jnp.array([[0.0, 5.0, 0.0, 7.0]], jnp.bfloat16)
  >>> a = formats.compress(w, w != 0, axis=-1)
  >>> x = jnp.array([[1, 2, 3, 4], [0, 1, 0, 0]], jnp.bfloat16)
  >>> sparse_matmul(a, x, out_layout='nm').tolist()
  [[38.0], [5.0]]
  """
  m, n, k = check_arguments(a, b, bias, activation, a_scale, b_scale, b_layout, out_layout)
  out_dtype = jnp.dtype(_default_out_dtype(a.dtype) if out_dtype is None else out_dtype)
  _dispatch.check_out_dtype(out_dtype)
  if keep_preactivation and activation is None:
    raise ValueError('keep_preactivation=True needs an activation, found activation=None: Z would be D')
  implementation = _dispatch.backend_of(OP, implementation, BACKENDS, a.dtype.itemsize)
  if isinstance(a, formats.Compressed24):
    a = operand.rows_first(a)
  candidates = (implementation,) if implementation else candidates_for(
    m, n, k, dtype=a.dtype, out_dtype=out_dtype, b_layout=b_layout, out_layout=out_layout,
    check=_device.arrays_are_whole(),
  )
  by_kernel = amax and _device.arrays_are_whole()
  call = Call(out_dtype, b_layout, out_layout, activation, keep_preactivation, float(alpha), by_kernel)
  vectors = Vectors(_float32(bias), _float32(a_scale), _float32(b_scale))
  found = _call(_Asked(implementation, tuple(candidates), call), a, b, vectors)
  if not amax or by_kernel:
    return found
  d, *z = found if keep_preactivation else (found,)
  return (d, *z, reference.largest(d))


def _float32(x: Array | None) -> Array | None:
  return None if x is None else jnp.asarray(x, jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Asked:
  """A call and who may answer it: the named back end, or the first of the candidates that can."""

  implementation: str | None
  candidates: tuple[str, ...]
  call: Call


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _call(asked: _Asked, a: Any, b: Array, vectors: Vectors) -> Any:
  rule = _rule(a, vectors, asked.call)
  return _partitioning.partitioned(OP, _on_a_part, rule, b, a, vectors, asked=asked)


def _rule(a: Any, vectors: Vectors, call: Call) -> _partitioning.Rule:
  # A tile of positions, 64 x 64 entries of A, is not cut; nor is a byte of the open format.
  packed = isinstance(a, operand.SparseOperand)
  m, k = ('m*64', 'k*64') if packed else ('m', 'k*8')
  of_a = ('m*64 k*32', 'm k .') if packed else ('m k*4', 'm k')
  sizes = (size if x.ndim else '' for x, size in zip(vectors, (m, m, 'n'), strict=True) if x is not None)
  d = f'{m} n' if call.out_layout == 'mn' else f'n {m}'
  # The leading axis of B is that of tokens: theirs is the mesh axis that weights want, too.
  b, order = (f'n {k}', ('n', 'k', 'm')) if call.b_layout == 'nk' else (f'{k} n', ('k', 'n', 'm'))
  return _partitioning.Rule((b, *of_a, *sizes), (d,) * (2 if call.keep_preactivation else 1), order, sums=('k',))


def _on_a_part(shard: _partitioning.Shard, b: Array, a: Any, vectors: Vectors, *, asked: _Asked) -> Any:
  call, candidates = asked.call, asked.candidates
  if asked.implementation is None and shard.divided:
    m, n, k = call.sizes(a, b)
    candidates = candidates_for(
      m, n, k, dtype=a.dtype, out_dtype=call.out_dtype, b_layout=call.b_layout, out_layout=call.out_layout, check=False
    )
  run = functools.partial(_dispatch.dispatch, OP, BACKENDS, asked.implementation, candidates, a, b)
  if not shard.sums('k'):
    return run(vectors, call=call)
  # What follows the sum waits for the other devices. Parts are rounded to the dtype of D before they are added.
  of_parts = dataclasses.replace(call, activation=None, keep_preactivation=False)
  d = shard.sum(run(vectors._replace(bias=None), call=of_parts), 'k')
  left, call = Vectors(vectors.bias), dataclasses.replace(call, alpha=1.0)
  if call.is_plain(left):
    return d
  return reference.results((d if call.out_layout == 'mn' else d.T).astype(jnp.float32), left, call)


def _call_fwd(asked, *args):
  return _call(asked, *args), args


def _call_bwd(asked, args, cotangent):
  # The cotangent is a pair with `keep_preactivation`, as the reference's result is.
  f = functools.partial(reference.sparse_matmul, call=asked.call)
  return jax.vjp(f, *args)[1](cotangent)


_call.defvjp(_call_fwd, _call_bwd)


def candidates_for(
  m: int, n: int, k: int, *, dtype: Any, out_dtype: Any, b_layout: str, out_layout: str,
  device: _device.Device | None = None, check: bool = True,
) -> Sequence[str]:
  """Back ends in the order in which `implementation=None` asks them; for the rest see `chosen`."""
  device = device or _device.current()
  if device.platform == 'cpu':
    return ('reference',)
  key = dict(m=m, n=n, k=k, dtype=jnp.dtype(dtype).name, out_dtype=jnp.dtype(out_dtype).name,
             b_layout=b_layout, out_layout=out_layout)
  found = chosen(key, device, check=check)
  if found is None:
    logging.info(
      '%s: nothing like %s was measured on %s, which `python -m pallas_kernels tune sparse_matmul` does; taking the'
      ' dense matmul',
      OP, key, device.name,
    )  # fmt: skip
  return (found, 'dense') if found not in (None, 'dense') else ('dense',)


def chosen(key: Mapping[str, Any], device: _device.Device, *, check: bool = True) -> str | None:
  """The fastest back end for a problem by the records of a GPU; where they have nothing near, by a check on it.

  Args:
    key: of the problem, as records have it.
    device: the GPU.
    check: whether a check may be made now. Otherwise records alone count: while XLA compiles, processes do not meet,
      and what one of them has checked before the others may not know.

  Returns:
    A back end, 'dense', or None if neither knows.
  """
  choice = _records.lookup(device.slug, OP, key)
  if choice is not None:
    return choice.implementation
  entry = checked(key, device) if check else None
  return None if entry is None else entry['choice']['implementation']


def checked(key: Mapping[str, Any], device: _device.Device) -> _checks.Entry | None:
  """What a check finds of a problem; None where records have something near, or where none can be made."""
  itemsize = jnp.dtype(key['dtype']).itemsize
  if _records.lookup(device.slug, OP, key) is not None or not _checks.possible(device, OP, itemsize):
    return None
  return _dispatch.load('pallas_kernels.sparse_matmul.check:outcome')(device, key)


def _default_out_dtype(dtype: jnp.dtype) -> Any:
  return jnp.bfloat16 if jnp.dtype(dtype).itemsize == 1 else dtype


def check_arguments(
  a: formats.Compressed24 | operand.SparseOperand, b: Array, bias: Array | None, activation: str | None,
  a_scale: Array | None, b_scale: Array | None, b_layout: str, out_layout: str,
) -> tuple[int, int, int]:
  """(M, N, K); ValueError naming the argument that is off."""
  _dispatch.check_type('a', a, formats.Compressed24, operand.SparseOperand)
  _dispatch.check_type('b', b, *_dispatch.ARRAYS)
  _dispatch.check_type('bias', bias, *_dispatch.ARRAYS, type(None))
  _one_of('b_layout', b_layout, reference.B_LAYOUTS)
  _one_of('out_layout', out_layout, reference.OUT_LAYOUTS)
  _one_of('activation', activation, (None, *ACTIVATIONS))
  if len(a.shape) != 2 or b.ndim != 2:
    raise ValueError(f'a and b must be matrices, found a of shape {a.shape} and b of shape {b.shape}')
  if isinstance(a, formats.Compressed24):
    formats.check_compressed(a, 'a')
    m, k = a.shape if a.axis == -1 else a.shape[::-1]
  else:
    m, k = a.shape
    operand.check_operand(a)
  n, b_k = b.shape if b_layout == 'nk' else b.shape[::-1]
  if b_k != k:
    raise ValueError(
      f"b of shape {b.shape} and layout '{b_layout}' has {b_k} entries along K, a of shape {(m, k)} has {k}"
    )
  if 0 in (m, n, k):
    raise ValueError(f'sizes must be positive, found m={m}, n={n}, k={k}')
  if a.dtype != b.dtype and not (a.dtype.itemsize == 1 and b.dtype.itemsize == 1):
    raise ValueError(f'a is {a.dtype} and b is {b.dtype}; they must be equal, or both float8')
  if a.dtype.itemsize > 1:
    formats.check_floating(a, 'a')
  if bias is not None and bias.shape != (m,):
    raise ValueError(f'bias must have shape {(m,)}, one entry a row of a, found {bias.shape}')
  for name, scale, size in (('a_scale', a_scale, m), ('b_scale', b_scale, n)):
    if scale is not None and jnp.shape(scale) not in ((), (size,)):
      raise ValueError(f'{name} must be a scalar or have shape {(size,)}, found {jnp.shape(scale)}')
  return m, n, k


def _one_of(name: str, value: Any, accepted: Sequence[Any]) -> None:
  if value not in accepted:
    raise ValueError(f'{name}={value!r} is unknown; accepted are {accepted}')
