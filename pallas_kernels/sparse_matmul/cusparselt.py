"""`sparse_matmul` by NVIDIA's cuSPARSELt, through XLA's foreign function interface.

The fall-back on every GPU from sm_80 on, and the baseline that the kernels of this package are held against. The
library keeps its operand in an undocumented blob, so there are two custom calls: `compress` makes the blob from the
dense matrix, `matmul` multiplies it. `sparse_matmul` makes the blob in each call, which costs about as much as the
matmul that follows it; a caller that keeps A over many matmuls calls `prepare` once.

cuSPARSELt adds in float32 and rounds to the dtype of D. Scales, bias and activation are applied by XLA to what it
wrote: for float8 to a float32 result, for 16-bit values to the rounded one, so that these round twice.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _device, _records, formats, operand
from pallas_kernels.ffi import cusparselt as library
from pallas_kernels.sparse_matmul import reference
from pallas_kernels.sparse_matmul.call import Call, Vectors

Array = jax.Array
Config = library.Config
OP = 'sparse_matmul'

_WIDE = ('bfloat16', 'float16')
_NARROW = ('float8_e4m3fn', 'float8_e5m2')
# Sizes that cuSPARSELt's descriptors and every one of its kernels take: 32 rows of A or of D's other side, and 64
# along the sum.
_ROWS, _SUM = 32, 64


@functools.partial(jax.tree_util.register_dataclass, data_fields=['blob'], meta_fields=['m', 'k', 'dtype'])
@dataclasses.dataclass(frozen=True)
class CusparseltOperand:
  """A 2:4 matrix [m, k] as cuSPARSELt stores it: of use on the kind of GPU and version that made it alone.

  Attributes:
    blob: uint8, values and metadata in the library's own order, with room to spare.
    m: rows.
    k: logical columns.
    dtype: of the values.
  """

  blob: Array
  m: int
  k: int
  dtype: jnp.dtype

  @property
  def shape(self) -> tuple[int, int]:
    """Shape of the dense matrix."""
    return self.m, self.k


def prepare(
  a: formats.Compressed24 | operand.SparseOperand | Array, *, device: _device.Device | None = None
) -> CusparseltOperand:
  """The operand that `sparse_matmul` makes in each call.

  Args:
    a: a sparse operand, or the dense matrix [M, K] with at most two non-zeros in each group of four of a row; -0.0 is
      zero.
    device: the GPU to build for; None is the current one.

  Raises:
    NotImplementedError: the GPU, the dtype or the library does not do.
  """
  if isinstance(a, formats.Compressed24 | operand.SparseOperand):
    a = formats.expand(operand.from_operand(a) if isinstance(a, operand.SparseOperand) else operand.rows_first(a))
  _check_device(device or _device.current(), a.dtype)
  library.register()
  m, k = a.shape
  rows, _, total = padded_sizes(m, 1, k)
  call = jax.ffi.ffi_call(
    library.COMPRESS, jax.ShapeDtypeStruct((blob_bound(rows, total, a.dtype),), jnp.uint8), vmap_method='sequential'
  )
  a = _without_negative_zeros(a)
  return CusparseltOperand(call(operand.pad_to(a, (rows, total))), m, k, jnp.dtype(a.dtype))


def blob_bound(m: int, k: int, dtype: Any) -> int:
  """Bytes that hold a compressed A [m, k] on every GPU; how many are used, the library says only at run time.

  Kept values take half of A and positions two bits each; both are rounded up to whole tiles, of 256 x 256 here.
  """
  m, k = (_up(x, 256) for x in (m, k))
  return m * (k // 2) * jnp.dtype(dtype).itemsize + m * k // 8 + 2**16


def sparse_matmul(
  a: formats.Compressed24 | operand.SparseOperand | CusparseltOperand,
  b: Array,
  vectors: Vectors,
  call: Call,
  *,
  config: Config | None = None,
  device: _device.Device | None = None,
) -> Any:
  """`reference.sparse_matmul` by cuSPARSELt: same arguments, and

  Args:
    a: also a `CusparseltOperand`, which saves compressing it.
    config: the algorithm; None takes the fastest verified one of this very problem in the GPU's records (see
      `tuned_config`). A problem without one runs the library's own choice, which may be much slower than its best;
      `python -m pallas_kernels tune sparse_matmul --backends cusparselt` adds to the records.
    device: the GPU to build for; None is the current one.

  Raises:
    NotImplementedError: no NVIDIA GPU from sm_80 on (sm_89 for float8), no cuSPARSELt 0.8.0 to 0.10, no compiler on
      first use, or dtypes or layouts that the library does not take.
  """
  device = device or _device.current()
  _check_device(device, a.dtype)
  _check_types(jnp.dtype(a.dtype), b.dtype, call.out_dtype, call.b_layout)
  library.register()
  a = operand.rows_first(a) if isinstance(a, formats.Compressed24) else a
  layouts = dict(b_layout=call.b_layout, out_layout=call.out_layout)
  config = config or tuned_config(*call.sizes(a, b), a.dtype, call.out_dtype, **layouts, device=device) or Config()
  alone = call.is_plain(vectors)
  stored = call.out_dtype if alone or a.dtype.itemsize == 2 else jnp.dtype('float32')
  d = matmul(
    a if isinstance(a, CusparseltOperand) else prepare(a, device=device), b, stored, **layouts, config=config
  )
  if alone:
    return d
  d = d.astype(jnp.float32)
  return reference.results(d if call.out_layout == 'mn' else d.T, vectors, call)


def matmul(
  a: CusparseltOperand, b: Array, out_dtype: Any, *, b_layout: str, out_layout: str, config: Config
) -> Array:
  """A . B alone, as [M, N] or [N, M]; sizes that the library does not take are padded with zeros, which copies B."""
  (m, k), n = a.shape, b.shape[0 if b_layout == 'nk' else 1]
  rows, columns, total = padded_sizes(m, n, k)
  b = operand.pad_to(b, (columns, total) if b_layout == 'nk' else (total, columns))
  shape = (rows, columns) if out_layout == 'mn' else (columns, rows)
  call = jax.ffi.ffi_call(library.MATMUL, jax.ShapeDtypeStruct(shape, out_dtype), vmap_method='sequential')
  settings = {name: np.int64(value) for name, value in dataclasses.asdict(config).items()}
  d = call(a.blob, b, b_layout=b_layout, out_layout=out_layout, **settings)
  return d[:m, :n] if out_layout == 'mn' else d[:n, :m]


def tuned_config(
  m: int, n: int, k: int, dtype: Any, out_dtype: Any, b_layout: str, out_layout: str, device: _device.Device,
  folder: pathlib.Path = _records.TUNED,
) -> Config | None:
  """The fastest algorithm that was verified for this very problem, on this GPU and version; None if none was."""
  key = dict(m=m, n=n, k=k, dtype=jnp.dtype(dtype).name, out_dtype=jnp.dtype(out_dtype).name, b_layout=b_layout,
             out_layout=out_layout)
  entry = _records.entry_of(folder / device.slug / f'{OP}.json', key)
  if entry is None:
    return None
  version = list(library.version())
  rows = [r for r in entry['candidates'] if r['implementation'] == 'cusparselt' and r['config']['version'] == version]
  best = _records.best_of({'candidates': rows}, 'cusparselt')
  return None if best is None else Config(**{k: v for k, v in best['config'].items() if k != 'version'})


def _without_negative_zeros(a: Array) -> Array:
  """`a` with 0.0 for -0.0, of which a mask times a weight is full; a compressor may take one for a value."""
  # By bits: XLA compares what `a` was before it was rounded, which may not be zero where `a` is.
  bits = {1: jnp.uint8, 2: jnp.uint16}[a.dtype.itemsize]
  return jnp.where(jax.lax.bitcast_convert_type(a, bits) << 1 == 0, jnp.zeros((), a.dtype), a)


def _check_device(device: _device.Device, dtype: Any) -> None:
  if jnp.dtype(dtype).name not in (*_WIDE, *_NARROW):
    raise NotImplementedError(f'A must be bfloat16, float16 or float8 (e4m3fn, e5m2), found {jnp.dtype(dtype)}')
  itemsize = jnp.dtype(dtype).itemsize
  if itemsize not in device.arch.itemsizes:
    since = {1: '8.9', 2: '8.0'}[itemsize]
    raise NotImplementedError(
      f'cuSPARSELt multiplies {jnp.dtype(dtype)} on NVIDIA GPUs of compute capability {since} and later, this is'
      f' {device.name} with {device.capability[0]}.{device.capability[1]}'
    )


def _check_types(a: jnp.dtype, b: jnp.dtype, out: jnp.dtype, b_layout: str) -> None:
  """NotImplementedError unless cuSPARSELt multiplies these types."""
  if a != b:
    raise NotImplementedError(f'cuSPARSELt multiplies matrices of one dtype, not {a} x {b}')
  if a.name in _WIDE and out != a:
    raise NotImplementedError(f'cuSPARSELt writes the matmul of {a} matrices as {a}, not {out}')
  if a.name in _NARROW and out.name not in (*_WIDE, 'float32'):
    raise NotImplementedError(f'the matmul of float8 matrices is written as bfloat16, float16 or float32, not {out}')
  if a.name in _NARROW and b_layout != 'nk':
    raise NotImplementedError("cuSPARSELt reads K-major float8 operands only: B must be [N, K], b_layout='nk'")


def padded_sizes(m: int, n: int, k: int) -> tuple[int, int, int]:
  """The smallest (M, N, K) from here on that the library takes.

  >>> padded_sizes(100, 32, 68)
  (128, 32, 128)
  """
  return _up(m, _ROWS), _up(n, _ROWS), _up(k, _SUM)


def _up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple
