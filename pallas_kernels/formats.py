"""The open 2:4 format: kept values and two-bit positions, in logical order.

A *group* is four consecutive entries along the compressed axis; two of them are stored. `Compressed24` is what users
save, inspect and convert; a back end that wants another order (the register order of a tensor-core instruction, say)
makes it from this one.
"""

from collections.abc import Callable, Hashable
import dataclasses
import functools
from typing import Any
import weakref

import jax
from jax import Array
from jax.experimental import checkify
import jax.numpy as jnp
import numpy as np

from pallas_kernels._program import one_program, traced_once

# The two-bit positions (low, high) of the pairs that a group can keep, by rank; `low | high << 2` is the nibble.
PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))


@functools.partial(jax.tree_util.register_dataclass, data_fields=['values', 'metadata'], meta_fields=['axis'])
@dataclasses.dataclass(frozen=True)
class Compressed24:
  """A 2:4-sparse array as its kept values and their positions.

  With `k` the length of the compressed axis of the dense array, a multiple of four:

  Attributes:
    values: the two stored entries of each group in their order, `k / 2` along `axis`; dtype of the dense array.
    metadata: uint8, `ceil(k / 8)` along `axis`. Group `g` is the low (even `g`) or high (odd `g`) nibble of byte
      `g // 2`; a nibble is `low | high << 2` with `0 <= low < high <= 3` the positions of the two values. The spare
      nibble of an odd number of groups is zero.
    axis: the compressed axis, negative, so that it keeps its meaning under `vmap` and a leading layer axis.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.formats import compress
  >>> x = jnp.array([0.0, 5.0, 0.0, 7.0])
  >>> c = compress(x, x != 0, axis=-1)
  >>> c.values.tolist(), c.metadata.tolist(), c.shape  # positions 1 and 3: 1 | 3 << 2
  ([5.0, 7.0], [13], (4,))
  """

  values: Array
  metadata: Array
  axis: int

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the dense array."""
    shape = list(self.values.shape)
    shape[self.axis] *= 2
    return tuple(shape)

  @property
  def dtype(self) -> jnp.dtype:
    return self.values.dtype

  @property
  def nbytes(self) -> int:
    return self.values.nbytes + self.metadata.nbytes


def negative_axis(x: Array, axis: int, *, name: str = 'axis') -> int:
  """`axis` counted from the end; ValueError if `x` has no such axis."""
  if not -x.ndim <= axis < x.ndim:
    raise ValueError(f'{name}={axis} is out of range for an array of shape {x.shape}')
  return axis if axis < 0 else axis - x.ndim


def check_groups(x: Array, axis: int, size: int = 4, *, name: str = 'w') -> int:
  """Negative `axis`, after checking that its length is a positive multiple of `size`."""
  axis = negative_axis(x, axis)
  if x.shape[axis] % size or not x.shape[axis]:
    raise ValueError(
      f'{name} of shape {x.shape} has length {x.shape[axis]} along axis {axis}; groups of {size} need a positive'
      f' multiple of {size}'
    )
  return axis


def check_floating(x: Array, name: str) -> None:
  """ValueError unless `x` is float32, bfloat16 or float16 to JAX, as NumPy's float64 is without `jax_enable_x64`."""
  if jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True).name not in ('float32', 'bfloat16', 'float16'):
    raise ValueError(f'{name} must be float32, bfloat16 or float16, found {x.dtype}')


def split_groups(x: Array, axis: int, size: int = 4) -> list[Array]:
  """The `size` entries of every group, as arrays whose `axis` counts groups.

  Slices rather than a reshape to `[..., groups, size, ...]`: XLA fuses them with what follows, and sharding of the
  axis survives as long as a shard holds whole groups.
  """
  axis = axis % x.ndim
  shape = x.shape[:axis] + (x.shape[axis] // size, size) + x.shape[axis + 1 :]
  grouped = x.reshape(shape)
  return [jax.lax.index_in_dim(grouped, i, axis + 1, keepdims=False) for i in range(size)]


def join_groups(parts: list[Array], axis: int) -> Array:
  """Inverse of `split_groups`."""
  axis = axis % parts[0].ndim
  joined = jnp.stack(parts, axis=axis + 1)
  shape = joined.shape
  return joined.reshape(shape[:axis] + (shape[axis] * shape[axis + 1],) + shape[axis + 2 :])


@one_program('axis')
def compress(w: Array, mask: Array, *, axis: int = -2) -> Compressed24:
  """Stores the entries of `w` that `mask` keeps.

  A group in which `mask` keeps fewer than two entries is filled up with its lowest free positions, holding zero.

  Args:
    w: any shape with `k`, a multiple of four, along `axis`; any real dtype.
    mask: bool, shape of `w`; at most two True a group.
    axis: the axis to compress, the contracted one of the matmul that will use it.

  Returns:
    A `Compressed24`; `decompress` gives back `jnp.where(mask, w, 0)`.

  Raises:
    ValueError: shapes differ, `mask` is not bool, `k` is not a multiple of four. Under `checkify` also when a group
      keeps more than two (elsewhere the first two are stored; `verify` names the group).

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.formats import compress
  >>> c = compress(jnp.array([0.0, 5.0, 0.0, 7.0]), jnp.array([False, True, False, True]), axis=-1)
  >>> c.values.tolist(), hex(c.metadata[0])
  ([5.0, 7.0], '0xd')
  """
  axis = check_groups(w, axis)
  if mask.shape != w.shape or mask.dtype != jnp.bool_:
    raise ValueError(f'mask must be bool of shape {w.shape}, found {mask.dtype} of shape {mask.shape}')
  w, mask = jnp.asarray(w), jnp.asarray(mask)
  checkify.debug_check(jnp.all(sum(_counted(mask, axis)) <= 2), 'a group of the mask keeps more than two of four')
  return compress_unchecked(w, mask, axis=axis)


def compress_unchecked(w: Array, mask: Array, *, axis: int) -> Compressed24:
  """`compress` for what is traced inside layers: a program with its check cannot be serialised by `jax.export`."""
  axis = check_groups(w, axis)
  kept = _counted(mask, axis)
  # Kept entries come first, free positions after them, each in index order: the rank of position i is the number of
  # kept before it if kept, else the number of kept at all plus the number of free before it.
  total = sum(kept)
  stored = []
  kept_before = jnp.zeros_like(total)
  for i, m in enumerate(kept):
    rank = jnp.where(m == 1, kept_before, total + (i - kept_before))
    stored.append(rank < 2)
    kept_before = kept_before + m
  # The low value is the first stored entry, the high value the last one.
  low_at, high_at = jnp.full_like(total, 2), jnp.full_like(total, 1)
  for i in (1, 0):
    low_at = jnp.where(stored[i], jnp.uint8(i), low_at)
  for i in (2, 3):
    high_at = jnp.where(stored[i], jnp.uint8(i), high_at)

  def taken(w: Array, *flags: Array) -> Array:
    kept, stored = flags[:4], flags[4:]
    entries = [jnp.where(m == 1, x, jnp.zeros((), w.dtype)) for x, m in zip(split_groups(w, axis), kept, strict=True)]
    low, high = entries[2], entries[1]
    for i in (1, 0):
      low = jnp.where(stored[i], entries[i], low)
    for i in (2, 3):
      high = jnp.where(stored[i], entries[i], high)
    return join_groups([low, high], axis)

  return Compressed24(_by_bits(taken, w, *kept, *stored), pack_nibbles(low_at | high_at << 2, axis), axis)


def _counted(mask: Array, axis: int) -> list[Array]:
  return [m.astype(jnp.uint8) for m in split_groups(mask, axis)]


def decompress(c: Compressed24) -> Array:
  """The dense array that `c` stands for: shape `c.shape`, dtype `c.dtype`.

  Raises:
    ValueError: `c` is not the format, as `check_compressed` says.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.formats import Compressed24, decompress
  >>> c = Compressed24(jnp.array([5.0, 7.0]), jnp.array([0xD], jnp.uint8), -1)
  >>> decompress(c).tolist()
  [0.0, 5.0, 0.0, 7.0]
  """
  check_compressed(c)
  return expand(c)


@traced_once()
def expand(c: Compressed24) -> Array:
  """`decompress` of what was made here, which needs no check."""
  axis = c.axis
  nibbles = unpack_nibbles(c.metadata, axis, c.values.shape[axis] // 2)

  def placed(values: Array, low_at: Array, high_at: Array) -> Array:  # is kept with the trace, and so holds no array
    low, high = split_groups(values, axis, 2)
    zero = jnp.zeros_like(low)
    return join_groups([jnp.where(low_at == i, low, jnp.where(high_at == i, high, zero)) for i in range(4)], axis)

  return _by_bits(placed, c.values, nibbles & 3, nibbles >> 2)


def _by_bits(f: Callable[..., Array], x: Array, *others: Array) -> Array:
  """`f(x, *others)`, linear in `x`, which only moves entries: those of float8 by their bits.

  XLA on a CPU goes by float16, also in slices that it fuses, and there a NaN loses its sign and payload.
  """
  if x.dtype.itemsize > 1 or x.dtype.kind in 'iub':
    return f(x, *others)

  @jax.custom_jvp
  def moved(x: Array, *others: Array) -> Array:
    return jax.lax.bitcast_convert_type(f(jax.lax.bitcast_convert_type(x, jnp.uint8), *others), x.dtype)

  @moved.defjvp
  def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    return moved(*primals), f(tangents[0], *primals[1:])

  return moved(x, *others)


def pack_nibbles(nibbles: Array, axis: int) -> Array:
  """uint8 nibbles, one a group, to bytes of two groups; an odd number is padded with a zero nibble."""
  if nibbles.shape[axis] % 2:
    pad = [(0, 0)] * nibbles.ndim
    pad[axis] = (0, 1)
    nibbles = jnp.pad(nibbles, pad)
  low, high = split_groups(nibbles, axis, 2)
  return low | high << 4


def unpack_nibbles(metadata: Array, axis: int, groups: int) -> Array:
  """Inverse of `pack_nibbles`, without the padding."""
  nibbles = join_groups([metadata & 15, metadata >> 4], axis)
  return jax.lax.slice_in_dim(nibbles, 0, groups, axis=axis % nibbles.ndim)


def check_compressed(c: Compressed24, name: str = 'c') -> None:
  """Refuses what is no `Compressed24` but in name, as an array from elsewhere may be.

  Shapes and dtypes are checked always, the positions of concrete arrays by value, of traced ones under `checkify`.

  Raises:
    ValueError: naming the field, and the first byte whose nibbles name no pair of positions.
  """
  axis = negative_axis(c.values, c.axis, name=f'{name}.axis')
  if c.axis != axis or not c.values.shape[axis] or c.values.shape[axis] % 2:
    raise ValueError(
      f'{name}.values must hold two entries a group along a negative axis, found shape {c.values.shape}, axis {c.axis}'
    )
  groups = c.values.shape[axis] // 2
  expected = list(c.values.shape)
  expected[axis] = -(-groups // 2)
  if c.metadata.shape != tuple(expected) or c.metadata.dtype != jnp.uint8:
    raise ValueError(
      f'{name}.metadata must be uint8 of shape {tuple(expected)}, as values of shape {c.values.shape} have it; found'
      f' {c.metadata.dtype} of shape {c.metadata.shape}'
    )
  rule = 'a nibble is low | high << 2 with 0 <= low < high <= 3, the spare one of an odd number of groups 0'

  # Which bytes have a spare nibble: the last, where groups are odd.
  shape = [1] * c.values.ndim
  shape[axis] = expected[axis]
  spare = (np.arange(expected[axis]) == groups // 2).reshape(shape)

  def legal(metadata):
    high = metadata >> np.uint8(4)
    return is_pair(metadata & np.uint8(15)) & ((spare & (high == 0)) | (~spare & is_pair(high)))

  def message(metadata, where):
    return f'{name}.metadata holds {metadata[where]:#04x} at {where}; {rule}'

  refuse_unless(legal, c.metadata, message, f'{name}.metadata names no pair of positions', ('pairs', axis, groups))


def is_pair(nibbles: Any) -> Any:
  """Whether each nibble, NumPy's or JAX's, is low | high << 2 with low < high: bool."""
  return nibbles & 3 < nibbles >> 2


# Concrete arrays that were looked at and found in order, by what was asked of them: JAX's cannot change.
_in_order: 'weakref.WeakValueDictionary[tuple[int, Hashable], Any]' = weakref.WeakValueDictionary()


def refuse_unless(
  legal: Callable[[Any], Any], x: Any, message: Callable[[np.ndarray, tuple[int, ...]], str], summary: str,
  asked: Hashable,
) -> None:
  """ValueError unless `legal(x)` is True everywhere; of a traced `x` an error under `checkify`, else nothing.

  Args:
    legal: of a NumPy or a JAX array, a bool one.
    x: what comes from elsewhere. A part of it that is on another host is not looked at.
    message: of `x` and the first index that is not legal.
    summary: what `checkify` says.
    asked: all that `legal` depends on beside its argument: an array is looked at once for each.
  """
  if isinstance(x, jax.core.Tracer):
    checkify.debug_check(jnp.all(legal(x)), summary)
    return
  if isinstance(x, jax.Array) and (_in_order.get((id(x), asked)) is x or not x.is_fully_addressable):
    return
  host = np.asarray(x)
  bad = np.argwhere(~np.asarray(legal(host)))
  if len(bad):
    raise ValueError(message(host, tuple(bad[0].tolist())))
  if isinstance(x, jax.Array):
    _in_order[id(x), asked] = x


def verify(
  w: Array | Compressed24, *, axis: int = -2, n: int = 2, m: int = 4, along: str | None = None
) -> None:
  """Checks on the host that every group of `m` along `axis` has at most `n` non-zeros (-0.0 counts as zero).

  Args:
    w: a concrete array; NaN counts as a non-zero. Or a `Compressed24`, of which `check_compressed` is asked: it has an
      axis of its own.
    axis: the grouped axis.
    n: entries a group may keep.
    m: entries in a group.
    along: what messages call the axis.

  Raises:
    ValueError: naming the first group that has more, its index and its entries, or what is wrong with `w`.

  >>> import jax.numpy as jnp
  >>> from pallas_kernels.formats import verify
  >>> verify(jnp.array([0.0, 5.0, -0.0, 7.0]), axis=-1)
  """
  if isinstance(w, Compressed24):
    if (n, m) != (2, 4):
      raise ValueError(f'a Compressed24 is 2:4, found n={n} and m={m}')
    return check_compressed(w, 'w')
  axis = check_groups(w, axis, m)
  # Compared by numpy: XLA on a CPU takes subnormal numbers for zeros.
  grouped = np.asarray(w).reshape(*w.shape[:axis], w.shape[axis] // m, m, *w.shape[axis:][1:])
  groups = np.moveaxis(grouped, axis, -1)
  bad = np.argwhere((groups != 0).sum(-1) > n)
  if len(bad):
    group = tuple(bad[0].tolist())
    raise ValueError(f'not {n}:{m} along {along or f"axis {axis}"}: group {group} holds {groups[group].tolist()}')
