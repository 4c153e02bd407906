"""Translation by an encoder-decoder, measured in BLEU (Papineni et al. 2002, by sacrebleu)."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.runs.data import pairs
from experiments.runs.data.batches import Batch, Batches, DataConfig
from experiments.runs.data.units import DataError
from experiments.runs.models.layers import cross_entropy
from experiments.runs.tasks import decoding, task


def load(**fields) -> Batches:
  """Sentence pairs of a corpus of `pairs`, as batches.

  Marks have the tokens after the vocabulary: one fills rows up, one begins a target. The tokenizer's separator ends it.
  """
  _sacrebleu()  # Before a run, not at its end.
  config = DataConfig(**fields)
  found = pairs.load(config)
  vocab = found.tokenizer.vocab_size

  make = functools.partial(teach, vocab_size=vocab)
  data = Batches(config, found.splits, make, found.fingerprint, 'sentence pairs')
  data.tokenizer, data.vocab_size = found.tokenizer, vocab
  return data


def teach(rows: dict[str, np.ndarray], rng: np.random.Generator | None, *, vocab_size: int) -> Batch:
  """A batch: the source with its length, and the target, also one token late after the mark that begins it."""
  del rng
  target = rows['target']
  begin = np.full((len(target), 1), vocab_size + 1, np.int32)
  return {
    'source': rows['source'],
    'lengths': rows['length'],
    'target_in': np.concatenate([begin, target[:, :-1]], axis=1),
    'targets': target,
    'weights': (target != vocab_size).astype(np.float32),
  }


def loss(logits_BxTxV: jax.Array, batch: task.Batch) -> jax.Array:
  """Mean cross-entropy of the target's tokens in nats; of micro-batches, the mean of their means."""
  return task.weighted_mean(cross_entropy(logits_BxTxV, batch['targets']), batch['weights'])


def translate(model: Callable[..., Any], data: Any, batch: Batch) -> np.ndarray:
  """The likeliest target of each source, token by token, int32 [B, T], filled up with the separator."""
  source, lengths = jnp.asarray(batch['source']), jnp.asarray(batch['lengths'])
  length = batch['target_in'].shape[1] + 1
  tokens = jnp.full((len(source), length), data.vocab_size + 1, jnp.int32)

  def logits_of(tokens_BxT: jax.Array) -> jax.Array:
    return model(source, lengths, tokens_BxT[:, :-1])

  end = data.tokenizer.separator
  return np.asarray(decoding.complete(logits_of, tokens, 1, vocab_size=data.vocab_size, end=end))[:, 1:]


def bleu(model: Callable[..., Any], data: Any, num_batches: int) -> dict[str, float]:
  """BLEU of greedy translations of the first validation batches, and the share of those that are the reference."""
  hypotheses, references = [], []
  for batch in data.validation(num_batches):
    hypotheses += [text_of(data, row) for row in translate(model, data, batch)]
    references += [text_of(data, row) for row in batch['targets']]
  same = np.mean([a == b for a, b in zip(hypotheses, references, strict=True)])
  return {'bleu': _sacrebleu().corpus_bleu(hypotheses, [references]).score, 'exact': float(same)}


def _sacrebleu() -> Any:
  try:
    import sacrebleu
  except ImportError as e:
    raise DataError(f"BLEU needs the package sacrebleu ({e}): pip install -e '.[tasks]'") from None
  return sacrebleu


def text_of(data: Any, row: np.ndarray) -> str:
  """The text of a target up to its end."""
  ended = np.flatnonzero(row == data.tokenizer.separator)
  return data.tokenizer.decode([int(t) for t in row[: ended[0] if len(ended) else None] if t < data.vocab_size])


TRANSLATION = task.Task(
  families=('translator',),
  inputs=('source', 'lengths', 'target_in'),
  load=load,
  loss=loss,
  sizes=lambda data: {'vocab_size': data.vocab_size + 2},
  score=bleu,
)
