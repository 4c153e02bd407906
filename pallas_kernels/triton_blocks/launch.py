"""How kernels on 4x4 blocks are cut up, and what they ask of a GPU and of their arrays."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _device
from pallas_kernels.two_of_four.philox import seed_words

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
  """How a kernel is cut up.

  Attributes:
    tile_rows: 4x4 blocks a program takes down, a multiple of 16.
    tile_columns: blocks across, a multiple of 16.
    num_warps: warps a program; 32 times their number share the tile's blocks.
  """

  tile_rows: int = 16
  tile_columns: int = 16
  num_warps: int = 4

  def grid(self, batches: int, rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // (4 * self.tile_rows)) * -(-columns // (4 * self.tile_columns)), batches

  def constants(self, rows: int, columns: int) -> dict[str, int]:
    return dict(ROWS=rows, COLUMNS=columns, TILE_ROWS=self.tile_rows, TILE_COLUMNS=self.tile_columns)


def check_float8() -> None:
  """NotImplementedError on a GPU without the conversion to float8."""
  device = _device.current()
  if device.platform == 'gpu' and 1 not in device.arch.itemsizes:
    raise NotImplementedError(f'float8 needs compute capability 8.9, {device.name} has {device.capability}')


def check_size(x: Array) -> None:
  """NotImplementedError for matrices in which the kernels' 32-bit offsets, of pairs of entries, would overflow."""
  if math.prod(x.shape[-2:]) >= 2**32:
    raise NotImplementedError(f'the Triton kernels take matrices of less than 2^32 entries, found {x.shape}')


def draw_parameters(key: Array, origin: tuple[Any, Any, Any]) -> Array:
  """uint32 [5] for `uniforms.block_uniforms`: seed words, then batch, group and quad of the first group."""
  batch, group, column = (jnp.asarray(o).astype(jnp.uint32) for o in origin)
  return jnp.stack([*seed_words(key), batch, group, column >> 2])
