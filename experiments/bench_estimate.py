"""Expected time of a run with neuron-level sparsity, from records of a transformer block and of feed-forward blocks."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import sparse24_jax as s24


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A transformer block whose feed-forward layer is squared ReLU, dense and with sparse activations.

  Attributes:
    pattern: of the activations, '128:2:8' say.
    dense_ms: forward and backward with the dense feed-forward layer.
    sparse_ms: with the sparse one.

  >>> step = Estimate('128:2:8', dense_ms=30.0, sparse_ms=20.0)
  >>> step.gain, step.gain_of_run(0.5)
  (1.5, 1.2)
  """

  pattern: str
  dense_ms: float
  sparse_ms: float

  @property
  def gain(self) -> float:
    """How many times faster a step of the sparse phase is."""
    return self.dense_ms / self.sparse_ms

  def gain_of_run(self, share: float) -> float:
    """The same for a run of which `share` of the steps are sparse."""
    return self.dense_ms / (share * self.sparse_ms + (1 - share) * self.dense_ms)


def sparse_share(recipe: s24.Recipe) -> float:
  """Share of the optimizer steps that are in sparse phases.

  >>> round(sparse_share(s24.recipes.neuron_level('up', 'down')), 12)
  0.7
  """
  return sum(phase.fraction for phase in recipe.phases if phase.name == 'sparse')


def estimates(records: Sequence[Mapping[str, Any]]) -> list[Estimate]:
  """One estimate a pattern that was timed in a feed-forward block, where a transformer block of its sizes was, too.

  What surrounds the feed-forward layer is the dense transformer block less the dense feed-forward layer that was timed
  with the same method; both have GELU. The squared-ReLU layer, dense and sparse, takes that layer's place.
  """
  ffn = [record for record in records if record['bench'] == 'ffn']
  found = {}
  for sparse in (record for record in ffn if record['recipe'] == 'neuron_level'):
    alike = [r for r in ffn if r['activation'] == 'gelu' and _place(r) == _place(sparse)]
    for block in (record for record in records if record['bench'] == 'block' and record['model'] == 'gpt2'):
      replaced = [r for r in alike if r['recipe'] == block['recipe']]
      if replaced and _place(block) == _place(sparse) and sparse['pattern'] not in found:
        around = _dense_ms(block) - _dense_ms(replaced[-1])
        times = (around + _dense_ms(sparse), around + sparse['median_ms'])
        found[sparse['pattern']] = Estimate(sparse['pattern'], *times)
  return sorted(found.values(), key=lambda estimate: estimate.gain)


def _place(record: Mapping[str, Any]) -> tuple[Any, ...]:
  shape = record['shape']
  tokens = shape['tokens'] if 'tokens' in shape else shape['batch'] * shape['length']
  return record['device'], tokens, shape['d'], shape['hidden']


def _dense_ms(record: Mapping[str, Any]) -> float:
  return record['baselines']['dense']['median_ms']
