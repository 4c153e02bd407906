"""Language models: of the next token, and of masked ones (Devlin et al., BERT, arXiv 1810.04805)."""

import functools
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments.runs.data import pipeline
from experiments.runs.data.batches import Batch, Batches
from experiments.runs.models.layers import cross_entropy
from experiments.runs.tasks import task

_MASKED = 0.15
# Shares of the masked tokens that are shown as the mask, and as any token; the rest are shown as they are.
_AS_MASK, _AS_ANY = 0.8, 0.1


def next_token_loss(logits_BxTxV: jax.Array, batch: task.Batch) -> jax.Array:
  """Mean next-token cross-entropy in nats."""
  return cross_entropy(logits_BxTxV, batch['targets']).mean()


def mask_tokens(rows: np.ndarray, rng: np.random.Generator | None, *, vocab_size: int) -> Batch:
  """Hides 15% of each row; the mask is the token after the last of the vocabulary.

  Every row has as many masked tokens, so that means of micro-batches are those of the batch. In validation what is
  masked depends on the text alone.

  >>> batch = mask_tokens(np.arange(42).reshape(2, 21), None, vocab_size=42)
  >>> batch['weights'].sum(axis=1).tolist(), (batch['inputs'] != batch['targets'])[batch['weights'] == 0].any()
  ([3.0, 3.0], np.False_)
  """
  tokens = rows[:, :-1].astype(np.int32)
  rng = rng or np.random.default_rng(zlib.crc32(tokens.tobytes()))
  count = max(1, round(_MASKED * tokens.shape[1]))
  rank = np.argsort(np.argsort(rng.random(tokens.shape), axis=1), axis=1)
  masked, how = rank < count, rng.random(tokens.shape)
  anything = rng.integers(0, vocab_size, tokens.shape, dtype=np.int32)
  shown = np.where(how < _AS_MASK, vocab_size, np.where(how < _AS_MASK + _AS_ANY, anything, tokens))
  inputs = np.where(masked, shown, tokens).astype(np.int32)
  return {'inputs': inputs, 'targets': tokens, 'weights': masked.astype(np.float32)}


def masked_loss(logits_BxTxV: jax.Array, batch: task.Batch) -> jax.Array:
  """Mean cross-entropy of the masked tokens in nats."""
  return task.weighted_mean(cross_entropy(logits_BxTxV, batch['targets']), batch['weights'])


def _accuracy(logits_BxTxV: jax.Array, batch: task.Batch) -> dict[str, jax.Array]:
  right = (jnp.argmax(logits_BxTxV, axis=-1) == batch['targets']).astype(jnp.float32)
  return {'accuracy': task.weighted_mean(right, batch['weights'])}


def mask_data(data: Any) -> Batches:
  """Windows of text with masked tokens in place of next ones."""
  return data.made(functools.partial(mask_tokens, vocab_size=data.vocab_size))


NEXT_TOKEN = task.Task(
  families=('gpt2', 'llama'),
  inputs=('inputs',),
  load=lambda **fields: pipeline.load(**fields),  # noqa: PLW0108  looked up when called
  loss=next_token_loss,
)

MASKED = task.Task(
  families=('gpt2',),
  inputs=('inputs',),
  load=lambda **fields: mask_data(pipeline.load(**fields)),
  loss=masked_loss,
  sizes=lambda data: {'vocab_size': data.vocab_size + 1, 'causal': False},
  measures=_accuracy,
)
