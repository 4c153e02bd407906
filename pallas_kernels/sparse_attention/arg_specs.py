"""The patterns and sizes that sparse attention is measured on."""

import dataclasses

from pallas_kernels.sparse_attention.patterns import Pattern

# Batch, positions, heads, head size: GPT-2 124M, and longer sequences of the same tokens.
SHAPES = {'1k': (16, 1024, 12, 64), '4k': (4, 4096, 12, 64), '16k': (1, 16384, 12, 64)}
PATTERNS = (Pattern('combined', 128), Pattern('fixed', 128), Pattern('local', 128), Pattern('strided', 128))


@dataclasses.dataclass(frozen=True)
class Spec:
  """Attention of all heads under one pattern; `length` is a key of `SHAPES`."""

  pattern: Pattern
  length: str

  @property
  def name(self) -> str:
    """What `--select` calls it."""
    return f'{self.pattern.kind}-{self.length}'


SPECS = {spec.name: spec for length in ('4k', '1k', '16k') for p in PATTERNS for spec in (Spec(p, length),)}
SELECTIONS = {'all': list(SPECS)} | {size: [n for n, s in SPECS.items() if s.length == size] for size in SHAPES}
# Specs with the plain-XLA form beside the kernels.
BLOCKS = ('combined-4k',)
