"""The problems of `vnm_matmul` that are tuned and measured, with data for them, and what packers are measured on."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.operand import to_operand
from pallas_kernels.vnm.format import decompress_operand, VNMOperand

PATTERNS = ((128, 8), (128, 16), (64, 8), (64, 16))
SHAPES = ((16384, 4096, 16384), (16384, 16384, 4096))
# Tokens and neurons of what is packed, and what a feed-forward block calls.
PACKED = (16384, 16384)
ROLES = (
  'forward', 'residuals', 'pull_back', 'transpose', 'transpose_gradient', 'transpose_24', 'transpose_24_gradient',
  'columns',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Spec:
  """A [m, k], V:2:M, times B [k, n]; `shape` is (m, k, n)."""

  v: int
  group: int
  shape: tuple[int, int, int]

  @property
  def name(self) -> str:
    """What `--select` calls it."""
    return f'{self.v}x2x{self.group}-{"x".join(map(str, self.shape))}'


@dataclasses.dataclass(frozen=True)
class PackSpec:
  """A packer, one of `ROLES`, at work on `PACKED`."""

  v: int
  group: int
  role: str

  @property
  def name(self) -> str:
    """What `--select` calls it."""
    return f'{self.v}x2x{self.group}-{self.role}'


SPECS = {spec.name: spec for spec in (Spec(v, m, shape) for v, m in PATTERNS for shape in SHAPES)}
PACK_SPECS = {spec.name: spec for spec in (PackSpec(v, m, role) for v, m in PATTERNS for role in ROLES)}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def operand(r: int, k: int, v: int, m: int, key: Array) -> VNMOperand:
  """A random V:2:M operand [r, k], made without a packer."""
  values, pairs, order = jax.random.split(key, 3)
  compact = 4 * k // m
  legal = jnp.array([low | high << 2 for low, high in formats.PAIRS], jnp.uint8)
  nibbles = legal[jax.random.randint(pairs, (r, compact // 4), 0, len(formats.PAIRS))]
  order = jnp.argsort(jax.random.uniform(order, (r // v, k // m, m)), axis=-1)[..., :4]
  rows = jnp.sort(order, axis=-1) + (jnp.arange(k // m) * m)[None, :, None]
  entries = jax.random.normal(values, (r, compact // 2), jnp.float32).astype(jnp.bfloat16)
  packed = to_operand(formats.Compressed24(entries, formats.pack_nibbles(nibbles, -1), -1))
  return VNMOperand(packed, rows.reshape(r // v, compact).astype(jnp.int32), m)


def matrices(spec: Spec, key: Array) -> tuple[VNMOperand, Array, Array]:
  """Random A and B, and A as a dense matrix."""
  m, k, n = spec.shape
  a = operand(m, k, spec.v, spec.group, key)
  b = jax.random.normal(jax.random.fold_in(key, 1), (k, n), jnp.float32).astype(a.dtype)
  return a, b, decompress_operand(a)


def dense_ways(wide: Any) -> dict[str, Callable[[Array, Array], Array]]:
  """XLA's dense matmul written both ways round, in the dtype `wide`."""

  def plain(a: Array, b: Array) -> Array:
    return jnp.dot(a.astype(wide), b.astype(wide)).astype(a.dtype)

  def swapped(a: Array, b: Array) -> Array:
    return jax.lax.dot_general(b.astype(wide), a.astype(wide), (((0,), (1,)), ((), ()))).T.astype(a.dtype)

  return {'dense plain': plain, 'dense swapped': swapped}
