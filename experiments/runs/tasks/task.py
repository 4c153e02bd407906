"""A task: data, what the model is called with, its loss, and what is measured beside. The loop knows nothing else."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from experiments.runs.data.batches import Batches

# What a model made of a batch.
type Outputs = jax.Array
type Batch = Mapping[str, jax.Array]


def _vocabulary(data: Any) -> dict[str, Any]:
  return {'vocab_size': data.vocab_size}


def _nothing(outputs: Outputs, batch: Batch) -> dict[str, jax.Array]:
  del outputs, batch
  return {}


@dataclasses.dataclass(frozen=True)
class Task:
  """What a run learns.

  Attributes:
    families: values of `model.family` that can learn it, the usual one first.
    inputs: the arrays of a batch that the model is called with, in this order.
    load: the fields of `DataConfig` -> the data.
    loss: outputs and batch -> the mean that is minimised, float32 scalar.
    sizes: data -> what it decides of the model's configuration.
    measures: outputs and batch -> float32 scalars by name; their means over the validation batches are recorded.
    score: model (inputs -> outputs), data, number of batches -> what takes more than a forward pass to know; asked
      once, at the end of a run, and by `eval`.
  """

  families: tuple[str, ...]
  inputs: tuple[str, ...]
  load: Callable[..., Batches]
  loss: Callable[[Outputs, Batch], jax.Array]
  sizes: Callable[[Any], dict[str, Any]] = _vocabulary
  measures: Callable[[Outputs, Batch], dict[str, jax.Array]] = _nothing
  score: Callable[[Callable[..., Outputs], Any, int], dict[str, float]] | None = None


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
  """Mean of values with float32 weights, float32 scalar; 0 where all weights are."""
  return (values * weights).sum() / jnp.maximum(weights.sum(), 1.0)
