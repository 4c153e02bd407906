"""Causal attention patterns as data.

Query i and key j <= i, window c:

    full      every j
    local     i - j < c                               the last c positions
    strided   (i - j) mod c = 0                       every c-th position back
    combined  local or strided
    fixed     i div c = j div c, or j mod c = c - 1   its own block, and the last of every block before

Source: Child et al., arXiv 1904.10509; as used in Liu et al., arXiv 2408.11746 (hybrid sparse attention).
"""

from collections.abc import Sequence
import dataclasses
import numbers
from typing import Any, get_args, Literal

import numpy as np

from pallas_kernels._choices import check_choices


@dataclasses.dataclass(frozen=True)
class Pattern:
  """Which earlier positions a head attends to; always itself.

  Attributes:
    kind: one of `KINDS`.
    window: c, in positions; without effect on `'full'`.

  >>> Pattern('strided', 2).mask(4).astype(int).tolist()
  [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]
  """

  kind: Literal['full', 'local', 'strided', 'combined', 'fixed']
  window: int = 128

  def __post_init__(self):
    check_choices(self)
    if not isinstance(self.window, numbers.Integral) or isinstance(self.window, bool) or self.window < 1:
      raise ValueError(f'window={self.window!r} must be a whole number of positions, 1 or more')
    object.__setattr__(self, 'window', int(self.window))  # one of NumPy's is not JSON

  def mask(self, length: int) -> np.ndarray:
    """bool `[length, length]`: row = query, column = key, True = attended."""
    query, key = np.arange(length)[:, None], np.arange(length)[None]
    distance, c = query - key, self.window
    patterns = {
      'full': distance >= 0,
      'local': distance < c,
      'strided': distance % c == 0,
      'combined': (distance < c) | (distance % c == 0),
      'fixed': (query // c == key // c) | (key % c == c - 1),
    }
    return patterns[self.kind] & (distance >= 0)

  def computed(self, length: int) -> int:
    """Scores that the block form computes for a sequence, masked ones among them; the dense form computes length**2."""
    if self.kind == 'full':
      return length * length
    blocks = -(-length // self.window)
    padded = blocks * self.window
    widths = {'local': 2 * self.window, 'strided': blocks, 'fixed': self.window + blocks}
    return padded * widths.get(self.kind, 2 * self.window + blocks)


KINDS: tuple[str, ...] = get_args(Pattern.__annotations__['kind'])


def heads_of(patterns: Any, num_heads: int) -> tuple[Pattern, ...]:
  """One pattern a head, from one for all or a sequence of them.

  Args:
    patterns: a `Pattern`, or anything with its two fields, or a sequence of `num_heads` of them.
    num_heads: query heads.

  Raises:
    ValueError: another number of patterns, or no pattern at all.
  """
  each = tuple(patterns) if isinstance(patterns, Sequence) else (patterns,) * num_heads
  if len(each) != num_heads:
    raise ValueError(f'patterns has {len(each)} entries; accepted are one pattern or one for each of {num_heads} heads')
  for pattern in each:
    if not (hasattr(pattern, 'kind') and hasattr(pattern, 'window')):
      raise ValueError(f'patterns holds {pattern!r}; accepted is a Pattern, or an object with its kind and window')
  return tuple(Pattern(pattern.kind, pattern.window) for pattern in each)
