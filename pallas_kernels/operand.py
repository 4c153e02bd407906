"""The sparse operand as the tensor cores read it: kept values K-major, metadata in the register order of sparse wgmma.

`wgmma.mma_async.sp` takes the metadata of its 64 rows, the positions of their values, from one 32-bit register of each
thread of the warpgroup. With thread = 32 w + 4 g + t, a register covers rows 16 w + g and 16 w + g + 8 of the tile and
64 entries along K:

* 16-bit values: two instructions of k32; the selector takes the registers of t = 0, 1 for the first and t = 2, 3 for
  the second. Within a pair the even thread describes k 0..15 and the odd one k 16..31; the low half is row g, the high
  one row g + 8.
* 8-bit values: one instruction of k64; all four t take part, t & 1 picks the row and t >> 1 the half of K.

Stored as uint32 [M/64, K/64, 128], thread last, a 64 x 64 tile of A is 512 contiguous bytes: any tile height is one TMA
box, and each thread loads its 32 bits without bank conflicts or shuffles. The order depends on the width of the values
alone, not on a kernel's tile sizes, so an operand serves every configuration.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from pallas_kernels._program import traced_once
from pallas_kernels.arch import REGISTER_ORDER

Array = jax.Array

# Two groups that keep positions 0 and 1: what padding holds, since a nibble of 0 names position 0 twice.
_LEGAL_BYTE = 0x44


@functools.partial(jax.tree_util.register_dataclass, data_fields=['values', 'metadata'], meta_fields=['layout'])
@dataclasses.dataclass(frozen=True)
class SparseOperand:
  """A 2:4 matrix [M, K] in the order that the sparse matmul kernel reads.

  Attributes:
    values: [..., M, K/2], the kept values.
    metadata: uint32 [..., ceil(M/64), ceil(K/64), 128], positions in register order.
    layout: the order of `metadata`; `REGISTER_ORDER` is the one above. Who reads them asks, see `check_layout`.
  """

  values: Array
  metadata: Array
  layout: str = REGISTER_ORDER

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the dense matrix, [..., M, K]."""
    return (*self.values.shape[:-1], 2 * self.values.shape[-1])

  @property
  def dtype(self) -> jnp.dtype:
    return self.values.dtype


def check_layout(a: SparseOperand, name: str = 'a', layout: str = REGISTER_ORDER) -> None:
  """ValueError unless the metadata of `a` is in the order that the caller reads: another would give wrong numbers.

  Args:
    a: what is read.
    name: of the argument.
    layout: what the caller reads.
  """
  if a.layout != layout:
    raise ValueError(
      f'{name} is packed in the order {a.layout!r}, and {layout!r} is read here; pack it again on this GPU, or from the'
      ' open format'
    )


def metadata_shape(m: int, k: int) -> tuple[int, int, int]:
  """Shape of `SparseOperand.metadata` for an [M, K] matrix."""
  return -(-m // 64), -(-k // 64), 128


@traced_once()
def to_operand(c: formats.Compressed24) -> SparseOperand:
  """The kernel's operand from the open format.

  Args:
    c: [..., M, K] compressed along its last axis, or [..., K, M] compressed along the one before it, which stands for
      A's transpose (a kernel [in, out] of a layer y = x W is A = W^T).

  Raises:
    ValueError: `c.axis` is neither -1 nor -2, or the dtype is not 8 or 16 bits wide.
  """
  c = rows_first(c)
  *batch, m, k = c.shape
  tiles_m, tiles_k, _ = metadata_shape(m, k)
  metadata = c.metadata
  if k % 8:
    metadata = metadata.at[..., -1].set(metadata[..., -1] | jnp.uint8(_LEGAL_BYTE & 0xF0))
  pad = [(0, 0)] * len(batch) + [(0, 64 * tiles_m - m), (0, 8 * tiles_k - metadata.shape[-1])]
  metadata = jnp.pad(metadata, pad, constant_values=_LEGAL_BYTE).astype(jnp.uint32)
  # Axes from the end: m64, warp, row half, g, k64, and the 8 bytes (16 groups) of a k64.
  metadata = metadata.reshape(*batch, tiles_m, 4, 2, 8, tiles_k, 8)
  b = len(batch)
  if _width(c.dtype) == 2:
    x = metadata.reshape(*batch, tiles_m, 4, 2, 8, tiles_k, 2, 2, 2)  # ..., selector, pair, byte
    half = x[..., 0] | x[..., 1] << 8
    word = half[(slice(None),) * (b + 2) + (0,)] | half[(slice(None),) * (b + 2) + (1,)] << 16
    # m64, warp, g, k64, selector, pair -> m64, k64, warp, g, selector, pair
    order = (0, 3, 1, 2, 4, 5)
  else:
    x = metadata.reshape(*batch, tiles_m, 4, 2, 8, tiles_k, 2, 4)  # ..., k half, byte
    word = x[..., 0] | x[..., 1] << 8 | x[..., 2] << 16 | x[..., 3] << 24
    # m64, warp, row half, g, k64, k half -> m64, k64, warp, g, k half, row half
    order = (0, 4, 1, 3, 5, 2)
  word = word.transpose(*range(b), *(b + i for i in order))
  return SparseOperand(c.values, word.reshape(*batch, tiles_m, tiles_k, 128))


@traced_once()
def from_operand(operand: SparseOperand) -> formats.Compressed24:
  """Inverse of `to_operand`, compressed along the last axis."""
  check_layout(operand, 'operand')
  nibbles = _nibbles(operand.metadata, operand.shape, _width(operand.dtype))
  return formats.Compressed24(operand.values, formats.pack_nibbles(nibbles.astype(jnp.uint8), -1), -1)


def _nibbles(metadata: Any, shape: tuple[int, ...], width: int) -> Any:
  """A nibble a group of a matrix [..., M, K], from NumPy's metadata or JAX's."""
  *batch, m, k = shape
  tiles_m, tiles_k, _ = metadata_shape(m, k)
  b = len(batch)
  nibbles = unpack_metadata(metadata.reshape(-1, 128), width)  # [tiles, 64, 16]
  nibbles = nibbles.reshape(*batch, tiles_m, tiles_k, 64, 16)
  nibbles = nibbles.transpose(*range(b), b, b + 2, b + 1, b + 3).reshape(*batch, 64 * tiles_m, 16 * tiles_k)
  return nibbles[..., :m, : k // 4]


def check_operand(a: SparseOperand, name: str = 'a') -> None:
  """Refuses metadata that does not fit the values, and where it is concrete, that names no pair of positions.

  In a trace its entries are left alone: only a packer makes them, and its steps are not to get longer.

  Raises:
    ValueError: naming the field and the first group.
  """
  check_layout(a, name)
  *batch, m, k = a.shape
  expected = (*batch, *metadata_shape(m, k))
  if a.metadata.shape != expected or a.metadata.dtype != jnp.uint32:
    raise ValueError(
      f'{name}.metadata must be uint32 of shape {expected}, as values of shape {a.values.shape} have it; found'
      f' {a.metadata.dtype} of shape {a.metadata.shape}'
    )
  if k % 4:
    raise ValueError(f'{name}.values must hold whole groups of two, found shape {a.values.shape}')
  if isinstance(a.metadata, jax.core.Tracer):
    return

  def legal(metadata):
    return formats.is_pair(_nibbles(metadata, a.shape, _width(a.dtype)))

  def message(metadata, where):
    found = int(_nibbles(metadata, a.shape, _width(a.dtype))[where])
    return (
      f'{name}.metadata names positions {found & 3} and {found >> 2} in group {where}; accepted are two of 0 to 3, the'
      ' lower one first'
    )

  formats.refuse_unless(legal, a.metadata, message, '', ('nibbles', a.shape, a.dtype))


def concatenate(first: SparseOperand, second: SparseOperand, *, axis: int) -> SparseOperand:
  """Two operands as one, along their rows (-2) or along the sum (-1).

  Raises:
    ValueError: the length of `first` along `axis` is no multiple of 64, so that its last tile of positions is not full.
  """
  check_layout(second, 'second', first.layout)
  if first.shape[axis] % 64:
    raise ValueError(f'the first operand, of shape {first.shape}, has no multiple of 64 along axis {axis}')
  return SparseOperand(
    jnp.concatenate([first.values, second.values], axis=axis),
    jnp.concatenate([first.metadata, second.metadata], axis=axis - 1), first.layout,
  )


def split(operand: SparseOperand, *, axis: int) -> tuple[SparseOperand, SparseOperand]:
  """The inverse of `concatenate` of two operands of one shape.

  Raises:
    ValueError: half the length along `axis` is no multiple of 64.
  """
  if operand.shape[axis] % 128:
    raise ValueError(f'an operand of shape {operand.shape} has no halves of a multiple of 64 along axis {axis}')
  values, metadata = jnp.split(operand.values, 2, axis=axis), jnp.split(operand.metadata, 2, axis=axis - 1)
  first, second = (SparseOperand(*each, operand.layout) for each in zip(values, metadata, strict=True))
  return first, second


def unpack_metadata(metadata: Any, width: int) -> Any:
  """uint32 [tiles, 128] of 64 x 64 tiles to nibbles uint32 [tiles, 64, 16]; `width` is the values' bytes.

  The arrays may be NumPy's or JAX's.
  """
  tiles = metadata.shape[0]
  x = metadata.reshape(tiles, 4, 8, 2, 2)  # warp, g, t >> 1, t & 1
  # Made in the trace: constants do not pass where a mesh may divide arrays.
  shifts = 4 * (np if isinstance(metadata, np.ndarray) else jnp).arange(8, dtype=np.uint32)
  x = (x[..., None] >> shifts.reshape(1, 1, 1, 1, 1, 8)) & np.uint32(15)
  if width == 2:
    x = x.reshape(tiles, 4, 8, 2, 2, 2, 4)  # warp, g, selector, pair, row half, group
    x = x.transpose(0, 1, 5, 2, 3, 4, 6)
  else:
    x = x.transpose(0, 1, 4, 2, 3, 5)  # warp, row half, g, k half, group
  return x.reshape(tiles, 64, 16)


def pad_to(x: Array, shape: tuple[int, ...]) -> Array:
  """`x` with zeros up to `shape`; no copy if it has it."""
  if x.shape == shape:
    return x
  return jnp.pad(x, [(0, new - old) for new, old in zip(shape, x.shape, strict=True)])


def rows_first(c: formats.Compressed24) -> formats.Compressed24:
  """`c` as rows of A, compressed along the last axis."""
  if c.values.ndim < 2 or c.axis not in (-1, -2):
    raise ValueError(f'a must have two axes and be compressed along -1 or -2, found shape {c.shape}, axis {c.axis}')
  if c.axis == -1:
    return c
  return formats.Compressed24(jnp.swapaxes(c.values, -1, -2), jnp.swapaxes(c.metadata, -1, -2), -1)


def _width(dtype: jnp.dtype) -> int:
  width = jnp.dtype(dtype).itemsize
  if width not in (1, 2):
    raise ValueError(f'the sparse operand must be 8 or 16 bits wide, found {dtype}')
  return width
