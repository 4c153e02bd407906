"""What the packing passes move: they read entries of `wide` bytes and write values of `width`, which is 1 of float8."""

from pallas_kernels.costs import Move, sparse_entry

# Of the mask of a 4x4 block, 16 bits.
_CODES = 1 / 8


def packed_entry(width: int, operands: int = 1) -> float:
  """Bytes of what is packed of an entry: operands; of float8 two, or one and the matrix dense."""
  return sparse_entry(width) + width if width == 1 and operands < 2 else operands * sparse_entry(width)


def transposable_pack(entries: int, wide: int, width: int) -> Move:
  """Of `pack.api.transposable_pack`."""
  return Move('transposable_pack', entries * (wide + packed_entry(width, 2) + _CODES))


def masked_pack(entries: int, wide: int, width: int, *, operands: int = 2, from_mask: bool = False) -> Move:
  """Of `pack.api.masked_pack`; `from_mask` with the pass of XLA's, about as fast, that makes codes of a mask."""
  codes = _CODES + (1 + _CODES if from_mask else 0)
  return Move('masked_pack8' if width == 1 else 'masked_pack', entries * (wide + packed_entry(width, operands) + codes))


def soft_threshold_pack(entries: int, wide: int, width: int, *, axis: int = -2) -> Move:
  """Of `pack.api.soft_threshold_pack`."""
  return Move(f'soft_threshold_pack{_suffix(width, axis)}', entries * (wide + packed_entry(width)))


def mvue_pack(entries: int, wide: int, width: int) -> Move:
  """Of `pack.api.mvue_pack`."""
  return Move(f'mvue_pack{_suffix(width, -2)}', entries * (wide + packed_entry(width)))


def _suffix(width: int, axis: int) -> str:
  return '8' if width == 1 else f'_axis{axis}'
