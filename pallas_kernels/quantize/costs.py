"""What rounding to float8 moves, of entries of `wide` bytes."""

from pallas_kernels.costs import COPY, Move


def amax(entries: int, wide: int) -> Move:
  """Of `quantize.api.amax`."""
  return Move('amax', entries * wide)


def quantize(entries: int, wide: int, *, transpose: str = 'no') -> Move:
  """Of `quantize.api.quantize`, 'no' or 'both'; without a transpose it is XLA's."""
  return Move('quantize_both', entries * (wide + 2)) if transpose == 'both' else Move(COPY, entries * (wide + 1))
