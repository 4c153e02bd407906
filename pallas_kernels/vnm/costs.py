"""What the packers of V:2:M activations move, of entries of `wide` bytes, priced at the speed of a copy.

Only the values of an operand count. Its metadata has an eighth of the bytes of 16-bit values.
"""

from pallas_kernels.costs import COPY, Move, sparse_entry


def vnm_pack(entries: int, wide: int, m: int) -> Move:
  """Of `vnm.api.vnm_pack`: values and inputs are written, or the inputs of a pattern read and values written."""
  return Move(COPY, entries * wide + 2 * _values(entries, wide, m))


def kept(entries: int, wide: int, m: int) -> int:
  """Bytes that `vnm.api.vnm_pack` leaves for a backward: values and inputs."""
  return round(2 * _values(entries, wide, m))


def transpose_pack(entries: int, wide: int, m: int) -> Move:
  """Of `vnm.api.transpose_pack`."""
  return Move(COPY, 2 * _values(entries, wide, m))


def transpose_pack_24(entries: int, wide: int, m: int) -> Move:
  """Of `vnm.api.transpose_pack_24`."""
  return Move(COPY, _values(entries, wide, m) + entries * sparse_entry(wide))


def take_columns(entries: int, wide: int, m: int, share: float) -> Move:
  """Of `vnm.api.take_columns`, of a `share` of the columns."""
  return Move(COPY, _values(entries, wide, m) + share * entries * wide)


def expand(entries: int, wide: int) -> Move:
  """Of `vnm.api.expand` of a 2:4 operand."""
  return Move(COPY, entries * (sparse_entry(wide) + wide))


def _values(entries: int, wide: int, m: int) -> float:
  return 2 / m * entries * wide
