"""Names of causal attention patterns, so that a phase can ask for one; computing them is the model's business."""

import dataclasses
from typing import Literal

import numpy as np

from pallas_kernels.sparse_attention.patterns import Pattern

KINDS = ('local', 'strided', 'combined', 'fixed')


@dataclasses.dataclass(frozen=True)
class AttentionPattern:
  """Which earlier positions a token attends to; always itself, never later ones. For all heads of all layers.

  Attributes:
    kind: `'local'`: the last `window` positions, itself included. `'strided'`: every `window`-th position back from
      itself. `'combined'`: either of the two. `'fixed'`: its own block of `window`, and the last position of each
      block before.
    window: c, in tokens.

  Source: Liu et al., arXiv 2408.11746 (hybrid sparse attention), after Child et al., arXiv 1904.10509.

  >>> import sparse24_jax as s24
  >>> round(s24.AttentionPattern('combined', 128).share(1024), 3)
  0.241
  """

  kind: Literal['local', 'strided', 'combined', 'fixed']
  window: int = 128

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(f'kind={self.kind!r}: known are {list(KINDS)}')
    if not isinstance(self.window, int) or self.window < 1:
      raise ValueError(f'window={self.window} must be a whole number of tokens, 1 or more')

  def mask(self, length: int) -> np.ndarray:
    """bool `[length, length]`: row = query, column = key, True = attended."""
    return Pattern(self.kind, self.window).mask(length)

  def share(self, length: int) -> float:
    """Attended share of the causal triangle, the diagonal included, of a sequence of `length` tokens."""
    return float(self.mask(length).sum() / (length * (length + 1) / 2))
