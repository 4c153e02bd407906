"""What a trained language model says: text that it goes on with, and which of several texts it finds likelier."""

from collections.abc import Callable, Iterator, Sequence
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.runs import build, programs
from experiments.runs.inspection import Loaded
from experiments.runs.models.layers import cross_entropy
from experiments.runs.tasks import decoding
from experiments.runs.tasks.language import NEXT_TOKEN

# Questions made of held-out text: the share of the sequence that is context, and how many pieces may follow.
_CONTEXT, _CHOICES = 0.5, 4
_ROWS = 64


class Item(NamedTuple):
  """A question: the tokens of a context, those of each choice, and which choice is right."""

  context: np.ndarray
  choices: tuple[np.ndarray, ...]
  answer: int


def _model_of(loaded: Loaded) -> Callable[[jax.Array], jax.Array]:
  parts = loaded.parts
  if parts.task is not NEXT_TOKEN:
    raise ValueError(f'the run learnt {parts.config.task!r}; this takes a run of a language model')
  _, attention = build.phase_of(parts, int(loaded.state.step) - 1)
  return programs.make_predict(parts, loaded.phase, attention, loaded.state)


def generate(
  loaded: Loaded, prompt: str, *, tokens: int = 100, temperature: float = 0.0, top_k: int = 0, seed: int = 0
) -> str:
  """The text with which a model goes on: the likeliest, or drawn if the temperature is not 0.

  The whole model runs for each token; nothing is cached. Where prompt and text are longer than the model's sequences
  the earlier half of them is forgotten.

  Args:
    loaded: a run of a language model.
    prompt: text to begin with; empty is the beginning of a document.
    tokens: how many to add; fewer if a document ends before.
    temperature: 0, or what logits are divided by before a token is drawn.
    top_k: draw among so many of the likeliest; 0 is all.
    seed: of the draws.

  Raises:
    ValueError: no language model, or arguments out of range.
  """
  if tokens < 1 or temperature < 0 or top_k < 0:
    raise ValueError(f'tokens {tokens} must be 1 or more, temperature {temperature} and top_k {top_k} not below 0')
  model, data = _model_of(loaded), loaded.parts.data
  tokenizer, length = data.tokenizer, loaded.parts.config.data.seq_len
  start = [tokenizer.separator, *tokenizer.encode(prompt).tolist()]
  text, key = list(start), jax.random.key(seed) if temperature else None
  while len(text) < len(start) + tokens:
    kept = text[-length:] if len(text) < length else text[-(length // 2) :]
    upto = min(length, len(kept) + len(start) + tokens - len(text))
    row = np.full((1, length), tokenizer.separator, np.int32)
    row[0, : len(kept)] = kept
    key = None if key is None else jax.random.fold_in(key, len(text))
    row = decoding.complete(
      model, jnp.asarray(row), len(kept), until=upto, vocab_size=data.vocab_size, end=tokenizer.separator, key=key,
      temperature=temperature, top_k=top_k,
    )  # fmt: skip
    text += np.asarray(row)[0, len(kept) : upto].tolist()
    if tokenizer.separator in text[len(start) :]:
      text = text[: text.index(tokenizer.separator, len(start))]
      break
  return tokenizer.decode(text[1:])


def cloze(loaded: Loaded, items: Sequence[Item]) -> dict[str, float]:
  """How often the right choice is the likeliest after its context, by the sum and by the mean of its tokens' logs.

  Returns:
    'accuracy', 'accuracy_by_mean', 'chance', and 'questions', their number.

  Raises:
    ValueError: no questions, a question that is longer than the model's sequences, or no language model.
  """
  if not items:
    raise ValueError('there are no questions')
  model, length = _model_of(loaded), loaded.parts.config.data.seq_len
  rows, targets, weights = [], [], []
  for number, item in enumerate(items, 1):
    for choice in item.choices:
      if not len(item.context) or not len(choice) or len(item.context) + len(choice) > length + 1:
        raise ValueError(
          f'question {number} has {len(item.context)} + {len(choice)} tokens of context and choice; a model of '
          f'sequences of {length} takes 1 or more of each and at most {length + 1}'
        )
      both = np.zeros(length + 1, np.int32)
      both[: len(item.context) + len(choice)] = [*item.context, *choice]
      at = np.arange(length) + 1
      rows.append(both[:-1])
      targets.append(both[1:])
      weights.append((at >= len(item.context)) & (at < len(item.context) + len(choice)))

  def losses(chosen: slice) -> np.ndarray:
    filled = [np.resize(np.stack(x[chosen]), (_ROWS, length)) for x in (rows, targets)]
    found = cross_entropy(model(jnp.asarray(filled[0])), jnp.asarray(filled[1]))
    return np.asarray(found)[: len(rows[chosen])]

  nats = np.concatenate([losses(slice(i, i + _ROWS)) for i in range(0, len(rows), _ROWS)])
  sums = (nats * np.stack(weights)).sum(axis=1)
  means = sums / np.stack(weights).sum(axis=1)
  right, right_by_mean, at = [], [], 0
  for item in items:
    here = slice(at, at + len(item.choices))
    right.append(np.argmin(sums[here]) == item.answer)
    right_by_mean.append(np.argmin(means[here]) == item.answer)
    at = here.stop
  chance = np.mean([1 / len(item.choices) for item in items])
  values = {'accuracy': np.mean(right), 'accuracy_by_mean': np.mean(right_by_mean), 'chance': chance}
  return {**{name: float(value) for name, value in values.items()}, 'questions': float(len(items))}


def read_items(path: str | Path, tokenizer: Any) -> list[Item]:
  """Questions of a file, a line each: {"context": ..., "choices": [..., ...], "answer": 0}.

  Raises:
    ValueError: a line that is none; names it.
  """
  items = []
  for number, line in enumerate(Path(path).read_text(encoding='utf-8').splitlines(), 1):
    try:
      record = json.loads(line)
      context, choices, answer = record['context'], record['choices'], record['answer']
      if not 0 <= answer < len(choices) or not all(isinstance(text, str) for text in (context, *choices)):
        raise ValueError('answer is the number of a choice, from 0, and texts are strings')
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(
        f'{path}:{number}: expected an object with context, choices and answer ({error}), got {line[:60]!r}'
      ) from error
    items.append(Item(tokenizer.encode(context), tuple(map(tokenizer.encode, choices)), answer))
  return items


def held_out_items(data: Any, count: int) -> Iterator[Item]:
  """Questions of held-out text: which of four pieces follows what is shown; the others are from elsewhere."""
  windows = np.concatenate([batch['inputs'] for batch in data.validation()])
  cut = max(1, round(windows.shape[1] * _CONTEXT))
  rng = np.random.default_rng(0)
  for i in range(count):
    # Not the same piece twice, even of a set that is small.
    here, *others = rng.choice(len(windows), _CHOICES, replace=False)
    answer = i % _CHOICES
    pieces = [windows[j, cut:] for j in others]
    yield Item(windows[here, :cut], (*pieces[:answer], windows[here, cut:], *pieces[answer:]), answer)
