"""Sparse attention by Triton kernels, for every pattern and every NVIDIA GPU of compute capability 8.0 and newer.

Launches, forward and backward: `full` and `local` 1 and 2; `strided` 1 and 1, or 2 where columns have more than 64
positions; `fixed` 1 and 3, with two sums; `combined` 2 and 3, or 4: its columns first, from whose result the window
goes on. Nothing is transposed or copied on the way: kernels take strides.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import _device, _partitioning, _triton
from pallas_kernels._varying import vary_like
from pallas_kernels.sparse_attention import _gradients, _kernels
from pallas_kernels.sparse_attention.blocks import by_pattern
from pallas_kernels.sparse_attention.patterns import Pattern

SIZES = (16, 32, 64, 128)
# In the order of launches; `fixed` has `last` in the launch of `own`.
PARTS = {'full': ('full',), 'local': ('near',), 'strided': ('column',), 'combined': ('far', 'near'), 'fixed': ('own',)}

# All later queries attend to the last keys of blocks: that many tiles of queries are a program's share.
TILES_A_SHARE = 16


@dataclasses.dataclass(frozen=True)
class Tiles:
  """What a program takes at a time.

  Attributes:
    rows: queries.
    columns: keys.
    num_warps: warps.
    stages: tiles in flight.
  """

  rows: int
  columns: int
  num_warps: int
  stages: int


def tiles(kernel: str, count: int, size: int) -> Tiles:
  """The tiles of a kernel.

  Args:
    kernel: 'forward', 'queries', 'keys' or 'last_keys'.
    count: positions in the view of its part.
    size: of a head.
  """
  side = min(64, max(16, 1 << (count - 1).bit_length()))
  warps = max(1, side // 16)
  # With large heads a third stage would not fit into the 99 KiB of smaller GPUs.
  stages = 3 if side == 64 and size <= 64 else 2
  if kernel == 'last_keys':
    return Tiles(side, 16, warps, stages)
  if kernel == 'keys':
    # Two results in the registers: with both sides 64, or large heads in two warps, those of an Ampere GPU spill.
    return Tiles(min(side, 32), side, min(4, 2 * warps) if size == 128 else warps, stages)
  return Tiles(side, side, warps, stages)


def sparse_attention(q: Array, k: Array, v: Array, *, patterns: tuple[Pattern, ...], scale: float) -> Array:
  """The back end: `reference.sparse_attention` by Triton.

  Raises:
    NotImplementedError: no NVIDIA GPU of compute capability 8.0, no jax-triton, a dtype of 32 bits, a head size that is
      not 16, 32, 64 or 128, a traced scale, or arrays too large for the kernels' offsets.
  """
  device = _device.current()
  if 2 not in device.arch.itemsizes:
    raise NotImplementedError(f'the Triton kernels need compute capability 8.0, {device.name} has none')
  if reason := _triton.why_absent():
    raise NotImplementedError(reason)
  check(q, k, scale)
  return by_pattern(q, k, v, patterns, functools.partial(attend, scale=float(scale)))


def check(q: Array, k: Array, scale: Any) -> None:
  """NotImplementedError for what the kernels do not take on any GPU."""
  batch, length, heads, size = q.shape
  if q.dtype not in (jnp.bfloat16, jnp.float16):
    raise NotImplementedError(f'the Triton kernels take bfloat16 and float16, found {q.dtype}')
  if size not in SIZES:
    raise NotImplementedError(f'the Triton kernels take heads of size {list(SIZES)}, found {size}')
  if isinstance(scale, jax.core.Tracer):
    raise NotImplementedError('the Triton kernels take a scale that is known when they are compiled')
  if not _partitioning.serves(q, k):
    raise NotImplementedError('the Triton kernels serve no mesh whose axes are of several kinds')
  if not q.size or batch > 65535 or max(heads * size * length, 2 * heads * length) >= 2**31:
    raise NotImplementedError(
      f'the Triton kernels take 1 to 65535 sequences of fewer than 2**31 entries, found {q.shape}'
    )


def attend(pattern: Pattern, q: Array, k: Array, v: Array, *, scale: float) -> Array:
  """One pattern for all heads; differentiable."""
  pattern = dataclasses.replace(pattern, window=min(pattern.window, q.shape[1]))
  q, k, v = (vary_like(x, (q, k, v)) for x in (q, k, v))
  return _attend(pattern, scale, q, k, v)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(pattern: Pattern, scale: float, q: Array, k: Array, v: Array) -> Array:
  return _attend_forward(pattern, scale, q, k, v)[0]


def _attend_forward(pattern: Pattern, scale: float, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
  heads, groups = _axes(q, k)
  rule = _partitioning.Rule((heads, groups, groups), (heads, _logs(q, k)), ('b', 'g'))
  y, log = vary_like(
    _partitioning.partitioned('sparse_attention', _forward, rule, q, k, v, pattern=pattern, scale=scale), (q, k, v)
  )
  return y, (q, k, v, y, log)


def _attend_backward(pattern: Pattern, scale: float, saved: Any, dy: Array) -> tuple[Array, Array, Array]:
  q, k, v, y, log = saved
  heads, groups = _axes(q, k)
  rule = _partitioning.Rule(
    (heads, groups, groups, heads, _logs(q, k), heads), (heads, groups, groups), ('b', 'g')
  )
  return vary_like(
    _partitioning.partitioned('sparse_attention', _backward, rule, q, k, v, y, log, dy, pattern=pattern, scale=scale),
    (q, k, v, dy),
  )


_attend.defvjp(_attend_forward, _attend_backward)


def _axes(q: Array, k: Array) -> tuple[str, str]:
  return f'b . g*{q.shape[2] // k.shape[2]} .', 'b . g .'


def _logs(q: Array, k: Array) -> str:
  return f'b g*{q.shape[2] // k.shape[2]} .'


@dataclasses.dataclass(frozen=True)
class Part:
  """One part of a pattern on arrays of known shapes: grids and constants of its kernels."""

  name: str
  pattern: Pattern
  scale: float
  shape: tuple[int, int, int, int]
  groups: int

  @property
  def stride(self) -> int:
    return self.pattern.window if self.name in ('far', 'column') else 1

  @property
  def count(self) -> int:
    """Positions in its view."""
    return -(-self.shape[1] // self.stride)

  def launch(self, kernel: str, **constants: Any) -> dict[str, Any]:
    """The grid and the constants of a kernel, which takes queries of all heads or keys of all groups."""
    batch, length, heads, size = self.shape
    t = tiles(kernel, self.count, size)
    by_keys = kernel == 'keys'
    across = -(-self.count // (t.columns if by_keys else t.rows)) * self.stride
    return dict(
      grid=(across * (self.groups if by_keys else heads), batch), num_warps=t.num_warps, PART=self.name, LENGTH=length,
      HEADS=heads, GROUPS=self.groups, SIZE=size, WINDOW=self.pattern.window, STRIDE=self.stride, SCALE=self.scale,
      ROWS=t.rows, COLUMNS=t.columns, STAGES=t.stages, **constants,
    )  # fmt: skip


def _parts(pattern: Pattern, scale: float, q: Array, k: Array) -> list[Part]:
  names = PARTS[pattern.kind]
  if pattern.kind == 'combined' and pattern.window >= q.shape[1]:
    names = ('near',)
  batch, length, heads, size = q.shape
  return [Part(name, pattern, scale, (batch, length, heads, size), k.shape[2]) for name in names]


def _has_last(pattern: Pattern, length: int) -> bool:
  return pattern.kind == 'fixed' and pattern.window < length


def _forward(_: Any, q: Array, k: Array, v: Array, *, pattern: Pattern, scale: float) -> tuple[Array, Array]:
  """(y, logarithms of the sums, float32 [B, H, T])."""
  batch, length, heads, _ = q.shape
  out = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)]
  last = _has_last(pattern, length)
  y = log = q
  for n, part in enumerate(_parts(pattern, scale, q, k)):
    launch = part.launch('forward', JOINED=n > 0, LAST=last)
    y, log = _triton.call(_kernels.forward_kernel, q, k, v, y, log, out_shape=out, **launch)
  return y, log


def _backward(
  _: Any, q: Array, k: Array, v: Array, y: Array, log: Array, dy: Array, *, pattern: Pattern, scale: float
) -> tuple[Array, Array, Array]:
  """Gradients of q, k and v."""
  delta = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1).swapaxes(1, 2)
  given = (q, k, v, dy, log, delta)
  of_q, of_k = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k))
  none = jax.ShapeDtypeStruct((1,), q.dtype)
  last = _has_last(pattern, q.shape[1])
  dq, dk, dv, joined = None, k, v, ''
  if last:
    (dk, dv), joined = _last_keys(given, pattern, scale), 'last'
  for part in _parts(pattern, scale, q, k):
    launch = part.launch('keys', JOINED=joined)
    # Short columns fit a tile: the gradients of their queries are complete there.
    whole = part.stride > 1 and part.count <= launch['COLUMNS']
    dk, dv, of_columns = _triton.call(
      _gradients.keys_kernel, *given, dk, dv, out_shape=[of_k, of_k, of_q if whole else none], WITH_DQ=whole, **launch
    )
    joined = 'all'
    if whole:
      dq = of_columns
      continue
    launch = part.launch('queries', JOINED=dq is not None, LAST=last)
    (dq,) = _triton.call(_gradients.queries_kernel, *given, q if dq is None else dq, out_shape=[of_q], **launch)
  assert dq is not None
  return dq, dk, dv


def last_keys_launch(pattern: Pattern, scale: float, shape: tuple[int, int, int, int], groups: int) -> dict[str, Any]:
  """The grid and the constants of `last_keys_kernel` for queries of this shape."""
  batch, length, heads, size = shape
  t = tiles('last_keys', length, size)
  splits = max(1, length // (TILES_A_SHARE * t.rows))
  tiles_of_keys = -(-((length - 1) // pattern.window) // t.columns)
  return dict(
    grid=(groups * tiles_of_keys * splits, batch), num_warps=t.num_warps, LENGTH=length, HEADS=heads, GROUPS=groups,
    SIZE=size, WINDOW=pattern.window, SCALE=scale, ROWS=t.rows, COLUMNS=t.columns, STAGES=t.stages, SPLITS=splits,
  )  # fmt: skip


def _last_keys(given: tuple[Array, ...], pattern: Pattern, scale: float) -> tuple[Array, Array]:
  """Gradients of the last keys and values of all blocks but one, float32 [B, blocks - 1, G, K]."""
  q, k = given[:2]
  batch, length, _, size = q.shape
  groups, blocks = k.shape[2], (length - 1) // pattern.window
  launch = last_keys_launch(pattern, scale, q.shape, groups)
  out = jax.ShapeDtypeStruct((batch, launch['SPLITS'], blocks, groups, size), jnp.float32)
  dk, dv = _triton.call(_gradients.last_keys_kernel, *given, out_shape=[out, out], **launch)
  return jnp.sum(dk, axis=1), jnp.sum(dv, axis=1)
