"""Names of causal attention patterns, so that a phase can ask for them; computing them is the model's business."""

import dataclasses
from typing import Any, Literal

import numpy as np

from pallas_kernels.sparse_attention.patterns import Pattern


@dataclasses.dataclass(frozen=True)
class AttentionPattern(Pattern):
  """Which earlier positions a token attends to; always itself, never later ones.

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

  def share(self, length: int) -> float:
    """Attended share of the causal triangle, the diagonal included, of a sequence of `length` tokens."""
    at = np.arange(length)
    near, far = np.minimum(at + 1, self.window), at // self.window
    pairs = {'local': near, 'strided': 1 + far, 'combined': near + far, 'fixed': at % self.window + 1 + far}[self.kind]
    return float(pairs.sum() / (length * (length + 1) / 2))


# What a model attends to: one pattern everywhere; or one entry a layer, each None, a pattern, or a tuple of one a head.
# For a layer, None is full causal attention; as a whole, it is what the model does by itself.
type Attention = AttentionPattern | tuple[AttentionPattern | tuple[AttentionPattern, ...] | None, ...] | None


def check_attention(name: str, attention: Any) -> None:
  """ValueError unless `attention` is an `Attention`."""
  if isinstance(attention, AttentionPattern | None):
    return
  layers = attention if isinstance(attention, tuple) else ()
  heads = [head for layer in layers if isinstance(layer, tuple) for head in layer or (None,)]
  whole = [layer for layer in layers if not isinstance(layer, tuple | None)]
  if not layers or not all(isinstance(pattern, AttentionPattern) for pattern in heads + whole):
    raise ValueError(
      f'{name} must be an AttentionPattern, None, or a tuple with one entry a layer, each an AttentionPattern, None, or'
      f' a tuple of one AttentionPattern a head; found {attention!r}'
    )


def attended_share(attention: Attention | tuple[AttentionPattern, ...], length: int) -> float:
  """Attended share of the causal triangle, all layers and heads together.

  >>> local = AttentionPattern('local', 1)
  >>> attended_share((None, (local, AttentionPattern('local', 2))), 2)
  0.9166666666666666
  """
  if isinstance(attention, tuple):
    return float(np.mean([attended_share(part, length) for part in attention]))
  return 1.0 if attention is None else attention.share(length)


def describe_attention(attention: Attention | tuple[AttentionPattern, ...]) -> Any:
  """The same as dicts and lists."""
  if isinstance(attention, tuple):
    return [describe_attention(part) for part in attention]
  return attention and dataclasses.asdict(attention)
